"""Requests through a batch of slots: whoever finishes leaves its slot to the next, and the others go on.

`serve` is the one loop: it fills slots, reads prompts in chunks between rounds, decides the width of a round through one hook,
runs the round, and hands out what each row emitted. `generate.py` gives it as many slots as prompts.

Shapes: B slots, R rows whose prompts are read together, T tokens of a chunk.
"""
import itertools
import math
import time
from dataclasses import dataclass, field
from operator import length_hint
from typing import Callable, Iterable, Iterator, NamedTuple, Optional

import torch

from auto import ring_for, start
from draft import Drafter
from hub import UserError
from model import Transformer
from plan import chunk_room
from ranks import agree
from verify import Decoder, Plan

MODES = ("auto", "ar", "dflash", "ddtree")
SPINE = False   # the default tree: see the README's table of the two shapes
BATCH = 16      # slots for a file of prompts
BUDGET = 32     # drafted nodes of a ddtree round
CHUNK = 256     # prompt tokens of a row per prefill forward, and of all rows together while most slots decode


@dataclass
class Request:
    """A text to write. Setting `cancelled` at any time ends it before the next round."""
    tokens: list                # the prompt's ids
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    cancelled: bool = False

    @property
    def sampled(self) -> bool:
        return self.temperature > 0

    @property
    def filtered(self) -> bool:
        return self.sampled and (self.top_k > 0 or self.top_p < 1)


@dataclass
class Result:
    """tokens: generated ids, a stop id not included. accepted: accepted drafts among the tokens each round emitted. modes: what each
    round was: "ar", "dflash", "ddtree 8"."""
    tokens: list = field(default_factory=list)
    accepted: list = field(default_factory=list)
    modes: list = field(default_factory=list)
    finish: str = ""            # "stop", "length" or "cancelled"
    first_token: float = 0.0    # seconds from the start to this text's first token
    seconds: float = 0.0        # to its end


class Event(NamedTuple):
    """What one round (or the prefill) gave one request."""
    number: int                 # which request, counted from 0
    tokens: list
    drafts: int                 # how many of the tokens are accepted drafts: the first ones
    finish: str                 # "" while it goes on
    prefill: bool
    mode: str = ""              # what the round was: Plan.name


@dataclass
class Row:
    """The request in a slot."""
    number: int
    request: Request
    limit: int                  # tokens it may hold, prompt included
    total: int                  # tokens it holds: the prompt and what was emitted
    read: int = 0               # prompt tokens committed

    @property
    def left(self) -> int:
        return len(self.request.tokens) - self.read


class State(NamedTuple):
    """What the plan of the next round may be chosen from."""
    rows: dict                  # slot -> (request number, tokens it may still emit) of those that decode
    more: bool                  # whether requests may wait for a slot
    span: int                   # cache slots the round will attend
    plan: Optional[Plan]        # of the last round; None before the first
    packed: list                # what the last round gave, as `Decoder.step` read it back: its slots, from which rows may have moved since
    seconds: float              # what it took, the copy to the host included


@dataclass
class Usage:
    """What `serve` has done so far."""
    slots: int = 0
    rounds: int = 0
    rows: int = 0               # that decoded, over all rounds
    tokens: int = 0             # emitted
    first: int = 0              # those of them that came with a prefill

    @property
    def busy(self) -> float:
        """The share of slots that a round found decoding."""
        return self.rows / (self.rounds * self.slots) if self.rounds else 0.0

    @property
    def per_round(self) -> float:
        """Tokens a row emits in a round."""
        return (self.tokens - self.first) / self.rows if self.rows else 0.0


def record(result: Result, e: Event, seconds: float) -> None:
    result.tokens += e.tokens
    result.seconds = seconds
    result.finish = e.finish
    if e.prefill:
        result.first_token = seconds
    elif e.finish != "cancelled":
        result.accepted.append(e.drafts)
        result.modes.append(e.mode)


# The loop

def open_batch(target: Transformer, draft: Optional[Drafter], requests: list, batch: int, mode: str, budget: Optional[int], spine: bool,
               compile: bool, progress: Callable = lambda text: None) -> tuple:
    """A Decoder of `batch` slots that hold the largest of the requests, the Plan of its rounds, and of mode auto the Pilot that
    chooses other ones (else None). progress(text) hears when rounds have to be measured first."""
    mode = "ar" if draft is None else mode
    context = target.config.max_positions
    most = slots_for(requests, context, False)
    decoder = Decoder(target, None if mode == "ar" else draft, batch, slots_for(requests, context, compile), ring_for(mode, compile))
    plan = Plan("ar" if mode == "auto" else mode, budget or BUDGET, spine, any(r.sampled for r in requests), any(r.filtered for r in requests))
    decoder.prepare(plan)
    if compile:
        decoder.compile(progress)
    if mode == "auto":
        typical = min(max(len(r.tokens) + r.max_new_tokens // 2 for r in requests), context)
        return decoder, plan, start(decoder, plan, budget, bucket(typical, decoder.least_span), progress)
    if compile:
        spans = {span_for(n, decoder.slots, decoder.least_span) for n in range(min(len(r.tokens) for r in requests) + 1, most + 1)}
        decoder.warm(plan, sorted(spans))
    return decoder, plan, None


def serve(decoder: Decoder, requests: Iterable[Request], plan: Plan, choose: Optional[Callable[[State], Plan]] = None, stop_ids: tuple = (),
          until: Optional[Callable] = None, progress: Callable = lambda text: None, usage: Optional[Usage] = None) -> Iterator[Event]:
    """Yields an Event per request and round. A request is taken from `requests` when a slot is free for it, not earlier; once there is none,
    rows that end leave the batch, and rounds are of those that are left (compiled ones stay as they are).

    plan: of every round, or choose(state) names the mode, budget and shape of each; it is called once more at the end, with no rows, to
    hear of the last. (Whether rounds sample and filter follows from the plan and the requests so far: asking each round for less would
    cost a graph.) Where ranks share the models, rank 0 chooses and cancels for all; requests and until must be the same on all. stop_ids end a text and are not emitted.
    until(number, tokens) may end one too: it returns how many of these new tokens to keep, or None to go on. progress(text) hears
    of prompts read while nothing decodes. UserError on a prompt that the slots cannot hold."""
    decoder.widen()
    B, device, stops, usage = decoder.root.shape[0], decoder.root.device, set(stop_ids), Usage() if usage is None else usage
    queue, numbers, rows, resting, state = iter(requests), itertools.count(), [None] * B, set(), State({}, True, 0, None, [], 0.0)
    usage.slots, more = B, True

    def take() -> tuple:
        """The next request and its number; None where there is none."""
        nonlocal more
        request = next(queue, None)
        more = request is not None and length_hint(queue, 1) > 0  # (lists tell how many are left)
        return next(numbers), request

    def leave(slot: int, finish: str) -> None:
        if finish != "length":  # stops and cancellations are the host's business; a row at its limit rests by itself
            resting.add(slot)
        rows[slot] = None

    def emit(slot: int, tokens: list, prefill: bool = False) -> Event:
        row, drafts, finish = rows[slot], len(tokens) - 1, ""
        end = next((i for i, t in enumerate(tokens) if t in stops), None)
        if end is not None:
            tokens, finish = tokens[:end], "stop"
        keep = until(row.number, tokens) if until is not None and tokens else None
        if keep is not None:
            tokens, finish = tokens[:keep], "stop"
        row.total += len(tokens)
        if not finish and row.total >= row.limit:
            finish = "length"
        if finish:
            leave(slot, finish)
        usage.tokens, usage.first = usage.tokens + len(tokens), usage.first + (len(tokens) if prefill else 0)
        return Event(row.number, tokens, min(drafts, len(tokens)), finish, prefill, "" if prefill else state.plan.name)

    shared = decoder.target.vocab is not None  # ranks that share no model decode each their own
    while True:
        for slot in agree([s for s, row in enumerate(rows) if row is not None and row.request.cancelled], shared):
            number = rows[slot].number
            leave(slot, "cancelled")
            yield Event(number, [], 0, "cancelled", False)
        fresh = []
        for slot in [s for s in range(B) if rows[s] is None]:
            number, request = take()
            while request is not None and agree(request.cancelled, shared):
                yield Event(number, [], 0, "cancelled", False)
                number, request = take()
            if request is None:
                break
            check_prompt(request.tokens, f"prompt {number}", decoder.slots, decoder.target.config.vocab_size)
            rows[slot] = Row(number, request, min(len(request.tokens) + request.max_new_tokens, decoder.slots), len(request.tokens))
            fresh.append((slot, request))
        if not any(rows):
            if choose is not None and state.plan is not None:
                choose(state._replace(rows={}, more=False))
            return
        if fresh:
            decoder.enter([s for s, _ in fresh], [(rows[s].limit, r.seed, r.temperature, r.top_k, r.top_p) for s, r in fresh])
            plan = plan._replace(sampled=plan.sampled or any(r.sampled for _, r in fresh), filtered=plan.filtered or any(r.filtered for _, r in fresh))
            resting -= {s for s, _ in fresh}
        if None in rows and not decoder.fixed:  # nobody comes any more: rounds of the rows that are left
            rows = [rows[s] for s in decoder.narrow([s for s in range(B) if rows[s] is not None])]
            B = len(rows)
            resting.clear()
        reading = sorted((s for s in range(B) if rows[s] is not None and rows[s].left), key=lambda s: rows[s].number)
        decoding = B - rows.count(None) - len(reading)
        if reading:
            # where most slots wait for their prompts, those come first; else a chunk at a time, and the others go on
            for slot, root in read_chunk(decoder, rows, reading, B * CHUNK if 2 * decoding < B else CHUNK, plan):
                yield emit(slot, [root], prefill=True)
            if not decoding:
                progress(f"prompts read: {sum(r.read for r in rows if r)} of {sum(len(r.request.tokens) for r in rows if r)} tokens")
        decoding = [s for s in range(B) if rows[s] is not None and not rows[s].left]
        if not decoding:
            continue
        if resting:
            decoder.active[torch.tensor(sorted(resting), device=device)] = False
            resting.clear()
        span = span_for(max(rows[s].total for s in decoding), decoder.slots, decoder.least_span)
        turn = plan
        if choose is not None:
            here = {s: (rows[s].number, rows[s].limit - rows[s].total) for s in decoding}
            turn = agree(choose(state._replace(rows=here, more=more, span=span)), shared)._replace(sampled=plan.sampled, filtered=plan.filtered)
        if decoder.draft is not None and min(rows[s].total for s in decoding) >= decoder.draft.config.max_positions:
            turn = turn._replace(mode="ar", ladder=())  # all of them are past what the drafter can see
        began = time.perf_counter()
        packed = decoder.step(turn, span)
        state = state._replace(plan=turn, packed=packed, seconds=time.perf_counter() - began)
        usage.rounds, usage.rows = usage.rounds + 1, usage.rows + len(decoding)
        for slot in decoding:
            count, *tokens = packed[slot]
            if count < 1:
                raise RuntimeError(f"row {slot} decodes here and rests on the device: this round would repeat for ever")
            yield emit(slot, tokens[:count])


def read_chunk(decoder: Decoder, rows: list, reading: list, room: int, plan: Plan) -> list:
    """Feeds the next chunk of the prompts in the slots `reading`, in this order, as many as fit together into `room` tokens, but
    at least one. Returns (slot, first token) of the rows whose prompt is read."""
    B, w_uk = len(rows), decoder.target.layers[0].self_attn.w_uk                                      # (heads of this rank, ·, ·)
    room = min(room, chunk_room(w_uk.shape[0], span_for(max(rows[s].read for s in reading), decoder.slots), w_uk.element_size()))
    few = decoder.compiled is not None  # few shapes: sizes in powers of four, filled with other rows that read nothing
    most = min(CHUNK, max(t for t in (16, 64, 256) if t <= room) if few else room)
    def shape(R: int, T: int) -> tuple:
        return (min(rung(R, 1), B), min(rung(T, 16), most)) if few else (R, T)
    lengths = [min(rows[s].left, most) for s in reading]
    R, T = 1, lengths[0]
    while R < len(reading) and math.prod(shape(R + 1, max(T, lengths[R]))) <= room:
        R, T = R + 1, max(T, lengths[R])
    slots, counts = reading[:R], lengths[:R]
    if few:
        size, T = shape(R, T)
        slots = slots + [s for s in range(B) if s not in slots][:size - R]
        counts = counts + [0] * (len(slots) - R)
    device, start = decoder.root.device, [rows[s].read if n else 0 for s, n in zip(slots, counts)]
    tokens = [rows[s].request.tokens[at:at + n] + [0] * (T - n) if n else [0] * T for s, at, n in zip(slots, start, counts)]
    last = [n > 0 and rows[s].left == n for s, n in zip(slots, counts)]
    roots = decoder.feed(torch.tensor(tokens, device=device), torch.tensor(counts, device=device), torch.tensor(last, device=device),
                         torch.tensor(slots, device=device), Plan("ar", 0, False, plan.sampled, plan.filtered), span_for(max(start), decoder.slots, decoder.least_span))
    for s, n in zip(slots, counts):
        if n:
            rows[s].read += n
    return [(s, root) for s, root, ends in zip(slots, roots, last) if ends]


def prefill(decoder: Decoder, prompts: list, plan: Plan) -> None:
    """Reads a prompt into each row, whole, and nothing else: for those who then run rounds by hand."""
    rows = [Row(i, Request(p), decoder.slots, len(p)) for i, p in enumerate(prompts)]
    while any(r.left for r in rows):
        read_chunk(decoder, rows, [i for i, r in enumerate(rows) if r.left], len(rows) * CHUNK, plan)


def slots_for(requests: list, context: int, compile: bool) -> int:
    """Cache slots of a row, to hold the largest of the requests. Compiled, powers of two: with whole buckets a second call finds the
    graphs of the first."""
    most = min(max(len(r.tokens) + r.max_new_tokens for r in requests), context)
    return min(bucket(most, 256), context) if compile else most


def bucket(n: int, least: int) -> int:
    """The power of two, at least `least`, that holds n."""
    return max(least, 1 << (n - 1).bit_length())


def rung(n: int, least: int) -> int:
    """The smallest of least, 4 * least, 16 * least, … that holds n."""
    return least if n <= least else rung(n, 4 * least)


def span_for(length: int, slots: int, least: int = 64) -> int:
    """How many cache slots to attend for `length` committed tokens: none, or a power of two, at most the whole cache."""
    return min(bucket(length, least), slots) if length else 0


# What cannot be served

def need(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def check_settings(mode: str, budget: Optional[int], max_new_tokens: int, temperature: float, top_p: float, top_k: int, seed, rows: int) -> None:
    """UserError on the first setting out of range."""
    need(mode in MODES, f"unknown mode {mode!r}; use one of {', '.join(MODES)}")
    need(budget is None or 1 <= budget <= 4096, f"budget must be between 1 and 4096, got {budget}")
    need(max_new_tokens >= 1, f"max-new-tokens must be at least 1, got {max_new_tokens}")
    need(temperature == 0 or 1e-4 <= temperature < math.inf, f"temperature must be 0 (greedy) or at least 0.0001, got {temperature}")
    need(0 < top_p <= 1, f"top-p must be above 0 and at most 1, got {top_p}")
    need(0 <= top_k < 2 ** 63, f"top-k must be 0 (off) or positive and fit 64 bits, got {top_k}")
    seeds = [seed] if isinstance(seed, int) else list(seed)
    need(isinstance(seed, int) or len(seeds) == rows, f"{len(seeds)} seeds for {rows} prompts; pass one, or one per prompt")
    need(all(-2 ** 63 <= s < 2 ** 63 for s in seeds), f"a seed must fit 64 bits, got {max(seeds, key=abs)}")


def check_prompts(prompts: list, context: int, vocab: int) -> None:
    """UserError on the first prompt that cannot be served."""
    need(len(prompts) > 0, "there is no prompt; pass --prompt")
    for i, p in enumerate(prompts):
        check_prompt(p, f"prompt {i}", context, vocab)


def check_prompt(tokens: list, what: str, context: int, vocab: int) -> None:
    need(len(tokens) > 0, f"{what} is empty; give it at least one token")
    need(len(tokens) < context, f"{what} has {len(tokens)} tokens and the context holds {context}; shorten it to at most {context - 1}")
    bad = next((t for t in tokens if not 0 <= t < vocab), None)
    need(bad is None, f"{what} holds the token id {bad}; the vocabulary has ids 0 to {vocab - 1}")


def check_pair_for(mode: str, budget: Optional[int], spine: bool, draft: Optional[Drafter]) -> None:
    """UserError where a mode asks of the drafter what it cannot give."""
    need(mode in ("ar", "auto") or draft is not None, f"mode {mode} needs a drafter and there is none; pass --draft, or use --mode ar")
    need(not (mode == "auto" and spine), "mode auto orders its trees best first; use --mode ddtree with a spine, or leave it out")
    need(not (mode == "ddtree" and spine) or (budget or BUDGET) >= draft.depths,
         f"with a spine the budget must be at least the {draft and draft.depths} drafted depths, got {budget or BUDGET}")
