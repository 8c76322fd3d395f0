"""The contract of a compiled round: one graph, nothing in it that reads a value on the host, nothing that changes makes another,
every buffer it writes at a fixed address, and the tokens of eager code."""
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import tiny
from serve import Request, Usage, serve, span_for
from verify import Decoder, Plan

FORBIDDEN = ("_local_scalar_dense", "nonzero", "_assert_scalar", "item", "masked_select", "unique", "bincount", "rand", "randn")


class Inspector:
    """A backend that runs graphs as they are and keeps what the contract is about."""

    def __init__(self):
        torch._dynamo.reset()
        counters.clear()
        self.graphs = 0
        self.backend = aot_autograd(fw_compiler=self.look, keep_inference_input_mutations=True)

    def look(self, graph, inputs):
        self.graphs += 1
        metadata = torch._guards.TracingContext.get().fw_metadata
        loose = {i for i, info in enumerate(metadata.input_info) if info.mutates_data} - set(metadata.static_input_indices)
        assert not loose, f"the graph writes inputs {loose}, whose addresses are not fixed"
        for module in graph.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                name = getattr(node.target, "_opname", str(node.target))
                assert name not in FORBIDDEN, f"{name} in the graph: {node.format_node()}"
                if name.startswith("index_put"):
                    assert all(i is None or i.meta["val"].dtype != torch.bool for i in node.args[1]), "a write through a bool mask"
        return make_boxed_func(graph.forward)


def requests(vocab: int, count: int = 12, tokens: int = 20) -> list:
    """Ragged prompts and lengths, greedy and sampled, with and without filters."""
    return [Request(p, 3 + (5 * i) % tokens, (0.0, 1.3, 0.7)[i % 3], (1.0, 0.8)[i % 2], (0, 0, 0, 5)[i % 4], seed=i)
            for i, p in enumerate(tiny.prompts(vocab, *(1 + 3 * i % 7 for i in range(count))))]


def texts(decoder: Decoder, asked: list, plan: Plan, usage=None, choose=None) -> list:
    out = [[] for _ in asked]
    for e in serve(decoder, asked, plan, choose, usage=usage):
        out[e.number] += e.tokens
    return out


def decoders(target, draft, batch: int, slots: int, *plans: Plan, **compile) -> Decoder:
    decoder = Decoder(target, draft, batch, slots)
    for plan in plans:
        decoder.prepare(plan)
    if compile:
        decoder.compile(**compile)
    return decoder


def check_contract(target, draft, plans: list, asked: list) -> Usage:
    """Compiled tokens of every plan are those of eager ar, and there is one graph for each plan, and one for each shape of a prefill."""
    plans, usage = [plan._replace(sampled=True, filtered=True) for plan in plans], Usage()
    plain = texts(decoders(target, None, 3, 64), asked, plans[0]._replace(mode="ar"))
    inspector = Inspector()
    decoder = decoders(target, draft, 3, 64, *plans, backend=inspector.backend)
    for plan in plans:
        assert texts(decoder, asked, plan, usage) == plain, plan
    rounds = [graph for graph in decoder.met if graph[0] == 0]
    assert len(rounds) == len(plans), f"rounds met {rounds}"
    assert inspector.graphs == len(decoder.met) == counters["stats"]["unique_graphs"], f"{inspector.graphs} graphs for {len(decoder.met)} shapes"
    assert not counters["graph_break"]
    return usage


PLANS = [Plan("ar"), Plan("dflash"), Plan("ddtree", 12)]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_contract_of_every_architecture(architecture):
    target = tiny.golden(architecture)
    check_contract(target, tiny.drafter(target, plain=True), PLANS, requests(target.config.vocab_size, 3, 6))


@pytest.mark.parametrize("kind", sorted(set(tiny.KINDS) - {"full"}))
def test_contract_of_every_drafter(kind):
    """Plain ones meet every mode above; a chain over conditionals is another graph than one of marginals."""
    target = tiny.target(max_position_embeddings=64)
    check_contract(target, tiny.drafter(target, kind, plain=True), PLANS[1:] if "markov_rank" in tiny.KINDS[kind] else PLANS[2:], requests(target.config.vocab_size, 3, 6))


def test_two_hundred_rounds_are_one_graph():
    """Lengths grow, seeds and temperatures change, rows finish at their limits and others take their slots."""
    target = tiny.target(max_position_embeddings=64)
    usage = check_contract(target, tiny.drafter(target, plain=True), [Plan("ddtree", 6)], requests(target.config.vocab_size, 90, 40))
    assert usage.rounds >= 200


def test_contract_where_modes_alternate():
    """With a ring and a ladder, as the automatic choice uses them: a graph for each plan, one that catches up, no other."""
    target = tiny.target(max_position_embeddings=64)
    ladder = (1, 4, 12)
    plans = [Plan(mode, budget, sampled=True, filtered=True, ladder=() if mode == "dflash" else ladder)
             for mode, budget in (("ar", 0), ("ddtree", 4), ("dflash", 0), ("ar", 0), ("ar", 0), ("ddtree", 12))]
    draft, turn, asked = tiny.drafter(target, plain=True), [0], requests(target.config.vocab_size, 8, 30)
    def choose(state):
        turn[0] += 1
        return plans[turn[0] % len(plans)]
    plain = texts(decoders(target, None, 3, 64, plans[0]), asked, plans[0])
    inspector = Inspector()
    decoder = Decoder(target, draft, 3, 64, ring=4)
    for plan in plans:
        decoder.prepare(plan)
    decoder.compile(backend=inspector.backend)
    assert texts(decoder, asked, plans[1], choose=choose) == plain
    assert sorted(g[0] for g in decoder.met if g[0] != 1) == [0] * len(set(plans)) + [2]
    assert inspector.graphs == len(decoder.met) and not counters["graph_break"]


def test_the_inspector_sees():
    """Each fault of the contract, planted."""
    class Host(Decoder):
        def propose(self, plan, span):
            self.root.add_(self.root.nonzero().sum() * 0)
            return super().propose(plan, span)
    class Mask(Decoder):
        def settle(self, *a, **k):
            self.root[self.active] = 1
            return super().settle(*a, **k)
    class Loose(Decoder):
        def round(self, plan, span, stranger):
            stranger.add_(1)
            return super().round(plan, span)
    target = tiny.target(max_position_embeddings=64)
    for fault, extra, words in ((Host, (), "nonzero"), (Mask, (), "bool"), (Loose, (torch.zeros(2),), "not fixed")):
        decoder = fault(target, None, 2, 64)
        decoder.compile(backend=Inspector().backend)
        with pytest.raises(Exception, match=words), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            decoder.compiled[0](Plan("ar"), 64, *extra)


def test_spans_cost_what_the_context_costs():
    """The operators of a round at length 200 are the same in a cache of 1,000 tokens and of 32,000."""
    from torch.utils.flop_counter import FlopCounterMode
    target, flops = tiny.target(max_position_embeddings=32768), []
    for slots in (1024, 32768):
        draft, plan = tiny.drafter(target, plain=True), Plan("ddtree", 12)
        decoder = decoders(target, draft, 1, slots, plan)
        decoder.length.fill_(200), decoder.limit.fill_(300), decoder.active.fill_(True)
        with FlopCounterMode(display=False) as counter:
            decoder.step(plan, span_for(200, slots))
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the largest tensor that an operator made anew."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        before = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in before:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("mode", ["ar", "dflash", "ddtree"])
def test_no_copy_of_a_cache(mode):
    target = tiny.target(max_position_embeddings=32768)
    draft, plan = tiny.drafter(target, plain=True), Plan(mode, 6)
    decoder = decoders(target, draft, 2, 30000, plan)
    decoder.length.fill_(50), decoder.limit.fill_(300), decoder.active.fill_(True)
    with Copies() as copies:
        decoder.step(plan, 64)
    one_layer = min(target.cache[0].nbytes, draft.k_cache[0].nbytes)
    assert 0 < copies.largest < one_layer / 50


@pytest.mark.slow
def test_inductor_writes_the_same_text():
    """The real compiler, a Markov head included; its code allocates no second cache."""
    from torch._inductor.utils import run_and_get_code
    target = tiny.target(torch.float32, max_position_embeddings=64)
    asked = requests(target.config.vocab_size, 6, 12)
    for plan, kind in ((Plan("dflash"), "full"), (Plan("ddtree", 12), "markov")):  # whose graphs hold those of ar
        torch._dynamo.reset()
        draft, plan = tiny.drafter(target, kind, plain=True), plan._replace(sampled=True, filtered=True)
        plain = texts(decoders(target, draft, 3, 64, plan), asked, plan)
        decoder = decoders(target, draft, 3, 64, plan, mode="reduce-overhead")
        written, code = run_and_get_code(texts, decoder, asked, plan)
        assert written == plain
        shapes = [f"({', '.join(map(str, c.shape))})" for c in (target.cache, draft.k_cache)]
        assert not any(f"empty_strided_cpu({shape}" in c for c in code for shape in shapes) and len(code) == len(decoder.met)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.mode)
def test_contract_on_a_gpu(plan):
    """No CUDA graph is skipped, and a replayed round waits for nothing."""
    import copy
    torch._dynamo.reset()
    counters.clear()
    target = copy.deepcopy(tiny.target(torch.float32, max_position_embeddings=512)).to("cuda")
    target.reset_frequencies()
    draft = tiny.drafter(target, plain=True).to("cuda")
    draft.share(target)
    draft.reset_frequencies()
    asked, plan = requests(target.config.vocab_size, 8, 30), plan._replace(sampled=True, filtered=True)
    plain = texts(decoders(target, draft, 3, 256, plan), asked, plan)
    decoder = decoders(target, draft, 3, 256, plan, mode="reduce-overhead")
    assert texts(decoder, asked, plan) == plain
    assert counters["inductor"]["cudagraph_skips"] == 0
    decoder.warm(plan, [256])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder._run(0, decoder.round, plan, 256)
    finally:
        torch.cuda.set_sync_debug_mode("default")
