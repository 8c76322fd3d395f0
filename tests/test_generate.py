"""One text in every mode: lossless in fp64, exact caches after every step, stops and limits one by one."""
import itertools
from types import SimpleNamespace

import pytest
import torch

import generate
import serve
import tiny
from hub import UserError
from invariants import counters_add_up, decode, texts
from verify import Sampling, sample

SETTINGS = {
    "greedy": {},
    "one seed": {"temperature": 0.9, "seed": 3},
    "a seed per prompt": {"temperature": 1.3, "seed": [7, -1, 2 ** 62, 7]},
    "top-k and top-p": {"temperature": 1.0, "seed": 5, "top_k": 9, "top_p": 0.8}}
PROMPTS = tiny.prompts(256, 1, 5, 37, 20)
TOKENS = 26


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Prompts of 37 tokens take three chunks."""
    monkeypatch.setattr(serve, "CHUNK", 16)


def modes(depths: int) -> list:
    return [("dflash", {}), ("ddtree", {"budget": 1}), ("ddtree", {"budget": 7}), ("ddtree", {"budget": 24}),
            ("ddtree", {"budget": depths, "spine": True}), ("ddtree", {"budget": 24, "spine": True})]


def informed(target, kind: str, prompts: list, results: list, forgets: bool = True, **changes):
    """A random drafter, told the texts."""
    draft = tiny.drafter(target, kind, **changes)
    draft.tell([p + r.tokens for p, r in zip(prompts, results)])
    draft.forgets = forgets
    return draft


def lossless(target, kind: str, settings: dict, **changes) -> None:
    """AR == DFlash == DDTree of any budget and shape, token for token, caches checked at every step; drafts were accepted."""
    plain = decode(target, None, PROMPTS, "ar", max_new_tokens=TOKENS, **settings)
    draft = informed(target, kind, PROMPTS, plain, **changes)
    for mode, shape in modes(draft.depths):
        results = decode(target, draft, PROMPTS, mode, max_new_tokens=TOKENS, **shape, **settings)
        assert texts(results) == texts(plain), (mode, shape)
        accepted = [a for r in results for a in r.accepted]
        if shape.get("budget") == 1:
            assert max(accepted) == 1
        else:
            assert sum(accepted) > len(accepted) and max(accepted) >= 3 and min(accepted) < draft.depths


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name, kind", list(zip(tiny.ARCHITECTURES, tiny.KINDS)))
def test_every_mode_gives_the_same_text(name, kind, setting):
    lossless(tiny.golden(name), kind, SETTINGS[setting])


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_kind_of_drafter_gives_the_same_text(kind):
    """A block of two, as short as blocks get, and one longer than most texts' rounds."""
    lossless(tiny.golden("kimi_k2"), kind, SETTINGS["greedy"], block_size=8)
    lossless(tiny.golden("deepseek_v2_lite"), kind, SETTINGS["one seed"], block_size=12)


@pytest.mark.parametrize("kind", ["full", "next"])
def test_a_block_of_two(kind):
    target = tiny.golden("moonlight")
    plain = decode(target, None, PROMPTS, "ar", max_new_tokens=TOKENS)
    draft = informed(target, kind, PROMPTS, plain, block_size=2)
    for mode, shape in (("dflash", {}), ("ddtree", {"budget": 4}), ("ddtree", {"budget": 4, "spine": True})):
        results = decode(target, draft, PROMPTS, mode, max_new_tokens=TOKENS, **shape)
        assert texts(results) == texts(plain) and max(a for r in results for a in r.accepted) == draft.depths


def test_an_uninformed_drafter_over_a_tiny_vocabulary():
    """No hints: what a random drafter gets right over 13 tokens is enough for trees to accept."""
    target = tiny.target()
    draft = tiny.drafter(target)
    prompts, accepted = tiny.prompts(13, 3, 30, 11), []
    for seed in range(4):
        settings = {"temperature": 1.5, "seed": seed, "max_new_tokens": 25}
        plain = decode(target, None, prompts, "ar", **settings)
        for budget in (9, 60):
            results = decode(target, draft, prompts, "ddtree", budget=budget, **settings)
            assert texts(results) == texts(plain)
            accepted += [a for r in results for a in r.accepted]
    assert sum(accepted) > 0.25 * len(accepted) and max(accepted) >= 2


@pytest.mark.parametrize("setting", ["greedy", "a seed per prompt"])
def test_a_prompt_alone_or_in_any_batch_and_order(setting):
    target = tiny.golden("glm4_moe_lite")
    settings = {"max_new_tokens": 18, **SETTINGS[setting]}
    seeds = settings.pop("seed", [0] * 4)
    plain = generate.generate(target, None, PROMPTS, "ar", seed=seeds, **settings)
    draft = informed(target, "sliding", PROMPTS, plain)
    for rows in [[0], [1], [2], [3], [3, 2, 1, 0], [2, 0], [1, 1, 3], [0, 3, 2]]:
        for mode in ("ar", "dflash", "ddtree"):
            results = generate.generate(target, draft, [PROMPTS[i] for i in rows], mode, seed=[seeds[i] for i in rows], **settings)
            assert texts(results) == [plain[i].tokens for i in rows], (rows, mode)


@pytest.mark.parametrize("chunk", [1, 2, 5, 36, 37, 38, 1000])
def test_chunks_of_any_size_give_the_same_text(chunk, monkeypatch):
    target = tiny.golden("deepseek_v3")
    plain = generate.generate(target, None, PROMPTS, "ar", max_new_tokens=8)
    draft = informed(target, "bidirectional", PROMPTS, plain)
    monkeypatch.setattr(serve, "CHUNK", chunk)
    assert texts(decode(target, draft, PROMPTS, "ddtree", budget=12, max_new_tokens=8)) == texts(plain)


def test_rows_in_different_buckets_of_the_cache():
    """A short row beside rows whose lengths pass 64 and 128 while they decode: the longest decides how much is attended."""
    target, prompts = tiny.golden("kimi_k2"), tiny.prompts(256, 3, 55, 120)
    plain = decode(target, None, prompts, "ar", max_new_tokens=20)
    draft = informed(target, "full", prompts, plain)
    for mode in ("dflash", "ddtree"):
        assert texts(decode(target, draft, prompts, mode, max_new_tokens=20)) == texts(plain)
    for p, r in zip(prompts, plain):
        assert texts(decode(target, draft, [p], "ddtree", max_new_tokens=20)) == [r.tokens]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_width_one_tree_decodes_byte_for_byte_as_the_chain(dtype, monkeypatch):
    """Tokens, accepted drafts, and every byte of the three caches: a spine without more budget, and best-first over peaked marginals."""
    class Fixed(serve.Decoder):
        def __init__(self, *args):
            super().__init__(*args)
            self.fixed = True  # texts stay in their rows to the end
    monkeypatch.setattr(serve, "Decoder", Fixed)
    target = tiny.golden("moonlight", dtype)
    draft = informed(target, "sliding", PROMPTS, generate.generate(target, None, PROMPTS, "ar", max_new_tokens=TOKENS))
    def run(mode, **shape):
        results = generate.generate(target, draft, PROMPTS, mode, max_new_tokens=TOKENS, **shape)
        end = [len(p) + len(r.tokens) - 1 for p, r in zip(PROMPTS, results)]
        kept = [[c[:, b, :n].clone() for b, n in enumerate(end)] for c in (target.cache, draft.k_cache, draft.v_cache)]
        return texts(results), [r.accepted for r in results], kept
    def same(a, b):
        assert a[:2] == b[:2] and all(torch.equal(x, y) for x, y in zip(itertools.chain(*a[2]), itertools.chain(*b[2])))
    dflash = run("dflash")
    assert max(map(max, dflash[1])) >= 3
    same(run("ddtree", budget=draft.depths, spine=True), dflash)
    ordinary = draft.proposal
    draft.proposal = lambda *args: (ordinary(*args)[0].float() * 1e4, None)
    same(run("ddtree", budget=draft.depths), run("dflash"))


def test_every_token_is_the_seeded_draw_at_its_own_position():
    """Teacher-forced: token p of a text is `sample` of the logits before it, at position p. No two tokens share their noise."""
    target = tiny.golden("deepseek_v3")
    settings = dict(temperature=1.2, top_k=30, top_p=0.9, seed=[4, 5, 6, 7])
    for p, r, seed in zip(PROMPTS, generate.generate(target, None, PROMPTS, "ar", max_new_tokens=12, **settings), settings["seed"]):
        logits = target.score(torch.tensor([p + r.tokens]))[0][:, len(p) - 1:-1]
        position = torch.arange(len(p), len(p) + 12).unsqueeze(0)
        draw = Sampling(torch.tensor([seed]), torch.tensor([1.2]).double(), torch.tensor([30]), torch.tensor([0.9]).double())
        assert sample(logits, position, draw)[0].tolist() == r.tokens


def test_seeds_make_the_text():
    target = tiny.golden("kimi_k2")
    def text(seed, **more):
        return texts(generate.generate(target, None, [[1, 2, 3]], "ar", max_new_tokens=20, temperature=1.0, seed=seed, **more))[0]
    assert text(1) == text(1) == text([1])
    assert len({tuple(text(s)) for s in (0, 1, 2, -1, 2 ** 32, 2 ** 63 - 1)}) == 6
    assert text(1, top_k=1) == text(2, top_p=1e-6) == texts(generate.generate(target, None, [[1, 2, 3]], "ar", max_new_tokens=20))[0]
    two = generate.generate(target, None, [[1, 2, 3]] * 3, "ar", max_new_tokens=20, temperature=1.0, seed=[1, 2, 1])
    assert texts(two) == [text(1), text(2), text(1)]


def test_decreasing_lengths_on_one_pair():
    """No state is left over from a longer request."""
    target = tiny.golden("deepseek_v3")
    draft = tiny.drafter(target)
    lengths = (60, 20, 3, 1)
    fresh = [texts(decode(target, draft, tiny.prompts(256, n), "ddtree", max_new_tokens=n)) for n in lengths]
    assert fresh == [texts(generate.generate(target, draft, tiny.prompts(256, n), "dflash", max_new_tokens=n)) for n in lengths]
    assert texts(decode(target, draft, tiny.prompts(256, 60), "ddtree", max_new_tokens=60)) == fresh[0]


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_bf16_tokens_are_the_targets_choice(name):
    """Teacher-forced: each emitted token is the argmax of the text scored in one pass, or within rounding of it. Rounding may also
    flip an expert, rarely."""
    target = tiny.golden(name, torch.bfloat16)
    draft = informed(target, "full", PROMPTS, generate.generate(target, None, PROMPTS, "ar", max_new_tokens=TOKENS))
    for mode in ("dflash", "ddtree"):
        results = generate.generate(target, draft, PROMPTS, mode, max_new_tokens=TOKENS)
        assert max(a for r in results for a in r.accepted) >= 3
        gaps = []
        for p, r in zip(PROMPTS, results):
            logits = target.score(torch.tensor([p + r.tokens]))[0][0, len(p) - 1:-1].float()
            gaps.append(logits.max(-1).values - logits.gather(-1, torch.tensor(r.tokens).unsqueeze(-1)).squeeze(-1))
        gap = torch.cat(gaps)
        assert (gap == 0).float().mean() > 0.85 and (gap < 0.05).float().mean() > 0.95 and gap.max() < 1


# Stops and limits. A drafter that knows all of the text makes rounds of 5 drafts and one token of the target: token 0 comes
# with the prefill, tokens 1 … 6 with the first round, 7 … 12 with the second.

@pytest.fixture(scope="module")
def known() -> tuple:
    """target, drafter that knows the text, prompt, text of 20 tokens of which the first 14 differ."""
    target, prompt = tiny.golden("kimi_k2"), [1, 2, 3]
    for seed in range(100):
        text = generate.generate(target, None, [prompt], "ar", max_new_tokens=20, temperature=1.5, seed=seed)
        if len(set(text[0].tokens[:14])) == 14:
            break
    settings = {"temperature": 1.5, "seed": seed}
    return target, informed(target, "full", [prompt], text, forgets=False), prompt, text[0].tokens, settings


@pytest.mark.parametrize("mode", generate.MODES)
@pytest.mark.parametrize("at", range(14))
def test_stop_id_anywhere_in_a_block(known, mode, at):
    """At 0 it is the prefill's token, at 6 and 12 the target's own, elsewhere an accepted draft. It is not emitted, nothing after it is,
    and the counters count what was emitted."""
    target, draft, prompt, text, settings = known
    r, = decode(target, draft, [prompt], mode, max_new_tokens=20, stop_ids=(text[at], 999), **settings)
    assert r.tokens == text[:at] and r.finish == "stop"
    if at > 0:  # (a round of auto may draft less: it follows the clock)
        assert sum(r.accepted) + len(r.accepted) == at
    if mode in ("dflash", "ddtree") and at > 0:
        assert r.accepted == [5] * ((at - 1) // 6) + [(at - 1) % 6]


@pytest.mark.parametrize("mode", generate.MODES)
@pytest.mark.parametrize("count", range(1, 16))
def test_max_new_tokens_is_reached_and_never_overshot(known, mode, count):
    target, draft, prompt, text, settings = known
    r, = decode(target, draft, [prompt], mode, max_new_tokens=count, **settings)
    assert r.tokens == text[:count] and r.finish == "length"
    assert sum(r.accepted) + len(r.accepted) == count - 1
    if mode in ("dflash", "ddtree"):
        full, rest = divmod(count - 1, 6)
        assert r.accepted == [5] * full + ([rest - 1] if rest else [])


@pytest.mark.parametrize("mode", generate.MODES)
def test_the_mask_id_is_a_token_like_any_other(known, mode):
    """A text may hold the drafter's mask id, and may end at it."""
    target, _, prompt, text, settings = known
    draft = informed(target, "full", [prompt], [generate.Result(text)], forgets=False, mask_token_id=text[3])
    r, = decode(target, draft, [prompt], mode, max_new_tokens=20, **settings)
    assert r.tokens == text
    r, = decode(target, draft, [prompt], mode, max_new_tokens=20, stop_ids=(text[3],), **settings)
    assert r.tokens == text[:3] and r.finish == "stop"


def test_the_first_of_several_stop_ids_ends_the_text(known):
    target, draft, prompt, text, settings = known
    r, = decode(target, draft, [prompt], "ddtree", max_new_tokens=20, stop_ids=(text[11], text[4], text[9]), **settings)
    assert r.tokens == text[:4]


def test_a_stop_at_the_last_allowed_token_is_a_stop(known):
    target, draft, prompt, text, settings = known
    r, = decode(target, draft, [prompt], "dflash", max_new_tokens=6, stop_ids=(text[5],), **settings)
    assert (r.tokens, r.finish) == (text[:5], "stop")
    r, = decode(target, draft, [prompt], "dflash", max_new_tokens=5, stop_ids=(text[5],), **settings)
    assert (r.tokens, r.finish) == (text[:5], "length")


@pytest.mark.parametrize("keep", [1, 2, 4, 7, 8])
def test_until_cuts_a_round_and_keeps_what_it_says(known, keep):
    """Stop strings work through it: the token that completes one is kept."""
    target, draft, prompt, text, settings = known
    seen = []
    def until(row, tokens):
        seen.extend(tokens)
        return keep - len(seen) + len(tokens) if len(seen) >= keep else None
    r, = generate.generate(target, draft, [prompt], "dflash", max_new_tokens=20, until=until, **settings)
    assert r.tokens == text[:keep] and r.finish == "stop"
    assert r.accepted == ([5] * ((keep - 2) // 6) + [min(5, (keep - 2) % 6 + 1)] if keep > 1 else [])


def test_a_stop_string_at_the_last_allowed_token_is_a_stop(known):
    target, draft, prompt, text, settings = known
    r, = generate.generate(target, draft, [prompt], "ar", max_new_tokens=4, until=lambda row, tokens: 1 if tokens == text[3:4] else None, **settings)
    assert (r.tokens, r.finish) == (text[:4], "stop")


@pytest.mark.parametrize("mode", generate.MODES)
def test_rows_that_finish_early_stay_finished(mode):
    """Each row has its own stop; the others go on as if they were alone."""
    target = tiny.golden("deepseek_v3")
    plain = generate.generate(target, None, PROMPTS, "ar", max_new_tokens=30)
    draft = informed(target, "full", PROMPTS, plain)
    stop = (plain[0].tokens[0], plain[2].tokens[7], plain[3].tokens[15])
    def cut(tokens):
        return next((i for i, t in enumerate(tokens) if t in stop), 30)
    results = decode(target, draft, PROMPTS, mode, max_new_tokens=30, stop_ids=stop)
    assert texts(results) == [r.tokens[:cut(r.tokens)] for r in plain]
    assert [r.finish for r in results] == ["stop" if cut(r.tokens) < 30 else "length" for r in plain]
    assert len({len(r.tokens) for r in results}) >= 3 and results[0].tokens == []


@pytest.mark.parametrize("mode", generate.MODES)
def test_the_context_limit_ends_rows_with_length(mode):
    """Ragged rows end with exactly `context` tokens each; a prompt one below the limit gives one token."""
    target, prompts = tiny.golden("moonlight"), tiny.prompts(256, 5, 38, 39, 30)
    plain = generate.generate(target, None, prompts, "ar", max_new_tokens=60)
    narrow = tiny.shorter(target, 40)
    draft = informed(narrow, "full", prompts, plain)
    results = decode(narrow, draft, prompts, mode, max_new_tokens=60, budget=12)
    assert [len(p) + len(r.tokens) for p, r in zip(prompts, results)] == [40] * 4
    assert all(r.finish == "length" for r in results)
    assert texts(results) == [r.tokens[:40 - len(p)] for p, r in zip(prompts, plain)]


@pytest.mark.parametrize("mode", ["dflash", "ddtree"])
def test_past_the_drafters_context_a_row_decodes_plainly_and_the_others_go_on(mode):
    """The text does not end there. Drafts are accepted for positions below the drafter's limit only, and once every row is past
    it the drafter is not asked."""
    target, prompts = tiny.golden("moonlight"), tiny.prompts(256, 3, 30, 38)
    plain = generate.generate(target, None, prompts, "ar", max_new_tokens=40)
    draft, asked = informed(target, "full", prompts, plain, forgets=False, max_position_embeddings=40), []
    ordinary = draft.proposal
    draft.proposal = lambda root, length, span: asked.append(length.tolist()) or ordinary(root, length, span)
    results = decode(target, draft, prompts, mode, max_new_tokens=40)
    assert texts(results) == texts(plain) and all(r.finish == "length" for r in results)
    for p, r in zip(prompts, results):
        length = len(p)  # committed tokens: the position of the root
        for accepted in r.accepted:
            assert accepted == max(0, min(5, 39 - length, len(p) + 40 - length - 2))
            length += accepted + 1
    assert all(min(lengths) < 39 for lengths in asked) and max(map(max, asked)) > 40 and max(len(r.accepted) for r in results) > len(asked)


def test_a_limit_holds_for_every_row_of_a_ragged_batch(known):
    target, _, _, _, _ = known
    draft = tiny.drafter(target)
    for n in (1, 2, 7):
        assert [len(r.tokens) for r in decode(target, draft, PROMPTS, "ddtree", max_new_tokens=n)] == [n] * 4


# The interface

def test_stream_gives_what_generate_gives_as_it_comes(known):
    target, draft, prompt, text, settings = known
    got, steps = [[], []], list(generate.stream(target, draft, [prompt, prompt], "dflash", max_new_tokens=20, **settings))
    for row, tokens in steps:
        got[row] += tokens
    assert got == [text, text] and [len(t) for _, t in steps[::2]] == [1, 6, 6, 6, 1]


def test_stream_runs_no_round_before_it_is_asked(known, monkeypatch):
    target, draft, prompt, text, settings = known
    ran = []
    ordinary = generate.Decoder.round
    monkeypatch.setattr(generate.Decoder, "round", lambda *args: ran.append(1) or ordinary(*args))
    steps = generate.stream(target, draft, [prompt], "dflash", max_new_tokens=20, **settings)
    assert next(steps) == (0, text[:1]) and not ran
    assert next(steps) == (0, text[1:7]) and len(ran) == 1


def test_two_streams_on_one_target_do_not_mix(known):
    """The caches belong to the models: the older stream ends with an error, never with the other's text."""
    target, draft, prompt, text, settings = known
    old = generate.stream(target, draft, [prompt], "dflash", max_new_tokens=20, **settings)
    assert next(old) == (0, text[:1])
    new = list(generate.stream(target, draft, [prompt], "dflash", max_new_tokens=20, **settings))
    assert [t for _, tokens in new for t in tokens] == text
    with pytest.raises(RuntimeError, match="took over"):
        next(old)


def test_results_are_timed(known):
    target, draft, prompt, _, settings = known
    for r in generate.generate(target, draft, [prompt, prompt[:1]], "ddtree", max_new_tokens=9, **settings):
        assert 0 < r.first_token < r.seconds


def test_ar_ignores_the_drafter(known):
    target, draft, prompt, text, settings = known
    with_draft, = generate.generate(target, draft, [prompt], "ar", max_new_tokens=9, **settings)
    assert with_draft.tokens == text[:9] and with_draft.accepted == [0] * 8


def test_a_round_copies_nothing_to_the_host(monkeypatch):
    """What a round emits leaves as one packed tensor, read once, by `step`."""
    target = tiny.golden("kimi_k2", torch.float32)
    decoder = generate.Decoder(target, tiny.Drafter(tiny.drafter(target).config), 2, 64)
    tiny.randomize(decoder.draft.own_params().values(), 0, 0.2)
    decoder.draft.share(target)
    decoder.limit.fill_(64), decoder.active.fill_(True)
    reads = []
    for name in ("tolist", "item", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        ordinary = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *args, _f=ordinary, _n=name: reads.append(_n) or _f(self, *args))
    for plan in (generate.Plan("ar"), generate.Plan("dflash"), generate.Plan("ddtree", 12), generate.Plan("ddtree", 12, True, True, True)):
        decoder.prepare(plan)
        reads.clear()
        decoder.round(plan, 64)
        assert reads == []
        decoder.step(plan, 64)
        assert reads == ["tolist"]


@pytest.mark.parametrize("changes, says", [
    ({"mode": "medusa"}, "unknown mode"), ({"budget": 0}, "budget"), ({"budget": 4097}, "budget"), ({"mode": "ddtree", "budget": 3, "spine": True}, "budget must be at least the 5"), ({"spine": True}, "best first"),
    ({"max_new_tokens": 0}, "max-new-tokens"), ({"temperature": -0.1}, "temperature"), ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"), ({"top_p": 0.0}, "top-p"), ({"top_p": 1.01}, "top-p"), ({"top_p": float("nan")}, "top-p"),
    ({"top_k": -1}, "top-k"), ({"top_k": 2 ** 70}, "top-k"), ({"seed": 2 ** 63}, "seed"), ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
    ({"prompts": []}, "no prompt"), ({"prompts": [[]]}, "prompt 0 is empty"), ({"prompts": [[1], [13]]}, "prompt 1 holds the token id 13"),
    ({"prompts": [[-1]]}, "token id -1"), ({"prompts": [[1] * 512]}, "512 tokens and the context holds 512")])
def test_arguments_out_of_range(changes, says):
    target = tiny.target()
    with pytest.raises(UserError, match=says) as e:
        generate.generate(target, tiny.drafter(target), **{"prompts": [[1]], **changes})
    assert "\n" not in str(e.value)


def test_speculation_without_a_drafter_is_an_error():
    for mode in ("dflash", "ddtree"):
        with pytest.raises(UserError, match="needs a drafter"):
            generate.generate(tiny.target(), None, [[1]], mode)


# A long run

def memory() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


@pytest.mark.slow
def test_soak_of_3000_rounds():
    """Batches of every shape, rows that finish at stops and limits, and one text of a thousand rounds; memory stays flat."""
    target = tiny.target(torch.float32, num_hidden_layers=2)
    draft = tiny.drafter(target, "next sliding", target_layer_ids=[0])
    g, done, before = torch.Generator().manual_seed(0), 0, None
    def pick(n):
        return int(torch.randint(n, (), generator=g))
    long = tiny.shorter(target, 3000)
    results = generate.generate(long, tiny.drafter(long, target_layer_ids=[0]), [[1, 2], [3]], "dflash", max_new_tokens=2000, temperature=2.0, seed=1)
    assert [len(r.tokens) for r in results] == [2000] * 2
    done += max(len(r.accepted) for r in results)
    while done < 3000:
        prompts = tiny.prompts(13, *(1 + pick(80) for _ in range(1 + pick(5))), seed=done)
        settings = dict(max_new_tokens=1 + pick(60), temperature=[0.0, 0.8, 1.5][pick(3)], seed=pick(99), stop_ids=[(), (4,), (9, 2)][pick(3)])
        results = generate.generate(target, draft, prompts, ["dflash", "ddtree"][pick(2)], budget=6 + pick(20), spine=bool(pick(2)), **settings)
        counters_add_up(results)
        assert all(r.finish and len(r.tokens) <= settings["max_new_tokens"] for r in results)
        done += max(len(r.accepted) for r in results)
        if before is None and done > 1800:
            before = memory()
    assert memory() - before < 16 << 20


def test_the_clock_starts_when_serving_begins(monkeypatch):
    """Measuring and compiling come before it."""
    now, ordinary = [0.0], generate.open_batch
    def slow(*args):
        now[0] += 100.0
        return ordinary(*args)
    monkeypatch.setattr(generate, "open_batch", slow)
    monkeypatch.setattr(generate, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    result, = generate.generate(tiny.golden("kimi_k2"), None, [[1, 2, 3]], "ar", max_new_tokens=2)
    assert result.first_token == result.seconds == 0
