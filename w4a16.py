"""int4 experts on a GPU: one grouped product over packed words, in Triton.

quant.py imports this file where the device is a GPU and Triton is installed; its plain torch is the oracle. The kernel's
arithmetic is tested in Triton's interpreter, and it compiles for compute capability 8.0, 8.9, 9.0, 10.0 and 12.0, within
99 KB of shared memory. It HAS NOT YET RUN ON A GPU: neither its results nor its speed there are known.

Rows (a token and one of its experts) are sorted by expert. A tile is up to BLOCK_M rows of one expert, and a program takes
one tile and BLOCK_N of the expert's weight rows. No two programs of a tile share a weight, so a tile reads its expert's
words once. An expert has several tiles only where more than BLOCK_M tokens chose it; they are neighbours in the grid, so
that all but the first should find the words in the L2 cache. How many tiles there are is known on the device alone: the
grid has as many as there can be, and those past the last return at once. So shapes are static and nothing is read back.

Few rows are the case that counts (decoding), and there the time is that of reading words. Hence the weights are the first
operand of `tl.dot`, whose sides 64 and more tensor cores want, and the rows are the second, where 16 are enough.

Shapes: T tokens, K experts per token, E experts, I expert width, h hidden size, W = in/8 words of a weight row.
"""
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quant import GROUP, WORD

# Fixed, and no sum is split over programs: whatever the batch, a sum is taken in the same order
BLOCK_N = 64  # weight rows of a program
BLOCK_W = 32  # words of a row that it holds at a time: one cache line


@triton.jit
def nibble(packed, j: tl.constexpr, dtype: tl.constexpr):
    """Value q of nibble j, in dtype. Converting integers is slow; but as the last bits of a power of two's mantissa, q + 8 is
    what is added to that power. 16-bit types are subtracted and multiplied in pairs."""
    u = (packed >> 4 * j) & 15
    if dtype == tl.bfloat16:
        return (u | 0x4300).to(tl.int16).to(dtype, bitcast=True) - 136       # 2^7 + 8
    elif dtype == tl.float16:
        return (u | 0x6400).to(tl.int16).to(dtype, bitcast=True) - 1032      # 2^10 + 8
    else:
        return (u | 0x4B000000).to(tl.float32, bitcast=True) - 8388616       # 2^23 + 8


@triton.jit
def w4a16(x, words, scale, out, weights, slots, bounds, tile_bounds, tile_expert,
          E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, W: tl.constexpr, GATED: tl.constexpr, UPCAST: tl.constexpr,
          WORD: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr):
    """GATED: x (T, 8, W) -> silu(gate) * up, (T*K, 8, N/8) in sorted order, words (E, 2N, W), scale (E, 2N, W/4).
    Else: x (T*K, 8, W) in sorted order -> times the weight, (T*K, N) in the order of ids, words (E, N, W), scale (E, N, W/4).
    x and the GATED output hold position 8w + j of a row at [j, w]: what nibble j of word w meets is then contiguous in w."""
    tile = tl.program_id(0)
    e = tl.load(tile_expert + tile)
    if e >= E:
        return
    row = tl.load(bounds + e) + (tile - tl.load(tile_bounds + e)) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64, like e and slot
    live = row < tl.load(bounds + e + 1)
    slot = tl.load(slots + row, mask=live, other=0)
    HALF: tl.constexpr = BLOCK_N // 2
    i = tl.arange(0, BLOCK_N)
    if GATED:  # one half of the block is gate rows, the other the up rows that go with them
        source = slot // K
        column = tl.program_id(1) * HALF + i % HALF
        n = e * (2 * N) + column + i // HALF * N
    else:
        source = row
        column = tl.program_id(1) * BLOCK_N + i
        n = e * N + column
    inside = (column < N)[:, None]
    GROUPS: tl.constexpr = W * WORD // GROUP
    STEP: tl.constexpr = BLOCK_W * WORD // GROUP
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, W, BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        g = start * WORD // GROUP + tl.arange(0, STEP)
        packed = tl.load(words + n[:, None] * W + w[None, :], mask=inside & (w < W)[None, :], other=0)                # (BLOCK_N, BLOCK_W)
        s = tl.load(scale + n[:, None] * GROUPS + g[None, :], mask=inside & (g < GROUPS)[None, :], other=0)           # (BLOCK_N, STEP)
        if UPCAST:
            s = s.to(tl.float32)
        s = tl.broadcast_to(s[:, :, None], (BLOCK_N, STEP, BLOCK_W // STEP)).reshape(BLOCK_N, BLOCK_W)
        for j in tl.static_range(WORD):
            # One nibble of every word is a product of its own: words are never laid out anew, and x is stored to suit
            a = (nibble(packed, j, s.dtype) * s).to(scale.dtype.element_ty).to(x.dtype.element_ty)  # rounded as in unpack_int4
            b = tl.load(x + source[None, :] * (WORD * W) + j * W + w[:, None], mask=live[None, :] & (w < W)[:, None], other=0)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision="ieee")
    if GATED:
        gate, up = acc.reshape(2, HALF, BLOCK_M).permute(1, 2, 0).split()                             # (HALF, BLOCK_M) each
        c = tl.program_id(1) * HALF + tl.arange(0, HALF)
        y = gate / (1 + tl.exp(-gate)) * up
        at_y = row[None, :] * N + (c % WORD * (N // WORD) + c // WORD)[:, None]
    else:
        c = column
        y = acc * tl.load(weights + slot, mask=live, other=0).to(tl.float32)[None, :]
        at_y = slot[None, :] * N + c[:, None]
    tl.store(out + at_y, y.to(out.dtype.element_ty), mask=live[None, :] & (c < N)[:, None])


def plan(ids: Tensor, E: int, block: int) -> tuple:
    """ids (T, K) -> slots (T*K,), the positions in ids sorted by expert; bounds (E+1,), expert e's are bounds[e] … bounds[e+1];
    tile_bounds (E+1,), likewise its tiles; tile_expert (tiles,), a tile's expert, or E past the last tile."""
    used = min(E, ids.numel())
    tiles = used + (ids.numel() - used) // block  # an expert of n > 0 rows has 1 + (n-1)//block: no more in sum, however they fall
    flat, slots = ids.flatten().sort(stable=True)
    index = torch.arange(max(E + 1, tiles), device=ids.device)
    bounds = torch.searchsorted(flat, index[:E + 1])
    tile_bounds = F.pad(((bounds.diff() + (block - 1)) // block).cumsum(0), (1, 0))
    return slots, bounds, tile_bounds, torch.searchsorted(tile_bounds[1:], index[:tiles], right=True)


def grouped_rows(x: Tensor, weights: Tensor, ids: Tensor, gate_up_packed: Tensor, gate_up_scale: Tensor,
                 down_packed: Tensor, down_scale: Tensor, partial: bool = False) -> Tensor:
    """What quant.own_rows computes, of fp32, fp16 or bf16. partial: rows of the id E, experts of other ranks, are zeros. SwiGLU stays in fp32 between its two products."""
    (T, K), (E, h, words_down) = ids.shape, down_packed.shape
    I = words_down * WORD
    block = 16 if T <= 16 else 32  # no expert has more than T rows
    tables = plan(ids, E, block)
    # Triton's interpreter calculates with the bits of bf16 as if they were integers: there, and only there, in fp32
    upcast = triton.knobs.runtime.interpret and torch.bfloat16 in (x.dtype, down_scale.dtype)
    def product(x, words, scale, out, N, gated):
        grid = (tables[3].numel(), triton.cdiv(N, BLOCK_N // 2 if gated else BLOCK_N))
        w4a16[grid](x, words, scale, out, weights.contiguous(), *tables, E=E, K=K, N=N, W=words.shape[2], GATED=gated, UPCAST=upcast,
                    WORD=WORD, GROUP=GROUP, BLOCK_M=block, BLOCK_N=BLOCK_N, BLOCK_W=BLOCK_W, num_warps=4, num_stages=3)
        return out
    act = product(x.unflatten(1, (-1, WORD)).mT.contiguous(), gate_up_packed, gate_up_scale, x.new_empty(T * K, I), I, True)
    y = product(act, down_packed, down_scale, (x.new_zeros if partial else x.new_empty)(T, K, h), h, False)
    return y.sum(1)  # atomic adds would save this pass, and sum in another order every time
