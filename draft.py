"""The drafter: DFlash (arXiv 2602.06036), a block-diffusion model fed with the target's hidden states.

`graft` turns the target's taps into K/V of every draft layer, once, when tokens are committed. `propose` runs one block
[root, mask, mask, …] over that grafted context and returns a distribution for every drafted depth at once. `blocks` is
the body of both `propose` (one block per sequence) and training (many blocks per sequence).

Distributions of different depths do not know each other. DSpark's Markov head, where a drafter has one, says what the token
before adds to a depth's logits.

Shapes: B sequences, M blocks per sequence (1 when proposing), b block slots, D drafted depths, S context slots, L draft layers,
G kv heads, g query heads per kv head, d head dim, h hidden size, n taps, V vocabulary, r rank of the Markov head, P prefixes,
K candidates.
"""
import math
from dataclasses import dataclass, replace
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import FFN, RMSNorm, Rope, at_least_fp32, cos_sin, upcast


@dataclass(frozen=True)
class DraftConfig:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    eps: float
    rope: Rope
    block: int             # slots of a block, the root included
    slots: str             # "masked": slot j >= 1 predicts position length + j; "next": slot j >= 0 predicts length + j + 1
    taps: tuple            # target layers whose OUTPUTS are grafted, 0-based
    mask_id: int
    num_target_layers: Optional[int]
    windows: tuple         # per layer: keys with q - k < window are seen; 0 = all
    causal: tuple          # per layer: causal inside the block
    max_positions: int
    markov_rank: int = 0             # of the Markov head; 0: none
    markov_type: str = "vanilla"     # or "gated"

    def drafted(self, block: int) -> int:
        """How many positions a block of so many slots drafts."""
        return block - (self.slots == "masked")

    @classmethod
    def from_dict(cls, d: dict) -> "DraftConfig":
        """config.json as a dict -> DraftConfig. ValueError names what is missing, guessed nowhere."""
        own = {**(d.get("dspark_config") or {}), **(d.get("dflash_config") or {})}
        def key(name, default=None):
            value = own.get(name, d.get(name, default))
            if value is None:
                raise ValueError(f"the key {name!r} is missing (looked at the top level and in dflash_config)")
            return value
        try:
            layers = d["num_hidden_layers"]
            kinds = d.get("layer_types") or ["full_attention"] * layers
            unknown = set(kinds) - {"full_attention", "sliding_attention"}
            if unknown or len(kinds) != layers:
                raise ValueError(f"layer_types must hold {layers} times full_attention or sliding_attention, got {kinds}")
            sliding = tuple(k == "sliding_attention" for k in kinds)
            if any(sliding) and not d.get("sliding_window"):
                raise ValueError("layer_types has sliding_attention but sliding_window is missing")
            taps, heads = tuple(key("target_layer_ids")), d["num_attention_heads"]
            if not taps or len(set(taps)) < len(taps) or min(taps) < 0:
                raise ValueError(f"target_layer_ids must be distinct layers >= 0, got {list(taps)}")
            architecture = (d.get("architectures") or [""])[0]
            follows = architecture == "Qwen3DSparkModel" or key("shift_label", False)
            rank, kind = own.get("markov_rank", d.get("markov_rank")) or 0, key("markov_head_type", "vanilla")
            if rank and kind == "rnn":
                raise ValueError("markov_head_type rnn is not supported: its state depends on the whole path; vanilla and gated heads are")
            if rank and kind not in ("vanilla", "gated"):
                raise ValueError(f"markov_head_type must be vanilla or gated, got {kind!r}")
            head_dim = d.get("head_dim") or d["hidden_size"] // heads
            config = cls(d["vocab_size"], d["hidden_size"], layers, heads, d.get("num_key_value_heads", heads), head_dim, d["intermediate_size"],
                         d["rms_norm_eps"], Rope.from_dict(d, head_dim), key("block_size"), "next" if follows else "masked", taps,
                         key("mask_token_id"), d.get("num_target_layers"), tuple(d["sliding_window"] if s else 0 for s in sliding),
                         tuple(s and d.get("is_causal") is not False for s in sliding), d.get("max_position_embeddings", 1 << 30), rank, kind)
        except KeyError as e:
            raise ValueError(f"the key {e.args[0]!r} is missing") from None
        except TypeError as e:
            raise ValueError(f"a value has the wrong type ({e})") from None
        if config.block < 2:
            raise ValueError(f"block_size must be at least 2, got {config.block}")
        return config


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates (x[i], x[i + d/2]) of the last dim d. cos (…, d): its halves are equal; sin likewise, the first half negated."""
    wide = upcast(x)
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).type_as(x)


class DraftAttention(nn.Module):
    """Grouped-query attention with normed queries and keys, over grafted context and the block itself, in two halves
    before one softmax. K and V weights of all layers live in the Drafter, so that a graft is one product."""

    def __init__(self, c: DraftConfig):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.eps)
        self.k_norm = RMSNorm(c.head_dim, c.eps)

    def forward(self, x: Tensor, kv_weight: Tensor, k: Tensor, v: Tensor, rope: tuple, bias: Tensor) -> Tensor:
        """x (B, M, b, h); kv_weight (2, G*d, h); k, v (B, S, G, d); rope of B*M*b positions; bias (B, 1, M, b, 1, S+b) -> (B, M, b, h)."""
        d, (B, M, b, h), (S, G) = self.c.head_dim, x.shape, k.shape[1:3]
        x = x.view(-1, h)
        own_k, own_v = F.linear(x, kv_weight.flatten(0, 1)).view(-1, 2, G, d).unbind(1)                  # (B*M*b, G, d)
        own_k = rotate_halves(self.k_norm(own_k), *rope)
        own_k, own_v = (t.view(B, M, b, G, d).permute(0, 3, 1, 2, 4).reshape(-1, b, d) for t in (own_k, own_v))  # (B*G*M, b, d)
        q = rotate_halves(self.q_norm(self.q_proj(x).view(B * M * b, -1, d)), *rope)                     # (B*M*b, H, d)
        q = q.view(B, M * b, G, -1, d).transpose(1, 2).reshape(B * G, -1, d)                             # (B*G, M*b*g, d)
        k, v = (t.transpose(1, 2).flatten(0, 1) for t in (k, v))                                         # (B*G, S, d): no copy of a cache
        # (bmm for the reason given in model.Attention)
        to_context = torch.bmm(q, k.transpose(1, 2)).view(B, G, M, b, -1, S)
        to_block = torch.bmm(q.view(B * G * M, -1, d), own_k.transpose(1, 2)).view(B, G, M, b, -1, b)
        scores = upcast(torch.cat((to_context, to_block), -1))                                           # (B, G, M, b, g, S+b)
        p_context, p_block = torch.add(bias, scores, alpha=d ** -0.5).softmax(-1).type_as(x).split_with_sizes((S, b), -1)
        out = torch.bmm(p_block.reshape(B * G * M, -1, b), own_v).view(B * G, -1, d)
        out = torch.baddbmm(out, p_context.view(B * G, -1, S), v)                                        # (B*G, M*b*g, d)
        out = out.view(B, G, M * b, -1, d).transpose(1, 2).reshape(B * M * b, -1)
        return self.o_proj(out).view(B, M, b, h)


class DraftLayer(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.eps)
        self.self_attn = DraftAttention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.eps)
        self.mlp = FFN(c.hidden_size, c.ffn)

    def forward(self, x: Tensor, *attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """What the token before adds to a depth's logits: p_k(· | x) = softmax(U_k + W2 e), e = W1[x] (DSpark). Gated, e is scaled by
    σ(Wg [h_k ; e]), h_k the block's output at the slot that drafts depth k."""

    def __init__(self, c: DraftConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(c.vocab_size, c.markov_rank)
        self.markov_w2 = nn.Linear(c.markov_rank, c.vocab_size, bias=False)
        self.gate_proj = nn.Linear(c.hidden_size + c.markov_rank, c.markov_rank) if c.markov_type == "gated" else None

    def forward(self, tokens: Tensor, hidden: Tensor, ids: Optional[Tensor] = None) -> Tensor:
        """tokens (…, P) before the depth and hidden (…, P, h) (or 1 in the place of P) of its slot -> (…, P, V), or (…, P, K) for
        the tokens ids (…, K) alone."""
        e = self.markov_w1(tokens)                                                                       # (…, P, r)
        if self.gate_proj is not None:
            e = self.gate_proj(torch.cat((hidden.expand(*e.shape[:-1], -1), e), -1)).sigmoid() * e
        return self.markov_w2(e) if ids is None else e @ F.embedding(ids, self.markov_w2.weight).mT


class Drafter(nn.Module):
    """`share` it with its target (embedding and head) before use, unless its file brings its own."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = c = config
        self.fc = nn.Linear(len(c.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.eps)
        self.kv_proj = nn.Parameter(torch.empty(c.num_layers, 2, c.num_kv_heads * c.head_dim, c.hidden_size))  # k, then v
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.eps)
        self.markov_head = MarkovHead(c) if c.markov_rank else None
        self.block = c.block  # may be lowered below what was trained, never raised
        self.register_buffer("frequencies", torch.empty(c.head_dim // 2), persistent=False)
        self.register_buffer("k_cache", torch.empty(0), persistent=False)
        self.register_buffer("v_cache", torch.empty(0), persistent=False)
        self.reset_frequencies()

    def share(self, target: nn.Module) -> None:
        """Uses the target's embedding and head, by reference."""
        self.embed_tokens, self.lm_head = target.embed_tokens, target.lm_head

    def own_params(self) -> dict:
        """Name -> parameter, without what is shared with the target."""
        return {n: p for n, p in self.named_parameters() if not n.startswith(("embed_tokens.", "lm_head."))}

    def reset_frequencies(self) -> None:
        self.frequencies = self.config.rope.frequencies().to(self.norm.weight.device, at_least_fp32(self.norm.weight.dtype))

    def init_weights(self, generator: torch.Generator) -> None:
        for p in self.own_params().values():
            if p.dim() > 1:
                nn.init.normal_(p.data, std=0.02, generator=generator)
            else:
                nn.init.ones_(p.data)
        if self.markov_head is not None:
            self.init_head(generator)

    def init_head(self, generator: torch.Generator) -> None:
        """A Markov head that adds nothing yet: a drafter trained without one may be given it."""
        head = self.markov_head
        nn.init.normal_(head.markov_w1.weight.data, std=0.5, generator=generator)
        nn.init.zeros_(head.markov_w2.weight.data)
        if head.gate_proj is not None:
            nn.init.zeros_(head.gate_proj.weight.data), nn.init.zeros_(head.gate_proj.bias.data)

    def adapt(self, block: Optional[int] = None, window: Optional[int] = None, attention_factor: Optional[float] = None) -> None:
        """Overrides for decoding: a block smaller than trained, a window of context that full layers see too, the
        amplitude of the rope (engines disagree about yarn's). ValueError where a value cannot work."""
        c = self.config
        if block is not None:
            if not 2 <= block <= c.block:
                raise ValueError(f"a draft block must be between 2 and the {c.block} slots it was trained with, got {block}")
            self.block = block
        if window is not None:
            if window < c.block:
                raise ValueError(f"a draft window must be at least one block, {c.block}, got {window}")
            self.config = replace(self.config, windows=tuple(min(w or window, window) for w in c.windows))
        if attention_factor is not None:
            if not 0 < attention_factor < math.inf:
                raise ValueError(f"an attention factor must be a positive number, got {attention_factor}")
            self.config = replace(self.config, rope=replace(c.rope, attention_factor=attention_factor))

    @property
    def kv_heads(self) -> int:
        """Those held here: all of them, unless ranks divide them."""
        return self.kv_proj.shape[2] // self.config.head_dim

    @property
    def depths(self) -> int:
        """D: how many positions one block drafts."""
        return self.config.drafted(self.block)

    def setup_cache(self, batch: int, slots: int) -> None:
        """K/V for `batch` sequences of `slots` tokens, and one slot more that takes what is not committed."""
        c, w = self.config, self.norm.weight
        shape = (c.num_layers, batch, self.kv_heads, slots + 1, c.head_dim)  # in memory a head's slots are neighbours: attention wants them so
        self.k_cache, self.v_cache = (torch.zeros(shape, dtype=w.dtype, device=w.device).transpose(2, 3) for _ in range(2))

    def rope(self, positions: Tensor) -> tuple:
        """cos and sin as `rotate_halves` wants them, the same for all heads: positions in any shape, T in all -> (T, 1, d)."""
        cos, sin = cos_sin(self.frequencies, positions.reshape(-1, 1), self.config.rope.amplitude)       # (T, 1, d/2)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def context(self, taps: Tensor, positions: Tensor) -> tuple:
        """taps (B, T, n*h) of tokens at positions (B, T) -> K, V (L, B, T, G, d) of every layer, in one product.
        They come from hidden_norm(fc(taps)) and never pass a layer's input norm."""
        c, (B, T, _) = self.config, taps.shape
        x = self.hidden_norm(self.fc(taps))
        k, v = F.linear(x, self.kv_proj.flatten(0, 2)).view(B * T, c.num_layers, 2, self.kv_heads, c.head_dim).unbind(2)  # (B*T, L, G, d)
        k = torch.stack([layer.self_attn.k_norm(k[:, i]) for i, layer in enumerate(self.layers)])                         # (L, B*T, G, d)
        return rotate_halves(k, *self.rope(positions)).unflatten(1, (B, T)), v.transpose(0, 1).unflatten(1, (B, T))

    def graft(self, taps: Tensor, length: Tensor, count: Optional[Tensor] = None, rows: Optional[Tensor] = None) -> None:
        """Writes the K/V of tokens at positions length … length+T-1 from their taps (B, T, n*h). Of row b only the
        first count[b] are real; the rest lands in the spare slot, which nothing reads. rows (B,): the cache's rows they are."""
        B, T, _ = taps.shape
        step = torch.arange(T, device=taps.device)
        positions = length.unsqueeze(1) + step                                                           # (B, T)
        k, v = self.context(taps, positions)
        slot = positions if count is None else torch.where(step < count.unsqueeze(1), positions, self.k_cache.shape[2] - 1)
        rows = (torch.arange(B, device=taps.device) if rows is None else rows).unsqueeze(1)
        self.k_cache[:, rows, slot] = k
        self.v_cache[:, rows, slot] = v

    def propose(self, root: Tensor, length: Tensor, span: Optional[int] = None) -> Tensor:
        """root (B,) at position length (B,), of the cache's first rows -> marginals (B, D, V), logits: depth d predicts position length + d + 1.
        span: context slots to attend, at least every length (default: all)."""
        return self.proposal(root, length, span)[0]

    def proposal(self, root: Tensor, length: Tensor, span: Optional[int] = None) -> tuple:
        """`propose`, and what `build_tree` takes as conditional, None without a Markov head: f(depth, before (B, P), ids (B, K))
        -> (B, P, K), what the token before adds to the logits of ids at a depth; of all V tokens without ids."""
        span = self.k_cache.shape[2] - 1 if span is None else span
        ids = torch.full((root.shape[0], 1, self.block), self.config.mask_id, device=root.device)
        ids[:, 0, 0] = root
        k, v = (cache[:, :len(root), :span] for cache in (self.k_cache, self.v_cache))                   # (L, B, S, G, d)
        x = self.blocks(ids, length.unsqueeze(1), k, v)                                                  # (B, 1, b, h)
        hidden = x[:, 0, self.block - self.depths:]                                                      # (B, D, h)
        def conditional(depth: int, before: Tensor, ids: Optional[Tensor] = None) -> Tensor:
            return self.markov_head(before, hidden[:, depth:depth + 1], ids)
        return self.lm_head(hidden), None if self.markov_head is None else conditional

    def logits(self, x: Tensor, before: Optional[Tensor] = None) -> Tensor:
        """blocks' output (B, M, b, h) -> logits (B, M, D, V) of the drafted slots; given the tokens (B, M, D) before each, where
        there is a Markov head to tell them (training: the text's own)."""
        x = x[:, :, self.block - self.depths:]
        logits = self.lm_head(x)
        return logits if before is None or self.markov_head is None else logits + self.markov_head(before, x)

    def blocks(self, ids: Tensor, start: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """ids (B, M, b) of M blocks that start at positions start (B, M), over context K, V (L, B, S, G, d) where slot s
        holds position s; a block sees the slots before its start. Returns the normed output (B, M, b, h)."""
        return self.hidden(self.embed_tokens(ids), start, k, v)

    def hidden(self, x: Tensor, start: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`blocks` on embeddings x (B, M, b, h)."""
        step = torch.arange(x.shape[2], device=x.device)
        positions = start.unsqueeze(-1) + step                                                           # (B, M, b)
        rope, kinds = self.rope(positions), list(zip(self.config.windows, self.config.causal))
        biases = {kind: block_bias(positions, start, k.shape[2], *kind, dtype=upcast(x).dtype) for kind in dict.fromkeys(kinds)}
        for i, (layer, kind) in enumerate(zip(self.layers, kinds)):
            x = layer(x, self.kv_proj[i], k[i], v[i], rope, biases[kind])
        return self.norm(x)

    def num_params(self) -> int:
        """Own parameters; embedding and head count with the target unless the file brought them."""
        return sum(p.numel() for p in self.own_params().values())

    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.own_params().values())

    def kv_bytes_per_token(self) -> int:
        c = self.config
        return 2 * c.num_layers * self.kv_heads * c.head_dim * self.norm.weight.element_size()


def block_bias(positions: Tensor, start: Tensor, S: int, window: int, causal: bool, dtype: torch.dtype) -> Tensor:
    """(B, 1, M, b, 1, S+b) additive mask: context slots before the block's start, then the block's own slots."""
    slot, step = torch.arange(S, device=start.device), torch.arange(positions.shape[-1], device=start.device)
    context = (slot < start.unsqueeze(-1)).unsqueeze(2).expand(*positions.shape, S)                      # (B, M, b, S)
    inside = torch.ones_like(positions.unsqueeze(-1), dtype=torch.bool).expand(*positions.shape, len(step))
    if window:
        context = context & (positions.unsqueeze(-1) - slot < window)
        inside = inside & ((step.unsqueeze(1) - step).abs() < window)
    if causal:
        inside = inside & (step <= step.unsqueeze(1))
    visible = torch.cat((context, inside), -1)[:, None, :, :, None]
    return torch.zeros(visible.shape, dtype=dtype, device=start.device).masked_fill(~visible, -math.inf)
