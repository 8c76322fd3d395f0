"""Checkpoints: every layout that is on the hub gives the same logits, both ways, and whatever is wrong ends in one line."""
import json
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint import load_draft, load_target, save_draft, save_target
from helpers import GOLDEN, TARGETS, fuse_experts, golden_draft, golden_target, kimi_k25, to_fp8, to_int4, with_junk, write
from hub import INDEX, SINGLE, UserError, read_config, resolve
from model import Config, Transformer
from quant import PackedExperts

torch.set_num_threads(1)


def logits(folder, dtype=torch.float32):
    ids = torch.arange(26).view(2, 13) * 7 % 256
    with torch.no_grad():
        return load_target(folder, dtype=dtype).score(ids)[0]


@pytest.fixture(scope="module")
def twin():
    """Logits of a golden target as it stands."""
    return {name: logits(GOLDEN / "targets" / name) for name in TARGETS}


# Layouts

@pytest.mark.parametrize("name", TARGETS)
def test_golden(name):
    want = load_file(GOLDEN / "targets" / name / "expected.safetensors")
    with torch.no_grad():
        got, hidden = load_target(GOLDEN / "targets" / name).score(want["input_ids"])
    torch.testing.assert_close(got, want["logits"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden, want["hidden"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("shard_bytes", (None, 100_000))
def test_saved_is_what_was_loaded(name, shard_bytes, tmp_path):
    source = GOLDEN / "targets" / name
    save_target(load_target(source), read_config(source), tmp_path, torch.float32, shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (tmp_path / INDEX).exists() == (shard_bytes is not None)
    saved = {k: v for f in files for k, v in load_file(f).items()}
    want = load_file(source / SINGLE)
    assert saved.keys() == want.keys() and all(torch.equal(saved[k], want[k]) for k in want)
    assert torch.equal(logits(tmp_path), logits(source))


def test_a_new_single_file_replaces_the_old_index(tmp_path):
    source = GOLDEN / "targets" / "moonlight"
    save_target(load_target(source), read_config(source), tmp_path, torch.float32, 100_000)
    save_target(load_target(source), read_config(source), tmp_path, torch.float32)
    assert not (tmp_path / INDEX).exists() and torch.equal(logits(tmp_path), logits(source))


def test_the_bias_stays_fp32(tmp_path):
    source = GOLDEN / "targets" / "deepseek_v3"
    model = load_target(source, dtype=torch.bfloat16)
    assert model.embed_tokens.weight.dtype == torch.bfloat16
    gate = model.layers[2].mlp.gate
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(gate.e_score_correction_bias, load_file(source / SINGLE)["model.layers.2.mlp.gate.e_score_correction_bias"])
    save_target(model, read_config(source), tmp_path)
    kinds = {k: v.dtype for k, v in load_file(tmp_path / SINGLE).items()}
    assert {k for k, d in kinds.items() if d != torch.bfloat16} == {k for k in kinds if k.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("prefix", ("language_model.", "model.language_model."))
@pytest.mark.parametrize("shards", (1, 3))
def test_wrapped(prefix, shards, tmp_path, twin):
    config, tensors = golden_target("kimi_k2")
    write(tmp_path, *kimi_k25(config, with_junk(config, tensors), prefix), shards)
    assert torch.equal(logits(tmp_path), twin["kimi_k2"])


@pytest.mark.parametrize("name", ("model-{i}-of-{n}.safetensors", "model-{i:05}-of-{n:06}.safetensors", "part_{i}.safetensors"))
def test_shard_names_and_junk(name, tmp_path, twin):
    config, tensors = golden_target("deepseek_v3")
    write(tmp_path, config, with_junk(config, tensors), 4, name)
    assert torch.equal(logits(tmp_path), twin["deepseek_v3"])


@pytest.mark.parametrize("name", ("glm4_moe_lite", "deepseek_v2_lite"))
def test_fused_experts(name, tmp_path, twin):
    config, tensors = golden_target(name)
    write(tmp_path, config, fuse_experts(tensors))
    assert torch.equal(logits(tmp_path), twin[name])


def test_tied_head(tmp_path, twin):
    config, tensors = golden_target("moonlight")
    config["tie_word_embeddings"] = True
    write(tmp_path / "present", config, tensors)
    assert torch.equal(logits(tmp_path / "present"), twin["moonlight"])  # a head that is present is loaded, tied or not
    head = tensors.pop("lm_head.weight")
    write(tmp_path / "absent", config, tensors)
    model = load_target(tmp_path / "absent")
    assert model.lm_head.weight is model.embed_tokens.weight
    save_target(model, config, tmp_path / "saved", torch.float32)
    assert load_file(tmp_path / "saved" / SINGLE).keys() == tensors.keys()
    write(tmp_path / "twin", {**config, "tie_word_embeddings": False}, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert torch.equal(logits(tmp_path / "absent"), logits(tmp_path / "twin")) and not torch.equal(head, model.lm_head.weight)
    assert "lm_head.weight" in error(write(tmp_path / "untied", {**config, "tie_word_embeddings": False}, tensors))


@pytest.mark.parametrize("shards", (1, 3))
def test_fp8(shards, tmp_path):
    config, tensors = golden_target("deepseek_v3")
    quantized, dense = to_fp8(tensors)
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    write(tmp_path / "fp8", config, quantized, shards)
    write(tmp_path / "dense", config, dense)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(logits(tmp_path / "fp8", dtype), logits(tmp_path / "dense", dtype))


@pytest.mark.parametrize("shards", (1, 3))
def test_int4_stays_packed(shards, tmp_path):
    config, tensors = golden_target("kimi_k2")
    packed, dense = to_int4(tensors)
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    write(tmp_path / "int4", *kimi_k25(config, packed), shards)
    write(tmp_path / "dense", *kimi_k25(config, dense))
    model = load_target(tmp_path / "int4")
    experts = [m for m in model.modules() if isinstance(m, PackedExperts)]
    assert len(experts) == 3 and all(e.gate_up_packed.dtype == torch.int32 and e.down_scale.dtype == torch.bfloat16 for e in experts)
    torch.testing.assert_close(logits(tmp_path / "int4"), logits(tmp_path / "dense"), rtol=1e-5, atol=1e-5)
    # and back
    save_target(model, config, tmp_path / "saved", torch.bfloat16)
    saved = load_file(tmp_path / "saved" / SINGLE)
    assert saved.keys() == packed.keys() and all(torch.equal(saved[k], packed[k]) for k in saved)


# Drafters

@pytest.fixture(scope="module")
def target():
    return load_target(GOLDEN / "targets" / "kimi_k2")


DRAFTERS = sorted(p.name for p in (GOLDEN / "drafters").iterdir())


@pytest.mark.parametrize("name", DRAFTERS)
def test_draft_both_ways(name, target, tmp_path):
    config, tensors = golden_draft(name)
    draft = load_draft(write(tmp_path / "a", config, tensors), target)
    assert draft.embed_tokens is target.embed_tokens and draft.lm_head is target.lm_head
    assert not any(p.requires_grad for p in draft.parameters()) and not draft.training
    save_draft(draft, config, tmp_path / "b", torch.float32)
    saved = load_file(tmp_path / "b" / SINGLE)
    assert saved.keys() == tensors.keys() and all(torch.equal(saved[k], tensors[k]) for k in saved)


def test_golden_draft_outputs(tmp_path):
    """The values a drafter computes after loading, where a norm that is in the file but not in its place would show."""
    for name in DRAFTERS:
        folder = GOLDEN / "drafters" / name
        want = load_file(folder / "expected.safetensors")
        config, tensors = golden_target("kimi_k2")
        config["vocab_size"] = 320
        for k in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[k] = torch.zeros(320, 64)
        draft = load_draft(folder, load_target(write(tmp_path / name, config, tensors), dtype=torch.float64), dtype=torch.float64)
        draft.setup_cache(2, 32)
        start = torch.full((2,), int(want["context1"]))
        draft.graft(want["target_hidden"][:, :start[0]].double(), torch.zeros(2, dtype=torch.long))
        got = draft.hidden(want["block1"].unsqueeze(1).double(), start.unsqueeze(1), draft.k_cache, draft.v_cache).squeeze(1)
        torch.testing.assert_close(got.float(), want["out1"], rtol=1e-5, atol=1e-5)


def test_own_embedding_and_head(target, tmp_path):
    config, tensors = golden_draft("full_b8")
    own = {"embed_tokens.weight": torch.randn(256, 64), "lm_head.weight": torch.randn(256, 64)}
    draft = load_draft(write(tmp_path / "both", config, tensors | own), target)
    assert torch.equal(draft.embed_tokens.weight, own["embed_tokens.weight"]) and torch.equal(draft.lm_head.weight, own["lm_head.weight"])
    own.pop("embed_tokens.weight")
    draft = load_draft(write(tmp_path / "head", config, tensors | own), target)
    assert draft.embed_tokens is target.embed_tokens and torch.equal(draft.lm_head.weight, own["lm_head.weight"])
    assert not torch.equal(target.lm_head.weight, own["lm_head.weight"])


@pytest.mark.parametrize("changes, says", (
    ({"hidden_size": 96}, "hidden size is 96, the target's 64"),
    ({"vocab_size": 320}, "vocabulary is 320, the target's 256"),
    ({"num_target_layers": 5}, "number of target layers is 5, the target's 4"),
    ({"dflash_config": {"target_layer_ids": [0, 1, 4], "mask_token_id": 255}}, "taps layer 4, the target has layers 0 to 3"),
    ({"dflash_config": {"target_layer_ids": [0, 1, 3], "mask_token_id": 255}}, "taps the last layer, 3"),
    ({"dflash_config": {"target_layer_ids": [0, 1, 1], "mask_token_id": 255}}, "distinct"),
    ({"dflash_config": {"target_layer_ids": [-1, 1, 2], "mask_token_id": 255}}, ">= 0"),
    ({"dflash_config": {"target_layer_ids": ["0", "1", "2"], "mask_token_id": 255}}, "config.json"),
    ({"dflash_config": {"mask_token_id": 255}}, "target_layer_ids"),
    ({"dflash_config": {"target_layer_ids": [0, 1, 2]}}, "mask_token_id"),
    ({"dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 256}}, "mask id is 256, the embedding has 256 rows"),
    ({"dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": -1}}, "mask_id must be a whole number of at least 0, got -1"),
    ({"block_size": 1}, "block_size"),
    ({"block_size": None}, "block_size"),
    ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, got (4, 3)"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "Eagle")))
def test_wrong_pairs(changes, says, target, tmp_path):
    line = error(write(tmp_path / "draft", *golden_draft("full_b8", **changes)), target)
    assert says in line and "draft" in line


@pytest.mark.parametrize("name, kind", (
    ("logit_head.prefix_gru.weight_ih", "a recurrent head"), ("markov_head.joint_proj.weight", "DSpark's rnn head"),
    ("layers.0.attention_conv.weight", "DFlash2"), ("layers.1.mlp_conv.weight", "DFlash2"), ("candidate_selector.weight", "DFlash2"),
    ("layers.0.self_attn.sinks", "attention sinks"), ("midlayer.hidden_norm.weight", "Eagle")))
def test_extensions_are_refused_by_name(name, kind, target, tmp_path):
    config, tensors = golden_draft("full_b8")
    line = error(write(tmp_path, config, tensors | {name: torch.ones(2)}), target)
    assert name in line and kind in line


def golden_dspark(kind: str = "vanilla", **changes) -> tuple:
    """A golden drafter with a Markov head of rank 4: (config, tensors)."""
    config, tensors = golden_draft("full_b8", markov_rank=4, markov_head_type=kind, **changes)
    g = torch.Generator().manual_seed(0)
    shapes = {"markov_w1.weight": (256, 4), "markov_w2.weight": (256, 4)} | (
        {"gate_proj.weight": (4, 68), "gate_proj.bias": (4,)} if kind == "gated" else {})
    return config, tensors | {f"markov_head.{k}": torch.randn(v, generator=g) for k, v in shapes.items()}


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
@pytest.mark.parametrize("prefix", ["", "logit_head."])
def test_markov_heads_are_read_and_written(kind, prefix, target, tmp_path):
    """Under both spellings, bit for bit; what is written is the published spelling."""
    config, tensors = golden_dspark(kind)
    nested = {prefix + k if k.startswith("markov_head.") else k: t for k, t in tensors.items()}
    draft = load_draft(write(tmp_path / "read", config, nested), target)
    for name, t in tensors.items():
        if name.startswith("markov_head."):
            assert torch.equal(draft.get_parameter(name), t)
    save_draft(draft, config, tmp_path / "written", torch.float32)
    again = load_file(tmp_path / "written" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[k], tensors[k]) for k in tensors)


def test_a_confidence_head_is_named_as_unused(target, tmp_path, capsys):
    config, tensors = golden_dspark(enable_confidence_head=True)
    folder = write(tmp_path, config, tensors | {"confidence_head.proj.weight": torch.ones(1, 68), "confidence_head.proj.bias": torch.ones(1)})
    load_draft(folder, target)
    assert capsys.readouterr().err == "loading the drafter: its confidence head (confidence_head.proj.bias, confidence_head.proj.weight) is not used\n"


def test_a_deepspec_folder(target, tmp_path):
    """Qwen3DSparkModel: every key at the top level, `next` slots, a frozen embedding and head of its own that are not the target's."""
    config, tensors = golden_dspark()
    keys = config.pop("dflash_config")
    own = {"embed_tokens.weight": torch.randn(256, 64), "lm_head.weight": torch.randn(256, 64)}
    draft = load_draft(write(tmp_path, {**config, **keys, "architectures": ["Qwen3DSparkModel"]}, tensors | own), target)
    assert draft.config.slots == "next" and draft.depths == 8 and draft.config.taps == (0, 1, 2)
    for name, t in own.items():
        assert torch.equal(draft.get_parameter(name), t)
    assert not torch.equal(own["lm_head.weight"], target.lm_head.weight)


@pytest.mark.parametrize("config, gone, says", (
    ({"markov_rank": 0}, (), "markov_head.markov_w1.weight belongs to a Markov head, but config.json has no markov_rank"),
    ({"markov_rank": 5}, (), "markov_head.markov_w1.weight is [256, 4], the config asks for [256, 5]"),
    ({"markov_rank": -1}, (), "markov_rank must be a whole number of at least 0, got -1"),
    ({"markov_rank": "4"}, (), "markov_rank must be a whole number of at least 0, got '4'"),
    ({"markov_head_type": "rnn"}, (), "markov_head_type rnn is not supported"),
    ({"markov_head_type": "gated"}, (), "missing: markov_head.gate_proj.weight, markov_head.gate_proj.bias"),
    ({}, ("markov_head.markov_w2.weight",), "1 tensor missing: markov_head.markov_w2.weight")))
def test_wrong_markov_heads(config, gone, says, target, tmp_path):
    base, tensors = golden_dspark()
    assert says in error(write(tmp_path, {**base, **config}, {k: t for k, t in tensors.items() if k not in gone}), target)


# Errors

def error(folder, target=None) -> str:
    with pytest.raises(UserError) as e:
        load_target(folder) if target is None else load_draft(folder, target)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_missing_and_unused_name_the_tensors(tmp_path):
    config, tensors = golden_target("moonlight")
    tensors["model.layers.1.mlp.gate.weights"] = tensors.pop("model.layers.1.mlp.gate.weight")
    line = error(write(tmp_path, config, tensors))
    assert "1 tensor missing: model.layers.1.mlp.gate.weight;" in line and "1 tensor of no use here: model.layers.1.mlp.gate.weights" in line


def test_many_are_counted(tmp_path):
    config, tensors = golden_target("moonlight")
    write(tmp_path, config, {k: v for k, v in tensors.items() if ".mlp.experts." not in k})
    assert re.search(r"72 tensors missing: model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight, .* and 69 more", error(tmp_path))


def test_the_same_tensor_twice(tmp_path):
    config, tensors = golden_target("moonlight")
    write(tmp_path, config, tensors | {"language_model.model.norm.weight": torch.ones(64)})
    assert "are the same tensor" in error(tmp_path)


def test_no_weights(tmp_path):
    shutil.copy(GOLDEN / "targets" / "moonlight" / "config.json", tmp_path)
    assert "neither" in error(tmp_path)


def test_bad_scales_are_named(tmp_path):
    (v3, tensors), (k2, dense) = golden_target("deepseek_v3"), golden_target("kimi_k2")
    quantized, scale = to_fp8(tensors)[0], "model.layers.1.self_attn.o_proj.weight_scale_inv"
    quantized[scale] = torch.full_like(quantized[scale], float("nan"))
    assert f"{scale} has values that are not finite" in error(write(tmp_path / "fp8", v3, quantized))
    packed, scale = to_int4(dense)[0], "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    packed[scale] = torch.full_like(packed[scale], float("inf"))
    assert f"{scale} has values that are not finite" in error(write(tmp_path / "int4", k2, packed))
    packed = to_int4(dense)[0]
    packed["model.layers.1.mlp.experts.3.up_proj.weight_shape"] = torch.tensor([64, 32], dtype=torch.int32)
    assert "up_proj.weight_shape says [64, 32], the config asks for [32, 64]" in error(write(tmp_path / "shape", k2, packed))


def fuzz_cases():
    """(base, corruption) pairs; a corruption gets (config, tensors, folder, random) and edits them, before or after writing."""
    def rename(c, t, r):
        k = r.choice(sorted(t))
        t[r.choice((k + "x", k.replace("layers", "layer"), k.replace("weight", "wait"), "x." + k))] = t.pop(k)
    def missing(c, t, r):
        t.pop(r.choice([k for k in sorted(t)]))
    def extra(c, t, r):
        t[r.choice(sorted(t)).rsplit(".", 1)[0] + r.choice((".bias", ".zero_point", ".lora_A"))] = torch.zeros(3)
    def transposed(c, t, r):
        k = r.choice([k for k in sorted(t) if t[k].dim() == 2 and t[k].shape[0] != t[k].shape[1]])
        t[k] = t[k].T
    def reshaped(c, t, r):
        k = r.choice(sorted(t))
        t[k] = t[k].flatten() if t[k].dim() > 1 else t[k].unsqueeze(0)
    def cut_rows(c, t, r):
        k = r.choice(sorted(t))
        t[k] = t[k][:-1]
    def kind(c, t, r):
        k = r.choice([k for k in sorted(t) if not k.endswith("weight_shape")])
        t[k] = t[k].float().to(r.choice((torch.int64, torch.int8, torch.bool, torch.uint8))) if t[k].is_floating_point() else t[k].float()
    def fp8_without_scale(c, t, r):
        k = r.choice([k for k in sorted(t) if t[k].dim() == 2 and t[k].dtype in (torch.float32, torch.bfloat16) and "scale" not in k])
        t[k] = t[k].to(torch.float8_e4m3fn)
    def spoiled(c, t, r):
        k = r.choice([k for k in sorted(t) if t[k].is_floating_point() and t[k].dtype != torch.float8_e4m3fn])
        t[k] = t[k].clone()
        t[k].view(-1)[r.randrange(t[k].numel())] = r.choice((float("nan"), float("inf"), -float("inf")))
    def scale(c, t, r):
        k = r.choice([k for k in sorted(t) if "scale" in k] or ["model.norm.weight" if "model.norm.weight" in t else "norm.weight"])
        t[k] = torch.full_like(t[k], float("nan"))
    def drop_key(c, t, r):
        c = c.get("text_config", c)
        c.pop(r.choice(sorted({"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps"} & c.keys())))
    def bad_value(c, t, r):
        c = c.get("text_config", c)
        k = r.choice(sorted({"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps",
                             "kv_lora_rank", "moe_intermediate_size", "n_routed_experts", "head_dim", "num_experts_per_tok"} & c.keys() - {"head_dim"}))
        c[k] = r.choice((-1, 0, "64", [64], {"a": 1}, float("nan"), True))
    def other_size(c, t, r):
        c = c.get("text_config", c)
        k = r.choice(sorted({"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"} & c.keys()))
        c[k] += r.choice((1, 2))
    def rope(c, t, r):
        c = c.get("text_config", c)
        c.pop("rope_parameters", None)
        c["rope_scaling"] = r.choice(({"type": "linear", "factor": 2}, {"type": "yarn"}, {"type": "yarn", "factor": -2}, "yarn", {"type": "yarn", "factor": "x"}))
    def architecture(c, t, r):
        c["architectures"] = r.choice((["LlamaForCausalLM"], [], ["Qwen3NextForCausalLM"], [3])) if "dflash_config" not in c else ["LlamaForCausalLMEagle3"]
    def truncated(folder, r):
        f = r.choice(sorted(folder.glob("*.safetensors")))
        f.write_bytes(f.read_bytes()[:r.choice((0, 4, 100, r.randrange(f.stat().st_size)))])
    def longer(folder, r):
        f = r.choice(sorted(folder.glob("*.safetensors")))
        f.write_bytes(f.read_bytes() + b"\0" * 8)
    def header_length(folder, r):
        f = r.choice(sorted(folder.glob("*.safetensors")))
        f.write_bytes(struct.pack("<Q", r.choice((0, 3, 1 << 40, 1 << 63))) + f.read_bytes()[8:])
    def header(folder, r):
        f = r.choice(sorted(folder.glob("*.safetensors")))
        b = bytearray(f.read_bytes())
        at = b.index(r.choice((b'"dtype"', b'"shape"', b'"data_offsets"')))
        b[at + 1] = 0xFF
        f.write_bytes(bytes(b))
    def no_file(folder, r):
        r.choice(sorted(folder.glob("*.safetensors"))).unlink()
    def text_file(folder, r):
        r.choice(sorted(folder.glob("*.safetensors"))).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    def folder_for_file(folder, r):
        f = r.choice(sorted(folder.glob("*.safetensors")))
        f.unlink()
        f.mkdir()
    def bad_json(folder, r):
        f = r.choice(sorted(folder.glob("*.json")))
        f.write_bytes(r.choice((b"", b"{", f.read_bytes()[:-2], b"[]", b"\xff\xfe{}", b"null", b"[" * 100000)))
    def no_config(folder, r):
        (folder / "config.json").unlink()
    def index(folder, r):
        listing = json.loads((folder / INDEX).read_text())
        names = listing["weight_map"]
        k = r.choice(sorted(names))
        others = sorted(set(names.values()) - {names[k]})
        edit = r.randrange(6)
        if edit == 0: names.pop(k)
        if edit == 1: names[k] = r.choice(others)
        if edit == 2: names[k] = r.choice(("nowhere.safetensors", "../" + names[k], "", 5, None))
        if edit == 3: names[k + ".extra"] = names[k]
        if edit == 4: listing["weight_map"] = r.choice(({}, [], None, "x"))
        if edit == 5: listing.pop("weight_map")
        (folder / INDEX).write_text(json.dumps(listing))
    before = (rename, missing, extra, transposed, reshaped, cut_rows, kind, fp8_without_scale, spoiled, scale, drop_key, bad_value, other_size, rope, architecture)
    after = (truncated, longer, header_length, header, no_file, text_file, folder_for_file, bad_json, no_config)
    for base in ("plain", "sharded", "fp8", "int4", "draft"):
        for f in before + after + ((index,) * 3 if base in ("sharded", "int4") else ()):
            for n in range(2):
                yield base, f, f in before, n


@pytest.fixture(scope="module")
def bases():
    v3, kimi = golden_target("deepseek_v3"), golden_target("kimi_k2")
    return {"plain": (*golden_target("moonlight"), 1), "sharded": (*v3, 3), "fp8": (v3[0], to_fp8(v3[1])[0], 1),
            "int4": (*kimi_k25(kimi[0], to_int4(kimi[1])[0]), 4), "draft": (*golden_draft("sliding_b16"), 1)}


def test_fuzz(bases, target, tmp_path):
    """Over 200 corruptions: each ends in one line that names the file or the tensor."""
    count = 0
    for base, corrupt, before, n in fuzz_cases():
        r = random.Random(f"{base} {corrupt.__name__} {n} {count}")
        config, tensors, shards = bases[base]
        config, tensors, folder = json.loads(json.dumps(config)), dict(tensors), tmp_path / str(count)
        junk = {k: tensors.pop(k) for k in list(tensors) if k.startswith(("vision_tower", "mm_projector"))}  # corrupt what matters
        if before:
            corrupt(config, tensors, r)
        write(folder, config, tensors | junk, shards)
        if not before:
            corrupt(folder, r)
        case = f"{base} {corrupt.__name__} {n}"
        try:
            load_draft(folder, target) if base == "draft" else load_target(folder)
        except UserError as e:
            line = str(e)
        except Exception as e:
            raise AssertionError(f"{case}: {e!r}") from e
        else:
            raise AssertionError(f"{case}: loaded in silence")
        assert "\n" not in line and len(line) < 600, f"{case}: {line}"
        named = str(folder) in line and (re.search(r"config\.json|safetensors|tensors? missing: (\w+\.)+weight", line) or any(k in line for k in {**tensors, **bases[base][1]}))
        assert named or "does not fit the target" in line, f"{case}: {line}"
        shutil.rmtree(folder)
        count += 1
    assert count >= 200


# Streaming

@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_while_loading(tmp_path):
    """The peak is the model's own storage, plus a window of the file that is being read."""
    config, _ = golden_target("moonlight")
    config |= {"hidden_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 16, "num_hidden_layers": 7, "vocab_size": 1000}
    model = Transformer(Config.from_dict(config))
    model.init_weights(torch.Generator().manual_seed(0))
    save_target(model, config, tmp_path, torch.float32)
    size, window = sum(p.nbytes for p in model.parameters()), 8 << 20
    code = f"""
import re, sys, torch
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from checkpoint import load_target
from hub import Files
torch.set_num_threads(1)
Files.window = {window}
load_target({str(GOLDEN / "targets" / "moonlight")!r})  # libraries warm up
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
before = peak()
model = load_target({str(tmp_path)!r})
print(peak() - before)
"""
    peak = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert size > 100 << 20 and size <= peak + (4 << 20) and peak < size + 3 * window, (size >> 20, peak >> 20)


# The hub

@pytest.fixture
def hub(monkeypatch):
    """A stub of the hub's client: the error or folder it is given, and the arguments it was called with."""
    import huggingface_hub
    class Stub:
        answer, calls = None, []
        def __call__(self, repo_id, **arguments):
            self.calls.append((repo_id, arguments))
            if isinstance(self.answer, Exception):
                raise self.answer
            return str(self.answer)
    stub = Stub()
    stub.calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stub)
    return stub


def test_hub_asks_for_what_is_needed(hub, tmp_path):
    hub.answer = tmp_path
    assert resolve("owner/name") == tmp_path and resolve("owner/name@v1.0") == tmp_path and resolve("name") == tmp_path
    assert [(name, a["revision"]) for name, a in hub.calls] == [("owner/name", None), ("owner/name", "v1.0"), ("name", None)]
    from fnmatch import fnmatch
    patterns = hub.calls[0][1]["allow_patterns"]
    wanted = ("config.json", "generation_config.json", INDEX, "model-1-of-61.safetensors", "tokenizer.json", "tokenizer_config.json", "tiktoken.model", "chat_template.jinja")
    assert all(any(fnmatch(f, p) for p in patterns) for f in wanted)
    assert not any(fnmatch(f, p) for p in patterns for f in ("pytorch_model.bin", "modeling_deepseek.py", "README.md", "tokenization_kimi.py", "figures/a.png", "model.gguf", ".gitattributes"))


def test_folders_come_first(hub, tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name") == Path("owner/name") and not hub.calls


@pytest.mark.parametrize("name", ("./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "../x", ""))
def test_no_such_folder(name, hub):
    with pytest.raises(UserError, match="no such model folder"):
        resolve(name)
    assert not hub.calls


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is a file"):
        resolve(str(tmp_path / "config.json"))


def hub_errors() -> list:
    from huggingface_hub import errors
    def http(cls):  # these carry a response, whose kind differs between versions of the client
        error = cls.__new__(cls)
        Exception.__init__(error, "404 Client Error.\n\nRepository Not Found for url: …")
        return error
    return [
        (http(errors.RepositoryNotFoundError), "no such model, or it is private"),
        (http(errors.GatedRepoError), "gated"),
        (http(errors.RevisionNotFoundError), "no such revision"),
        (errors.HFValidationError("Repo id must use alphanumeric chars"), "not a hub id either"),
        (errors.OfflineModeIsEnabled("offline"), "offline mode is on"),
        (errors.LocalEntryNotFoundError("An error happened\nwhile trying to locate the files"), "not in the local cache"),
        (ConnectionError("[Errno -3] Temporary failure in name resolution"), "the download failed with ConnectionError"),
        (TimeoutError("timed\nout"), "the download failed with TimeoutError: timed out"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (http(errors.HfHubHTTPError), "the download failed with HfHubHTTPError")]


@pytest.mark.parametrize("failure, says", hub_errors())
def test_hub_errors(failure, says, hub):
    hub.answer = failure
    with pytest.raises(UserError, match=says) as e:
        resolve("owner/name@v2")
    assert "\n" not in str(e.value) and "owner/name at revision v2" in str(e.value)


def test_offline_for_real(tmp_path):
    """The client itself, offline and with an empty cache: no network is asked, one line comes back."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r}); from hub import resolve, UserError\ntry: resolve('owner/name')\nexcept UserError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert done.stdout.startswith("owner/name is no folder here, and from the hub: it is not in the local cache") and done.stdout.count("\n") == 1, done
