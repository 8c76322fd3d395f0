"""`--mode auto`: what each round should do, from what rounds cost here and what the drafter expects to win.

Candidates are plain decode, a DFlash chain, and DDTree at a ladder of widths. A round of a candidate takes so many seconds (measured
on the real model before the first prompt is read, kept in a file, refreshed by live rounds) and gives so many tokens: one, and
for every depth the probability that the drafter's nodes there hold the target's token. The nodes of one tree are ordered best first, so
the widest tree prices all narrower ones. A drafter is too sure of itself or not sure enough: a running ratio of accepted to
expected drafts per depth corrects it, at any temperature, since what is accepted is equality with the target's own token.

The candidate with the most expected tokens per second is found by a full scan (distinct experts are concave in the width, so a stop at
the first loss would err), whenever a round reported or a row ended, and every few rounds of plain decode, which are short. While
requests wait for a slot, each row counts as the mean one does; once none does, rounds get cheaper as rows end, and what counts is when each
of them will. Something else is picked only where it is clearly better, and now and then another candidate gets a round, so that what lost once
can come back: the more often, the less it is behind. Plain decode tells something of drafts, too: what the target is sure of is easy
to draft. Where it gets surer than it was when the drafter was heard, drafts are expected to win more.

The controller is plain Python and holds no tensor: tests and bench.py --simulate drive it with a clock of their own.

Shapes: D drafted depths, W widths of the ladder.
"""
import math
from functools import lru_cache
from statistics import NormalDist
from typing import Callable, Optional

import torch

from ranks import agree
from timing import better, cost_key, gains_key, keeps_costs, measure_sizes, read_costs, unmeasured, write_costs
from verify import ODDS, Decoder, Plan

WIDTHS = (1, 4, 8, 16, 32, 64)
COMPILED_WIDTHS = (8, 32)   # each plan costs a compilation
RING, RING_COMPILED = 128, 32  # rounds the drafter's taps may wait in memory: compiled, a graft is of all of them, whatever waits
MEMORY = 1 / 24             # of expected tokens: a round counts e times less 24 rounds later
RETURN, USUAL = 1 / 32, 1 / 32  # of expected tokens to the usual, per round of plain decode; of the usual to what is heard, per report
CALIBRATION = 1 / 48        # of the drafter's calibration, per expected draft
DRIFT, PAIRED = 0.25, 0.04  # how fast the machine's pace, and a candidate's own cost, follow live rounds
UNREST = 1.25               # the two least of a kind's times are this far apart on a busy machine: eager rounds are measured again at the next start
MARGIN, DOUBT = 0.02, 0.15  # by how much another candidate must be better, and more where it rests on few rounds
PROBES = 0.0075             # share of time that probes may lose; while plain decode runs, it is multiplied by
NEAR, NEARER, LEAST, MOST = 0.85, 6, 0.2, 2.0  # (best other rate / (NEAR * its own)) ** NEARER, LEAST to MOST: what is far behind is hardly better by now
SURE, CONFIDENCE, POWER = 6, 1 / 5, 3.0  # rounds of plain decode of which one reports; how fast the mean of confidences follows; how far odds may follow it
SETTLED, QUIET = 6.0, 5     # once means rest on so many rounds, one round of so many reports, where rounds are not compiled
REST, REST_AR = 32, 12      # rounds before a candidate is probed again, and between two scans of plain decode
END = 24                    # tokens of the longest row below which a probe would teach too late
KNOWN, GUESSED = 6.0, 3.0   # rounds that what another text taught counts for at most, and a first guess
SPREAD = 10.0               # how unlike rows are over one token: of the bundled pair, on other texts than those of bench/
LIKENESS = 32.0             # drafts of a row that weigh as much as that rule

quantile = lru_cache(4096)(NormalDist().inv_cdf)  # (rows of plain decode stay in the same places)


def candidates_for(depths: int, widths: tuple, chain: bool = True) -> list:
    """Plans: plain decode first, then the narrower before the wider."""
    return [Plan("ar", 0, ladder=widths)] + [Plan("dflash", depths, ladder=widths)] * chain + [Plan("ddtree", n, ladder=widths) for n in widths]


def pick(rates: dict) -> int:
    """The candidate with the most expected tokens per second. A full scan; the earlier among equals."""
    return max(rates, key=lambda i: (rates[i], -i))


def unsure(p: float) -> float:
    """A probability that is neither 0 nor 1: it has a logarithm, and another can be a power of it."""
    return min(max(p, 0.02), 0.98)


def between(known: dict, rows: int):
    """rows -> what is known of so many rows, a number or a list of them: on the line between its neighbours, at the ends what is there."""
    if rows not in known:
        below, above = max((n for n in known if n < rows), default=None), min((n for n in known if n > rows), default=None)
        if below is None or above is None:
            return known[above if below is None else below]
        part, low, high = (rows - below) / (above - below), known[below], known[above]
        return [a + part * (b - a) for a, b in zip(low, high)] if isinstance(low, list) else low + part * (high - low)
    return known[rows]


class Auto:
    """Picks a candidate per round: `choose()` before it, `learn(...)` and `time(...)` after it."""

    def __init__(self, candidates: list, seconds: dict, depths: int, habits: Optional[dict] = None, report: Optional[dict] = None):
        """candidates: Plans, plain decode first; seconds: rows of the batch -> seconds of one round of each, perhaps off by a common factor;
        depths: D; habits: what `habits()` of an earlier text gave, to begin with; report: rows -> seconds more of a probe, which reports."""
        self.candidates, self.depths, self.report = candidates, depths, report or {1: 0.0}
        self.seconds = {rows: between(seconds, rows) for rows in range(min(seconds), max(seconds) + 1)}
        self.widths, n = tuple(c.budget for c in candidates if c.mode == "ddtree"), len(candidates)
        self.current = 0
        self.resize(max(seconds))
        self.drift, self.own = 0.0, [0.0] * n                     # logs: the machine's pace, and each candidate's own error
        # mean expected drafts per depth: of each width, then of the chain; before anything is known, those of a middling drafter
        self.mass = [[0.7 ** d * (d <= n) * (n >= depths or 0.9) for d in range(1, depths + 1)] for n in (*self.widths, depths)]
        self.accepted, self.expected = [4.0] * depths, [4.0] * depths  # decaying sums of rows; the start says: calibrated
        self.weight = [GUESSED] * len(self.mass)                  # rounds behind each mean
        self.confidence, self.then = 0.5, [0.5] * len(self.mass)  # how sure the target is, and was behind each mean
        self.felt, self.guessed = 0.0, habits is None             # what was told of it, in square roots of rows; whether no text taught anything
        if habits:
            self.mass, self.accepted, self.expected = habits["mass"], habits["accepted"], habits["expected"]
            self.weight = [min(w, KNOWN) for w in habits["weight"]]
            self.confidence, self.then = unsure(habits["confidence"][0]), list(map(unsure, habits["then"]))
        self.usual, self.usually = list(self.mass), list(self.then)  # slower means: first what other texts taught, later this one's
        self.turn = 0                                             # rounds so far
        self.heard = [0] * len(self.mass)                         # the turn of the last report on each
        self.luck, self.prospects = {}, []                        # row -> drafts it accepted and a mean row did; see `look`
        self.current = pick({i: self.rate(i) for i in self.possible})
        self.last, self.run, self.ran = self.current, 0, [-REST] * n  # ran: the turn of each candidate's last round
        if habits:                                                # seconds that probes may lose: texts save up for one together
            self.allowance = habits["allowance"][0] * self.full(0)
        else:                                                     # a drafter never heard is asked at once, and again: texts begin hard
            self.allowance = 2 * min([self.cost(i) for i in self.possible if i], default=0.0)
        self.share, self.most = PROBES, 2 * self.full(self.current)  # of time that is saved up for probes, and the most savings
        self.rounds, self.probes, self.probing, self.timed = [0] * n, 0, False, False
        self.nap = 0                                              # rounds for which the last scan holds unless there is news

    # What a round gives and costs

    def odds(self, i: int) -> list:
        """The probability that a row accepts a draft at each depth in one round of candidate i; of plain decode, none. While plain decode
        runs and nothing is heard, it returns to the usual: the stretch that drafts lost in passes. And it follows the target's confidence:
        what was some power of it is the same power of it now."""
        if i == 0:
            return []
        k, back, power = self.row(i), 0.0, 1.0
        if self.current == 0:
            back = 1 - (1 - RETURN) ** (self.turn - self.heard[k])
            then = self.then[k] + back * (self.usually[k] - self.then[k])
            power = min(max(math.log(self.confidence) / math.log(then), 1 / POWER), POWER)
        return [min((m + back * (u - m)) * a / e, 1.0) ** power for m, u, a, e in zip(self.mass[k], self.usual[k], self.accepted, self.expected)]

    def gain(self, i: int) -> float:
        """Expected tokens of a row in one round."""
        return 1 + sum(self.odds(i))

    def ends(self, i: int) -> list:
        """After how many rounds of candidate i each row ends, the soonest first: what a row accepted so far tells it from the mean, and
        before that, its place among the rows."""
        odds = self.odds(i)
        drafts, rounds = sum(odds), []
        for left, own, mean, unlike in self.prospects:
            far = 1 + SPREAD * odds[0] * abs(unlike) if odds else 1.0
            like = sum([p ** (far if unlike > 0 else 1 / far) for p in odds])  # drafts of a row in this place
            rounds.append(max(left / (1 + min((drafts * own + LIKENESS * like) / (mean + LIKENESS), self.depths)), 1.0))
        return sorted(rounds)

    def look(self, left: dict) -> None:
        """left: row -> tokens to come. Of each row, the soonest to end first: those tokens, its luck, and how unlike the mean row its place
        makes it: as n ordered normal numbers are (Blom 1958), and the more the fewer tokens are left, since luck has no time to even out."""
        self.prospects, drafts = [], max(sum(self.odds(self.current)), 1.0)
        rows = [(n, *self.luck.get(row, (0.0, 0.0))) for row, n in left.items()]
        rows.sort(key=lambda row: row[0] / (1 + drafts * (row[1] + LIKENESS) / (row[2] + LIKENESS)))
        longest = max(left.values(), default=1)
        place, alike = 0.0, sum(left.values()) / longest  # rows that have ended almost do not count
        for n, own, mean in rows:
            place += n / longest
            self.prospects.append((n, own, mean, quantile(max(place - 0.375, 0.125) / (alike + 0.25)) / n ** 0.5))

    def row(self, i: int) -> int:
        """Where `mass` holds what candidate i, which drafts, should have accepted."""
        return self.widths.index(self.candidates[i].budget) if self.candidates[i].mode == "ddtree" else len(self.widths)

    def resize(self, rows: int) -> None:
        """Rounds are of so many rows from here on."""
        self.rows, seconds = rows, between(self.seconds, rows)
        # what costs too much to win though all its drafts were accepted is left alone (0.8: costs are not known that well)
        self.possible = [i for i, c in enumerate(self.candidates) if i == 0 or 1 + min(c.budget, self.depths) > 0.8 * seconds[i] / seconds[0]]
        widest = max(self.candidates[i].budget for i in self.possible)
        self.told = self.widths[:1 + sum(w < widest for w in self.widths[:-1])]  # widths to report on; their widest prices the chain, too
        self.current = self.current if self.current in self.possible else 0

    def cost(self, i: int) -> float:
        """Seconds, at the machine's present pace."""
        return between(self.seconds, self.rows)[i] * self.pace(i)

    def full(self, i: int) -> float:
        """Seconds of a round of all rows."""
        return self.seconds[max(self.seconds)][i] * self.pace(i)

    def pace(self, i: int) -> float:
        """Seconds that live rounds took, of one that was measured."""
        return math.exp(self.own[i] + self.drift)

    def rate(self, i: int) -> float:
        """Expected tokens per second: of a mean row while requests wait, else of all rows to their ends, were there no other candidate."""
        if not self.prospects:
            return self.gain(i) / self.cost(i)
        return sum(left for left, *_ in self.prospects) / self.rest(i)

    def rest(self, i: int) -> float:
        """Seconds until the last row ends, in rounds of candidate i."""
        seconds = before = 0.0
        for ended, rounds in enumerate(self.ends(i)):
            seconds, before = seconds + (rounds - before) * between(self.seconds, max(self.rows - ended, 1))[i], rounds
        return seconds * self.pace(i)

    # The decision

    def choose(self, left: Optional[dict] = None, rows: Optional[int] = None) -> int:
        """The number of the candidate that the next round should be. left: row -> the tokens it may still emit; none where
        other requests wait for a row to end. rows: of the round (None: as many as of the last)."""
        left, self.probing = left or {}, False
        if rows not in (None, self.rows):
            self.resize(rows)
            self.nap = 0
        longest = max(left.values(), default=math.inf)
        if self.nap and len(left) == len(self.prospects) and longest > self.depths:
            self.nap -= 1
            return self.current
        self.nap = (QUIET if self.current else REST_AR) - 1
        self.look(left)
        costs, rates = {i: self.cost(i) for i in self.possible}, {i: self.rate(i) for i in self.possible}
        best = pick(rates)
        # a guess from few rounds must be better still; plain decode gives its token for certain, so that a tie is its own
        margin = MARGIN * (1 if self.current else 2) + DOUBT / self.weight[self.row(best)] if best else 0.0
        if rates[best] > rates[self.current] * (1 + margin):
            self.current = best
        late = longest < min(END, self.turn)
        if self.current:
            self.share = PROBES
        elif not late:
            near = max((rates[i] for i in self.possible if i), default=0.0) / rates[0]
            self.share = PROBES * min(max((near / NEAR) ** NEARER, LEAST), MOST)
        if self.current == 0 and self.turn and self.turn - max(self.heard) < REST_AR:
            return self.current
        def loss(i):                  # seconds that a round of i, which reports, loses against the current candidate
            return max(costs[i] * (1 - rates[i] / rates[self.current]) + between(self.report, self.rows) * math.exp(self.drift), 0.01 * costs[self.current])
        # plain decode and a chain tell nothing of the widths: what is nearly as good is asked sooner then
        soon = REST // 4 if self.turn - max(self.heard[:len(self.told)]) >= REST // 4 else REST
        stale = [i for i in self.possible if i != self.current and self.turn - self.ran[i] >= soon
                 and (self.turn - self.ran[i] >= REST or loss(i) < 0.1 * costs[self.current])]
        least = min(stale, key=loss, default=None)
        # (enough for one probe, whatever it costs: drafts may not be lost for good)
        self.most = max(2 * self.full(self.current), loss(least) if least is not None and self.current == 0 else 0.0)
        if least is not None and not late and loss(least) <= self.allowance:
            self.allowance -= loss(least)
            self.probing, self.nap = True, 0
            return least
        return self.current

    def settled(self) -> bool:
        """Whether the round just chosen need not report: the means rest on enough rounds, the last of them is not long ago."""
        return not self.probing and min(*self.weight[:len(self.told)], self.weight[-1]) >= SETTLED and self.turn - self.heard[-1] + 1 < QUIET

    def learn(self, i: int, drafts: dict, accepted: Optional[list] = None, expected: Optional[list] = None, rounds: int = 1) -> None:
        """What a round of candidate i showed, or several that did not report. drafts: row -> how many it accepted. accepted (D): how many
        rows accepted a draft at each depth. expected, summed over rows: how many should have, of each width of the ladder and the chain
        (W + 1, D); of a dflash round, of the chain alone (1, D); None of plain decode, and of a round that did not report."""
        self.rounds[i] += rounds
        self.probes += self.probing
        self.run = self.run + rounds if i == self.last else rounds - 1
        self.last, self.turn = i, self.turn + rounds
        self.ran[i] = self.turn
        if not self.probing:
            self.allowance = max(self.allowance, min(self.allowance + rounds * self.share * self.cost(i), self.most))
        if i and drafts:
            mean = sum(drafts.values()) / len(drafts)
            known = {row: self.luck.get(row, (0.0, 0.0)) for row in drafts}
            self.luck = {row: (own + drafts[row], of_mean + mean) for row, (own, of_mean) in known.items()}
        if drafts and expected is not None:
            self.hear(i, len(drafts), accepted, expected)

    def feel(self, rows: int, confidence: float) -> None:
        """confidence: the mean probability of the target's best token, over so many rows, in one round: before `learn` of that round."""
        confidence = min(max(confidence, 0.0), 1.0)
        if not self.felt and self.guessed:
            self.then = self.usually = [unsure(confidence)] * len(self.mass)
        self.felt = min(self.felt + rows ** 0.5, rows ** 0.5 / CONFIDENCE)
        self.confidence = unsure(self.confidence + (confidence - self.confidence) * rows ** 0.5 / self.felt)

    def time(self, i: int, seconds: Optional[float], run: int) -> None:
        """Seconds of a round of candidate i, None where they tell nothing (a first call); run: rounds of it just before. The machine's
        pace moves at once and is common to all. A candidate's own cost is learnt where it can be told from the pace: in the first
        rounds after another candidate."""
        if seconds is None:
            return
        error = math.log(max(seconds, 1e-9) / self.cost(i))
        if not self.timed:
            self.timed, self.drift = True, self.drift + error
            return
        error = min(max(error, -0.4), 0.4)  # one disturbed round is not a trend
        self.drift += DRIFT * error
        self.own[i] += PAIRED / (1 + run) * error

    def hear(self, i: int, rows: int, accepted: list, expected: list) -> None:
        self.nap, heard = 0, [*range(len(expected) - 1), len(self.mass) - 1]  # (a chain is drafted without a tree)
        for k, now in zip(heard, expected):  # many rows tell more than one, but share the machine's and the hour's texts
            self.weight[k] = self.weight[k] * (1 - MEMORY) ** (self.turn - self.heard[k]) + rows ** 0.5
            self.heard[k] = self.turn
            part = rows ** 0.5 / self.weight[k]
            self.mass[k] = [m + (x / rows - m) * part for m, x in zip(self.mass[k], now)]  # (never below 0: part is at most 1)
            self.then[k] += (self.confidence - self.then[k]) * part
            self.usual[k] = [u + (x / rows - u) * USUAL for u, x in zip(self.usual[k], now)]
            self.usually[k] += (self.confidence - self.usually[k]) * USUAL
        told = expected[heard.index(self.row(i))]
        for d in [d for d in range(self.depths) if told[d] > 0]:  # forgets as much as it hears: a depth that rounds do not reach keeps its ratio
            keep = (1 - CALIBRATION) ** told[d]
            self.accepted[d] = self.accepted[d] * keep + accepted[d]
            self.expected[d] = self.expected[d] * keep + told[d]

    def habits(self) -> dict:
        """What another text with this pair may begin with, in any batch."""
        return {"mass": self.mass, "accepted": self.accepted, "expected": self.expected, "weight": self.weight, "then": self.then,
                "confidence": [self.confidence], "allowance": [self.allowance / self.full(0)]}

    # What the user hears

    def why(self) -> str:
        """The present choice against plain decode, or plain decode against the best of the rest."""
        now = self.current
        other = max((i for i in self.possible if (i == 0) != (now == 0)), key=self.rate, default=now)
        def price(i):
            ends = f" and ends {len(self.prospects)} rows in {self.rest(i):.2g} s" if len(self.prospects) > 1 else ""
            return f"{self.candidates[i].name} gives {self.gain(i):.2f} tokens in {self.cost(i) * 1e3:.3g} ms{ends}"
        return f"{price(now)}, {price(other)}"

    def summary(self) -> str:
        ran, total = sorted((i for i in range(len(self.candidates)) if self.rounds[i]), key=lambda i: -self.rounds[i]), sum(self.rounds)
        shares = ", ".join(f"{self.candidates[i].name} {self.rounds[i] / total:.0%}" for i in ran)
        return f"{shares} of rounds: {self.why()}" if ran else f"no rounds: {self.why()}"


# The controller at work

class Pilot:
    """Called by `serve` with the State before every round, and after the last: hears what the last one showed, and returns the next one's
    Plan. Where ranks share the models each has one, and what rank 0's says is done."""

    def __init__(self, decoder: Decoder, candidates: list, key: dict, kept: dict, habits: Optional[dict]):
        """key: of the files that keep what is learnt. kept: what `start` measured, or read. habits: of earlier texts."""
        self.decoder, self.key, self.kept = decoder, key, kept
        sizes = [int(n) for n in kept["rows"]]
        self.catch_up, self.reports = dict(zip(sizes, kept["catch_up"])), dict(zip(sizes, kept["report"]))
        self.auto = Auto(candidates, dict(zip(sizes, kept["seconds"])), decoder.draft.depths, habits, {n: narrow for n, (narrow, _) in self.reports.items()})
        self.numbers = {(c.mode, c.budget): i for i, c in enumerate(candidates)}
        self.calls, self.span, self.followed, self.rows = {}, 0, 0.0, {}
        self.plain = []  # seconds of rounds of plain decode, short as they are: learnt from together, to spare the host's time
        self.ar = [candidates[0]._replace(ladder=())] * (SURE - 1) + [candidates[0]]  # the last tells how sure the target is
        self.idle = False  # whether the last round was one, and its seconds need no correction
        self.slots, self.more = 0, True

    def __call__(self, state) -> Plan:
        slots, waiting, ring = len(self.decoder.root), self.decoder.waiting, self.decoder.ring
        if (self.idle and state.plan is not None and state.plan.mode == "ar" and self.auto.nap and waiting < ring
                and slots == self.slots and len(state.rows) == len(self.rows) and state.more == self.more):
            self.auto.nap -= 1
            if state.plan.ladder:
                self.feel(state)
            self.plain.append(state.seconds)
            return self.ar[len(self.plain) % SURE]
        if state.plan is not None:
            self.hear(state)
        if not state.rows:  # that was the last round
            return self.auto.candidates[0]
        if slots != self.slots:
            self.learn_plain()  # they were of more rows
        self.slots, self.more = slots, state.more
        plan = self.auto.candidates[self.auto.choose({} if state.more else dict(state.rows.values()), slots)]
        self.followed = 0.0 if plan.mode == "ar" and waiting < ring else 1.0 if self.decoder.compiled and waiting else waiting / ring
        self.idle = plan.mode == "ar" and not self.followed and not self.decoder.compiled
        self.span, self.rows = state.span, state.rows
        if self.decoder.compiled is not None:
            return plan
        if plan.mode == "ar":
            return self.ar[len(self.plain) % SURE]
        return plan._replace(ladder=() if self.auto.settled() else self.auto.told)  # a report costs as much as a few nodes

    def hear(self, state) -> None:
        plan, D, seconds = state.plan, self.auto.depths, state.seconds
        i = 0 if plan.mode == "ar" else self.numbers[plan.mode, plan.budget]
        told = state.packed[self.slots + 1:]  # nothing after a quiet round, and after plain decode
        if plan.ladder:
            self.feel(state)
        if self.followed or told:
            seconds = max(seconds - between(self.catch_up, self.slots) * self.followed - self.report(plan) * bool(told), 0.1 * seconds)
        if self.decoder.compiled:  # the first two calls of a graph compile and record it
            self.calls[plan, self.span] = calls = self.calls.get((plan, self.span), 0) + 1
            seconds = seconds if calls > 2 else None
        if i == 0:
            self.plain.append(seconds)
        if i or not self.auto.nap:
            self.learn_plain()
        if i:
            drafts = {number: state.packed[slot][0] - 1 for slot, (number, _) in self.rows.items()}
            self.auto.learn(i, drafts, told[-1][:D] if told else None, [[m / ODDS for m in row[:D]] for row in told[:-1]] or None)
            self.auto.time(i, seconds, self.auto.run)

    def feel(self, state) -> None:
        self.auto.feel(len(self.rows), state.packed[self.slots][0] / ODDS / len(self.rows))

    def learn_plain(self) -> None:
        if self.plain:
            self.auto.learn(0, {}, rounds=len(self.plain))
            seconds = sorted(s for s in self.plain if s is not None)
            self.auto.time(0, seconds[len(seconds) // 2] if seconds else None, self.auto.run)
            self.plain = []

    def report(self, plan: Plan) -> float:
        """Seconds that the report of a round takes: little of a chain's, and of a tree's as much more as a wider one must be built."""
        narrowest, widest = between(self.reports, self.slots)
        wider = (plan.ladder[-1] - plan.budget) / self.auto.widths[-1] if plan.mode == "ddtree" and plan.ladder else 0.0
        return widest + (narrowest - widest) * wider

    def keep(self) -> None:
        """Costs as live rounds refreshed them, and what the drafter gives, for the next text."""
        self.learn_plain()
        if sum(self.auto.rounds) > 1 and keeps_costs(self.decoder):
            if not in_doubt(self.decoder, self.kept):  # else the next start measures, and compares with what was measured
                write_costs(self.key, {**self.kept, "seconds": [[s * math.exp(own) for s, own in zip(row, self.auto.own)] for row in self.kept["seconds"]]})
            write_costs(gains_key(self.key), self.auto.habits())


def ladder(budget: Optional[int], compiled: bool) -> tuple:
    """The widths to choose from: budget caps them, and is one."""
    widths = COMPILED_WIDTHS if compiled else WIDTHS
    return widths if budget is None else tuple(w for w in widths if w < budget) + (budget,)


def in_doubt(decoder: Decoder, kept: dict) -> bool:
    """Whether the next start measures again what `measure_sizes` gave. Compiled rounds are measured once: that takes minutes."""
    return decoder.compiled is None and max(kept["unrest"]) > UNREST


def ring_for(mode: str, compiled: bool) -> int:
    """Rounds that the drafter's taps may wait: only mode auto lets it rest."""
    return 0 if mode != "auto" else RING_COMPILED if compiled else RING


def start(decoder: Decoder, plan: Plan, budget: Optional[int], span: int, progress: Callable = lambda text: None) -> Pilot:
    """A Pilot for a new Decoder (with a ring, no row in use). plan: whether rounds sample and filter. span: the bucket of cache slots
    of a typical round. What rounds cost is read from the file, or measured here and kept; measured again where the machine was busy.
    Where the widest tree does not fit the device's memory, the ladder ends below it. Compiled rounds have a shorter ladder, and where costs are in the file nothing is compiled before it is chosen."""
    widths, compiled = ladder(budget, decoder.compiled is not None), decoder.compiled is not None
    while True:
        candidates = candidates_for(decoder.draft.depths, widths, chain=not compiled and decoder.draft.depths <= widths[-1])
        turns = [c._replace(sampled=plan.sampled, filtered=plan.filtered) for c in candidates]
        if not compiled:  # (a graph reports for nothing, and quiet ones would be as many again)
            turns = [t._replace(ladder=()) for t in turns] + [turns[-len(widths)], turns[-1]]
        for turn in turns + candidates:
            decoder.prepare(turn)
        key = cost_key(decoder, turns, span)
        kept = agree(read_costs(key, unmeasured(decoder, len(candidates))), decoder.target.vocab is not None)
        if kept is None or in_doubt(decoder, kept):
            progress(f"measuring {len(turns)} kinds of rounds, " + ("once" if kept is None else "again: the machine was busy") + (": each is compiled" if compiled else ""))
            try:
                measured = measure_sizes(decoder, turns, min(span, decoder.slots), 0 if compiled else len(widths))
                kept = better(measured, kept) if kept else measured
            except torch.OutOfMemoryError:
                if len(widths) == 1 or decoder.target.vocab is not None:  # other ranks wait in this round's collectives
                    raise
                if kept is None:
                    widths = widths[:-1]
                    continue
            if keeps_costs(decoder):
                write_costs(key, kept)
        like = Auto(candidates, {1: kept["seconds"][0]}, decoder.draft.depths).habits()
        return Pilot(decoder, candidates, key, kept, agree(read_costs(gains_key(key), like), decoder.target.vocab is not None))
