"""Sampling, acceptance, commit, and the round that joins them: propose, build, verify, accept, commit.

Sampling is a pure function of (seed, position, logits): no generator state, so the same seed gives the same text in every
mode, batch and tree shape. Acceptance then is plain equality with the target's own token, greedy or sampled alike.

Shapes: B sequences, N nodes, D drafted depth, P = D + 1 nodes of a path, V vocabulary, L layers, S cache slots, W widths of a
ladder.
"""
import math
import time
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn

from ddtree import CANDIDATES, candidate_tables, first, greedy_chain, grow, ranked_tokens
from draft import Drafter
from model import Transformer, Tree, chain, upcast
from ranks import Vocabulary, best

MASK32 = 0xFFFFFFFF
ODDS = 1 << 20  # expected acceptances leave a round as integers of this many parts


# Sampling

def mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash in int64 (xorshift-multiply, the lowbias32 constants 0x21f0aaad and 0x735a2d97 found by
    T. Schulz's and C. Wellons' searches). Both constants are below 2^31, so no product overflows."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK32
    return x ^ (x >> 15)


def gumbel(seed: Tensor, position: Tensor, vocab: int, dtype: torch.dtype, first: int = 0) -> Tensor:
    """seed (B,), position (B, N) -> standard Gumbel noise (B, N, V), one value per (seed, position, token id); the ids are those
    from `first` on."""
    # sums, and constants, keep 0 and equal inputs from meeting: mix(0) is 0
    seed = seed.unsqueeze(1)
    key = mix((mix((mix((seed & MASK32) ^ 0x9E3779B9) + ((seed >> 32) & MASK32)) & MASK32) + position) & MASK32).unsqueeze(-1)
    h = mix((key + mix(torch.arange(first, first + vocab, device=seed.device) ^ 0x85EBCA6B)) & MASK32)              # (B, N, V)
    u = ((h.to(dtype) + 0.5) * 2.0 ** -32).clamp(max=1 - 2.0 ** -24)  # small u, where large noise comes from, stays exact
    return -(-torch.log1p(-u)).log()


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside the top_k (B,) best tokens (0: all) and then outside the smallest set of probability top_p (B,).
    logits (B, N, V), already divided by the temperature. Equals are kept from the lowest id on."""
    ordered = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    k = torch.where(top_k > 0, top_k, logits.shape[-1]).view(-1, 1, 1)
    p = ordered.values.masked_fill(rank >= k, -math.inf).softmax(-1)
    top_p = top_p.view(-1, 1, 1)
    kept = (rank < k) & ((p.cumsum(-1) - p < top_p) | (top_p >= 1) | (rank == 0))  # a sum that rounds to 1 ends nothing
    return logits.masked_fill(~torch.zeros_like(kept).scatter(-1, ordered.indices, kept), -math.inf)


class Sampling(NamedTuple):
    """Per-row settings, all (B,). temperature 0 is greedy, top_k 0 and top_p 1 keep everything."""
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor


def sample(logits: Tensor, position: Tensor, settings: Sampling, filtered: bool = True, vocab: Optional[Vocabulary] = None) -> Tensor:
    """logits (B, N, V) for tokens at position (B, N) -> tokens (B, N): argmax(logits / temperature + noise), the lowest
    id among equals. filtered=False skips top-k and top-p, for batches where no row asks for them.

    vocab: where ranks divide the vocabulary. Noise belongs to the global id, so the text is the same; only filters must see all
    logits, and gather them."""
    if filtered and vocab is not None:
        logits, vocab = vocab.whole(logits), None
    logits = upcast(logits)
    hot = (settings.temperature > 0).view(-1, 1, 1)
    scaled = logits / torch.where(hot.flatten(), settings.temperature, 1.0).to(logits.dtype).view(-1, 1, 1)
    if filtered:
        scaled = keep_top(scaled, settings.top_k, settings.top_p.to(logits.dtype))
    noisy = scaled + gumbel(settings.seed, position, logits.shape[-1], logits.dtype, vocab.first if vocab is not None else 0)
    return best(torch.where(hot, noisy, logits), vocab)


# Acceptance and commit

def accept(tree: Tree, target_tokens: Tensor) -> tuple:
    """target_tokens (B, N): the target's token after each node -> path (B, P) node ids, accepted (B,) drafts on it,
    next_root (B,). A node is accepted when no ancestor, itself included, differs from what the target says after its parent.
    Siblings differ, so the accepted nodes are one path; entries beyond accepted + 1 are padding."""
    B, N = tree.tokens.shape
    if N == 1:  # a root alone
        path = torch.zeros_like(target_tokens)
        return path, path[:, 0], target_tokens[:, 0]
    index = torch.arange(N, device=tree.tokens.device)
    match = (tree.tokens == target_tokens.gather(1, tree.parents.clamp(min=0))) | (index == 0)
    good = ~(tree.ancestors & ~match.unsqueeze(1)).any(-1)                                       # (B, N)
    path = torch.where(good, index, N).sort(-1).values[:, :tree.max_depth + 1].clamp(max=N - 1)  # parents come before children
    accepted = good.sum(-1) - 1
    return path, accepted, token_after(target_tokens, path, accepted)


def token_after(target_tokens: Tensor, path: Tensor, accepted: Tensor) -> Tensor:
    """The target's token after the last accepted node of the path: (B,)."""
    return target_tokens.gather(1, path.gather(1, accepted.unsqueeze(1))).squeeze(1)


def commit(target: Transformer, latents: Tensor, path: Tensor, length: Tensor, count: Tensor, rows: Optional[Tensor] = None) -> None:
    """Writes the latents (L, B, N, C+R) of the first count (B,) nodes of path (B, P) to slots length, length+1, …
    One indexed write; the rest goes to the spare slot at the end of the cache, which nothing reads. rows (B,): the cache's
    rows that the sequences are, where they are not all of them."""
    step, index = torch.arange(path.shape[1], device=path.device), torch.arange(path.shape[0], device=path.device).unsqueeze(1)
    slot = torch.where(step < count.unsqueeze(1), length.unsqueeze(1) + step, target.cache.shape[2] - 1)
    target.cache[:, index if rows is None else rows.unsqueeze(1), slot] = latents if latents.shape[2] == 1 else latents[:, index, path]


# The round

class Plan(NamedTuple):
    """What one round does. Static: each plan is one graph."""
    mode: str = "ddtree"     # "ar", "dflash" or "ddtree"
    budget: int = 32         # drafted nodes of a ddtree round
    spine: bool = False      # see build_tree
    sampled: bool = False    # some row has a temperature
    filtered: bool = False   # some row has top-k or top-p
    ladder: tuple = ()       # widths to report on: a ddtree round builds the widest tree and verifies its first `budget` drafts; empty: no
                             # report. Plain decode reports the target's confidence alone
    candidates: int = CANDIDATES  # tokens of a depth that a Markov head scores: see ddtree.grow

    @property
    def name(self) -> str:
        return f"ddtree {self.budget}" if self.mode == "ddtree" else self.mode


def describe(args: tuple) -> str:
    """What tells one graph from another, in words: `8 x 16 tokens`, `ddtree 32`, `span 256`."""
    words = [f"{' x '.join(map(str, a.shape))} tokens" for a in args if isinstance(a, Tensor) and a.dim() == 2]
    plan, span = next((a for a in args if isinstance(a, Plan)), None), next((a for a in args if isinstance(a, int)), None)
    words += [f"{plan.mode} {plan.budget}" if plan.mode == "ddtree" else plan.mode] if plan and not words else []
    return ", ".join(words + ([f"span {span}"] if span is not None else []))


class Decoder(nn.Module):
    """B sequences in flight: the two models, their caches, and per-row state in buffers, so that a round takes no
    argument that changes and the host has nothing to decide inside it.

    ring: how many ar rounds in a row may leave their taps waiting before the drafter's context must catch up; 0: it always does."""

    def __init__(self, target: Transformer, draft: Optional[Drafter], batch: int, slots: int, ring: int = 0):
        super().__init__()
        self.target, self.draft, self.slots = target, draft, slots
        device = target.norm.weight.device
        self.per_row = []                      # names of the buffers that `narrow` takes rows of
        def buffer(name, value, dtype):
            self.per_row.append(name)
            self.register_buffer(name, torch.full((batch,), value, dtype=dtype, device=device), persistent=False)
        buffer("root", 0, torch.long)          # the last emitted token, in no cache yet
        buffer("length", 0, torch.long)        # committed tokens = the root's position
        buffer("limit", 0, torch.long)         # tokens a row may hold, prompt included
        buffer("active", False, torch.bool)    # inactive rows accept, commit and emit nothing
        buffer("pending", 0, torch.long)       # committed tokens that the drafter's context lacks: their taps are in the ring
        buffer("seed", 0, torch.long)
        buffer("temperature", 0.0, torch.float64)
        buffer("top_k", 0, torch.long)
        buffer("top_p", 1.0, torch.float64)
        # the caches belong to the models: one generation at a time may use them
        self.claim = target.claim = object()
        target.setup_cache(batch, slots)
        if draft is not None:
            draft.setup_cache(batch, slots)
        self.ring, self.waiting = ring if draft is not None else 0, 0      # waiting: the host's bound on pending
        if self.ring:
            self.per_row.append("waiting_taps")
            self.register_buffer("waiting_taps", target.norm.weight.new_zeros(batch, ring, draft.fc.in_features), persistent=False)
            self.register_buffer("ring_starts", torch.arange(batch, device=device) * ring, persistent=False)
        self.whole = {}                        # the buffers that `narrow` left the first rows of
        self.fixed = False                     # rows stay where they are: a graph's shapes and addresses
        self.compiled, self.pairs, self.least_span = None, {}, 64

    def compile(self, progress: Callable = lambda text: None, **options) -> None:
        """From here on `step` runs each (plan, span, chunk shape) as one compiled graph: on CUDA, one CUDA graph. The first call
        of each compiles it; progress(text) hears before and after. options: of torch.compile, other than those used here."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)  # a graph per plan and bucket
        options = {"mode": "reduce-overhead", **options} if "backend" not in options else options
        self.compiled = [torch.compile(f, fullgraph=True, dynamic=False, **options) for f in (self.round, self.prefill, self.catch_up)]
        self.progress, self.met, self.least_span, self.fixed = progress, set(), 256, True  # fewer buckets, fewer graphs

    def step(self, plan: Plan, span: int) -> list:
        """`round`, read back: the one device-to-host copy of a round. A drafter that rested catches up before it drafts, and
        when the ring is full."""
        rests = self.rests(plan)
        if self.waiting and (not rests or self.waiting == self.ring):
            self.follow()
        self.waiting += rests
        return self.run(plan, span)

    def run(self, plan: Plan, span: int) -> list:
        """`step` where no drafter rested."""
        return self._run(0, self.round, plan, span).tolist()

    def follow(self) -> None:
        """`catch_up`, now: of as many taps as wait, or, compiled, in the one shape of all."""
        self._run(2, self.catch_up, *([] if self.compiled else [self.waiting]))
        self.waiting = 0

    def feed(self, *chunk) -> list:
        """`prefill`, read back."""
        return self._run(1, self.prefill, *chunk).tolist()

    def _run(self, which: int, eager: Callable, *args) -> Tensor:
        self.check_claim()
        if self.compiled is None:
            with torch.inference_mode():  # an operator then costs a little less than under no_grad
                return eager(*args)
        torch.compiler.cudagraph_mark_step_begin()  # the last output was read; its memory may be written again
        graph = (which, *(a.shape if isinstance(a, Tensor) else a for a in args))
        if graph in self.met:
            return self.compiled[which](*args)
        name = f"{eager.__name__} {describe(args)}".strip()
        self.progress(f"compiling {name} …")
        began, out = time.perf_counter(), self.compiled[which](*args)
        self.met.add(graph)
        seconds = time.perf_counter() - began
        self.progress(f"compiled {name} in {seconds:.1f} s" if seconds > 1 else "")
        return out

    def check_claim(self) -> None:
        if self.target.claim is not self.claim:
            raise RuntimeError("another generation took over this target's caches; finish one before the next, or load a second copy")

    def warm(self, plan: Plan, spans: list) -> None:
        """Compiles the rounds of a plan before the first row enters: rows at rest emit and commit nothing. Three calls each,
        since a CUDA graph is warmed up, recorded, and then replayed."""
        for span in spans:
            for _ in range(3):
                self._run(0, self.round, plan, span)

    def enter(self, rows: list, settings: list) -> None:
        """New requests take these rows: nothing is committed and nothing happens in them until their prompts are read.
        settings: (limit, seed, temperature, top_k, top_p) of each."""
        index = torch.tensor(rows, device=self.root.device)
        for buffer, values in zip((self.limit, self.seed, self.temperature, self.top_k, self.top_p), zip(*settings)):
            buffer[index] = torch.tensor(values, dtype=buffer.dtype, device=index.device)
        self.length[index], self.pending[index], self.active[index] = 0, 0, False

    def narrow(self, rows: list) -> list:
        """The batch is of these rows alone from here on, and rounds cost less: the last of them move to where others leave room, in the
        caches, too, of which rounds read the first rows. Returns which row each slot now holds. Not of fewer rows where they are fixed."""
        self.check_claim()
        n, order = len(rows), [s if s in rows else None for s in range(len(rows))]
        moved = [s for s in rows if s >= n]
        self.whole = self.whole or {name: getattr(self, name) for name in self.per_row}
        caches = [self.target.cache] + ([self.draft.k_cache, self.draft.v_cache] if self.draft is not None else [])
        for slot in [s for s in range(n) if order[s] is None]:
            order[slot] = moved.pop()
            for t in [getattr(self, name) for name in self.per_row] + [c.transpose(0, 1) for c in caches]:
                t[slot] = t[order[slot]]
        for name in self.per_row:
            setattr(self, name, getattr(self, name)[:n])
        return order

    def widen(self) -> None:
        """All rows again, at rest."""
        for name, whole in self.whole.items():
            setattr(self, name, whole)
        self.active.zero_()
        self.whole = {}

    def prepare(self, plan: Plan) -> None:
        """Makes build_tree's index tables for a plan, as a buffer: a graph then reads them from a fixed address."""
        budget = plan.ladder[-1] if plan.ladder else plan.budget
        if plan.mode == "ddtree" and self.draft.markov_head is None and budget not in self.pairs:
            tables = candidate_tables(self.draft.depths, self.target.config.vocab_size, budget, self.root.device)
            self.register_buffer(f"pairs_{budget}", torch.cat(tables, 1), persistent=False)
            self.pairs[budget] = [t.shape[1] for t in tables]

    def tables(self, budget: int) -> Optional[tuple]:
        return None if self.draft.markov_head is not None else getattr(self, f"pairs_{budget}").split(self.pairs[budget], 1)

    def choose(self, logits: Tensor, position: Tensor, plan: Plan, rows: Optional[Tensor] = None) -> Tensor:
        """logits (B, N, V) for tokens at position (B, N) -> the target's tokens (B, N). rows (B,): whose settings to use."""
        if not plan.sampled:
            return best(logits, self.target.vocab)
        settings = (self.seed, self.temperature, self.top_k, self.top_p)
        return sample(logits, position, Sampling(*(settings if rows is None else (s[rows] for s in settings))), plan.filtered, self.target.vocab)

    @property
    def taps(self) -> tuple:
        return self.draft.config.taps if self.draft is not None else ()

    @torch.no_grad()
    def prefill(self, tokens: Tensor, count: Tensor, last: Tensor, rows: Tensor, plan: Plan, span: int) -> Tensor:
        """One chunk of the prompts of some rows (R,), all different: tokens (R, T), of which the first count (R,) are real. Rows
        with last (R,) have their whole prompt in now: they get their first token and become active. Returns the roots (R,)."""
        length = self.length[rows]
        logits, taps, latents = self.target(chain(tokens), length, span, self.taps, last=(count - 1).clamp(min=0), rows=rows)
        self.commit(latents, taps, torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape), count, rows)
        length = length + count
        root = torch.where(last, self.choose(logits, length.unsqueeze(1), plan, rows).squeeze(1), self.root[rows])
        self.root[rows] = root
        self.active[rows] = self.active[rows] | (last & (length + 1 < self.limit[rows]))
        return root

    @torch.no_grad()
    def round(self, plan: Plan, span: int, mark: Callable = lambda stage: None) -> Tensor:
        """One round for all rows. span: cache slots to attend, at least every length. Returns (B, P + 1): how many tokens
        a row emitted, then the tokens. With a ladder, the row of `confidence` follows, and where it drafts those of `expected` and of
        `reached`; all are then D + 2 wide (of plain decode 2). `mark` is called after each stage, for those who time them."""
        marginals, conditional = self.propose(plan, span)
        mark("propose")
        tree, score = self.build(marginals, conditional, plan)
        told = [self.expected(tree, score, plan)] if plan.ladder and plan.mode != "ar" else []
        if plan.ladder and plan.mode == "ddtree":
            tree = first(tree, plan.budget + 1)
        mark("build")
        logits, taps, latents = self.target(tree, self.length, span, self.taps)
        tokens = self.choose(logits, self.length.unsqueeze(1) + tree.depth + 1, plan)
        mark("verify")
        path, accepted, _ = accept(tree, tokens)
        if plan.ladder:
            told = [self.confidence(logits, plan)] + (told + [self.reached(accepted)] if told else [])
        emitted = self.settle(path, accepted, tokens, taps, latents, self.rests(plan))
        if told:
            width = self.draft.depths + 2 if plan.mode != "ar" else 2
            told[0] = told[0].expand(1, width)
            emitted = torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1])) if t.shape[1] < width else t for t in [emitted] + told])
        mark("accept+commit")
        return emitted

    def propose(self, plan: Plan, span: int) -> tuple:
        """Marginals (B, D, V), and what the drafter's Markov head adds to them (`Drafter.proposal`), or None."""
        return (None, None) if plan.mode == "ar" else self.draft.proposal(self.root, self.length, span)

    def build(self, marginals: Optional[Tensor], conditional: Optional[Callable], plan: Plan) -> tuple:
        """The tree, and the log probabilities (B, N) of its nodes' prefixes; None of plain decode and of an independent chain without a ladder."""
        if plan.mode == "ar":
            return chain(self.root.unsqueeze(1)), None
        if plan.mode == "dflash":
            drafts, score = self.top_chain(marginals, conditional, plan)
            return chain(torch.cat((self.root.unsqueeze(1), drafts), 1)), score if score is None else torch.nn.functional.pad(score, (1, 0))
        budget = plan.ladder[-1] if plan.ladder else plan.budget
        return grow(marginals, self.root, budget, plan.spine, self.tables(budget), self.target.vocab, conditional, plan.candidates)

    def rests(self, plan: Plan) -> bool:
        return plan.mode == "ar" and self.ring > 0

    def top_chain(self, marginals: Tensor, conditional: Optional[Callable], plan: Plan) -> tuple:
        """(B, D): the drafts of a dflash round, and their prefixes' log probabilities, None where they would cost and nobody asks."""
        if conditional is not None:
            return greedy_chain(marginals, self.root, conditional, plan.candidates, self.target.vocab)
        if not plan.ladder:
            return best(marginals, self.target.vocab), None
        ids, logp = ranked_tokens(marginals, 1, self.target.vocab)                                          # (B, D, 1)
        return ids[..., 0], logp[..., 0].cumsum(1)

    def expected(self, tree: Tree, score: Tensor, plan: Plan) -> Tensor:
        """(W + 1, D): how many drafts the drafter expects to be accepted at each depth were the tree cut to each width of the ladder,
        and last were it the chain of a dflash round; summed over active rows, in 1/ODDS. Nodes come best first, so one tree prices all
        smaller ones, and the chain is the way down by first children. (Where it leaves the tree it counts as nothing: it is worth less
        there than the tree's last node.) A chain prices itself alone: (1, D)."""
        at = tree.depth.unsqueeze(-1) == torch.arange(1, self.draft.depths + 1, device=score.device)        # (B, N, D)
        mass = (score.exp() * self.active.unsqueeze(1)).unsqueeze(-1) * at                                  # (B, N, D)
        if plan.mode == "dflash":
            return (mass.sum((0, 1)).unsqueeze(0) * ODDS).round().long()
        first_nodes = mass.sum(0).cumsum(0)                                                                 # (N, D)
        later = (tree.parents.unsqueeze(2) == tree.parents.unsqueeze(1)).tril(-1).any(-1)                   # (B, N): not the first child
        led = mass.masked_fill((tree.ancestors & later.unsqueeze(1)).any(-1, keepdim=True), 0)
        rows = [first_nodes[min(n, len(first_nodes) - 1)] for n in plan.ladder] + [led.sum((0, 1))]
        return (torch.stack(rows) * ODDS).round().long()

    def confidence(self, logits: Tensor, plan: Plan) -> Tensor:
        """(1, 1): how likely the target's best token after the root is, summed over active rows, in 1/ODDS; at a row's temperature, where it
        samples. What the target is sure of is easy to draft, and this costs no draft. (Where logits overflowed it may be anything.)"""
        x = upcast(logits[:, 0])
        if plan.sampled:
            x = x / torch.where(self.temperature > 0, self.temperature, 1.0).to(x.dtype).unsqueeze(1)
        top, total = x.amax(-1), x.logsumexp(-1)
        if self.target.vocab is not None:
            top, total = self.target.vocab.gather(torch.stack((top, total))).unbind(1)                      # (n, B)
            top, total = top.amax(0), total.logsumexp(0)
        return (((top - total).exp() * self.active).sum() * ODDS).long().view(1, 1)

    def reached(self, accepted: Tensor) -> Tensor:
        """(1, D): how many active rows accept a draft at each depth, whatever their limits cut off."""
        depth = torch.arange(1, self.draft.depths + 1, device=accepted.device)
        return ((accepted.unsqueeze(1) >= depth) & self.active.unsqueeze(1)).sum(0, keepdim=True)

    def settle(self, path: Tensor, accepted: Tensor, tokens: Tensor, taps: Optional[Tensor], latents: Tensor, rests: bool = False) -> Tensor:
        """Commits and grafts the path (B, P), moves every active row on. tokens (B, N): the target's. rests: the drafter does not
        run now; the taps of the root wait."""
        count, root, emitted = self.active.long(), tokens[:, 0], tokens
        if path.shape[1] > 1:
            # A row stops at its limit: what it accepts beyond is dropped, and the target's token there is the same token
            accepted = torch.minimum(accepted, self.limit - self.length - 2)
            if self.draft is not None:  # a drafter whose context is smaller than the target's: past it, a row decodes plainly
                accepted = torch.minimum(accepted, self.draft.config.max_positions - self.length - 1)
            accepted = accepted.clamp(min=0)
            count, root = torch.where(self.active, accepted + 1, 0), token_after(tokens, path, accepted)
            emitted = tokens.gather(1, path)  # the target's token after each accepted node
        self.commit(latents, taps, path, count, rests=rests)
        self.root.copy_(torch.where(self.active, root, self.root))
        self.active.copy_(self.active & (self.length + 1 < self.limit))
        return torch.cat((count.unsqueeze(1), emitted), 1)

    def commit(self, latents: Tensor, taps: Optional[Tensor], path: Tensor, count: Tensor, rows: Optional[Tensor] = None, rests: bool = False) -> None:
        """Latents and taps of the first count (B,) nodes of path go to both caches; lengths follow. rows (B,): see `commit` above.
        rests: the taps, of one node at most, go to the ring instead."""
        length = self.length if rows is None else self.length[rows]
        commit(self.target, latents, path, length, count, rows)
        if taps is not None and rests:
            # a row at rest writes where its next tap will come
            self.waiting_taps.view(-1, taps.shape[-1]).index_copy_(0, self.ring_starts[:len(count)] + self.pending, taps[:, 0])
            self.pending.add_(count)
        elif taps is not None:
            self.draft.graft(taps.gather(1, path.unsqueeze(-1).expand(-1, -1, taps.shape[-1])), length, count, rows)
        if rows is None:
            self.length.add_(count)
        else:
            self.length.index_add_(0, rows, count)

    @torch.no_grad()
    def catch_up(self, taps: Optional[int] = None) -> None:
        """Grafts the taps that wait, at most `taps` of a row (None: the ring): the drafter's context is as long as the target's again."""
        self.draft.graft(self.waiting_taps[:, :self.ring if taps is None else taps], self.length - self.pending, self.pending)
        self.pending.zero_()
