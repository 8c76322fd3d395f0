"""The memory plan: what a model, its drafter, their caches and one round need on each device, from the configs alone.

Shapes: B sequences, N nodes or prompt tokens per sequence, S context slots, H heads, V vocabulary, L layers.
"""
from typing import Optional

import torch

from checkpoint import UserError, check_pair, keep_packed, on_meta, parse_config
from draft import DraftConfig, Drafter
from model import Config, MoE, Transformer


def storage(config: dict) -> str:
    """How a checkpoint stores its weights: "int4" (routed experts, the rest bf16), "fp8" (blocks) or "plain"."""
    q = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    method, form = (q.get("quant_method"), q.get("format")) if isinstance(q, dict) else (q, None)
    if method is None or method == "fp8":
        return method or "plain"
    if method == "compressed-tensors" and form == "pack-quantized":
        return "int4"
    raise UserError(f"quantization {method!r} (format {form!r}) is not supported; fp8 blocks and compressed-tensors pack-quantized are")


def weights(model: Transformer, tp: int) -> dict:
    """Kind -> bytes on each of tp devices. Heads, FFN widths, experts and the vocabulary are divided; projections to latents,
    routers and norms are everywhere."""
    kinds = {}
    def add(kind, named, divided=lambda name: True):
        for name, p in named:
            kinds[kind] = kinds.get(kind, 0) + -(-p.numel() // (tp if divided(name) else 1)) * p.element_size()
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            add("routed experts", layer.mlp.experts.named_parameters())
            if layer.mlp.shared_experts is not None:
                add("shared experts", layer.mlp.shared_experts.named_parameters())
            add("routers and norms", layer.mlp.gate.named_parameters(), lambda name: False)
        else:
            add("dense layers", layer.mlp.named_parameters())
        per_head = ("w_uk", "w_uv", "q_proj.weight", "q_b_proj.weight", "o_proj.weight")
        add("attention", layer.self_attn.named_parameters(), lambda name: name in per_head)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            add("routers and norms", norm.named_parameters(), lambda name: False)
    add("routers and norms", model.norm.named_parameters(), lambda name: False)
    add("embedding and head", {id(m.weight): ("", m.weight) for m in (model.embed_tokens, model.lm_head)}.values())  # tied: once
    return kinds


def workspace(c: Config, B: int, N: int, S: int, tp: int, item: int, logits: int) -> int:
    """The peak of one forward of N nodes a sequence: attention scores, twice in the model's dtype and four times in fp32
    around the softmax, or the logits of `logits` nodes a sequence with their fp32 copy and the noise of sampling."""
    scores = B * N * -(-c.num_heads // tp) * (S + N) * (2 * item + 4 * 4)
    experts = B * N * c.experts_per_token * (c.hidden_size + 3 * c.expert_ffn) * item
    return max(scores, experts, B * logits * c.vocab_size * (item + 2 * 4)) + 4 * B * N * c.hidden_size * item


def memory_plan(config: dict, draft: Optional[dict] = None, context: int = 4096, batch: int = 1, tp: int = 1, budget: int = 32,
                chunk: int = 256, dtype: torch.dtype = torch.bfloat16) -> dict:
    """What -> bytes on each of tp devices, for `batch` sequences of `context` tokens; "total" is the last entry.
    config, draft: what config.json holds. fp8 counts as dense weights, which it becomes when loaded; int4 stays packed."""
    c = parse_config(Config, config)
    if min(context, batch, tp) < 1:
        raise UserError(f"context, batch and tp must be at least 1, got {context}, {batch} and {tp}")
    if context > c.max_positions:
        raise UserError(f"a context of {context} is longer than the model's, {c.max_positions}")
    if c.num_heads % tp:
        raise UserError(f"{c.num_heads} heads cannot be divided over {tp} devices")
    model, item = on_meta(Transformer, c, dtype), dtype.itemsize
    if c.tie:
        model.lm_head.weight = model.embed_tokens.weight
    if storage(config) == "int4":
        for m in model.modules():
            if isinstance(m, MoE):
                keep_packed(m, c)
    plan = weights(model, tp)
    if draft is not None:
        d = parse_config(DraftConfig, draft)
        check_pair(d, c, "(its config.json)")
        drafter = on_meta(Drafter, d, dtype)
        whole = ("markov_head.",)  # every device has the Markov head: it is small, and its rows are picked by token
        plan["drafter"] = sum(-(-p.numel() // (tp if p.dim() > 1 and not name.startswith(whole) else 1)) * item
                              for name, p in drafter.own_params().items())
    slots = context + 1  # one spare slot takes what is not committed
    plan["target latents"] = batch * slots * c.num_layers * c.latent_dim * item  # a latent serves all heads: every device has all
    if draft is not None:
        plan["drafter K/V"] = batch * slots * 2 * d.num_layers * -(-d.num_kv_heads // tp) * d.head_dim * item
    nodes = min(budget + 1, context)
    plan["workspace"] = max(workspace(c, batch, nodes, context, tp, item, nodes), workspace(c, batch, min(chunk, context), context, tp, item, 1))
    return {**plan, "total": sum(plan.values())}


def table(plan: dict, tp: int = 1) -> str:
    """The plan as text, one kind a line."""
    wide = max(map(len, plan))
    lines = [f"{what:<{wide}}  {size / 1e9:9.3f} GB" for what, size in plan.items()]
    rule = "-" * len(lines[0])
    return "\n".join([f"on each of {tp} devices" if tp > 1 else "on one device", rule, *lines[:-1], rule, lines[-1]])


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
    heads = parse_config(Config, config).num_heads
    devices = next((n for n in range(tp + 1, heads + 1) if heads % n == 0 and total(tp=n) <= available), 0)
    fits = [f"{what}{n}{unit}" for what, n, unit in (("a context of ", largest("context", context), ""), ("a batch of ", largest("batch", batch), ""),
                                                     ("", devices, " devices")) if n]
    raise UserError(f"{plan['total'] / 1e9:.1f} GB are needed on each of {tp} devices for a context of {context} and a batch of {batch}, "
                    f"{available / 1e9:.1f} GB are there; " + (f"what would fit: {' or '.join(fits)}" if fits else "no smaller context, batch or share fits"))
