"""Tiny targets and drafters for the tests, made in milliseconds."""
from dataclasses import replace
from functools import lru_cache

import torch

from checkpoint import load_target
from draft import DraftConfig, Drafter
from helpers import GOLDEN, TARGETS
from model import Config, Transformer

ARCHITECTURES = TARGETS

TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu", "vocab_size": 13, "hidden_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.0, "first_k_dense_replace": 1, "rope_theta": 10000.0, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": None}

DRAFT = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "block_size": 6,
    "target_layer_ids": [0, 1], "mask_token_id": 1}

KINDS = {  # every way a drafter may see its block, both slot conventions, and Markov heads
    "full": {},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "bidirectional": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "is_causal": False},
    "next": {"shift_label": True},
    "next sliding": {"architectures": ["Qwen3DSparkModel"], "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "markov": {"markov_rank": 4},
    "next gated": {"architectures": ["Qwen3DSparkModel"], "markov_rank": 4, "markov_head_type": "gated"}}


@lru_cache(None)
def golden(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    return load_target(GOLDEN / "targets" / name, dtype=dtype)


def shorter(target: Transformer, context: int) -> Transformer:
    """The same weights with another context limit."""
    twin = Transformer(replace(target.config, max_positions=context)).to(target.norm.weight.dtype)
    twin.load_state_dict(target.state_dict())
    twin.reset_frequencies()
    return twin.requires_grad_(False)


def randomize(parameters, seed: int, std: float) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.data.copy_(torch.randn(p.shape, generator=g) * std if p.dim() > 1 else 1 + 0.1 * torch.randn(p.shape, generator=g))


@lru_cache(None)
def target(dtype: torch.dtype = torch.float64, seed: int = 0, **changes) -> Transformer:
    model = Transformer(Config.from_dict({**TARGET, **changes})).to(dtype)
    randomize(model.parameters(), seed, 0.3)
    model.reset_frequencies()
    return model.requires_grad_(False)


class Informed(Drafter):
    """A drafter that was told how texts go on, and gives the right token first, second or not at all, by its position: drafts
    are accepted to every depth. Whatever a drafter drafts may never change a text."""
    known: dict = {}
    forgets = True

    def tell(self, texts: list) -> None:
        self.known = {(p, t[p]): t[p + 1:p + 1 + self.depths] for t in texts for p in range(len(t))}

    def proposal(self, root, length, span=None):
        logits, conditional = super().proposal(root, length, span)
        for row, key in enumerate(zip(length.tolist(), root.tolist())):
            for d, token in enumerate(self.known.get(key, ())):
                p = key[0] + d + 1
                top = logits[row, d].max()
                if self.forgets and p % 11 == 0:
                    continue
                if self.forgets and p % 4 == 0:
                    logits[row, d, (token + 1) % logits.shape[-1]] = top + 9
                logits[row, d, token] = top + 8
        return logits, conditional


def drafter(target: Transformer, kind: str = "full", seed: int = 0, plain: bool = False, **changes) -> Drafter:
    """plain: it was told nothing, and can be compiled."""
    c, dtype = target.config, target.norm.weight.dtype
    sizes = {"vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "num_target_layers": c.num_layers,
             "max_position_embeddings": c.max_positions}
    model = (Drafter if plain else Informed)(DraftConfig.from_dict({**DRAFT, **sizes, **KINDS[kind], **changes})).to(dtype)
    randomize(model.own_params().values(), seed, 0.2)
    model.share(target)
    model.reset_frequencies()
    return model.requires_grad_(False)


def prompts(vocab: int, *lengths: int, seed: int = 0) -> list:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=g).tolist() for n in lengths]


def random_tree(rows: int, nodes: int, vocab: int, seed: int = 0):
    """A tree of any shape: every node hangs on a random earlier one."""
    from model import Tree
    g = torch.Generator().manual_seed(seed)
    parents = torch.full((rows, nodes), -1)
    depth = torch.zeros(rows, nodes, dtype=torch.long)
    ancestors = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
    for b in range(rows):
        for i in range(1, nodes):
            parents[b, i] = p = int(torch.randint(i, (), generator=g))
            depth[b, i] = depth[b, p] + 1
            ancestors[b, i] |= ancestors[b, p]
    return Tree(torch.randint(vocab, (rows, nodes), generator=g), parents, depth, ancestors, int(depth.max()))
