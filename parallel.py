"""Many devices: which rank holds what.

All ranks run the same program on the same text. A rank holds some heads, some columns of every FFN (or some whole experts) and some
of the vocabulary; what it computes from them are parts of sums, and the logits of its own tokens. So there are two collectives: an
all-reduce after each attention and each FFN, and one gather of candidates where tokens are chosen or a tree is built (ranks.py).
Latents are the same on all ranks: each computes and keeps all of them.

`target_table` and `draft_table` say who holds what. DTensor's `parallelize_module` applies them to a model on the meta device, and
checkpoint.py then reads the rank's slices. What a rank holds are plain tensors, no DTensors: dispatching those took 160
microseconds for a pair of linears where plain ones took 8, and the models' code stays that of one device.

Shapes: n ranks, E experts, I expert width, H heads, G kv heads, V vocabulary, h hidden size.
"""
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Iterator, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from draft import DraftConfig, Drafter
from hub import UserError
from model import Config, Transformer
from quant import GROUP, PackedExperts
from ranks import Vocabulary, all_sum, draft_misfits


class Layout(NamedTuple):
    """n ranks that share a model, and which of them this is. Experts: `whole` groups of n/whole neighbours; groups hold different
    experts, and the ranks of a group divide the width of theirs. whole = 1 is plain tensor, whole = n plain expert parallelism."""
    size: int
    whole: int = 1
    rank: int = 0

    def outer(self, groups: int) -> tuple:
        """(parts, this rank's): one part for each of `groups` groups of neighbours."""
        return groups, self.rank // (self.size // groups)

    def inner(self, groups: int) -> tuple:
        """(parts, this rank's): as many parts as a group has ranks."""
        return self.size // groups, self.rank % (self.size // groups)


def parse_layout(size: int, experts: str = "tp", rank: int = 0) -> Layout:
    """experts: "tp", "ep", or "AxB": A groups that hold whole experts, B ranks that divide each expert's width. UserError otherwise."""
    if experts in ("tp", "ep"):
        return Layout(size, size if experts == "ep" else 1, rank)
    a, _, b = experts.partition("x")
    if not (a.isdecimal() and b.isdecimal() and int(a) >= 1 and int(a) * int(b) == size):
        raise UserError(f"--experts must be tp, ep, or AxB where A groups hold whole experts and B ranks divide each of them, A times B "
                         f"being the number of ranks, {size}; got {experts!r}")
    return Layout(size, int(a), rank)


# What a rank holds of a module, and what the module's forward then needs

class Part(ParallelStyle):
    """Of the module's own parameters, those named are divided: name -> {dim: (parts, this rank's)}. The others are copied.
    `shares` of the module remembers (offset, whole shape) of each part, for the checkpoint."""

    def __init__(self, **divided):
        super().__init__()
        self.divided = divided

    def place(self, name: str, shape: tuple) -> tuple:
        """(offset, shape) of this rank's part of a parameter. As torch.chunk has it, the last parts may be smaller."""
        offset, held = [0] * len(shape), list(shape)
        for dim, (parts, which) in self.divided.get(name, {}).items():
            size = -(-shape[dim] // parts)
            offset[dim] = min(which * size, shape[dim])
            held[dim] = min(offset[dim] + size, shape[dim]) - offset[dim]
        return tuple(offset), tuple(held)

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.shares = {}
        for name, p in list(module.named_parameters(recurse=False)):
            offset, held = self.place(name, p.shape)
            if held != tuple(p.shape):
                module.shares[name] = offset, tuple(p.shape)
                setattr(module, name, nn.Parameter(p.new_empty(held), requires_grad=False))
        self.prepare(module, mesh.get_group().group_name)
        return module

    def prepare(self, module: nn.Module, group: str) -> None:
        pass


class Summed(Part):
    """Its output is a part of a sum: all-reduced."""

    def prepare(self, module, group):
        module.register_forward_hook(lambda module, args, out: all_sum(out, group))


class Sliced(Summed):
    """A linear divided along its input, of which every rank is given all: it takes its own slice, and its output is summed."""

    def prepare(self, module, group):
        (_, first), (_, width) = module.shares["weight"][0], module.weight.shape
        module.register_forward_pre_hook(lambda module, args: (args[0][..., first:first + width],))
        super().prepare(module, group)


class ExpertsPart(Part):
    """Whole experts, a part of each, or both. gate_up is divided in its halves, gate and up: `shares` tells where `down` begins,
    which is where both of them begin."""

    def prepare(self, module, group):
        down = "down_packed" if isinstance(module, PackedExperts) else "down"
        offset, whole = module.shares.get(down, ((0,), (0,)))
        if module.get_parameter(down).shape[0] < whole[0]:
            module.first = offset[0]


class PartEmbedding(nn.Embedding):
    """The rows of some token ids; others are another rank's, and zero here."""
    first: int
    group: str

    def forward(self, ids: Tensor) -> Tensor:
        row = ids - self.first
        own = (row >= 0) & (row < self.weight.shape[0])
        return all_sum(F.embedding(torch.where(own, row, 0), self.weight).masked_fill(~own.unsqueeze(-1), 0), self.group)


class EmbeddingPart(Part):
    def prepare(self, module, group):
        module.__class__ = PartEmbedding
        module.first, module.group = module.shares["weight"][0][0], group


class HeadPart(Part):
    """Logits of the rank's own tokens; on the last ranks padded with -inf where the vocabulary does not divide."""

    def prepare(self, module, group):
        V, (parts, which) = module.out_features, self.divided["weight"][0]
        size = -(-V // parts)
        missing = max((which + 1) * size - V, 0)
        if missing:
            module.register_forward_hook(lambda module, args, out: F.pad(out, (0, missing), value=-torch.inf))


# The tables: module -> what a rank holds of it. Every module with parameters of its own is in one of them, under one name

def target_table(r: Layout) -> dict:
    """r.outer(n) is a part for every rank."""
    rows, columns = {0: r.outer(r.size)}, {1: r.outer(r.size)}
    whole, width = r.outer(r.whole), r.inner(r.whole)
    return {
        "embed_tokens":                             EmbeddingPart(weight=rows),           # (V, h): token ids
        "layers.*.input_layernorm":                 Part(),
        "layers.*.self_attn.q_a_layernorm":         Part(),
        "layers.*.self_attn.kv_a_layernorm":        Part(),
        "layers.*.self_attn":                       Part(w_q=rows, w_uk=rows, w_uv=rows), # (H*head, ·), (H, ·, C): heads. w_a is
                                                                                          # copied: what is low in rank serves them all
        "layers.*.self_attn.o_proj":                Summed(weight=columns),               # (h, H*v): heads
        "layers.*.post_attention_layernorm":        Part(),
        "layers.*.mlp":                             Summed(gate_up=rows, down=columns),   # (2I, h), (h, I) of a dense layer; else without
                                                                                          # weights: one sum for routed and shared experts
        "layers.*.mlp.gate":                        Part(),                               # copied: every rank routes every token
        "layers.*.mlp.experts":                     ExpertsPart(
            gate_up={0: whole, 1: width},           down={0: whole, 2: width},            # (E, 2I, h), (E, h, I)
            gate_up_packed={0: whole, 1: width},    gate_up_scale={0: whole, 1: width},
            down_packed={0: whole, 2: width},       down_scale={0: whole, 2: width}),
        "layers.*.mlp.shared_experts":              Part(gate_up=rows, down=columns),
        "norm":                                     Part(),
        "lm_head":                                  HeadPart(weight=rows)}                # (V, h): token ids


def draft_table(r: Layout, d: DraftConfig) -> dict:
    """With fewer kv heads than ranks, the ranks whose query heads share one hold the same one. A drafter whose sizes do not divide is
    copied, but for embedding and head: it is small beside its target."""
    if draft_misfits(d, r.size):
        table = draft_table(r, replace(d, num_heads=r.size, num_kv_heads=r.size, ffn=r.size, hidden_size=r.size))  # one that divides
        return {pattern: style if isinstance(style, (EmbeddingPart, HeadPart)) else Part() for pattern, style in table.items()}
    rows, columns = {0: r.outer(r.size)}, {1: r.outer(r.size)}
    return {
        "":                                         Part(kv_proj={2: r.outer(min(d.num_kv_heads, r.size))}),  # (L, 2, G*d, h): kv heads
        "fc":                                       Sliced(weight=columns),               # (h, taps*h)
        "hidden_norm":                              Part(),
        "layers.*.input_layernorm":                 Part(),
        "layers.*.self_attn.q_proj":                Part(weight=rows),                    # (H*d, h): heads
        "layers.*.self_attn.q_norm":                Part(),
        "layers.*.self_attn.k_norm":                Part(),
        "layers.*.self_attn.o_proj":                Summed(weight=columns),
        "layers.*.post_attention_layernorm":        Part(),
        "layers.*.mlp":                             Summed(gate_up=rows, down=columns),   # (2I, h), (h, I)
        "norm":                                     Part(),
        "markov_head.*":                            Part(),                               # copied: small, and its rows are picked by token
        "embed_tokens":                             EmbeddingPart(weight=rows),           # where its file has its own
        "lm_head":                                  HeadPart(weight=rows)}


def matches(model: nn.Module, pattern: str) -> Iterator[tuple]:
    """(name, module) of the modules a pattern means; * stands for one name between dots, as in parallelize_module."""
    atoms = pattern.split(".")
    for name, m in model.named_modules():
        if len(name.split(".")) == len(atoms) and all(map(fnmatchcase, name.split("."), atoms)):
            yield name, m


def held(model: nn.Module, table: dict) -> dict:
    """Name -> shape of what a rank holds of every parameter of a whole model."""
    shapes = {f"{at}.{name}".lstrip("."): style.place(name, p.shape)[1] for pattern, style in table.items()
              for at, m in matches(model, pattern) for name, p in m.named_parameters(recurse=False)}
    assert shapes.keys() == {n for n, _ in model.named_parameters()}, "the table and the model do not agree"
    return shapes


def misfits(r: Layout, c: Config, packed: bool = False, dtype: torch.dtype = torch.bfloat16) -> list:
    """What keeps r.size ranks from sharing a target, in words. The vocabulary need not divide: it is padded."""
    whole, width = r.whole, r.size // r.whole
    divided = [("heads", c.num_heads, r.size), ("dense FFN width", c.dense_ffn, r.size if False in c.moe_layers else 1),
               ("shared experts' width", c.expert_ffn * c.shared_experts, r.size), ("experts", c.num_experts, whole), ("expert width", c.expert_ffn, width)]
    wrong = [f"{what} {size} over {parts}" for what, size, parts in divided if size % parts]
    if c.expert_ffn % width == 0 and packed and c.expert_ffn // width % GROUP:
        wrong.append(f"expert width {c.expert_ffn} over {width} in whole groups of {GROUP}")
    if c.expert_ffn % width == 0 and not packed and dtype != torch.float64 and c.expert_ffn // width * dtype.itemsize % 16:
        wrong.append(f"expert width {c.expert_ffn} over {width} in rows of whole 16 bytes")
    if -(-c.vocab_size // r.size) * (r.size - 1) >= c.vocab_size:
        wrong.append(f"vocabulary {c.vocab_size} over {r.size}")
    return wrong


def check_layout(r: Layout, experts: str, *target) -> None:
    """UserError where a target cannot be shared in this way; it says what would work. target: the last arguments of `misfits`."""
    wrong = misfits(r, *target)
    if not wrong:
        return
    fits = [n for n in range(2, 129) if experts in ("tp", "ep") and not misfits(parse_layout(n, experts), *target)]
    other = [f"{a}x{r.size // a}" for a in range(1, r.size + 1) if r.size % a == 0 and not misfits(Layout(r.size, a), *target)]
    would = [f"--tp {' or '.join(map(str, fits))}"] * bool(fits) + [f"--experts {' or '.join(other)}"] * bool(other)
    raise UserError(f"{r.size} ranks with --experts {experts} cannot share this model, because some sizes do not divide: {'; '.join(wrong)}. "
                    f"What would work: {', or '.join(would) or 'one device'}")


def dividers(experts: str, device: str) -> tuple:
    """For checkpoint's readers: functions that leave this rank's part of a target, and of its drafter, that are on the meta device.
    All ranks of the launch share them. UserError where they cannot."""
    def divide_target(model: Transformer) -> None:
        packed = any(isinstance(m, PackedExperts) for m in model.modules())
        check_layout(r, experts, model.config, packed, model.norm.weight.dtype)
        group = divide(model, target_table(r), device)
        size = -(-model.config.vocab_size // r.size)
        model.vocab = Vocabulary(r.rank * size, size, model.config.vocab_size, r.size, group)

    def divide_draft(model: Drafter) -> None:
        wrong = draft_misfits(model.config, r.size)
        if wrong:
            print(f"every rank holds the whole drafter, whose sizes do not divide: {', '.join(wrong)}", file=sys.stderr)
        divide(model, draft_table(r, model.config), device)
    r = parse_layout(torch.distributed.get_world_size(), experts, torch.distributed.get_rank())
    return divide_target, divide_draft


def divide(model: nn.Module, table: dict, device: str) -> str:
    """Leaves this rank's part of a model. Returns the name of the group of all ranks."""
    held(model, table)  # sees that the table is complete
    mesh = init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))
    parallelize_module(model, mesh, {name: style for pattern, style in table.items() for name, _ in matches(model, pattern)})
    return mesh.get_group().group_name
