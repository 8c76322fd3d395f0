"""What a round costs here: measured on the real model, and kept in a file for the next time.

A file holds lists of numbers, and the key that says what they depend on: pair, weights, device, versions, our own source. Whoever
changes one of these measures anew.
"""
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Optional

import torch

from ranks import agree
from verify import Decoder


SLACK = 1.1  # a round may take so many times as long as one that does more: what suits a kernel is not monotone


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if Path("/proc/cpuinfo").exists():
        for line in open("/proc/cpuinfo"):
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def fingerprint(decoder: Decoder) -> str:
    """Of the weights, by the first few numbers of many tensors: what a drafter wins changes when one of the pair is trained."""
    some = [*decoder.target.layers[-1].parameters(), *decoder.draft.own_params().values()]
    return hashlib.sha256(repr(torch.cat([p.detach().reshape(-1)[:16].double() for p in some]).tolist()).encode()).hexdigest()[:16]


def cost_key(decoder: Decoder, turns: list, span: int) -> dict:
    """All that the seconds of rounds depend on, and what they win."""
    target, draft, here = decoder.target, decoder.draft, Path(__file__).parent
    source = hashlib.sha256(b"".join((here / f).read_bytes() for f in ("auto.py", "timing.py", "model.py", "draft.py", "ddtree.py", "verify.py")))
    device = target.norm.weight.device
    parts = [list(p.shape) for p in target.layers[-1].parameters()]  # tell how ranks share the model
    return {"target": repr(target.config), "parts": parts, "draft": repr(draft.config), "block": draft.block, "weights": target.weight_bytes(),
            "fingerprint": fingerprint(decoder),
            "dtype": str(target.norm.weight.dtype), "device": device_name(device), "threads": torch.get_num_threads() if device.type == "cpu" else 0,
            "torch": torch.__version__, "python": platform.python_version(), "source": source.hexdigest()[:16],
            "compiled": decoder.compiled is not None, "batch": len(decoder.root), "span": span, "rounds": [list(map(str, t)) for t in turns]}


def gains_key(key: dict) -> dict:
    """What a drafter wins depends neither on the batch nor on the context's bucket: a text begins with what those of other sizes taught."""
    return {**key, "batch": 0, "span": 0}


def keeps_costs(decoder: Decoder) -> bool:
    """Whether this process writes the file: of ranks that share the models, rank 0 does, for its file is the one that is read."""
    return decoder.target.vocab is None or decoder.target.vocab.first == 0


def cost_file(key: dict) -> Path:
    """Under the user's cache folder (XDG_CACHE_HOME, or ~/.cache): one small file per key."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "nanograft" / f"{'rounds' if key['batch'] else 'gains'}-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"


def read_costs(key: dict, like: dict) -> Optional[dict]:
    """What `write_costs` kept, lists of numbers, of the names and sizes of those in `like`; None where the file is absent, damaged or another key's."""
    try:
        kept = json.loads(cost_file(key).read_text())
        ours, alike = kept.pop("key") == key, kept.keys() == like.keys() and all(sizes(kept[name]) == sizes(like[name]) for name in like)
        numbers = [x for row in kept.values() for x in (sum(row, []) if isinstance(row[0], list) else row)]
        sound = all(isinstance(x, float) and 0 <= x < math.inf for x in numbers) and min(sum(kept.get("seconds", []), []) + kept.get("expected", []) + kept.get("weight", [])) > 0
        return kept if ours and alike and sound else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def sizes(x) -> Optional[list]:
    """What tells the shape of nested lists, whose rows may differ."""
    return [sizes(row) for row in x] if isinstance(x, list) else None


def write_costs(key: dict, kept: dict) -> None:
    """Whole or not at all; a cache folder that cannot be written is no error."""
    path, temporary = cost_file(key), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as f:
            temporary = f.name
            json.dump({"key": key, **kept}, f)
        os.replace(temporary, path)
    except OSError:
        pass
    finally:
        if temporary is not None:
            with suppress(OSError):  # it has its name, unless something failed
                os.unlink(temporary)


def rows_to_measure(decoder: Decoder) -> list:
    """All rows of the batch, and every power of two below: rows that have ended leave it. (Compiled ones stay.)"""
    batch = len(decoder.root)
    return [batch] + [1 << n for n in reversed(range((batch - 1).bit_length())) if not decoder.fixed]


def unmeasured(decoder: Decoder, kinds: int) -> dict:
    """Lists of the sizes of those that `measure_sizes` returns, of so many kinds of rounds that do not report."""
    n = len(rows_to_measure(decoder))
    return {"rows": [0.0] * n, "seconds": [[0.0] * kinds] * n, "catch_up": [0.0] * n, "report": [[0.0] * 2] * n, "unrest": [0.0] * n}


def measure_sizes(decoder: Decoder, turns: list, span: int, trees: int) -> dict:
    """`measure` with each of `rows_to_measure`. trees: how many turns, the last but two, are trees that do not report; the last two
    report, the narrowest and the widest; 0: none does. Returns lists, an entry for every number of rows: "rows", "seconds" of each turn,
    "catch_up", "report", seconds that a tree's report takes, of the narrowest and the widest, and "unrest" (see `measure`)."""
    batch, kept = len(decoder.root), {"rows": [], "seconds": [], "catch_up": [], "report": [], "unrest": []}
    quiet = len(turns) - 2 * (trees > 0)
    try:
        for rows in rows_to_measure(decoder):
            decoder.narrow(range(rows))
            hurry = {} if rows == batch else {"repeats": 6, "patience": 1.0}
            *seconds, catch_up, unrest = agree(measure(decoder, turns, span, warm=2 if decoder.compiled else 0, **hurry), decoder.target.vocab is not None)
            seconds, loud, report = plausible(turns[:quiet], seconds[:quiet]), plausible(turns[quiet:], seconds[quiet:]), [0.0, 0.0]
            if trees:  # (differences of two clocks: noise may not make them more than a part)
                narrow, wide = loud
                widest = min(max(wide - seconds[-1], 0.0), 0.05 * min(seconds[1:]))
                report = [min(max(narrow - seconds[-trees], widest), 0.3 * narrow), widest]
            for kind, value in (("rows", float(rows)), ("seconds", seconds), ("catch_up", catch_up), ("report", report), ("unrest", unrest)):
                kept[kind].append(value)
    finally:
        decoder.widen()
    return kept


def plausible(turns: list, seconds: list) -> list:
    """Seconds of the turns' rounds, none much longer than of a round that does more: what others on the machine did meanwhile would
    otherwise be kept, and a kind of round that seems to cost a hundred times too much would not even be probed."""
    return [min(s, SLACK * min(other for u, other in zip(turns, seconds) if u.budget >= t.budget)) for t, s in zip(turns, seconds)]


def better(one: dict, other: dict) -> dict:
    """Of two results of `measure_sizes` the lesser seconds, and all else of the calmer; its unrest is believed less: where others are
    always on the machine, the least of a few starts must do."""
    calmer = min(one, other, key=lambda kept: max(kept["unrest"]))
    return {**calmer, "seconds": [list(map(min, a, b)) for a, b in zip(one["seconds"], other["seconds"])], "unrest": [u ** 0.5 for u in calmer["unrest"]]}


def measure(decoder: Decoder, turns: list, span: int, warm: int = 0, repeats: int = 10, patience: float = 4.0) -> list:
    """Seconds of each Plan's round, taking turns, and of catching up: the least of up to `repeats`, for others on the machine only ever
    add; and last, how many times as long as the least the second took, at worst: others may have disturbed all. After
    `patience` seconds 5 are enough, after twice that 2. Each is timed as the second in a row: what another kind of round left in the
    processor's caches is not what a round finds at work. No row may be active: such rounds cost the same and commit nothing. Roots are
    random tokens while it lasts, for equal ones would all go to the same experts."""
    device, V = decoder.root.device, decoder.target.config.vocab_size
    decoder.root.copy_(torch.randint(V, decoder.root.shape, generator=torch.Generator().manual_seed(0)))
    def follow():
        decoder.waiting = decoder.ring  # all it can hold
        decoder.follow()
    calls = [follow] + [lambda turn=turn: decoder.run(turn, span) for turn in turns]
    times, end = [[] for _ in calls], now(device) + patience
    for n in range(warm + repeats):
        if agree(n >= warm + 5 and now(device) > end or n >= warm + 2 and now(device) > end + patience, decoder.target.vocab is not None):
            break
        for call, kept in zip(calls, times):
            call()
            began = now(device)
            call()
            kept += [now(device) - began] if n >= warm else []
    decoder.root.zero_()
    decoder.waiting = 0
    least = [[max(t, 1e-9) for t in sorted(kept)[:2]] for kept in times[1:] + times[:1]]
    return [t[0] for t in least] + [max(t[-1] / t[0] for t in least)]


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
