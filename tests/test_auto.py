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


@pytest.mark.parametrize("width", LADDER)
def test_a_round_reports_on_every_width(width):
    decoder, _ = started(tiny.prompts(256, 5, 9, 2))
    target, draft, plan = decoder.target, decoder.draft, Plan("ddtree", width, ladder=LADDER)
    decoder.prepare(plan)
    decoder.active[1] = False
    for _ in range(6):
        active = decoder.active.clone()
        marginals = draft.propose(decoder.root, decoder.length, 70)
        want, hits = [], []
        trees = [build_tree(marginals, decoder.root, n) for n in LADDER]
        for n, tree in zip(LADDER, trees):
            score = grow(marginals, decoder.root, n)[1].exp() * active.unsqueeze(1)
            want.append([(score * (tree.depth == d)).sum().item() for d in range(1, draft.depths + 1)])
        for tree in trees + [chain(torch.cat((decoder.root.unsqueeze(1), marginals.argmax(-1)), 1))]:
            logits = target(tree, decoder.length, 70)[0]
            accepted = accept(tree, logits.argmax(-1))[1]
            hits.append([(accepted[active] >= d).sum().item() for d in range(1, draft.depths + 1)])
        got = decoder.round(plan, 70).tolist()
        assert [len(row) for row in got] == [draft.depths + 2] * (3 + 2 * len(LADDER) + 1)
        expected, found, along = got[3:3 + len(LADDER)], got[3 + len(LADDER):-1], got[-1]
        torch.testing.assert_close(torch.tensor(expected)[:, :-2] / ODDS, torch.tensor(want), rtol=0, atol=1e-5)
        verified = LADDER.index(width)
        assert [row[:-2] for row in found[:verified + 1]] == hits[:verified + 1]
        assert all(row == found[verified] for row in found[verified:])
        if width == LADDER[-1]:  # the widest tree holds the chain, as far as anybody follows it
            assert along[:-2] == hits[-1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_round_does_the_text_is_that_of_ar(seed, temperature):
    settings = {"temperature": temperature} if temperature else {}
    prompts, rng = tiny.prompts(256, 5, 33, 1, 12, seed=seed), random.Random(seed)
    decoder, texts = started(prompts, ring=5, limit=40, **settings)
    out = [list(p) + [decoder.root[row].item()] for row, p in enumerate(prompts)]
    choices = [Plan("ar"), Plan("dflash"), *(Plan("ddtree", n, ladder=LADDER) for n in LADDER)]
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
