"""The target: a DeepSeek-V2/V3-style decoder (MLA attention, mixture of experts) that scores a tree of tokens.

Everything the target computes is one call, `Transformer.forward(tree, length, span)`: score N nodes per sequence against
that sequence's committed latents. Prefill is a chain of known tokens, plain decode is one node, verification is a draft
tree. The forward reads the latent cache and RETURNS the new latents; it never writes. `commit` (verify.py) writes.

Shapes: B sequences, N nodes, S cache slots attended (span), L layers, H heads, C latent rank (kv_lora_rank), R rope dim,
E experts, K experts per token, I expert width, T = B*N tokens, V vocabulary, h hidden size, n taps.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "KimiK25ForConditionalGeneration")


class Tree(NamedTuple):
    """N nodes per sequence; node 0 is the root, and a parent always comes before its children."""
    tokens: Tensor     # (B, N) int64
    parents: Tensor    # (B, N) int64, the root's is -1
    depth: Tensor      # (B, N) int64, the root's is 0
    ancestors: Tensor  # (B, N, N) bool: [b, i, j] is "j is i or an ancestor of i"
    max_depth: int     # a static bound on depth; a path has max_depth + 1 nodes


def chain(tokens: Tensor) -> Tree:
    """The one-branch tree over tokens (B, N): node i is the child of node i - 1."""
    B, N = tokens.shape
    depth = torch.arange(N, device=tokens.device).expand(B, N)
    ancestors = torch.ones(N, N, dtype=torch.bool, device=tokens.device).tril().expand(B, N, N)
    return Tree(tokens, depth - 1, depth, ancestors, N - 1)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding parameters, yarn included (arXiv 2309.00071); factor 1 means no yarn."""
    dim: int
    theta: float
    factor: float = 1.0
    original: int = 4096          # context the unscaled model was trained for
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: Optional[float] = None  # overrides the amplitude of cos and sin

    @classmethod
    def from_dict(cls, d: dict, dim: int) -> "Rope":
        """Accepts rope_theta + rope_scaling{type} and rope_parameters{rope_type, rope_theta}. ValueError on other types."""
        p = {**(d.get("rope_scaling") or {}), **(d.get("rope_parameters") or {})}
        kind = p.get("rope_type", p.get("type", "default"))
        theta = p.get("rope_theta", d.get("rope_theta", 10000.0))
        if kind == "default":
            return cls(dim, theta)
        if kind != "yarn":
            raise ValueError(f"rope type {kind!r} is not supported; use 'default' or 'yarn'")
        return cls(dim, theta, p["factor"], p.get("original_max_position_embeddings") or d["max_position_embeddings"],
                   p.get("beta_fast") or 32.0, p.get("beta_slow") or 1.0, p.get("mscale") or 0.0,
                   p.get("mscale_all_dim") or 0.0, p.get("attention_factor"))

    def frequencies(self) -> Tensor:
        """(dim/2,) fp64 inverse frequencies: low ones divided by the factor, high ones kept, a linear ramp between."""
        extra = self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        if self.factor == 1.0:
            return extra
        def turns(r):  # the (fractional) index whose wavelength makes r turns over the original context
            return self.dim * math.log(self.original / (2 * math.pi * r)) / (2 * math.log(self.theta))
        low, high = max(math.floor(turns(self.beta_fast)), 0), min(math.ceil(turns(self.beta_slow)), self.dim - 1)
        ramp = ((torch.arange(self.dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)).clamp(0, 1)
        return extra / self.factor * ramp + extra * (1 - ramp)

    def _m(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def amplitude(self) -> float:
        """The factor on cos and sin, as transformers computes it."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._m(self.mscale) / self._m(self.mscale_all_dim)
        return self._m(1.0)

    @property
    def softmax_factor(self) -> float:
        """The factor on MLA's softmax scale: m squared, m from mscale_all_dim."""
        return self._m(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True)
class Config:
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: Optional[int]
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    dense_ffn: int
    expert_ffn: int
    num_experts: int
    experts_per_token: int
    shared_experts: int
    n_group: int
    topk_group: int
    scoring: str                # "sigmoid" with a bias, or "softmax" without
    norm_topk: bool
    routed_scale: float
    moe_layers: tuple           # one bool per layer
    rope: Rope
    max_positions: int
    eps: float
    eos: tuple
    tie: bool = False

    @classmethod
    def from_dict(cls, d: dict) -> "Config":
        """config.json as a dict -> Config. ValueError names what is missing or unsupported."""
        architecture = (d.get("architectures") or ["(none)"])[0]
        if architecture not in ARCHITECTURES:
            raise ValueError(f"architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}")
        t = {**d, **d.get("text_config", {})}
        try:
            layers, dense = t["num_hidden_layers"], t.get("first_k_dense_replace", 0)
            kinds = t.get("mlp_layer_types")
            moe = tuple(k == "sparse" for k in kinds) if kinds else tuple(i >= dense for i in range(layers))
            v2 = architecture == "DeepseekV2ForCausalLM"
            scoring = t.get("scoring_func") or ("softmax" if v2 else "sigmoid")
            if scoring not in ("sigmoid", "softmax"):
                raise ValueError(f"scoring_func {scoring!r} is not supported; use sigmoid or softmax")
            if t.get("moe_layer_freq", 1) != 1 or t.get("attention_bias") or t.get("hidden_act", "silu") != "silu":
                raise ValueError("moe_layer_freq other than 1, attention_bias and activations other than silu are not supported")
            eos = t.get("eos_token_id")
            eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
            config = cls(architecture, t["vocab_size"], t["hidden_size"], layers, t["num_attention_heads"], t.get("q_lora_rank"),
                         t["kv_lora_rank"], t["qk_nope_head_dim"], t["qk_rope_head_dim"], t["v_head_dim"], t["intermediate_size"],
                         t["moe_intermediate_size"], t["n_routed_experts"], t["num_experts_per_tok"], t.get("n_shared_experts") or 0,
                         t.get("n_group") or 1, t.get("topk_group") or 1, scoring, t.get("norm_topk_prob", not v2),
                         t.get("routed_scaling_factor", 1.0), moe, Rope.from_dict(t, t["qk_rope_head_dim"]),
                         t["max_position_embeddings"], t["rms_norm_eps"], eos, t.get("tie_word_embeddings", False))
        except KeyError as e:
            raise ValueError(f"the key {e.args[0]!r} is missing") from None
        except TypeError as e:
            raise ValueError(f"a value has the wrong type ({e})") from None
        if len(moe) != layers:
            raise ValueError(f"mlp_layer_types has {len(moe)} entries for {layers} layers")
        return config

    @property
    def latent_dim(self) -> int:
        return self.kv_lora_rank + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        return (self.nope_dim + self.rope_dim) ** -0.5 * self.rope.softmax_factor


def upcast(x: Tensor) -> Tensor:
    """At least fp32: fp64 stays fp64, so that a model in fp64 is fp64 throughout."""
    return x if x.dtype == torch.float64 else x.float()


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide, n = upcast(x), x.shape[-1]
        if x.is_cpu and not torch.compiler.is_compiling():  # one kernel for six: (x, -x) has mean 0, and the variance that is wanted
            y = F.layer_norm(torch.cat((wide, wide.neg()), -1), (2 * n,), None, None, self.eps).narrow(-1, 0, n)
        else:
            y = F.rms_norm(wide, (n,), None, self.eps)
        return (y if wide is x else y.to(x.dtype)) * self.weight


def cos_sin(frequencies: Tensor, positions: Tensor, amplitude: float) -> tuple:
    """positions (...,) -> cos, sin (..., dim/2), at least fp32."""
    angle = positions.unsqueeze(-1).to(frequencies.dtype) * frequencies
    return angle.cos() * amplitude, angle.sin() * amplitude


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x0, x1), (x2, x3), … of the last dim R. cos (…, R): each value twice; sin likewise, the first of a pair negated."""
    wide = upcast(x)
    return torch.addcmul(wide * cos, wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), sin).type_as(x)


class Attention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434). A cache row is one latent: [c (C) ; rotated rope key (R)]."""

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        head = c.nope_dim + c.rope_dim
        # what is low in rank, in one product: the query (where it is), the latent and the rope key
        self.w_a = nn.Parameter(torch.empty((c.q_lora_rank or 0) + c.latent_dim, c.hidden_size))
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, 1e-6) if c.q_lora_rank else None  # 1e-6 in every model, whatever rms_norm_eps says
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, 1e-6)
        self.w_q = nn.Parameter(torch.empty(c.num_heads * head, c.q_lora_rank or c.hidden_size))
        self.w_uk = nn.Parameter(torch.empty(c.num_heads, c.nope_dim, c.kv_lora_rank))  # latent -> the key's nope part
        self.w_uv = nn.Parameter(torch.empty(c.num_heads, c.v_dim, c.kv_lora_rank))     # latent -> value
        self.o_proj = nn.Linear(c.num_heads * c.v_dim, c.hidden_size, bias=False)

    def project(self, x: Tensor, rope: tuple) -> tuple:
        """x (T, h) -> q_nope (T, H, nope), q_rope (T, H, R), latents (T, C+R)."""
        c = self.c
        q, latent, k_rope = F.linear(x, self.w_a).split_with_sizes((c.q_lora_rank or 0, c.kv_lora_rank, c.rope_dim), 1)
        q = F.linear(self.q_a_layernorm(q) if c.q_lora_rank else x, self.w_q)
        q_nope, q_rope = q.view(x.shape[0], -1, c.nope_dim + c.rope_dim).split_with_sizes((c.nope_dim, c.rope_dim), 2)
        rotated = rotate_pairs(torch.cat((q_rope, k_rope.unsqueeze(1)), 1), *rope)                    # (T, H+1, R), one pass for both
        return q_nope, rotated[:, :-1], torch.cat((self.kv_a_layernorm(latent), rotated[:, -1]), 1)

    def forward(self, x: Tensor, rope: tuple, past: Tensor, bias: Tensor) -> tuple:
        """Absorbed: queries move into the latent space, so every latent row is read once for all nodes and heads.
        x (B, N, h); rope of B*N tokens; past (B, S, C+R) committed latents; bias (B, N, 1, S+N), 0 where visible and -inf elsewhere.
        Returns the output (B, N, h) and the new latents (B, N, C+R)."""
        (B, N, h), S, C = x.shape, past.shape[1], self.c.kv_lora_rank
        q_nope, q_rope, new = self.project(x.view(B * N, h), rope)
        new = new.view(B, N, -1)
        # (bmm where einsum and @ would do: in eager mode their dispatch costs more than a small model's product)
        q = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)                              # (B*N, H, C)
        q = torch.cat((q, q_rope), 2).view(B, -1, C + self.c.rope_dim)                                # (B, N*H, C+R)
        scores = torch.cat((torch.bmm(q, past.transpose(1, 2)), torch.bmm(q, new.transpose(1, 2))), 2).view(B, N, -1, S + N)
        p = torch.add(bias, upcast(scores), alpha=self.c.softmax_scale).softmax(-1).type_as(x).view(B, -1, S + N)
        p_past, p_new = p.split_with_sizes((S, N), 2)
        out = torch.baddbmm(torch.bmm(p_new, new.narrow(2, 0, C)), p_past, past.narrow(2, 0, C))      # (B, N*H, C)
        out = torch.bmm(out.view(B * N, -1, C).transpose(0, 1), self.w_uv.transpose(1, 2))            # (H, B*N, v)
        return self.o_proj(out.transpose(0, 1).reshape(B * N, -1)).view(B, N, h), new

    def expanded(self, x: Tensor, rope: tuple) -> Tensor:
        """The textbook form over whole causal sequences x (B, N, h): keys and values built per head. The oracle of the absorbed
        form, and cheaper where N is long and nothing is cached: training."""
        c, (B, N, h) = self.c, x.shape
        q_nope, q_rope, latents = self.project(x.view(B * N, h), rope)
        latent, k_rope = latents.split((c.kv_lora_rank, c.rope_dim), -1)
        k_nope = F.linear(latent, self.w_uk.flatten(0, 1)).unflatten(-1, (-1, c.nope_dim))            # (B*N, H, nope)
        v = F.linear(latent, self.w_uv.flatten(0, 1)).unflatten(-1, (-1, c.v_dim))                    # (B*N, H, v)
        q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope.unsqueeze(1).expand_as(q_rope)), -1)
        q, k, v = (t.unflatten(0, (B, N)).transpose(1, 2) for t in (q, k, v))                         # (B, H, N, ·)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.softmax_scale)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FFN(nn.Module):
    """SwiGLU: the dense layers and the shared experts. gate_up (2I, h) has the gate's rows first, down is (h, I)."""

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * width, dim))
        self.down = nn.Parameter(torch.empty(dim, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(swiglu(F.linear(x, self.gate_up)), self.down)


def swiglu(x: Tensor) -> Tensor:
    """(…, 2I), the gate first -> (…, I)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class Router(nn.Module):
    """Scores in at least fp32, from weights kept in at least fp32: a cast to bf16 ruins routing."""

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        dtype = at_least_fp32(torch.get_default_dtype())
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size, dtype=dtype))
        if c.scoring == "sigmoid":
            self.e_score_correction_bias = nn.Parameter(torch.zeros(c.num_experts, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> tuple:
        """x (T, h) -> weights (T, K) in at least fp32, expert ids (T, K)."""
        c = self.c
        logits = F.linear(x.to(self.weight.dtype), self.weight)
        if c.scoring == "sigmoid":
            scores = logits.sigmoid()
            choice = scores + self.e_score_correction_bias  # the bias steers the choice, never the weights
        else:
            choice = scores = logits.softmax(-1)
        if c.n_group > 1:
            groups = choice.unflatten(-1, (c.n_group, -1))                                            # (T, G, E/G)
            best = groups.topk(2, -1).values.sum(-1) if c.scoring == "sigmoid" else groups.amax(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(c.topk_group, -1).indices, True)
            masked = -math.inf if c.scoring == "sigmoid" else 0.0
            choice = groups.masked_fill(~kept.unsqueeze(-1), masked).flatten(-2)
        ids = choice.topk(c.experts_per_token, -1).indices
        weights = scores.gather(-1, ids)
        if c.norm_topk:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * c.routed_scale, ids


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (T, in) sorted by expert, weight (E, out, in), ends (E,) int32 row where each expert's rows end -> (T, out).
    Rows past the last end hold anything."""
    if torch.is_autocast_enabled(x.device.type):  # autocast (training) knows the plain products, not this one
        x, weight = (t.to(torch.get_autocast_dtype(x.device.type)) for t in (x, weight))
    # inductor refuses grouped_mm in fp32 on the CPU, which eager takes: there the graph holds it as one opaque op
    opaque = torch.compiler.is_compiling() and x.device.type == "cpu" and x.dtype != torch.bfloat16
    return opaque_grouped_linear(x, weight, ends) if opaque else eager_grouped_linear(x, weight, ends)


def eager_grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if x.dtype != torch.float64:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    bounds = [0, *ends.tolist()]  # fp64 has no grouped kernel; it runs on the CPU, where reading the bounds is free
    y = [F.linear(x[i:j], w) for w, i, j in zip(weight, bounds, bounds[1:])]
    return torch.cat((*y, x.new_empty(x.shape[0] - bounds[-1], weight.shape[1])))


opaque_grouped_linear = torch.library.custom_op("nanograft::grouped_linear", eager_grouped_linear, mutates_args=())
opaque_grouped_linear.register_fake(lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[1]))


def own_ids(ids: Tensor, first: int, E: int) -> Tensor:
    """Expert ids of the whole model -> those of a rank that holds E of them from `first` on; E stands for all others, so
    that they sort last."""
    return torch.where((ids >= first) & (ids < first + E), ids - first, E)


CACHE_BYTES = 16e6  # of expert weights that a processor's last cache holds, so that reading them again is free


class Experts(nn.Module):
    """The routed experts, stacked: gate_up (E, 2I, h) with the gate's rows first, down (E, h, I)."""

    def __init__(self, c: Config):
        super().__init__()
        self.first: Optional[int] = None  # parallel.py: the first expert held here, where other ranks hold the rest
        self.gate_up = nn.Parameter(torch.empty(c.num_experts, 2 * c.expert_ffn, c.hidden_size))
        self.down = nn.Parameter(torch.empty(c.num_experts, c.hidden_size, c.expert_ffn))

    def num_weights(self) -> int:
        return self.gate_up.numel() + self.down.numel()

    def gathers(self, pairs: int) -> bool:
        """Whether each (token, expert) pair reads its expert's weights by itself: compiled, that is one fused product, no sort
        and no grouped kernel. It reads an expert once per pair, so it pays while pairs rarely meet, or meet in a cache."""
        one = self.gate_up[0].nbytes + self.down[0].nbytes
        return torch.compiler.is_compiling() and (pairs <= self.down.shape[0] or pairs * one <= CACHE_BYTES)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x (T, h), weights (T, K), ids (T, K) -> (T, h)."""
        (T, K), E = ids.shape, self.down.shape[0]
        if self.first is not None:
            ids = own_ids(ids, self.first, E)
        if T == 1 and x.is_cpu and not torch.compiler.is_compiling():
            return self.one_token(x, weights, ids)
        y = self.gathered(x, ids if self.first is None else ids.clamp(max=E - 1)) if self.gathers(T * K) else self.grouped(x, ids)  # (T, K, h)
        if self.first is not None:
            y = y.masked_fill((ids == E).unsqueeze(-1), 0)
        return torch.bmm(weights.type_as(y).unsqueeze(1), y).squeeze(1)

    def one_token(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Plain decode in eager mode on a CPU, where the host reads ids for free: nothing to sort, and nothing to gather."""
        gate_up, down, y = self.gate_up, self.down, 0.0
        for e, weight in zip(ids.tolist()[0], weights.type_as(x).view(-1, 1).split(1)):
            if e < down.shape[0]:
                y = y + F.linear(swiglu(F.linear(x, gate_up[e])) * weight, down[e])
        return y if isinstance(y, Tensor) else torch.zeros_like(x)

    def gathered(self, x: Tensor, ids: Tensor) -> Tensor:
        hidden = swiglu((self.gate_up[ids] * x[:, None, None]).sum(-1))                                   # (T, K, I)
        return (self.down[ids] * hidden.unsqueeze(2)).sum(-1)

    def grouped(self, x: Tensor, ids: Tensor) -> Tensor:
        (T, K), E = ids.shape, self.down.shape[0]
        flat, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(flat, torch.arange(1, E + 1, device=x.device), out_int32=True)
        y = grouped_linear(swiglu(grouped_linear(x[order // K], self.gate_up, ends)), self.down, ends)
        # back to (T, K) order before summing: atomic adds would sum in another order every time
        return torch.empty_like(y).index_copy(0, order, y).unflatten(0, (T, K))


class MoE(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate = Router(c)
        self.experts = Experts(c)
        self.shared_experts = FFN(c.hidden_size, c.expert_ffn * c.shared_experts) if c.shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        y, shared = self.experts(flat, *self.gate(flat)), self.shared_experts
        return (y if shared is None else y + shared(flat)).view_as(x)


class Layer(nn.Module):
    def __init__(self, c: Config, moe: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.eps)
        self.mlp = MoE(c) if moe else FFN(c.hidden_size, c.dense_ffn)

    def forward(self, x: Tensor, rope: tuple, past: Optional[Tensor] = None, bias: Optional[Tensor] = None) -> tuple:
        """Absorbed against `past`, or expanded and causal where there is none. Returns x and the new latents."""
        normed = self.input_layernorm(x)
        attended, new = (self.self_attn.expanded(normed, rope), None) if past is None else self.self_attn(normed, rope, past, bias)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), new

    @torch.compiler.nested_compile_region
    def cached(self, x: Tensor, rope: tuple, past: Tensor, bias: Tensor) -> tuple:
        """`forward` as a region that is compiled once for all layers alike: 61 layers cost little more than two."""
        return self.forward(x, rope, past, bias)  # not self(…): its wrapper would have every layer traced anew


class Transformer(nn.Module):
    """The target. Build it on the meta device and load weights with checkpoint.py, or call `init_weights`."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = c = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, moe) for moe in c.moe_layers)
        self.norm = RMSNorm(c.hidden_size, c.eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.vocab = None  # parallel.py: which token ids this rank's logits are of, where ranks divide the vocabulary
        self.register_buffer("frequencies", torch.empty(c.rope_dim // 2), persistent=False)
        self.register_buffer("cache", torch.empty(0), persistent=False)
        self.reset_frequencies()

    def reset_frequencies(self) -> None:
        """Recomputes what is derived from the config, after the module left the meta device or changed its dtype."""
        dtype = at_least_fp32(self.norm.weight.dtype)
        self.frequencies = self.config.rope.frequencies().to(self.norm.weight.device, dtype)

    def init_weights(self, generator: torch.Generator) -> None:
        """Fills every weight with small random values."""
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p.data, std=0.02, generator=generator)
            else:
                nn.init.constant_(p.data, float("bias" not in name))

    def setup_cache(self, batch: int, slots: int) -> None:
        """Allocates latents for `batch` sequences of `slots` tokens, and one slot more that takes what is not committed."""
        w = self.norm.weight
        self.cache = torch.zeros(len(self.layers), batch, slots + 1, self.config.latent_dim, dtype=w.dtype, device=w.device)

    def forward(self, tree: Tree, length: Tensor, span: int, taps: tuple = (), last: Optional[Tensor] = None,
                rows: Optional[Tensor] = None) -> tuple:
        """Scores `tree` against the committed prefix.

        length (B,): committed tokens; span: cache slots to attend, at least every length; taps: ids of layers whose
        outputs are wanted; last (B,): where given, logits for that node alone (prefill wants no others); rows (B,): where
        given, the rows of the cache that the sequences are (prefill of a few of them); else they are its first.
        Returns logits (B, N, V) (N = 1 with `last`), taps (B, N, n*h) or None, latents (L, B, N, C+R)."""
        rope = self.rope(length.unsqueeze(1) + tree.depth)
        bias = attention_bias(tree, length, span, upcast(self.norm.weight).dtype)
        x, hidden, latents = self.embed_tokens(tree.tokens), {}, []
        pasts = self.cache[:, :, :span] if rows is not None else self.cache[:, :tree.tokens.shape[0], :span]  # (L, B, span, C+R)
        for i, (layer, past) in enumerate(zip(self.layers, pasts.unbind())):
            x, new = layer.cached(x, rope, past if rows is None else past[rows], bias)
            latents.append(new)
            if i in taps:
                hidden[i] = x
        if last is not None:
            x = x.gather(1, last.view(-1, 1, 1).expand(-1, 1, x.shape[-1]))
        tapped = torch.cat([hidden[i] for i in taps], -1) if taps else None
        return self.lm_head(self.norm(x)), tapped, torch.stack(latents)

    def rope(self, positions: Tensor) -> tuple:
        """positions (B, N) -> cos and sin as `rotate_pairs` wants them, the same for all heads: (B*N, 1, R)."""
        cos, sin = cos_sin(self.frequencies, positions.reshape(-1, 1), self.config.rope.amplitude)  # (B*N, 1, R/2)
        return torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)

    def score(self, ids: Tensor, expanded: bool = False) -> tuple:
        """ids (B, T) -> logits (B, T, V), hidden (L+1, B, T, h): the embedding, then every layer's raw output.
        Caches are neither read nor written. `expanded` takes the textbook form of attention."""
        tree = chain(ids)
        length = torch.zeros(ids.shape[0], dtype=torch.long, device=ids.device)
        x, rope = self.embed_tokens(ids), self.rope(tree.depth)
        past = bias = None
        if not expanded:
            past = x.new_zeros(ids.shape[0], 0, self.config.latent_dim)
            bias = attention_bias(tree, length, 0, upcast(x).dtype)
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], rope, past, bias)[0])
        return self.lm_head(self.norm(hidden[-1])), torch.stack(hidden)

    # Cost accounting. Sizes are counted from the parameters themselves, so they hold on the meta device too.

    def routed_experts(self) -> list:
        return [layer.mlp.experts for layer in self.layers if isinstance(layer.mlp, MoE)]

    def num_params(self) -> int:
        routed = {id(p) for e in self.routed_experts() for p in e.parameters()}
        return self.routed_params() + sum(p.numel() for p in self.parameters() if id(p) not in routed)

    def routed_params(self) -> int:
        return sum(e.num_weights() for e in self.routed_experts())

    def active_params(self) -> int:
        """Parameters one token multiplies: everything but the experts it is not routed to (the embedding is a lookup)."""
        c = self.config
        idle = self.routed_params() * (1 - c.experts_per_token / c.num_experts) if c.num_experts else 0
        return round(self.num_params() - idle - self.embed_tokens.weight.numel())

    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def latent_bytes_per_token(self) -> int:
        """Cache bytes one committed token costs over all layers; also what every later round reads for it."""
        return len(self.layers) * self.config.latent_dim * self.norm.weight.element_size()


def attention_bias(tree: Tree, length: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    """(B, N, 1, span+N): 0 for committed slots and for a node's ancestors and itself, -inf elsewhere. Built once a call."""
    B, N = tree.tokens.shape
    committed = (torch.arange(span, device=length.device) < length.unsqueeze(1)).unsqueeze(1).expand(B, N, span)
    visible = torch.cat((committed, tree.ancestors), -1).unsqueeze(2)
    return torch.zeros(visible.shape, dtype=dtype, device=length.device).masked_fill_(~visible, -math.inf)
