"""fp8 and int4 against values that other libraries computed, and the memory that packed experts need."""
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoint import load_draft, load_target
from generate import generate
from helpers import GOLDEN, golden_draft, golden_target, kimi_k25, pack_int4, to_int4, write
from model import Config, Experts, own_ids
from quant import PackedExperts, all_rows, dequantize_fp8, own_rows, unpack_int4

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "quant" / "expected.safetensors")


@pytest.mark.parametrize("name", ("square", "kv_a"))
def test_fp8(name, golden):
    """kv_a has 576 rows: its last block is half a block."""
    dense = dequantize_fp8(golden[f"fp8.{name}.weight"], golden[f"fp8.{name}.weight_scale_inv"])
    assert dense.dtype == torch.float32 and torch.equal(dense.bfloat16(), golden[f"fp8.{name}.dense"])


def test_fp8_stacked(golden):
    """Fused experts carry a leading dimension."""
    w, s = golden["fp8.kv_a.weight"], golden["fp8.kv_a.weight_scale_inv"]
    assert torch.equal(dequantize_fp8(torch.stack((w, w)), torch.stack((s, 2 * s)))[1], 2 * dequantize_fp8(w, s))


@pytest.mark.parametrize("name", ("gate", "down"))
def test_int4(name, golden):
    packed, scale, shape = (golden[f"int4.{name}.weight_{k}"] for k in ("packed", "scale", "shape"))
    assert torch.equal(unpack_int4(packed, scale, tuple(shape.tolist())), golden[f"int4.{name}.dense"])


def experts(E=8, I=64, h=96, dtype=torch.float32):
    """(PackedExperts, the dense twin)"""
    generator = torch.Generator().manual_seed(0)
    packed = PackedExperts(E, I, h)
    config = Config.from_dict({
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 8, "hidden_size": h, "num_hidden_layers": 1, "num_attention_heads": 1, "kv_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "intermediate_size": 8, "moe_intermediate_size": I, "n_routed_experts": E,
        "num_experts_per_tok": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6})
    dense = Experts(config).to(dtype).requires_grad_(False)
    for e in range(E):
        for words, scales, weight in ((packed.gate_up_packed, packed.gate_up_scale, dense.gate_up), (packed.down_packed, packed.down_scale, dense.down)):
            words[e], scales[e] = pack_int4(torch.randn(weight.shape[1:], generator=generator) / weight.shape[2] ** 0.5)
            weight[e] = unpack_int4(words[e], scales[e], tuple(weight.shape[1:]))
    return packed.requires_grad_(False), dense


@pytest.mark.parametrize("dtype, tolerance", ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)))
@pytest.mark.parametrize("T", (1, 2, 17))
def test_packed_is_dense(dtype, tolerance, T):
    packed, dense = experts(dtype=dtype)
    generator = torch.Generator().manual_seed(T)
    x = torch.randn(T, 96, generator=generator).to(dtype)
    weights, ids = torch.rand(T, 8, generator=generator).topk(3)
    want = dense(x, weights, ids)
    weights_in = tuple(packed.parameters())
    for got in (packed(x, weights, ids), own_rows(x, weights, ids, *weights_in), all_rows(x, weights, ids, *weights_in)):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_a_rank_computes_its_own_experts():
    """Parts that hold three and five of the experts, and parts that hold halves of each, add up to the whole."""
    whole, _ = experts()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 96, generator=generator).double()
    weights, ids = torch.rand(9, 8, generator=generator).topk(3)
    ids[0], ids[1] = torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7])
    def part(first, tensors):
        made = PackedExperts(1, 32, 32)
        for name, t in zip(("gate_up_packed", "gate_up_scale", "down_packed", "down_scale"), tensors):
            setattr(made, name, torch.nn.Parameter(t, requires_grad=False))
        made.first = first
        return made
    a, b = (part(i, [p[i:j] for p in whole.parameters()]) for i, j in ((0, 3), (3, 8)))
    torch.testing.assert_close(a(x, weights, ids) + b(x, weights, ids), whole(x, weights, ids))
    for m, token in ((a, 1), (b, 0)):
        own = tuple(m.parameters())
        rows = own_ids(ids, m.first, len(own[0]))
        torch.testing.assert_close(all_rows(x, weights, rows, *own), m(x, weights, ids))
        assert not m(x, weights, ids)[token].any()
        assert not m(x[token:token + 1], weights[token:token + 1], ids[token:token + 1]).any()  # nobody wants its experts
    gate_up = [[t.chunk(4, 1)[i] for t in (whole.gate_up_packed, whole.gate_up_scale)] for i in range(4)]
    halves = [part(None, [torch.cat(pair, 1) for pair in zip(gate_up[i], gate_up[i + 2])] +
                   [t.chunk(2, 2)[i] for t in (whole.down_packed, whole.down_scale)]) for i in range(2)]
    torch.testing.assert_close(halves[0](x, weights, ids) + halves[1](x, weights, ids), whole(x, weights, ids))


def test_a_compiled_graph_keeps_it_whole():
    packed, _ = experts()
    x, (weights, ids) = torch.randn(4, 96), torch.rand(4, 8).topk(2)
    graphs = []
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    got = torch.compile(packed, backend=backend, fullgraph=True)(x, weights, ids)
    assert torch.equal(got, packed(x, weights, ids)) and len(graphs) == 1
    assert [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"] == ["nanograft.packed_experts.default"]
    torch.library.opcheck(torch.ops.nanograft.packed_experts.default, (x, weights, ids, *packed.parameters()))


@pytest.mark.parametrize("T", (1, 3))
def test_a_rank_that_holds_none_of_the_chosen_experts(T):
    """Experts 8 … 15 of 16 are here: rows that chose others get nothing from here, all of them or some."""
    packed, dense = experts()
    packed.first = dense.first = 8
    x, weights = torch.randn(T, 96), torch.rand(T, 2)
    for ids in (torch.tensor([[0, 7]] * T), torch.tensor([[3, 8], [15, 9], [0, 1]][:T])):
        here = ids >= 8
        dense.first = None
        want = dense(x, weights * here, (ids - 8).clamp(min=0))
        dense.first = 8
        for got in (packed(x, weights, ids), dense(x, weights, ids)):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            assert here.any(1).all() or not got[~here.any(1)].any()


class LiveBytes(TorchDispatchMode):
    """The peak of bytes alive that operators under this mode have allocated."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.users = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(t, torch.Tensor):
                continue
            at, size = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
            if at not in self.users and at in known:
                continue  # a view of something that was there before
            if at not in self.users:
                self.live += size
                self.users[at] = 0
            self.users[at] += 1
            weakref.finalize(t, self.gone, at, size)
        self.peak = max(self.peak, self.live)
        return out

    def gone(self, at, size):
        self.users[at] -= 1
        if not self.users[at]:
            del self.users[at]
            self.live -= size


@pytest.mark.parametrize("way", (own_rows, all_rows))
def test_memory(way):
    """One dense expert at a time: what a forward allocates does not grow with the experts it uses."""
    E, I, h = 32, 128, 128
    packed, _ = experts(E, I, h)
    one = 2 * I * h * 4  # the larger half of one expert, in fp32
    peaks = []
    for K in (2, 16):
        x, (weights, ids) = torch.randn(4, h), torch.rand(4, E).topk(K)
        with LiveBytes() as count:
            way(x, weights, ids, *packed.parameters())
        peaks.append(count.peak)
    assert peaks[1] < 1.1 * peaks[0] + 64 * 1024, peaks
    assert one < peaks[1] < 4 * one < sum(p.nbytes for p in packed.parameters()), (one, peaks)


def test_int4_writes_what_its_dense_twin_writes(tmp_path):
    """A checkpoint in Kimi-K2.5's layout and its dense twin, in all modes, token for token."""
    config, tensors = golden_target("kimi_k2")
    tensors |= {k: v * 8 for k, v in tensors.items() if k == "lm_head.weight"}  # clearer choices than a random model's
    packed, dense = to_int4(tensors)
    folders = [write(tmp_path / "int4", *kimi_k25(config, packed), shards=3), write(tmp_path / "dense", *kimi_k25(config, dense))]
    drafter = write(tmp_path / "draft", *golden_draft("full_b8"))
    texts = []
    for folder in folders:
        target = load_target(folder)
        draft = load_draft(drafter, target)
        for mode in ("ar", "dflash", "ddtree"):
            for temperature in (0.0, 0.8):
                results = generate(target, draft, [[5, 6, 7], [9] * 11], mode=mode, budget=12, max_new_tokens=24, temperature=temperature, seed=3)
                texts.append((temperature, [r.tokens for r in results]))
    assert all(text == next(t for at, t in texts if at == temperature) for temperature, text in texts)
    assert len({tuple(r) for _, text in texts for r in text}) == 4 and all(len(r) == 24 for _, text in texts for r in text)
