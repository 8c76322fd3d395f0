"""The grouped int4 kernel against plain torch: in Triton's interpreter on the CPU, and on a GPU where there is one.

Triton reads TRITON_INTERPRET when it is imported, and the interpreter changes it for good, so it gets a process of its own:
run as a script, this file prints one line of JSON per case.
"""
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from quant import PackedExperts, has_kernel, own_rows  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# name: (T, K, experts, experts that are chosen, I, h, dtype, dtype of scales, significant bits of scales, tolerance).
# A scale of 4 bits makes q * scale exact in every dtype. The interpreter calculates in fp32 where there is bf16, and truncates
# the results, where a GPU rounds.
CASES = {
    "one token": (1, 2, 5, 4, 96, 288, FP32, BF16, 4, 1e-5),
    "three tokens": (3, 2, 5, 4, 64, 288, FP32, BF16, 4, 1e-5),
    "more than 16 tokens": (17, 3, 6, 5, 32, 64, FP32, FP32, 24, 1e-5),
    "two tiles of one expert": (40, 2, 4, 2, 96, 32, FP32, BF16, 4, 1e-5),
    "bf16": (3, 2, 5, 4, 96, 96, BF16, BF16, 8, 4e-2),
    "bf16, 40 tokens": (40, 2, 4, 2, 32, 64, BF16, BF16, 4, 4e-2),
    "fp16": (3, 2, 5, 4, 64, 96, FP16, FP16, 11, 2e-3),
}
# name: (text of w4a16.py, what a mistake would have there, the case that must notice)
FAULTS = {
    "nibbles from the high end": ("packed >> 4 * j", "packed >> (28 - 4 * j)", "three tokens"),
    "the next group's scale": ("g = start * WORD // GROUP +", "g = start * WORD // GROUP + 1 +", "three tokens"),
    "gate and up exchanged": ("gate, up = acc", "up, gate = acc", "three tokens"),
    "stored as q + 7": ("- 8388616", "- 8388615", "three tokens"),
    "a tile that repeats the first": ("tl.load(tile_bounds + e)) * BLOCK_M", "tl.load(tile_bounds + e)) * 0", "two tiles of one expert"),
}


def inputs(T, K, E, chosen, I, h, dtype, scale_dtype, bits, device="cpu"):
    """x, weights, ids, packed words and scales. Only `chosen` of the E experts are used; K of them, all different, by a token."""
    generator = torch.Generator().manual_seed(T)
    packed = PackedExperts(E, I, h, scale_dtype)
    for p in packed.parameters():
        if p.dtype == torch.int32:
            p.copy_(torch.randint(-2 ** 31, 2 ** 31, p.shape, generator=generator))
        else:
            size = 2.0 ** -round(math.log2(p.shape[2] * 32) / 2 + 2)  # a power of two leaves the bits as they are
            p.copy_(torch.randint(2 ** (bits - 1), 2 ** bits, p.shape, generator=generator) / 2 ** bits * size)
    x = torch.randn(T, h, generator=generator).to(dtype)
    weights, ids = torch.rand(T, chosen, generator=generator).topk(K)
    ids = torch.randperm(E, generator=generator)[ids]
    return [t.to(device) for t in (x, weights, ids, *packed.parameters())]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative above 1; infinite where something is not a number."""
    return ((got.double() - want.double()).abs() / want.double().abs().clamp(min=1)).nan_to_num(float("inf")).max().item()


def interpret(folder: Path) -> None:
    """Prints [case, error] of each case, and [fault, error] of each fault."""
    import w4a16
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN: what was there may be an earlier, right result
    for name, case in CASES.items():
        given = inputs(*case[:-1])
        print(json.dumps([name, error(w4a16.grouped_rows(*given), own_rows(*given))]), flush=True)
    source = (ROOT / "w4a16.py").read_text()
    for i, (name, (right, wrong, case)) in enumerate(FAULTS.items()):
        assert source.count(right) == 1, name
        path = folder / f"faulty_{i}.py"  # Triton reads a kernel's text from its file
        path.write_text(source.replace(right, wrong))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        faulty = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(faulty)
        given = inputs(*CASES[case][:-1])
        print(json.dumps([name, error(faulty.grouped_rows(*given), own_rows(*given))]), flush=True)


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict:
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, tmp_path_factory.mktemp("faulty")], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("case", CASES)
def test_interpreted(case, errors):
    assert errors[case] < CASES[case][-1]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault, errors):
    assert errors[fault] > 0.05


@pytest.mark.parametrize("T", (1, 16, 17, 512))
@pytest.mark.parametrize("chosen", (8, 9, 384))
def test_plan(T, chosen):
    """Every row is in one tile, of its own expert; and the grid has room for all tiles."""
    pytest.importorskip("triton")
    from w4a16 import plan
    E, block = 384, 16
    ids = torch.rand(T, chosen, generator=torch.Generator().manual_seed(T)).topk(8).indices * (E // chosen)
    slots, bounds, tile_bounds, tile_expert = (t.tolist() for t in plan(ids, E, block))
    seen, live = [], [(tile, e) for tile, e in enumerate(tile_expert) if e < E]
    for tile, e in live:
        first = bounds[e] + (tile - tile_bounds[e]) * block
        seen += (rows := slots[first:min(first + block, bounds[e + 1])])
        assert rows and (ids.flatten()[rows] == e).all()
    assert sorted(seen) == list(range(ids.numel()))
    assert len(live) == tile_bounds[-1] <= len(tile_expert) <= ids.numel() // block + E


def test_mantissas():
    """The interpreter never takes the bf16 branch of nibble() (see CASES), so the two numbers of each branch are checked here."""
    ways = re.findall(r"\(u \| (0x\w+)\).* - (\d+) ", (ROOT / "w4a16.py").read_text())
    u = torch.arange(16)
    for (power, offset), dtype, bits in zip(ways, (BF16, FP16, FP32), (torch.int16, torch.int16, torch.int32), strict=True):
        assert torch.equal((u | int(power, 16)).to(bits).view(dtype) - int(offset), (u - 8).to(dtype))


def test_plain_torch_without_a_gpu():
    assert not has_kernel(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype, tolerance", ((BF16, 5e-2), (FP16, 1e-2), (FP32, 1e-4)))
@pytest.mark.parametrize("T", (1, 16, 40, 512))
def test_on_a_gpu(T, dtype, tolerance):
    """Kimi-K2.6's experts, but 32 of them: without a host sync, and whole in a compiled graph that CUDA graphs replay."""
    pytest.importorskip("triton")
    from w4a16 import grouped_rows
    x, weights, ids, *packed = inputs(T, 8, 32, 24, 2048, 7168, dtype, BF16, 8, "cuda")
    assert has_kernel(x.device)
    with torch.device("meta"):
        experts = PackedExperts(32, 2048, 7168)
    for name, p in zip(dict(experts.named_parameters()), packed):
        setattr(experts, name, torch.nn.Parameter(p, requires_grad=False))
    def wrong(got, ids):
        return error(got, own_rows(x.float(), weights, ids, *packed)) >= tolerance
    assert not wrong(grouped_rows(x, weights, ids, *packed), ids)  # and the kernel is built, which a sync may be needed for
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = experts(x, weights, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not wrong(got, ids)
    compiled = torch.compile(experts, fullgraph=True, mode="reduce-overhead")
    for turn in range(4):  # the graph is warmed up, recorded, and then replayed over other experts
        rolled = ids.roll(turn, 0)
        assert not wrong(compiled(x, weights, rolled).clone(), rolled)


if __name__ == "__main__":
    interpret(Path(sys.argv[1]))
