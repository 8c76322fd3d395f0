"""The checks that judge the engine. test_faults.py plants faults and sees that they notice."""
import torch
from safetensors.torch import load_file

import generate
import serve
from checkpoint import load_draft
from helpers import GOLDEN
from model import chain
from verify import Decoder, commit

UNWRITTEN = 777.0


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    assert a.shape == b.shape
    error = (a - b).abs().max().item()
    assert error <= tolerance, f"off by {error}"


def scored(target, text: list, taps: tuple = ()) -> tuple:
    """Logits, taps and latents of one text scored as a chain from nothing; the cache in use stays as it is."""
    kept, target.cache = target.cache, target.norm.weight.new_zeros(target.config.num_layers, 1, 1, target.config.latent_dim)
    try:
        logits, _, latents = target(chain(torch.tensor([text])), torch.zeros(1, dtype=torch.long), 0)
        hidden = target.score(torch.tensor([text]))[1]
        return logits, torch.cat([hidden[i + 1] for i in taps], -1) if taps else None, latents
    finally:
        target.cache = kept


def nodes_score_like_their_paths(target, tree, lengths: list, tolerance: float = 1e-10) -> None:
    """Logits, taps and latents of every node == those of its path scored as a chain, over ragged committed prefixes."""
    B, N = tree.tokens.shape
    taps, V = tuple(range(target.config.num_layers)), target.config.vocab_size
    prefix = torch.randint(V, (B, max(lengths)), generator=torch.Generator().manual_seed(1))
    zero, length = torch.zeros(B, dtype=torch.long), torch.tensor(lengths)
    target.setup_cache(B, max(lengths) + 3)
    target.cache.fill_(UNWRITTEN)
    latents = target(chain(prefix), zero, 0)[2]
    commit(target, latents, chain(prefix).depth, zero, length)
    got = target(tree, length, target.cache.shape[2] - 1, taps)
    for b in range(B):
        for leaf in set(range(N)) - set(tree.parents[b].tolist()):
            path = tree.ancestors[b, leaf].nonzero().squeeze(1)
            want = scored(target, prefix[b, :lengths[b]].tolist() + tree.tokens[b, path].tolist(), taps)
            close(got[0][b, path], want[0][0, lengths[b]:], tolerance)
            close(got[1][b, path], want[1][0, lengths[b]:], tolerance)
            close(got[2][:, b, path], want[2][:, 0, lengths[b]:], tolerance)


class Watched(Decoder):
    """Checks after every step that exactly the committed slots are written, in both caches."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        for cache in self.caches():
            cache.fill_(UNWRITTEN)
        self.origin, self.gone = list(range(len(self.length))), {}

    def caches(self) -> list:
        """Their rows in use."""
        caches = [self.target.cache] + ([self.draft.k_cache, self.draft.v_cache] if self.draft is not None else [])
        return [cache[:, :len(self.length)] for cache in caches]

    def narrow(self, rows):
        """Keeps what rows hold that leave the batch."""
        self.gone |= {name: self.row(slot) for slot, name in enumerate(self.origin) if slot not in rows}
        order = super().narrow(rows)
        assert sorted(order) == sorted(rows)
        self.origin = [self.origin[slot] for slot in order]
        self.look()
        return order

    def widen(self):
        super().widen()
        self.origin, self.gone = list(range(len(self.length))), {}

    def row(self, slot: int) -> tuple:
        return self.length[slot].item(), self.pending[slot].item(), [cache[:, slot].clone() for cache in self.caches()]

    def enter(self, rows, settings):
        super().enter(rows, settings)
        for cache in self.caches():
            cache[:, rows] = UNWRITTEN

    def prefill(self, tokens, count, last, rows, plan, span):
        before, others = self.length.clone(), [b for b in range(len(self.length)) if b not in rows]
        roots = super().prefill(tokens, count, last, rows, plan, span)
        assert torch.equal(self.length[rows], before[rows] + count) and torch.equal(self.length[others], before[others])
        self.look()
        return roots

    def round(self, plan, span):
        before, active = self.length.clone(), self.active.clone()
        emitted = super().round(plan, span)
        count = emitted[:len(before), 0]  # what auto hears of a round comes after the rows
        assert torch.equal(self.length, before + count) and torch.equal(count > 0, active)
        self.look()
        return emitted

    def look(self) -> None:
        assert (self.length < self.limit).logical_or(self.limit == 0).all()
        assert (self.pending >= 0).all() and (self.pending <= min(self.waiting, self.ring)).all()
        for i, cache in enumerate(self.caches()):  # the drafter's lacks what waits in the ring
            length = self.length if i == 0 else self.length - self.pending
            committed = torch.arange(self.slots) < length.unsqueeze(1)                 # (B, S)
            written = cache[:, :, :self.slots].flatten(3) != UNWRITTEN                 # (L, B, S, C)
            assert torch.equal(written.all(-1), committed.expand(len(cache), -1, -1)), "a committed slot is not written"
            assert torch.equal(written.any(-1), committed.expand(len(cache), -1, -1)), "a slot past the committed ones is written"

    def holds(self, texts: list, tolerance: float) -> None:
        """Both caches hold what scoring the texts as plain chains gives."""
        for row, text in enumerate(texts):
            n, pending, caches = self.gone[row] if row in self.gone else self.row(self.origin.index(row))
            # all but the root; past a stop, the rest of that round is committed and not emitted, and then the row rests
            assert len(text) - 1 <= n <= len(text) + (self.draft.depths if self.draft is not None else 0)
            committed = min(n, len(text))
            _, taps, latents = scored(self.target, text[:committed], self.draft.config.taps if self.draft is not None else ())
            close(caches[0][:, :committed], latents[:, 0], tolerance)
            if self.draft is not None:
                grafted = min(committed, n - pending)
                k, v = self.draft.context(taps[:, :grafted], torch.arange(grafted).unsqueeze(0))
                close(caches[1][:, :grafted], k[:, 0], tolerance)
                close(caches[2][:, :grafted], v[:, 0], tolerance)


def decode(target, draft, prompts: list, mode: str, tolerance: float = 1e-9, **settings) -> list:
    """`generate`, with every step and the final contents of the caches checked."""
    made = []
    class Kept(Watched):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)
    before = serve.Decoder
    serve.Decoder = Kept
    try:
        results = generate.generate(target, draft, prompts, mode, **settings)
    finally:
        serve.Decoder = before
    counters_add_up(results)
    made[0].holds([p + r.tokens for p, r in zip(prompts, results)], tolerance)
    return results


def counters_add_up(results: list) -> None:
    """One token from the prefill, then per round the accepted drafts and the target's own; a stop id is not emitted."""
    for r in results:
        assert len(r.tokens) == 1 + sum(a + 1 for a in r.accepted) - (r.finish == "stop")


def texts(results: list) -> list:
    return [r.tokens for r in results]


def load_golden_draft(variant: str) -> tuple:
    """A golden drafter and its expected tensors; its target is a stand-in, the goldens hold embeddings."""
    import tiny
    folder = GOLDEN / "drafters" / variant
    target = tiny.target(torch.float32, vocab_size=320, hidden_size=64, num_hidden_layers=4)
    return load_draft(folder, target), load_file(folder / "expected.safetensors")


def draft_equals_golden(variant: str, tolerance: float = 1e-5) -> None:
    """Two blocks over grafted context, the second after more of it was grafted."""
    draft, e = load_golden_draft(variant)
    draft.setup_cache(2, 40)
    draft.k_cache.fill_(UNWRITTEN), draft.v_cache.fill_(UNWRITTEN)
    done = 0
    for i in "12":
        start = done + int(e[f"context{i}"])
        draft.graft(e["target_hidden"][:, done:start], torch.full((2,), done))
        x = draft.hidden(e[f"block{i}"].unsqueeze(1), torch.full((2, 1), start), draft.k_cache[:, :, :40], draft.v_cache[:, :, :40])
        close(x.squeeze(1), e[f"out{i}"], tolerance)
        done = start
