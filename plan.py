"""The memory plan: what a model, its drafter, their caches and one round need on each device, from the configs alone.

Shapes: B sequences, N nodes or prompt tokens per sequence, S context slots, H heads, V vocabulary, L layers.
"""
import math
import os
from typing import Optional

import torch

from checkpoint import check_pair, keep_packed, on_meta, parse_config
from draft import DraftConfig, Drafter
from hub import UserError
from model import Config, MoE, Transformer
from ranks import draft_misfits


def storage(config: dict) -> str:
    """How a checkpoint stores its weights: "int4" (routed experts, the rest bf16), "fp8" (blocks) or "plain"."""
    q = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    method, form = (q.get("quant_method"), q.get("format")) if isinstance(q, dict) else (q, None)
    if method is None or method == "fp8":
        return method or "plain"
    if method == "compressed-tensors" and form == "pack-quantized":
        return "int4"
    raise UserError(f"quantization {method!r} (format {form!r}) is not supported; fp8 blocks and compressed-tensors pack-quantized are")


def weights(model: Transformer, shapes: dict) -> dict:
    """Kind -> bytes. shapes: what a device holds of each parameter, by name."""
    kinds, sizes = {}, {name: math.prod(shapes[name]) * p.element_size() for name, p in model.named_parameters()}
    def add(kind, *within):
        for name in [n for n in sizes if n.startswith(within)]:
            kinds[kind] = kinds.get(kind, 0) + sizes.pop(name)
    for i, layer in enumerate(model.layers):
        at = f"layers.{i}."
        if isinstance(layer.mlp, MoE):
            add("routed experts", f"{at}mlp.experts.")
            add("shared experts", f"{at}mlp.shared_experts.")
        else:
            add("dense layers", f"{at}mlp.")
        add("attention", f"{at}self_attn.")
    add("embedding and head", "embed_tokens.", "lm_head.")
    add("routers and norms", "")
    return kinds


def shared(config: Config, packed: bool, dtype: torch.dtype, tp: int, experts: str) -> tuple:
    """Which functions of a target and of a drafter tell what one of tp ranks holds of their parameters. UserError where they
    cannot be shared so."""
    if tp == 1:
        return (lambda model: {name: p.shape for name, p in model.named_parameters()},) * 2
    from parallel import check_layout, draft_table, held, parse_layout, target_table  # here, because its imports take long
    r = parse_layout(tp, experts)
    check_layout(r, experts, config, packed, dtype)
    return lambda model: held(model, target_table(r)), lambda model: held(model, draft_table(r, model.config))


ROOM = 3 << 29  # bytes that the attention scores of a prefill chunk may take


def score_bytes(heads: int, item: int) -> int:
    """Of one node and one slot, at the peak: twice in the model's dtype and four times in fp32 around the softmax."""
    return heads * (2 * item + 4 * 4)


def chunk_room(heads: int, span: int, item: int) -> int:
    """How many prompt tokens, of all rows together, a prefill forward may hold that attends `span` slots: as many as keep its
    scores within ROOM, and at least 16. heads: those of a rank."""
    return max(16, ROOM // (score_bytes(heads, item) * (span + 256)))


def workspace(c: Config, tokens: int, N: int, S: int, tp: int, item: int, logits: int) -> int:
    """The peak of one forward of `tokens` nodes, N a sequence: attention scores, or the logits of `logits` nodes with their fp32
    copy and the noise of sampling."""
    scores = tokens * (S + N) * score_bytes(-(-c.num_heads // tp), item)
    experts = tokens * c.experts_per_token * (c.hidden_size + 3 * c.expert_ffn) * item
    return max(scores, experts, logits * c.vocab_size * (item + 2 * 4)) + 4 * tokens * c.hidden_size * item


def memory_plan(config: dict, draft: Optional[dict] = None, context: int = 4096, batch: int = 1, tp: int = 1, budget: int = 32,
                chunk: int = 256, dtype: torch.dtype = torch.bfloat16, experts: str = "tp", ring: int = 0) -> dict:
    """What -> bytes on each of tp devices, for `batch` sequences of `context` tokens; "total" is the last entry.
    config, draft: what config.json holds. fp8 counts as dense weights, which it becomes when loaded; int4 stays packed. experts:
    see parallel.py. ring: rounds the drafter's taps may wait, of mode auto. Where devices hold different amounts, the first one is meant, which holds the most."""
    c = parse_config(Config, config)
    if min(context, batch, tp) < 1:
        raise UserError(f"context, batch and tp must be at least 1, got {context}, {batch} and {tp}")
    if context > c.max_positions:
        raise UserError(f"a context of {context} is longer than the model's, {c.max_positions}")
    d = None if draft is None else parse_config(DraftConfig, draft)
    if d is not None:
        check_pair(d, c, "(its config.json)")
    packed = storage(config) == "int4"
    of_target, of_draft = shared(c, packed, dtype, tp, experts)
    model, item = on_meta(Transformer, c, dtype), dtype.itemsize
    if c.tie:
        model.lm_head.weight = None
    if packed:
        for m in model.modules():
            if isinstance(m, MoE):
                keep_packed(m, c)
    plan = weights(model, of_target(model))
    if d is not None:
        drafter = on_meta(Drafter, d, dtype)
        plan["drafter"] = sum(math.prod(shape) for shape in of_draft(drafter).values()) * item
    slots = context + 1  # one spare slot takes what is not committed
    plan["target latents"] = batch * slots * c.num_layers * c.latent_dim * item  # a latent serves all heads: every device has all
    if d is not None:
        kv_heads = d.num_kv_heads if draft_misfits(d, tp) else -(-d.num_kv_heads // tp)
        plan["drafter K/V"] = batch * slots * 2 * d.num_layers * kv_heads * d.head_dim * item
        if ring:
            plan["waiting taps"] = batch * ring * drafter.fc.in_features * item
    nodes, chunk = min(budget + 1, context), min(chunk, context)
    read = min(batch * chunk, chunk_room(-(-c.num_heads // tp), context, item))
    plan["workspace"] = max(workspace(c, batch * nodes, nodes, context, tp, item, batch * nodes), workspace(c, read, chunk, context, tp, item, batch))
    return {**plan, "total": sum(plan.values())}


def table(plan: dict, tp: int = 1) -> str:
    """The plan as text, one kind a line."""
    wide = max(map(len, plan))
    lines = [f"{what:<{wide}}  {size / 1e9:9.3f} GB" for what, size in plan.items()]
    rule = "-" * len(lines[0])
    return "\n".join([f"on each of {tp} devices" if tp > 1 else "on one device", rule, *lines[:-1], rule, lines[-1]])


def memory_of(device: str) -> int:
    """Bytes free on a CUDA device; all of the host's for any other."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_fits(available: int, config: dict, draft: Optional[dict] = None, context: int = 4096, batch: int = 1, tp: int = 1, **more) -> dict:
    """The plan, or a UserError that says what would fit in `available` bytes per device."""
    def total(**changes):
        return memory_plan(config, draft, **{**dict(context=context, batch=batch, tp=tp), **changes}, **more)["total"]
    plan = memory_plan(config, draft, context, batch, tp, **more)
    if plan["total"] <= available:
        return plan
    def largest(name, most):
        """The largest value of an argument that fits, found by halving the range; 0 where none does."""
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if total(**{name: middle}) <= available else (low, middle)
        return low
    def enough(n):
        try:
            return total(tp=n) <= available
        except UserError:  # this many cannot share the model
            return False
    devices = next((n for n in range(tp + 1, parse_config(Config, config).num_heads + 1) if enough(n)), 0)
    fits = [f"{what}{n}{unit}" for what, n, unit in (("a context of ", largest("context", context), ""), ("a batch of ", largest("batch", batch), ""),
                                                     ("", devices, " devices")) if n]
    raise UserError(f"{plan['total'] / 1e9:.1f} GB are needed on each of {tp} devices for a context of {context} and a batch of {batch}, "
                    f"{available / 1e9:.1f} GB are there; " + (f"what would fit: {' or '.join(fits)}" if fits else "no smaller context, batch or share fits"))
