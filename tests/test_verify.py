"""Sampling as a pure function, its distribution, acceptance's bookkeeping, and single steps of the Decoder."""
import math

import pytest
import torch

import tiny
from draft import Drafter
from generate import generate
from invariants import UNWRITTEN, Watched
from serve import Request, open_batch, prefill, serve
from verify import Decoder, Plan, Sampling, commit, gumbel, keep_top, sample


def within_chance(counts, expected) -> None:
    """Pearson's chi-square; a sound generator fails this once in a billion times."""
    counts, expected = torch.as_tensor(counts).double().flatten(), torch.as_tensor(expected).double().flatten()
    assert (counts[expected == 0] == 0).all(), "something impossible was drawn"
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert expected.min() > 5
    chi, df = ((counts - expected) ** 2 / expected).sum().item(), len(counts) - 1
    z = ((chi / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))  # Wilson and Hilferty
    assert abs(z) < 6, f"chi-square {chi:.0f} with {df} degrees of freedom"


def uniform(seeds, positions, vocab: int, dtype=torch.float64) -> torch.Tensor:
    """The noise mapped back to (0, 1)."""
    return torch.exp(-torch.exp(-gumbel(torch.as_tensor(seeds), torch.as_tensor(positions), vocab, dtype)))


def settings(rows: int, seed=0, temperature=1.0, top_k=0, top_p=1.0) -> Sampling:
    full = lambda x, dtype: torch.as_tensor(x, dtype=dtype).expand(rows)  # noqa: E731
    return Sampling(full(seed, torch.long), full(temperature, torch.float64), full(top_k, torch.long), full(top_p, torch.float64))


# The noise

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("over", ["positions", "seeds", "tokens"])
def test_noise_is_uniform(over, dtype):
    n = 60000
    u = {"positions": lambda: uniform([5], [list(range(n))], 3, dtype)[0, :, 1],
         "seeds": lambda: uniform(list(range(n)), [[7]] * n, 3, dtype)[:, 0, 1],
         "tokens": lambda: uniform([5], [[7]], n, dtype)[0, 0]}[over]()
    within_chance(torch.histc(u.double(), 100, 0, 1), [n / 100] * 100)


@pytest.mark.parametrize("pair", ["tokens", "positions", "seeds", "high seeds"])
def test_noise_of_neighbours_is_independent(pair):
    """Pairs of draws fill the square evenly."""
    n = 40000
    if pair == "seeds":
        u = uniform(list(range(n + 1)), [[7]] * (n + 1), 1)[:, 0, 0]
        a, b = u[:-1], u[1:]
    elif pair == "high seeds":
        s = torch.arange(n)
        a, b = uniform(s, [[7]] * n, 1)[:, 0, 0], uniform(s + 2 ** 32, [[7]] * n, 1)[:, 0, 0]
    elif pair == "positions":
        u = uniform([3], [list(range(n + 1))], 1)[0, :, 0]
        a, b = u[:-1], u[1:]
    else:
        a, b = uniform([3], [list(range(n))], 2)[0].unbind(-1)
    cells = (a * 12).long() * 12 + (b * 12).long()
    within_chance(torch.bincount(cells, minlength=144), [n / 144] * 144)


def test_seed_and_position_do_not_trade_places():
    """(seed s, position p) and (seed p, position s), or sums that agree, are different draws."""
    s, p = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    u = uniform(s.flatten(), p.flatten().unsqueeze(1), 1).flatten()
    assert len(u.unique()) == len(u)


def test_noise_takes_every_64_bit_seed_and_is_finite():
    seeds = [0, 1, -1, 2 ** 32, -2 ** 32, 2 ** 63 - 1, -2 ** 63]
    for dtype in (torch.float32, torch.float64):
        noise = gumbel(torch.tensor(seeds), torch.zeros(len(seeds), 1, dtype=torch.long), 50000, dtype)
        assert noise.isfinite().all() and noise.dtype == dtype
        assert len(noise[:, 0, 0].unique()) == len(seeds)


# The distribution

def exact(logits: list, temperature: float, top_k: int, top_p: float) -> list:
    """The probabilities that temperature, then top-k, then top-p leave, written out."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda v: (-weights[v], v))[:top_k or len(logits)]
    total, kept, mass = sum(weights[v] for v in order), [], 0.0
    for v in order:
        if kept and mass >= top_p:
            break
        kept.append(v)
        mass += weights[v] / total
    left = sum(weights[v] for v in kept)
    return [weights[v] / left if v in kept else 0.0 for v in range(len(logits))]


LOGITS = [0.3, -1.2, 2.0, 2.0, 0.9, -0.4, 1.1, -1.5]


@pytest.mark.parametrize("temperature, top_k, top_p", [(1, 0, 1), (0.5, 0, 1), (2, 0, 1), (1, 3, 1), (1, 0, 0.7), (0.7, 5, 0.8), (1, 1, 1), (1, 0, 1e-9)])
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_sampling_draws_the_exact_distribution(temperature, top_k, top_p, over):
    n = 30000
    logits, count = torch.tensor(LOGITS).expand(1, n, -1), torch.arange(n)
    if over == "positions":
        tokens = sample(logits, count.unsqueeze(0), settings(1, 11, temperature, top_k, top_p))
    else:
        tokens = sample(logits.transpose(0, 1), torch.full((n, 1), 4), settings(n, count, temperature, top_k, top_p))
    expected = [p * n for p in exact(LOGITS, temperature, top_k, top_p)]
    if sum(e > 0 for e in expected) == 1:
        assert (tokens == expected.index(n)).all()
    else:
        within_chance(torch.bincount(tokens.flatten(), minlength=8), expected)


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (3, 1.0), (1, 0.5), (0, 0.9), (0, 0.05), (40, 0.6), (100, 1.0)])
def test_what_top_k_and_top_p_keep(top_k, top_p):
    """Against the rules written out, on 50 rows with many equals."""
    logits = (torch.randn(50, 1, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4).round() / 2
    kept = keep_top(logits, torch.full((50,), top_k), torch.full((50,), top_p, dtype=torch.float64))
    for row, got in zip(logits[:, 0], kept[:, 0]):
        want = exact(row.tolist(), 1.0, top_k, top_p)
        assert [g > -math.inf for g in got.tolist()] == [p > 0 for p in want]
        assert torch.equal(got[got > -math.inf], row[got > -math.inf])


def test_top_p_one_keeps_everything():
    """Also tokens so improbable that the sum of those before them rounds to 1."""
    logits = torch.tensor([[[40.0, 0.0, -3.0, 1.0]]])
    assert torch.equal(keep_top(logits, torch.tensor([0]), torch.tensor([1.0])), logits)


def test_greedy_rows_in_a_mixed_batch_are_greedy():
    logits = torch.randn(3, 400, 9, generator=torch.Generator().manual_seed(0)).round()
    mixed = Sampling(torch.tensor([1, 2, 3]), torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64), torch.tensor([0, 4, 2]),
                     torch.tensor([1.0, 0.9, 0.3], dtype=torch.float64))
    tokens = sample(logits, torch.arange(400).expand(3, -1), mixed)
    assert torch.equal(tokens[[0, 2]], logits[[0, 2]].argmax(-1))
    assert not torch.equal(tokens[1], logits[1].argmax(-1))


def test_equals_go_to_the_lowest_id():
    logits = torch.zeros(1, 1, 5000)
    logits[..., [17, 400, 4999]] = 1.0
    assert sample(logits, torch.tensor([[3]]), settings(1, temperature=0.0)).item() == 17
    assert sample(logits.bfloat16(), torch.tensor([[3]]), settings(1, temperature=0.0)).item() == 17


def test_a_draw_depends_on_its_seed_position_and_logits_alone():
    """Not on the row, the node, the batch, or whether other rows ask for filters."""
    logits = torch.randn(4, 6, 30, generator=torch.Generator().manual_seed(0))
    position = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1))
    whole = sample(logits, position, settings(4, torch.tensor([7, 8, 9, 10]), 0.8))
    for b in range(4):
        for i in range(6):
            alone = sample(logits[b:b + 1, i:i + 1], position[b:b + 1, i:i + 1], settings(1, 7 + b, 0.8), filtered=False)
            assert alone.item() == whole[b, i]


def test_sampling_fp64_stays_fp64():
    """Two logits that fp32 cannot tell apart."""
    logits = torch.tensor([[[0.0, 1.0, 1.0 + 1e-12]]], dtype=torch.float64)
    assert sample(logits, torch.tensor([[0]]), settings(1, temperature=1e-15)).item() == 2


# Commit, and one step

def test_commit_moves_the_path_and_leaves_the_rest():
    target = tiny.target()
    target.setup_cache(3, 10)
    target.cache.fill_(UNWRITTEN)
    latents = torch.randn(3, 3, 7, 24, generator=torch.Generator().manual_seed(0)).double()
    path, length, count = torch.tensor([[0, 3, 6], [0, 2, 5], [0, 1, 4]]), torch.tensor([0, 7, 4]), torch.tensor([2, 3, 0])
    commit(target, latents, path, length, count)
    want = torch.full((3, 3, 10, 24), UNWRITTEN, dtype=torch.float64)
    want[:, 0, 0], want[:, 0, 1] = latents[:, 0, 0], latents[:, 0, 3]
    want[:, 1, 7], want[:, 1, 8], want[:, 1, 9] = latents[:, 1, 0], latents[:, 1, 2], latents[:, 1, 5]
    assert torch.equal(target.cache[:, :, :10], want)


def ready(rows: int, limits: list) -> tuple:
    """A Decoder after a prefill of ragged prompts, with a drafter that knows the text."""
    target = tiny.target()
    draft = tiny.drafter(target)
    decoder = Watched(target, draft, rows, max(limits))
    decoder.limit.copy_(torch.tensor(limits))
    decoder.prepare(Plan("ddtree", 12))
    prompts = tiny.prompts(13, *range(3, 3 + rows))
    tokens = torch.tensor([p + [0] * (10 - len(p)) for p in prompts])
    roots = decoder.prefill(tokens, torch.tensor([len(p) for p in prompts]), torch.ones(rows, dtype=torch.bool), torch.arange(rows), Plan(), 0)
    return decoder, prompts, roots


def test_inactive_rows_do_nothing():
    decoder, _, _ = ready(3, [40, 40, 40])
    decoder.active[1] = False
    before = decoder.target.cache[:, 1, :40].clone()
    for root in range(13):
        decoder.root[1] = root
        emitted = decoder.round(Plan("ddtree", 12), 40)
        assert emitted[1, 0] == 0 and decoder.length[1] == 4 and decoder.root[1] == root
    assert decoder.length[0] > 3 and decoder.length[2] > 5
    assert torch.equal(decoder.target.cache[:, 1, :40], before)


def test_rows_of_one_batch_may_differ_in_every_setting():
    """Greedy, sampled and filtered rows in one Decoder: each decodes what it decodes alone."""
    rows = [(0.0, 0, 1.0, 3), (1.0, 0, 1.0, 3), (0.8, 4, 1.0, 5), (1.2, 0, 0.6, 3)]
    def run(which):
        decoder, prompts, _ = ready(4, [30] * 4)
        for buffer, i in ((decoder.temperature, 0), (decoder.top_k, 1), (decoder.top_p, 2), (decoder.seed, 3)):
            buffer.copy_(torch.tensor([r[i] for r in rows]))
        decoder.active.copy_(torch.tensor([b in which for b in range(4)]))
        out, plan = {b: [] for b in which}, Plan("ddtree", 12, sampled=True, filtered=True)
        while decoder.active.any():
            for b, (count, *tokens) in enumerate(decoder.round(plan, 30).tolist()):
                if count:
                    out[b] += tokens[:count]
        return out
    together = run(range(4))
    assert all(run([b])[b] == together[b] for b in range(4))
    assert len({tuple(t) for t in together.values()}) == 4


def test_a_round_stops_at_its_limit():
    """Rows never hold more than `limit` tokens, the root included, whatever is accepted."""
    text, = generate(tiny.target(), None, tiny.prompts(13, 3), "ar", max_new_tokens=20)
    for limit in range(4, 12):
        decoder, prompts, roots = ready(1, [limit])
        decoder.draft.tell([prompts[0] + text.tokens])
        decoder.draft.forgets = False
        tokens, rounds = roots.tolist(), 0
        while decoder.active.item():
            count, *new = decoder.round(Plan("dflash"), limit)[0].tolist()
            tokens, rounds = tokens + new[:count], rounds + 1
        assert tokens == text.tokens[:limit - 3] and rounds == -(-(limit - 4) // 6)


def test_stages_are_marked_in_order():
    decoder, _, _ = ready(1, [20])
    seen = []
    super(Watched, decoder).round(Plan("ddtree", 12), 20, seen.append)
    assert seen == ["propose", "build", "verify", "accept+commit"]


# Markov heads in the round

@pytest.mark.parametrize("kind, plan", [("markov", Plan("dflash")), ("markov", Plan("ddtree", 6)), ("next gated", Plan("ddtree", 9, True, candidates=5))])
def test_a_round_over_conditionals_is_one_graph_without_a_sync(kind, plan):
    """Traced whole; nothing in it waits for the device; and it emits what the eager round does."""
    target = tiny.target(torch.float32)
    draft, seen, emitted = tiny.drafter(target, kind), [], []
    draft.__class__ = Drafter  # without the knowledge of texts, which is read on the host
    def backend(graph, inputs):
        seen.append(" ".join(str(n.target) for n in graph.graph.nodes))
        return graph.forward
    for compiled in (False, True):
        torch._dynamo.reset()
        decoder = Decoder(target, draft, 2, 40)
        decoder.enter([0, 1], [(30, 1, 0.0, 0, 1.0), (30, 2, 0.0, 0, 1.0)])
        decoder.prepare(plan)
        prefill(decoder, [[3, 4, 5], [6, 7]], plan)
        run = torch.compile(decoder.round, backend=backend, fullgraph=True, dynamic=False) if compiled else decoder.round
        emitted.append([run(plan, 40).tolist() for _ in range(3)])
    assert emitted[0] == emitted[1] and len(seen) == 1
    assert not any(op in seen[0] for op in ("_local_scalar_dense", "nonzero", "_assert_scalar"))


@pytest.mark.parametrize("candidates", [1, 3, 13])
def test_a_cap_on_candidates_changes_no_text(candidates):
    target, draft = tiny.target(), tiny.drafter(tiny.target(), "markov")
    plain = [r.tokens for r in generate(target, None, [[1, 2, 3], [4, 5]], "ar", max_new_tokens=12)]
    for mode in ("dflash", "ddtree"):
        requests = [Request([1, 2, 3], 12), Request([4, 5], 12)]
        decoder, plan, _ = open_batch(target, draft, requests, 2, mode, 6, False, False)
        texts = [[], []]
        for e in serve(decoder, requests, plan._replace(candidates=candidates)):
            texts[e.number] += e.tokens
        assert texts == plain
