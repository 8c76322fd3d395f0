"""Small checkpoints in the layouts that are on the hub, made from the golden ones."""
import json
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from hub import write_safetensors
from verify import Decoder

GOLDEN = Path(__file__).parent / "golden"
TARGETS = sorted(p.name for p in (GOLDEN / "targets").iterdir())


def golden_target(name: str) -> tuple:
    """(config, tensors) of a golden target."""
    folder = GOLDEN / "targets" / name
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def golden_draft(name: str, **changes) -> tuple:
    """(config, tensors) of a golden drafter, for a target of hidden size 64, 4 layers and 256 tokens. Changes to config keys
    go to the top level; a golden drafter has no embedding, so its vocabulary is only a number."""
    folder = GOLDEN / "drafters" / name
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"], config["dflash_config"]["mask_token_id"] = 256, 255
    return {**config, **changes}, load_file(folder / "model.safetensors")


def write(folder: Path, config: dict, tensors: dict, shards: int = 1, name: str = "model-{i}-of-{n}.safetensors") -> Path:
    """One file, or an index and shards that tensors are dealt to in turn: the weight and its scale land in different ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    def save(file, names):
        write_safetensors(folder / file, {k: (tensors[k].shape, tensors[k].dtype, lambda t=tensors[k]: t) for k in names})
    if shards == 1:
        save("model.safetensors", tensors)
        return folder
    files = {key: name.format(i=i % shards + 1, n=shards) for i, key in enumerate(tensors)}
    for file in set(files.values()):
        save(file, [k for k in tensors if files[k] == file])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def pack_int4(dense: torch.Tensor) -> tuple:
    """dense (out, in) -> packed (out, in/8) int32, scale (out, in/32) bf16, symmetric, as compressed-tensors does it."""
    groups = dense.float().unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1) / 7.5).clamp(min=1e-6).to(torch.bfloat16)
    q = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).to(torch.int64).flatten(-2) + 8
    words = (q.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2 ** 31, words - 2 ** 32, words).to(torch.int32), scale


def to_int4(tensors: dict) -> tuple:
    """Routed experts packed, the rest bf16 as in Kimi-K2.5's files -> (tensors, their dense bf16 twin)."""
    packed, dense = {}, {}
    for name, t in tensors.items():
        if ".mlp.experts." not in name:
            packed[name] = dense[name] = t if name.endswith("e_score_correction_bias") else t.to(torch.bfloat16)
            continue
        words, scale = pack_int4(t)
        packed |= {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": torch.tensor(t.shape, dtype=torch.int32)}
        q = ((words.long().unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15).flatten(-2) - 8
        dense[name] = (q.to(torch.bfloat16).unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)).flatten(-2)
    return packed, dense


def to_fp8(tensors: dict) -> tuple:
    """Linear weights as float8 with one scale per 128 x 128 block, as in DeepSeek-V3's files -> (tensors, dense fp32 twin)."""
    quantized, dense = {}, {}
    for name, t in tensors.items():
        if t.dim() < 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", ".gate.weight")):
            quantized[name] = dense[name] = t if name.endswith("e_score_correction_bias") else t.to(torch.bfloat16)
            continue
        scale = torch.empty(-(-t.shape[0] // 128), -(-t.shape[1] // 128))
        q, d = torch.empty(t.shape, dtype=torch.float8_e4m3fn), torch.empty_like(t)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
                scale[i, j] = t[at].abs().max() / 448
                q[at] = (t[at] / scale[i, j]).to(torch.float8_e4m3fn)
                d[at] = q[at].float() * scale[i, j]
        quantized |= {name: q, f"{name}_scale_inv": scale}
        dense[name] = d
    return quantized, dense


def kimi_k25(config: dict, tensors: dict, prefix: str = "language_model.") -> tuple:
    """The wrapper of Kimi-K2.5: nested text_config, prefixed names, and a vision tower beside the text model."""
    wrapped = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "eos_token_id": config["eos_token_id"],
               "vision_config": {"vt_hidden_size": 8}, "text_config": {**config, "architectures": ["DeepseekV3ForCausalLM"]}}
    junk = {"vision_tower.encoder.blocks.0.wqkv.weight": torch.zeros(2, 2), "mm_projector.proj.0.weight": torch.zeros(2, 2)}
    def rename(name):
        if prefix == "model.language_model.":  # re-saved copies: the head stays outside
            return name if name.startswith("lm_head") else prefix + name.removeprefix("model.")
        return prefix + name
    return wrapped, {rename(k): v for k, v in tensors.items()} | junk


def with_junk(config: dict, tensors: dict) -> dict:
    """What real files hold beside the model: a multi-token-prediction layer past the last one, rope tables of a wrong length."""
    last = config["num_hidden_layers"]
    extra = {f"model.layers.{last}.{k.split('.', 3)[3]}": v for k, v in tensors.items() if k.startswith(f"model.layers.{last - 1}.")}
    extra |= {f"model.layers.{last}.eh_proj.weight": torch.zeros(64, 128), f"model.layers.{last}.enorm.weight": torch.ones(64)}
    extra |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(64) for i in range(last)}
    return tensors | extra


def fuse_experts(tensors: dict) -> dict:
    """Per layer one gate_up_proj (E, 2I, h) and one down_proj (E, h, I), as transformers 5 may save them."""
    fused = {k: v for k, v in tensors.items() if ".mlp.experts." not in k}
    for layer in sorted({k.split(".mlp.experts.")[0] for k in tensors if ".mlp.experts." in k}):
        at, E = f"{layer}.mlp.experts", sum(k.startswith(f"{layer}.mlp.experts.") for k in tensors) // 3
        fused[f"{at}.gate_up_proj"] = torch.stack([torch.cat([tensors[f"{at}.{e}.{w}_proj.weight"] for w in ("gate", "up")]) for e in range(E)])
        fused[f"{at}.down_proj"] = torch.stack([tensors[f"{at}.{e}.down_proj.weight"] for e in range(E)])
    return fused


@contextmanager
def steps_that_end(after: int, error):
    """So many rounds of whatever decodes go well, and the next ones raise the error."""
    ordinary, left = Decoder.step, [after]
    def step(*args):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return ordinary(*args)
    with patch.object(Decoder, "step", step):
        yield
