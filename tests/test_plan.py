"""The real configs, built without storage, and the memory plan."""
import json
import re
from pathlib import Path

import pytest
import torch

import tiny
from checkpoint import layout, load_draft, load_target, on_meta, parse_config
from draft import DraftConfig, Drafter
from helpers import golden_draft, golden_target, kimi_k25, to_fp8, to_int4, write
from hub import UserError
from model import Config, Transformer
from plan import check_fits, memory_plan, storage, table
from verify import Decoder

CONFIGS = {p.stem: json.loads(p.read_text()) for p in sorted((Path(__file__).parent / "configs").glob("*.json"))}
DRAFT = CONFIGS.pop("kimi_k25_dflash")
PUBLISHED = {  # parameters and active parameters, 1e9; softmax scale; how the weights are stored
    "deepseek_v3": (671, 37, 0.1352338, "fp8"), "deepseek_r1": (671, 37, 0.1352338, "fp8"), "deepseek_v2_lite": (15.7, 2.4, 0.1147214, "plain"),
    "kimi_k2_instruct": (1040, 32, 0.1308608, "fp8"), "kimi_k25": (1040, 32, 0.1446796, "int4"), "kimi_k26": (1040, 32, 0.1446796, "int4"),
    "moonlight_16b_a3b": (16, 3, 0.0721688, "plain"), "glm_47_flash": (30, 3, 0.0625, "plain")}


def meta(config):
    return on_meta(Transformer, parse_config(Config, config), torch.bfloat16)


def test_every_config_is_known():
    assert CONFIGS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes(name):
    total, active, scale, stored = PUBLISHED[name]
    model = meta(CONFIGS[name])
    assert model.num_params() / 1e9 == pytest.approx(total, rel=0.015)
    assert model.active_params() / 1e9 == pytest.approx(active, abs=0.6)
    assert model.config.softmax_scale == pytest.approx(scale, abs=1e-7)
    assert storage(CONFIGS[name]) == stored


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensor_names(name):
    """Every layer's names and shapes as FORMATS lists them."""
    config = CONFIGS[name]
    c = config.get("text_config", config)
    h, L, H, C, R, E, I = (c[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim",
                                          "n_routed_experts", "moe_intermediate_size"))
    q, nope, v, shared, dense = c["q_lora_rank"], c["qk_nope_head_dim"], c["v_head_dim"], I * c["n_shared_experts"], c["intermediate_size"]
    want = {"embed_tokens.weight": (c["vocab_size"], h), "norm.weight": (h,), "lm_head.weight": (c["vocab_size"], h)}
    first_moe = c["mlp_layer_types"].index("sparse") if "mlp_layer_types" in c else c["first_k_dense_replace"]
    for i in range(L):
        a, m = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        want |= {f"layers.{i}.input_layernorm.weight": (h,), f"layers.{i}.post_attention_layernorm.weight": (h,),
                 a + "kv_a_proj_with_mqa.weight": (C + R, h), a + "kv_a_layernorm.weight": (C,), a + "kv_b_proj.weight": (H * (nope + v), C),
                 a + "o_proj.weight": (h, H * v)}
        want |= {a + "q_a_proj.weight": (q, h), a + "q_a_layernorm.weight": (q,), a + "q_b_proj.weight": (H * (nope + R), q)} if q else {
            a + "q_proj.weight": (H * (nope + R), h)}
        ffns = {m: dense}
        if i >= first_moe:
            ffns = {f"{m}shared_experts.": shared, **{f"{m}experts.{e}.": I for e in range(E)}}
            want[m + "gate.weight"] = (E, h)
            if name != "deepseek_v2_lite":
                want[m + "gate.e_score_correction_bias"] = (E,)
        for at, width in ffns.items():
            want |= {at + "gate_proj.weight": (width, h), at + "up_proj.weight": (width, h), at + "down_proj.weight": (h, width)}
    assert {s.name: s.shape for s in layout(meta(config))} == want


def test_draft_names():
    drafter = on_meta(Drafter, parse_config(DraftConfig, DRAFT), torch.bfloat16)
    names = {re.sub(r"layers\.\d+\.", "layers.N.", s.name) for s in layout(drafter)}
    each = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{k}" for k in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
            *(f"mlp.{k}_proj" for k in ("gate", "up", "down")))
    assert names == {"fc.weight", "hidden_norm.weight", "norm.weight", *(f"layers.N.{k}.weight" for k in each)}
    assert next(s.shape for s in layout(drafter) if s.name == "fc.weight") == (7168, 6 * 7168)


def test_kimi_k26_on_disk():
    """595 GB: what its files hold is what the plan counts."""
    plan = memory_plan(CONFIGS["kimi_k26"], context=1, budget=1)
    assert plan["routed experts"] + sum(plan[k] for k in ("dense layers", "attention", "shared experts", "embedding and head", "routers and norms")) == pytest.approx(595e9, rel=0.002)


@pytest.mark.parametrize("kind", ("plain", "fp8", "int4", "tied"))
def test_the_plan_is_what_is_allocated(kind, tmp_path):
    config, tensors = golden_target("kimi_k2" if kind == "int4" else "deepseek_v3")
    draft_config, draft_tensors = golden_draft("sliding_b16")
    if kind == "fp8":
        tensors, config["quantization_config"] = to_fp8(tensors)[0], {"quant_method": "fp8"}
    if kind == "int4":
        config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        config, tensors = kimi_k25(config, to_int4(tensors)[0])
    if kind == "tied":
        config["tie_word_embeddings"] = True
        tensors.pop("lm_head.weight")
    target = load_target(write(tmp_path / "t", config, tensors), dtype=torch.bfloat16)
    draft = load_draft(write(tmp_path / "d", draft_config, draft_tensors), target, dtype=torch.bfloat16)
    plan = memory_plan(config, draft_config, context=100, batch=3)
    target.setup_cache(3, 100)
    draft.setup_cache(3, 100)
    weights = sum(v for k, v in plan.items() if k not in ("target latents", "drafter K/V", "drafter", "workspace", "total"))
    assert plan["target latents"] == target.cache.nbytes and plan["drafter K/V"] == draft.k_cache.nbytes + draft.v_cache.nbytes
    assert plan["drafter"] == sum(p.nbytes for p in draft.own_params().values())
    assert weights == sum(t.nbytes for t in {t.data_ptr(): t for t in target.parameters()}.values())
    assert plan["total"] == weights + plan["drafter"] + plan["target latents"] + plan["drafter K/V"] + plan["workspace"]


def test_the_ring_of_mode_auto_is_planned():
    target, draft = tiny.target(torch.float32), tiny.drafter(tiny.target(torch.float32))
    decoder = Decoder(target, draft, 3, 50, 32)
    config, (draft_config, _) = golden_target("deepseek_v3")[0], golden_draft("sliding_b16")
    without, plan = (memory_plan(config, draft_config, context=100, batch=3, dtype=torch.float32, ring=ring) for ring in (0, 32))
    taps = len(parse_config(DraftConfig, draft_config).taps) * config["hidden_size"]
    assert plan["waiting taps"] == plan["total"] - without["total"] == decoder.waiting_taps.nbytes * taps // draft.fc.in_features


def test_more_devices_need_less_each():
    one, eight = (memory_plan(CONFIGS["deepseek_v3"], context=8192, batch=4, tp=n) for n in (1, 8))
    assert all(eight[k] <= one[k] for k in one) and eight["routed experts"] * 8 == one["routed experts"]
    assert eight["target latents"] == one["target latents"]
    # q_a (1536 x 7168), kv_a (576 x 7168) and their norms are on every device; the per-head rest is divided
    assert 8 * eight["attention"] - one["attention"] == 7 * 61 * 2 * (1536 * 7168 + 576 * 7168 + 1536 + 512)
    assert eight["routers and norms"] == one["routers and norms"]


def test_table():
    text = table(memory_plan(CONFIGS["kimi_k26"], DRAFT, 32768, 8, 8), 8)
    for what in ("on each of 8 devices", "routed experts", "target latents", "drafter K/V", "workspace", "total"):
        assert what in text


def test_what_would_fit():
    config = CONFIGS["deepseek_v2_lite"]
    need = memory_plan(config, context=32768, batch=8)["total"]
    assert check_fits(need, config, context=32768, batch=8)["total"] == need
    with pytest.raises(UserError, match=r"what would fit: a context of (\d+) or a batch of (\d+) or 2 devices") as e:
        check_fits(int(need * 0.9), config, context=32768, batch=8)
    context, batch = map(int, re.search(r"context of (\d+) or a batch of (\d+) or", str(e.value)).groups())
    check_fits(int(need * 0.9), config, context=context, batch=8)
    check_fits(int(need * 0.9), config, context=32768, batch=batch)
    for changes in ({"context": context + 1, "batch": 8}, {"context": 32768, "batch": batch + 1}):
        assert memory_plan(config, **changes)["total"] > int(need * 0.9)
    with pytest.raises(UserError, match="no smaller context, batch or share fits"):
        check_fits(10 ** 6, config, context=32768, batch=8)


@pytest.mark.parametrize("arguments, says", (
    (dict(context=0), "at least 1"), (dict(batch=0), "at least 1"), (dict(tp=0), "at least 1"), (dict(tp=7), "heads 128 over 7.*What would work: --tp 2 or 4 or 8 or 16"),
    (dict(context=10 ** 6), "longer than the model's, 163840")))
def test_bad_arguments(arguments, says):
    with pytest.raises(UserError, match=says):
        memory_plan(CONFIGS["deepseek_v3"], **arguments)


def test_other_quantization_and_pairs_are_refused():
    for given in ({"quant_method": "awq"}, "awq"):
        with pytest.raises(UserError, match="'awq'"):
            memory_plan({**CONFIGS["deepseek_v2_lite"], "quantization_config": given})
    with pytest.raises(UserError, match="hidden size is 7168, the target's 2048"):
        memory_plan(CONFIGS["deepseek_v2_lite"], DRAFT)


def test_a_markov_head_is_on_every_device():
    """2 x V x r values on one device and on eight, beside a drafter that is divided."""
    def drafter(tp, **head):
        return memory_plan(CONFIGS["kimi_k26"], {**DRAFT, **head}, tp=tp)["drafter"]
    for tp in (1, 8):
        assert drafter(tp, markov_rank=256) - drafter(tp) == 2 * 163840 * 256 * 2
