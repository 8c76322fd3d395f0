"""Requests through a batch of slots: who shares a batch changes no text, slots are refilled, the others go on meanwhile."""
import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch

import generate
import serve
import tiny
from hub import UserError
from invariants import Watched, close, counters_add_up, scored
from serve import Request, Result, Usage, open_batch, record
from verify import Decoder, Plan

MODES = [("ar", {}), ("dflash", {}), ("ddtree", {"budget": 12}), ("ddtree", {"budget": 7, "spine": True})]


class Refilled(Watched):
    """Watched, and when a text ends its row's caches hold what scoring it from nothing gives."""
    def ended(self, slot: int, text: list, tolerance: float = 1e-9) -> None:
        n = min(len(text), self.length[slot].item())
        assert n >= len(text) - 1
        _, taps, latents = scored(self.target, text[:n], self.draft.config.taps if self.draft is not None else ())
        close(self.target.cache[:, slot, :n], latents[:, 0], tolerance)
        if self.draft is not None:
            k, v = self.draft.context(taps, torch.arange(n).unsqueeze(0))
            close(self.draft.k_cache[:, slot, :n], k[:, 0], tolerance)
            close(self.draft.v_cache[:, slot, :n], v[:, 0], tolerance)


def test_slots_are_whole_buckets_where_rounds_are_compiled():
    """The memory plan asks the same function."""
    requests = [Request([1] * 5, 20), Request([1] * 300, 9)]
    assert [serve.slots_for(requests, context, compile) for context in (4096, 400, 300) for compile in (False, True)] == [309, 512, 309, 400, 300, 300]
    target = tiny.golden("kimi_k2")
    assert open_batch(target, None, requests, 2, "ar", None, False, False)[0].slots == serve.slots_for(requests, target.config.max_positions, False)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(serve, "CHUNK", 16)


def mixed(count: int, vocab: int = 256, seed: int = 0, **changes) -> list:
    """Requests of every kind: short and long, greedy and sampled, with filters and without, each with a seed of its own."""
    g = random.Random(seed)
    kinds = [{}, {"temperature": 0.9}, {"temperature": 1.3, "top_k": 9}, {"temperature": 1.0, "top_p": 0.8}]
    return [Request(tiny.prompts(vocab, g.choice((1, 5, 15, 16, 17, 40)), seed=seed + i)[0], g.randint(1, 20), seed=i, **{**kinds[i % 4], **changes}) for i in range(count)]


def alone(target, requests: list, **more) -> list:
    """The texts, each decoded plainly by itself."""
    return [generate.generate(target, None, [r.tokens], "ar", max_new_tokens=r.max_new_tokens, temperature=r.temperature, top_p=r.top_p, top_k=r.top_k,
                              seed=r.seed, **more)[0].tokens for r in requests]


def informed(target, requests: list, texts: list, kind: str = "full", **changes):
    draft = tiny.drafter(target, kind, **changes)
    draft.tell([r.tokens + t for r, t in zip(requests, texts)])
    return draft


def flow(monkeypatch, target, draft, requests: list, batch: int, mode: str = "ddtree", budget: int = 12, spine: bool = False, fixed: bool = False,
         **more) -> tuple:
    """Everything served, with every step and the caches of every finished row checked -> results, usage. fixed: as compiled rows are."""
    monkeypatch.setattr(serve, "Decoder", Refilled)
    decoder, plan, _ = open_batch(target, draft, requests, batch, mode, budget, spine, False)
    decoder.fixed = fixed
    results, usage = [Result() for _ in requests], Usage()
    for n, e in enumerate(serve.serve(decoder, requests, plan, usage=usage, **more)):
        record(results[e.number], e, float(n))
        if e.finish == "length":
            held = requests[e.number].tokens + results[e.number].tokens
            # the row is known by what it holds
            slot = next(s for s in range(len(decoder.length)) if decoder.length[s] == len(held) - 1 and decoder.root[s] == held[-1])
            decoder.ended(slot, held)
    return results, usage


# The text

@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("mode, shape", MODES)
def test_who_shares_a_batch_changes_no_text(mode, shape, fixed, monkeypatch):
    """Thirteen requests with settings of their own, through one, three and all slots."""
    target, requests = tiny.golden("kimi_k2"), mixed(13)
    texts = alone(target, requests)
    draft = informed(target, requests, texts)
    for batch in (1, 3, 13):
        results, usage = flow(monkeypatch, target, draft, requests, batch, mode, fixed=fixed, **shape)
        assert [r.tokens for r in results] == texts and all(r.finish == "length" for r in results)
        counters_add_up(results)
        assert usage.tokens == sum(map(len, texts)) and usage.first == 13
        assert usage.rows == sum(len(r.accepted) for r in results) and usage.busy == usage.rows / (usage.rounds * batch)
    if mode != "ar":
        assert usage.per_round > 1.5


def test_any_order_and_any_number_of_slots(monkeypatch):
    target, requests = tiny.golden("deepseek_v3"), mixed(9, seed=50)
    texts = alone(target, requests)
    draft = informed(target, requests, texts, "sliding")
    for seed in range(4):
        order = random.Random(seed).sample(range(9), 9)
        results, _ = flow(monkeypatch, target, draft, [requests[i] for i in order], 2 + seed)
        assert [r.tokens for r in results] == [texts[i] for i in order]


def test_a_sampled_request_may_come_after_greedy_ones(monkeypatch):
    """Whether rounds sample and filter only ever turns true: at most three kinds of rounds in a run."""
    target = tiny.golden("kimi_k2")
    requests = [replace(r, temperature=t, top_k=k) for r, (t, k) in zip(mixed(6, seed=9), [(0, 0), (0, 0), (0.8, 0), (0, 0), (1.1, 5), (0, 0)])]
    texts, seen = alone(target, requests), []
    decoder = Decoder(target, None, 1, 80)
    ordinary = decoder.step
    decoder.step = lambda plan, span: seen.append((plan.sampled, plan.filtered)) or ordinary(plan, span)
    got = [[] for _ in requests]
    for e in serve.serve(decoder, iter(requests), Plan("ar")):
        got[e.number] += e.tokens
    assert got == texts
    assert list(dict.fromkeys(seen)) == [(False, False), (True, False), (True, True)] and sorted(seen) == seen


def test_bf16_tokens_are_the_targets_choice():
    """Teacher-forced: each emitted token is the argmax of the text scored in one pass, or within rounding of it. Rounding may also
    flip an expert, rarely."""
    target, requests = tiny.golden("moonlight", torch.bfloat16), mixed(12, temperature=0.0, top_k=0, top_p=1.0)
    draft = informed(target, requests, alone(target, requests))
    decoder, plan, _ = open_batch(target, draft, requests, 4, "ddtree", 12, False, False)
    texts = [[] for _ in requests]
    for e in serve.serve(decoder, requests, plan):
        texts[e.number] += e.tokens
    gaps = []
    for r, text in zip(requests, texts):
        assert len(text) == r.max_new_tokens
        logits = target.score(torch.tensor([r.tokens + text]))[0][0, len(r.tokens) - 1:-1].float()
        gaps.append(logits.max(-1).values - logits.gather(-1, torch.tensor(text).unsqueeze(-1)).squeeze(-1))
    gap = torch.cat(gaps)
    assert (gap == 0).float().mean() > 0.85 and (gap < 0.05).float().mean() > 0.95 and gap.max() < 0.6


# Rows of every state in one batch

@pytest.mark.parametrize("mode, shape", MODES)
def test_padded_finished_and_limited_rows_in_one_batch(mode, shape, monkeypatch):
    """Context 48, six slots, four requests: two slots stay empty; one prompt fills the context but one, one row meets the context a
    few tokens on, one stops early and rests, one goes on to the end. Each is what it is alone, and rounds beside them stay wide."""
    long = tiny.golden("moonlight")
    target = tiny.shorter(long, 48)
    requests = [Request(p, 30) for p in tiny.prompts(256, 47, 40, 4, 9)]
    whole = alone(long, requests)
    draft = informed(target, requests, whole)
    draft.forgets = False
    stop = whole[2][3]
    monkeypatch.setattr(serve, "Decoder", Refilled)
    decoder, plan, _ = open_batch(target, draft, requests, 6, mode, shape.get("budget", 12), shape.get("spine", False), False)
    decoder.fixed = True
    results = [Result() for _ in requests]
    for e in serve.serve(decoder, requests, plan, until=lambda number, tokens: tokens.index(stop) + 1 if number == 2 and stop in tokens else None):
        record(results[e.number], e, 0.0)
        assert not decoder.active[4:].any() and (decoder.length[4:] == 0).all()
    assert [r.tokens for r in results] == [whole[0][:1], whole[1][:8], whole[2][:4], whole[3]]
    assert [r.finish for r in results] == ["length", "length", "stop", "length"]
    if mode != "ar":  # the row at its limit takes what is left, the one beside it whole blocks
        assert results[1].accepted == [5, 0] and results[3].accepted[:4] == [5] * 4
    # past its stop the third row rested: it committed no more than the round of its stop
    assert not decoder.active.any() and decoder.length[2] <= 4 + 1 + draft.depths + 1


def test_when_nobody_waits_a_round_is_of_the_rows_that_are_left():
    """Those that end, stop or are cancelled leave the batch, with one that never came; until then a slot waits for the next request."""
    target, requests = tiny.golden("kimi_k2"), [Request(p, n) for p, n in zip(tiny.prompts(256, 5, 12, 2, 9, 4, 6), (4, 30, 30, 12, 30, 2))]
    texts = alone(target, requests)
    def generator(requests):
        yield from requests
    for slots, iterable, want in ((5, list, [5] * 4 + [4] * 7), (5, generator, [5] * 4 + [4] * 7), (7, list, [6, 5, 5] + [4] * 8), (7, generator, [6, 5, 5] + [4] * 8)):
        decoder, plan, _ = open_batch(target, informed(target, requests, texts), requests, slots, "ar", 1, False, False)
        step, sizes, got, cancelled = decoder.step, [], [[] for _ in requests], [replace(r) for r in requests]
        decoder.step = lambda plan, span: sizes.append(len(decoder.root)) or step(plan, span)
        for _ in range(2):  # and the next has all rows again
            for e in serve.serve(decoder, iterable(cancelled), plan, until=lambda number, tokens: 1 if number == 2 and len(got[2]) == 14 else None):
                got[e.number] += e.tokens
                cancelled[4].cancelled |= len(got[4]) == 20
            assert got == texts[:2] + [texts[2][:15], texts[3], texts[4][:20], texts[5]]
            assert sizes == want + [3] * 3 + [2] * 5 + [1] * 10 and not decoder.active.any()
            sizes, got, cancelled[4].cancelled = [], [[] for _ in requests], False


def test_a_batch_whose_caches_another_took_does_not_touch_them():
    """Not when rows of its own are about to leave it, nor when it is served again."""
    target, requests = tiny.golden("kimi_k2"), [Request(p, n) for p, n in zip(tiny.prompts(256, 5, 9, 7), (2, 5, 12))]
    texts = alone(target, requests)
    older, plan, _ = open_batch(target, None, requests, 3, "ar", 1, False, False)
    old = serve.serve(older, requests, plan)
    next(e for e in old if e.number == 1 and e.finish)      # one row has left, one is about to
    decoder, plan, _ = open_batch(target, None, requests, 3, "ar", 1, False, False)
    new, got = serve.serve(decoder, requests, plan), [[], [], []]
    for n, e in enumerate(new):
        got[e.number] += e.tokens
        for events in ([old, serve.serve(older, requests, plan)] if n == 1 else []):
            with pytest.raises(RuntimeError, match="took over"):
                list(events)
    assert got == texts


def test_a_batch_that_was_left_in_the_middle_is_at_rest_when_it_is_served_again():
    target, requests = tiny.golden("kimi_k2"), mixed(3)
    decoder, plan, _ = open_batch(target, None, requests, 3, "ar", 1, False, False)
    decoder.fixed = True
    next(e for e in serve.serve(decoder, requests, plan) if not e.prefill)
    assert decoder.active[1:].any()
    for e in serve.serve(decoder, requests[:1], plan):
        assert not decoder.active[1:].any()


def test_a_batch_that_has_ended_holds_no_memory():
    """Its caches go when the next batch needs some, and itself when nobody wants it, without waiting for the garbage collector."""
    target, requests = tiny.golden("kimi_k2"), mixed(3)
    draft = tiny.drafter(target)
    gc.collect()
    gc.disable()
    try:
        decoder, plan, _ = open_batch(target, draft, requests, 3, "ddtree", 12, False, False)
        list(serve.serve(decoder, requests, plan))
        held = [weakref.ref(c) for c in (target.cache, draft.k_cache, draft.v_cache, decoder)]
        another = open_batch(target, draft, requests, 3, "ddtree", 12, False, False)
        assert [h() is None for h in held] == [True, True, True, False]
        del decoder, another
        assert held[3]() is None
    finally:
        gc.enable()


def test_slots_without_requests_are_never_written(monkeypatch):
    target, requests = tiny.golden("kimi_k2"), mixed(2)
    texts = alone(target, requests)
    results, usage = flow(monkeypatch, target, informed(target, requests, texts), requests, 5, fixed=True)
    assert [r.tokens for r in results] == texts and usage.slots == 5 and usage.busy <= 0.4


def test_a_row_that_rests_on_the_device_alone_is_an_error():
    """It would emit nothing for ever."""
    target, requests = tiny.golden("kimi_k2"), mixed(2)
    decoder, plan, _ = open_batch(target, None, requests, 2, "ar", 1, False, False)
    events = serve.serve(decoder, [replace(r, max_new_tokens=9) for r in requests], plan)
    next(events), next(events)
    decoder.active[1] = False
    with pytest.raises(RuntimeError, match="row 1 decodes here and rests on the device"):
        list(events)


# Refill

def calls(decoder) -> list:
    """What a decoder is asked to do, in order: ("read", rows, tokens) and ("round", rows that decode)."""
    log, feed, step = [], decoder.feed, decoder.step
    decoder.feed = lambda tokens, count, last, rows, plan, span: log.append(("read", rows.tolist(), tokens.shape[1])) or feed(tokens, count, last, rows, plan, span)
    decoder.step = lambda plan, span: log.append(("round", decoder.active.tolist())) or step(plan, span)
    return log


def test_a_long_prompt_is_read_in_chunks_between_the_rounds_of_the_others():
    """And its reading computes over its own row alone."""
    target = tiny.golden("kimi_k2")
    requests = [Request([1, 2, 3], 30), Request([5], 2), Request(tiny.prompts(256, 70)[0], 3)]
    decoder, plan, _ = open_batch(target, None, requests, 2, "ar", 1, False, False)
    log = calls(decoder)
    events = list(serve.serve(decoder, requests, plan))
    first = log.index(("read", [1], 16))
    assert log[first:first + 10] == [c for n in (16, 16, 16, 16, 6) for c in (("read", [1], n), ("round", [True, n == 6]))]
    assert [e.number for e in events if e.prefill] == [0, 1, 2]
    between = [e for e in events[:next(i for i, e in enumerate(events) if e.prefill and e.number == 2)] if e.number == 0]
    assert len(between) == 1 + 1 + 4  # its prefill, the round that ended the second text, and one round after each chunk but the last


def test_short_prompts_are_read_together_and_a_slot_is_refilled_at_once():
    target = tiny.golden("kimi_k2")
    requests = [Request([i], 4) for i in range(12)]
    decoder, plan, _ = open_batch(target, None, requests, 4, "ar", 1, False, False)
    log, usage = calls(decoder), Usage()
    list(serve.serve(decoder, requests, plan, usage=usage))
    assert [c[0] for c in log] == ["read", "round", "round", "round"] * 3 and all(c[1] == [0, 1, 2, 3] for c in log if c[0] == "read")
    assert usage.busy == 1 and usage.rounds == 9


def test_while_few_rows_decode_prompts_come_first():
    """Three of four slots read 64 tokens each: four chunks of all three, not one row's chunk a round."""
    target = tiny.golden("kimi_k2")
    requests = [Request([1], 20)] + [Request(p, 2) for p in tiny.prompts(256, 64, 64, 64)]
    decoder, plan, _ = open_batch(target, None, requests, 4, "ar", 1, False, False)
    log = calls(decoder)
    list(serve.serve(decoder, requests, plan))
    reads = [c for c in log if c[0] == "read"]
    assert reads[0] == ("read", [0, 1, 2, 3], 16) and reads[1:] == [("read", [1, 2, 3], 16)] * 3


def test_while_most_rows_decode_a_round_waits_for_one_chunk_at_most():
    target = tiny.golden("kimi_k2")
    requests = [Request([1], 20), Request([2], 20)] + [Request(p, 2) for p in tiny.prompts(256, 32, 32)]
    decoder, plan, _ = open_batch(target, None, requests, 4, "ar", 1, False, False)
    log = calls(decoder)
    list(serve.serve(decoder, requests, plan))
    assert [c for c in log if c[0] == "read"] == [("read", [0, 1, 2, 3], 16), ("read", [2], 16), ("read", [2], 16)]  # (the fourth moved up when the third had ended)


def test_a_slot_whose_text_was_stopped_rests_until_its_next_prompt_is_read(monkeypatch):
    """The device does not know of stops: a row that it thinks active would go on in the middle of the new prompt."""
    target, requests = tiny.golden("kimi_k2"), [Request(p, 25, seed=i) for i, p in enumerate(tiny.prompts(256, 5, 9, 60, 40))]
    texts = alone(target, requests)
    monkeypatch.setattr(serve, "Decoder", Refilled)
    decoder, plan, _ = open_batch(target, informed(target, requests, texts), requests, 2, "dflash", 1, False, False)
    got = [[] for _ in requests]
    for e in serve.serve(decoder, requests, plan, until=lambda number, tokens: 1 if number == 1 and len(got[1]) > 3 else None):
        got[e.number] += e.tokens
    assert [got[0], got[2], got[3]] == [texts[0], texts[2], texts[3]] and got[1] == texts[1][:len(got[1])] and 4 < len(got[1]) < 25


def test_requests_are_taken_when_a_slot_is_free():
    target, taken = tiny.golden("kimi_k2"), []
    def requests():
        for i in range(6):
            taken.append(i)
            yield Request([i], 3)
    done = 0
    for e in serve.serve(Decoder(target, None, 2, 10), requests(), Plan("ar")):
        assert len(taken) <= min(2 + done, 6)
        done += bool(e.finish)
    assert done == 6 == len(taken)


def test_a_prompt_that_does_not_fit_is_refused():
    target = tiny.golden("kimi_k2")
    for tokens, says in (([1] * 10, "10 tokens and the context holds 10"), ([], "prompt 1 is empty"), ([999], "token id 999")):
        with pytest.raises(UserError, match=says):
            list(serve.serve(Decoder(target, None, 1, 10), [Request([1], 2), Request(tokens, 1)], Plan("ar")))


# Cancelling

def test_cancelled_requests_end_and_the_others_do_not_notice(monkeypatch):
    """One before its turn, one while its prompt is read, one while it decodes."""
    target, requests = tiny.golden("kimi_k2"), [Request(p, 12, seed=i) for i, p in enumerate(tiny.prompts(256, 5, 60, 3, 4, 8))]
    texts = alone(target, requests)
    monkeypatch.setattr(serve, "Decoder", Refilled)
    decoder, plan, _ = open_batch(target, informed(target, requests, texts), requests, 2, "dflash", 1, False, False)
    results, ends = [Result() for _ in requests], []
    for n, e in enumerate(serve.serve(decoder, requests, plan)):
        record(results[e.number], e, 0.0)
        requests[3].cancelled = True
        if n == 1:  # its first chunk is read
            requests[1].cancelled = True
        if len(results[2].tokens) > 3:
            requests[2].cancelled = True
        ends += [(e.number, e.finish)] if e.finish else []
    assert dict(ends) == {0: "length", 1: "cancelled", 2: "cancelled", 3: "cancelled", 4: "length"} and len(ends) == 5
    assert results[0].tokens == texts[0] and results[4].tokens == texts[4] and results[1].tokens == results[3].tokens == []
    assert 3 < len(results[2].tokens) < 12 and results[2].tokens == texts[2][:len(results[2].tokens)]
    counters_add_up([results[0], results[2], results[4]])
    assert not decoder.active.any()


# The hook of the width

def test_a_width_for_every_round(monkeypatch):
    """Plans picked at random: one text; the hook hears of the last round and of the one to come."""
    target, requests, g, told = tiny.golden("kimi_k2"), mixed(10, temperature=0.0, top_k=0, top_p=1.0), random.Random(0), []
    texts = alone(target, requests)
    plans = [Plan("ar"), Plan("dflash"), Plan("ddtree", 3), Plan("ddtree", 12)]
    monkeypatch.setattr(serve, "Decoder", Refilled)
    decoder, plan, _ = open_batch(target, informed(target, requests, texts), requests, 3, "ddtree", 12, False, False)
    for p in plans:
        decoder.prepare(p)
    def choose(state):
        told.append((state, g.choice(plans)))
        return told[-1][1]
    got, emitted = [[] for _ in requests], []
    for e in serve.serve(decoder, requests, plan, choose):
        got[e.number] += e.tokens
        emitted += [] if e.prefill else [len(e.tokens)]
    assert got == texts and len({p for _, p in told}) == 4
    assert told[0][0].plan is None and all(s.span >= 1 for s, _ in told[:-1])
    assert all(0 <= slot < 3 and 0 <= number < 10 and 0 < left < requests[number].max_new_tokens for s, _ in told for slot, (number, left) in s.rows.items())
    assert told[0][0].more and not told[-1][0].more and told[-1][0].rows == {} and all(1 <= len(s.rows) <= 3 for s, _ in told[:-1])
    assert not any(s.more for s, _ in told if any(number == 9 for number, _ in s.rows.values()))  # the last is taken: nobody waits
    for (_, plan), (state, _) in zip(told, told[1:]):
        assert state.plan == plan and state.seconds > 0 and (len(state.packed) == 3 or not state.more)
        assert sum(row[0] for row in state.packed) == sum(emitted[:sum(r[0] > 0 for r in state.packed)])
        emitted = emitted[sum(r[0] > 0 for r in state.packed):]


# Graphs

def test_a_refill_compiles_nothing_new():
    """Chunks and rows come in a short ladder of shapes, and rows, lengths and settings are tensors: a second file finds all graphs."""
    from torch._dynamo.utils import counters
    target, requests = tiny.target(torch.float32), mixed(14, vocab=13)
    draft = tiny.Drafter(tiny.drafter(target).config)
    tiny.randomize(draft.own_params().values(), 0, 0.2)
    draft.share(target)
    texts = alone(target, requests)
    torch._dynamo.reset()
    graphs = []
    def backend(module, inputs):
        graphs.append(module)
        return module.forward
    decoder, plan, _ = open_batch(target, draft, requests, 4, "dflash", 1, False, False)
    decoder.compile(backend=backend)
    shapes, step, feed = set(), decoder.step, decoder.feed
    decoder.step = lambda plan, span: shapes.add(span) or step(plan, span)
    decoder.feed = lambda tokens, count, last, rows, plan, span: shapes.add((tokens.shape, span)) or feed(tokens, count, last, rows, plan, span)
    for n in range(2):
        got = [[] for _ in requests]
        for e in serve.serve(decoder, requests if n == 0 else requests[::-1], plan):
            got[e.number] += e.tokens
        assert (got if n == 0 else got[::-1]) == texts
        assert len(graphs) == len(shapes)
    assert counters["graph_break"] == {} and {s[0][0] for s in shapes if isinstance(s, tuple)} <= {1, 4} and {s[0][1] for s in shapes if isinstance(s, tuple)} == {16}
    torch._dynamo.reset()


# A long run

def memory() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


class Written(Decoder):
    """Can tell how many slots of each row are written: a fresh row is filled with a value that nothing computes."""
    UNWRITTEN = 777.0

    def enter(self, rows, settings):
        super().enter(rows, settings)
        for cache in (self.target.cache, self.draft.k_cache, self.draft.v_cache):
            cache[:, rows] = self.UNWRITTEN

    def lengths(self) -> list:
        return [(cache[:, :len(self.length), :self.slots].flatten(3) != self.UNWRITTEN).all(-1).sum(-1)
                for cache in (self.target.cache, self.draft.k_cache, self.draft.v_cache)]


@pytest.mark.slow
def test_soak_of_20000_rounds(monkeypatch):
    """Refill, stops, limits, cancellations, requests of every kind and texts of 2000 tokens; both caches are as long as each other
    throughout, and memory stays flat."""
    monkeypatch.setattr(serve, "Decoder", Written)
    target = tiny.shorter(tiny.target(torch.float32, num_hidden_layers=1, first_k_dense_replace=0), 2100)
    draft = tiny.drafter(target, "next sliding", target_layer_ids=[0], num_hidden_layers=1, layer_types=["sliding_attention"])
    g, usage, live, before, ends, emitted, count, looked = random.Random(0), Usage(), {}, None, {}, {}, 0, 0

    def requests():
        nonlocal count
        while usage.rounds < 20000:
            kind = g.choice([{}, {"temperature": 0.8}, {"temperature": 1.5, "top_k": 5}, {"temperature": 1.0, "top_p": 0.7}])
            tokens, new = [g.randrange(13) for _ in range(g.choice((1, 3, 20, 60)))], 2000 if count % 200 == 40 else g.randint(1, 200)
            live[count] = Request(tokens, new, seed=count, **kind)
            count += 1
            yield live[count - 1]

    plans = [Plan("ar")] * 17 + [Plan("dflash")] * 2 + [Plan("ddtree", 6)]
    decoder, plan, _ = open_batch(target, draft, [Request([1], 2100)], 6, "ddtree", 6, False, False)
    for e in serve.serve(decoder, requests(), plan, lambda state: g.choice(plans),
                         until=lambda number, tokens: 1 if g.random() < 0.003 else None, usage=usage):
        emitted[e.number] = emitted.get(e.number, 0) + len(e.tokens)
        if e.finish:
            r = live.pop(e.number)
            assert emitted[e.number] <= r.max_new_tokens and (e.finish != "length" or emitted[e.number] == min(r.max_new_tokens, 2100 - len(r.tokens)))
            ends[e.finish] = ends.get(e.finish, 0) + 1
            del emitted[e.number]
        elif g.random() < 0.002:
            live[g.choice(list(live))].cancelled = True
        if usage.rounds // 50 > looked:
            looked = usage.rounds // 50
            assert all((n == decoder.length).all() for n in decoder.lengths()) and len(live) <= 6
            before = memory() if before is None and usage.rounds > 6000 else before
    assert usage.rounds >= 20000 and set(ends) == {"stop", "length", "cancelled"} and min(ends.values()) > 50 and not live and usage.busy > 0.95
    assert memory() - before < 16 << 20
