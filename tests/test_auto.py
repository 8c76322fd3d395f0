"""The mode that picks its own width: what a round reports, switching, the controller, its costs."""
import random

import pytest
import torch

import tiny
from ddtree import build_tree, grow
from invariants import Watched
from model import chain
from verify import ODDS, Plan, accept

LADDER = (1, 4, 8, 16, 32, 64)


def started(prompts: list, ring: int = 0, limit: int = 60, **changes) -> tuple:
    """A decoder whose rows have read their prompts, and the texts that plain decoding writes."""
    import generate
    target = tiny.golden("kimi_k2")
    texts = [p + r.tokens for p, r in zip(prompts, generate.generate(target, None, prompts, "ar", max_new_tokens=limit, **changes))]
    draft = tiny.drafter(target)
    draft.tell(texts)
    decoder = Watched(target, draft, len(prompts), max(map(len, texts)), ring=ring)
    decoder.limit.copy_(torch.tensor([len(t) for t in texts]))
    decoder.temperature.fill_(changes.get("temperature", 0.0))
    tokens = torch.tensor([p + [0] * (max(map(len, prompts)) - len(p)) for p in prompts])
    every = torch.ones(len(prompts), dtype=torch.bool)
    decoder.prefill(tokens, torch.tensor([len(p) for p in prompts]), every, torch.arange(len(prompts)), Plan("ar", sampled="temperature" in changes), 0)
    return decoder, texts


@pytest.mark.parametrize("width", [0, *LADDER])
def test_a_round_reports_on_every_width(width):
    decoder, _ = started(tiny.prompts(256, 5, 9, 2), limit=20)
    target, draft, D = decoder.target, decoder.draft, decoder.draft.depths
    plan = Plan("ddtree", width, ladder=LADDER) if width else Plan("dflash", ladder=LADDER)
    decoder.prepare(plan)
    decoder.active[1] = False
    while decoder.active.any():
        active = decoder.active.clone()
        marginals = draft.propose(decoder.root, decoder.length, decoder.slots)
        top = chain(torch.cat((decoder.root.unsqueeze(1), marginals.argmax(-1)), 1))
        tree, want = build_tree(marginals, decoder.root, width) if width else top, []
        for n in LADDER * (width > 0):
            smaller, score = grow(marginals, decoder.root, n)
            score = score.exp() * active.unsqueeze(1)
            want.append([(score * (smaller.depth == d)).sum().item() for d in range(1, D + 1)])
        if width:
            want.append((marginals.float().softmax(-1).amax(-1).cumprod(1) * active.unsqueeze(1)).sum(0).tolist())
        accepted = accept(tree, target(tree, decoder.length, decoder.slots)[0].argmax(-1))[1]  # not cut by limits
        got = decoder.round(plan, decoder.slots).tolist()
        assert [len(row) for row in got] == [D + 2] * (3 + len(want) + 1)
        if want:
            expected, want = torch.tensor([row[:D] for row in got[3:-1]]) / ODDS, torch.tensor(want)
            torch.testing.assert_close(expected[:-1], want[:-1], rtol=0, atol=1e-5)
            seen = want[-1] > 0.05  # deep in a chain, its nodes may be too improbable for the widest tree
            torch.testing.assert_close(expected[-1][seen], want[-1][seen], rtol=0, atol=0.05)
        assert got[-1] == [(accepted[active] >= d).sum().item() for d in range(1, D + 1)] + [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_round_does_the_text_is_that_of_ar(seed, temperature):
    settings = {"temperature": temperature} if temperature else {}
    prompts, rng = tiny.prompts(256, 5, 33, 1, 12, seed=seed), random.Random(seed)
    decoder, texts = started(prompts, ring=5, limit=40, **settings)
    out = [list(p) + [decoder.root[row].item()] for row, p in enumerate(prompts)]
    choices = [Plan("ar"), Plan("dflash", ladder=LADDER), *(Plan("ddtree", n, ladder=LADDER) for n in LADDER)]
    for plan in choices:
        decoder.prepare(plan)
    waited = 0
    while decoder.active.any():
        plan = rng.choice([choices[0], rng.choice(choices)])._replace(sampled=temperature > 0)  # ar half of the time: the ring fills
        for row, (count, *tokens) in enumerate(decoder.step(plan, decoder.slots)[:len(prompts)]):
            out[row] += tokens[:count]
        waited = max(waited, int(decoder.pending.max()))
    assert out == texts
    assert 1 < waited <= 5
    decoder.holds(texts, 1e-9)
    decoder.catch_up()
    decoder.holds(texts, 1e-9)
