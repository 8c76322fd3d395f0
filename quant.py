"""Quantized weights: fp8 blocks, which become dense when a checkpoint is loaded, and int4 experts, which never do.

A layer of int4 experts stays packed in memory. A forward unpacks the experts that its tokens use, one at a time; on a GPU
with Triton, w4a16.py unpacks them in registers.

Shapes: T tokens, K experts per token, E experts, I expert width, h hidden size.
"""
import functools
import importlib.util

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import own_ids, swiglu

BLOCK = 128  # fp8: rows and columns that share a scale; the last block of either may be smaller
GROUP = 32   # int4: neighbours along the input that share a scale
WORD = 8     # int4: values in one int32, the first in the lowest bits


def dequantize_fp8(weight: Tensor, scale: Tensor, at: tuple = (0, 0)) -> Tensor:
    """weight (…, out, in) float8, scale (…, ceil(out/128), ceil(in/128)) -> fp32. at: the row and column of the scaled matrix where
    weight begins."""
    (i, j), (rows, columns) = at, weight.shape[-2:]
    scale = scale.float().repeat_interleave(BLOCK, -2)[..., i:i + rows, :].repeat_interleave(BLOCK, -1)[..., j:j + columns]
    return weight.float().mul_(scale)


def unpack_int4(packed: Tensor, scale: Tensor, shape: tuple) -> Tensor:
    """packed (…, out, in/8) int32 of q + 8, scale (…, out, in/32) -> (…, *shape), shape = (out, in), in the scale's dtype:
    that of the checkpoint, because the product was meant to be rounded there."""
    shifts = torch.arange(0, 4 * WORD, 4, dtype=torch.int32, device=packed.device)
    q = ((packed.unsqueeze(-1) >> shifts) & 15).sub_(8).flatten(-2)[..., :shape[-1]]
    return (q.to(scale.dtype).unflatten(-1, (-1, GROUP)) * scale.unsqueeze(-1)).flatten(-2)


def one_expert(x: Tensor, e: Tensor, gate_up_packed: Tensor, gate_up_scale: Tensor, down_packed: Tensor, down_scale: Tensor) -> Tensor:
    """Rows x (n, h) through expert e (1,), the only one that is ever dense."""
    h, I = x.shape[1], down_packed.shape[2] * WORD
    def dense(packed, scale, shape):
        return unpack_int4(packed.index_select(0, e).squeeze(0), scale.index_select(0, e).squeeze(0), shape).to(x.dtype)
    hidden = swiglu(F.linear(x, dense(gate_up_packed, gate_up_scale, (2 * I, h))))
    return F.linear(hidden, dense(down_packed, down_scale, (h, I)))


def own_rows(x: Tensor, weights: Tensor, ids: Tensor, *packed: Tensor) -> Tensor:
    """Where the host may read the ids (CPU): each expert sees the rows that chose it."""
    y = x.new_zeros(*ids.shape, x.shape[1])                                                           # (T, K, h)
    for e in ids[ids < packed[0].shape[0]].unique().view(-1, 1):  # none, where a rank holds none of those chosen
        token, k = (ids == e).nonzero(as_tuple=True)
        y[token, k] = one_expert(x[token], e, *packed)
    return torch.einsum("tkh,tk->th", y, weights.to(y.dtype))


def all_rows(x: Tensor, weights: Tensor, ids: Tensor, *packed: Tensor) -> Tensor:
    """Where it may not (a captured graph): only static shapes. Each used expert sees all rows, and rows that did not choose
    it weigh nothing. Reading weights is what costs, and each expert is still read once."""
    E = packed[0].shape[0]
    share = x.new_zeros(x.shape[0], E + 1).scatter_(1, ids, weights.to(x.dtype))                      # (T, E + 1)
    used = torch.zeros(E + 1, device=x.device).index_fill_(0, ids.flatten(), 1)[:E].argsort(descending=True, stable=True)
    out = torch.zeros_like(x)
    for e in used[:ids.numel()].split(1):  # as many as there can be; those past the used ones add nothing
        out += one_expert(x, e, *packed) * share.index_select(1, e)
    return out


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Whether w4a16.py can run there. Triton is no requirement of this project: torch's builds for GPUs bring it."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


@torch.library.custom_op("nanograft::packed_experts", mutates_args=())
def packed_experts(x: Tensor, weights: Tensor, ids: Tensor, gate_up_packed: Tensor, gate_up_scale: Tensor,
                   down_packed: Tensor, down_scale: Tensor, partial: bool = False) -> Tensor:
    """The experts' forward over packed weights; with `partial`, an id E is an expert of another rank, and adds nothing. An operator of
    its own, so that a compiled graph keeps it whole: its loop holds one dense expert at a time, where a compiler might merge the loop's
    rounds and hold many."""
    if x.dtype != torch.float64 and has_kernel(x.device):
        from w4a16 import grouped_rows  # here, because it imports Triton
        way = functools.partial(grouped_rows, partial=partial)
    else:
        way = own_rows if x.device.type == "cpu" else all_rows
    with torch.cuda.device_of(x):  # Triton launches on the current device
        return way(x, weights, ids, gate_up_packed, gate_up_scale, down_packed, down_scale)


@packed_experts.register_fake
def _(x, weights, ids, gate_up_packed, gate_up_scale, down_packed, down_scale, partial=False):
    return torch.empty_like(x)


class PackedExperts(nn.Module):
    """The routed experts in int4. Takes the place of model.Experts, and keeps the scales as the checkpoint has them."""

    def __init__(self, num_experts: int, width: int, hidden: int, scale_dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.first: Optional[int] = None  # as in model.Experts
        def words(rows, columns):
            return nn.Parameter(torch.empty(num_experts, rows, columns // WORD, dtype=torch.int32), requires_grad=False)
        def scales(rows, columns):
            return nn.Parameter(torch.empty(num_experts, rows, columns // GROUP, dtype=scale_dtype), requires_grad=False)
        self.gate_up_packed, self.gate_up_scale = words(2 * width, hidden), scales(2 * width, hidden)
        self.down_packed, self.down_scale = words(hidden, width), scales(hidden, width)

    def num_weights(self) -> int:
        """Of the model, not of the storage: a word holds eight."""
        return WORD * (self.gate_up_packed.numel() + self.down_packed.numel())

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x (T, h), weights (T, K), ids (T, K) -> (T, h)."""
        if self.first is not None:
            ids = own_ids(ids, self.first, self.down_packed.shape[0])
        return packed_experts(x, weights, ids, self.gate_up_packed, self.gate_up_scale, self.down_packed, self.down_scale, self.first is not None)
