"""One rank of the launches that test_parallel.py starts: runs all cases of a file, and writes what it saw.

    RANK=… WORLD_SIZE=… python tests/ranks_worker.py FOLDER     reads FOLDER/cases.json, writes FOLDER/rank<N>.json
"""
import datetime
import json
import os
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import auto  # noqa: E402
import serve  # noqa: E402
import timing  # noqa: E402
import tiny  # noqa: E402
from checkpoint import open_draft, open_target  # noqa: E402
from draft import Drafter  # noqa: E402
from hub import Files  # noqa: E402
from parallel import dividers  # noqa: E402
from ranks import agree  # noqa: E402
from verify import Plan  # noqa: E402

torch.set_num_threads(1)
pairs, device, rank = {}, os.environ.get("DEVICE", "cpu"), int(os.environ["RANK"])


class Told(tiny.Informed):
    """Right at most positions, whichever rank holds the token. (No relation to what the logits are: ranks see different ones.)"""

    def proposal(self, root, length, span=None):
        logits, conditional = super(tiny.Informed, self).proposal(root, length, span)
        first, vocab = (self.vocab.first, self.vocab.total) if self.vocab else (0, logits.shape[-1])
        def put(row, d, token, value):
            if 0 <= token - first < logits.shape[-1]:
                logits[row, d, token - first] = value
        for row, key in enumerate(zip(length.tolist(), root.tolist())):
            for d, token in enumerate(self.known.get(key, ())):
                p = key[0] + d + 1
                if p % 11:
                    put(row, d, token, 60.0)
                    if p % 4 == 0:
                        put(row, d, (token + 1) % vocab, 61.0)
        return logits, conditional


def pair(case: dict) -> tuple:
    """A target and its drafter, of this rank's part."""
    key = case["target"], case.get("draft"), case["experts"], case["dtype"]
    if key not in pairs:
        config, read = open_target(Path(case["target"]), getattr(torch, case["dtype"]))
        draft, read_draft = open_draft(Path(case["draft"]), config, getattr(torch, case["dtype"])) if case.get("draft") else (None, None)
        divide = dividers(case["experts"], device)
        target = read(device, divide[0])
        pairs[key] = target, draft and read_draft(target, device, divide[1])
    target, draft = pairs[key]
    if draft is not None:
        draft.__class__, draft.vocab = Told if case.get("told") else Drafter, target.vocab
        if case.get("told"):
            draft.tell(case["told"])
    return target, draft


# What each rank would decide by itself: something else on every rank

def guessed(decoder, turns: list, *args, **settings) -> list:
    """`timing.measure` by a clock that goes as it likes, and takes no time."""
    clock = random.Random(rank)
    return [clock.uniform(0.005, 0.006) for _ in turns] + [clock.uniform(0.0001, 0.001), 1.0]


def scattered(self, left: dict, rows: int) -> int:
    """`Auto.choose` that meets all candidates in turn, and other ones on other ranks."""
    if rows != self.rows:
        self.resize(rows)
    self.probing = sum(self.rounds) % 3 == rank % 3
    return self.possible[(5 * sum(self.rounds) + 1 + rank) % len(self.possible)]


def decoded(case: dict) -> tuple:
    """What one process would do for the requests of a case, on this rank; the Decoder, and the Pilot of mode auto."""
    target, draft = pair(case)
    requests, choose = [serve.Request(**r) for r in case["requests"]], patch.object(auto.Auto, "choose", scattered)
    decoder, plan, pilot = serve.open_batch(target, draft, requests, len(requests), case["mode"], case["budget"], False, bool(case.get("compile")))
    results = [serve.Result() for _ in requests]
    with choose if case.get("scattered") else nullcontext():
        for e in serve.serve(decoder, requests, plan, pilot):
            serve.record(results[e.number], e, 0.0)
    return {"tokens": [r.tokens for r in results], "accepted": [r.accepted for r in results], "modes": [r.modes for r in results]}, decoder, pilot


def text(case: dict) -> dict:
    counters = torch._dynamo.utils.counters
    counters.clear()
    with patch.object(timing, "measure", guessed), patch.object(auto, "read_costs", lambda key, like: None), patch.object(auto, "write_costs", lambda key, kept: None):
        seen, decoder, _ = decoded(case)
    shapes = len(decoder.met) if case.get("compile") else 0
    return {**seen, "shapes": shapes, "graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def kept(case: dict) -> dict:
    """Rounds are measured where rank 0 has no file of what they cost, whatever others have; and for as long as rank 0's clock says."""
    measured, ordinary, habits, out = [], timing.measure, None, []
    def measure(*args, **settings):
        measured.append(0)
        return ordinary(*args, **{**settings, "patience": 0.0 if rank == 0 else 1e9})
    for whose in (None, 0, 1):
        with patch.object(timing, "measure", measure), patch.object(auto, "UNREST", 1e9), patch.object(auto, "read_costs", lambda key, like: habits[key["span"] == 0] if rank == whose else None):
            seen, _, pilot = decoded(case)
        pilot.keep()
        habits = pilot.kept, pilot.auto.habits()
        out.append([len(measured), seen["tokens"], seen["modes"]])
    files = Path(os.environ["XDG_CACHE_HOME"], "nanograft")
    return {"runs": out, "files": len(list(files.iterdir())) if files.exists() else 0}


def served(case: dict) -> dict:
    """More requests than slots, and rounds whose mode each rank would choose by a clock of its own."""
    target, draft = pair(case)
    requests = [serve.Request(**r) for r in case["requests"]]
    decoder, plan, _ = serve.open_batch(target, draft, requests, case["slots"], "ddtree", 12, False, False)
    plans = [Plan("ar", 0), Plan("dflash", 0), Plan("ddtree", 12), Plan("ddtree", 4, ladder=(1, 4, 12))]
    for p in plans:
        decoder.prepare(p)
    results = [serve.Result() for _ in requests]
    for e in serve.serve(decoder, requests, plan, lambda state: plans[(time.perf_counter_ns() // 1000 + rank) % len(plans)]):
        serve.record(results[e.number], e, 0.0)
        if e.number == 1 and len(results[1].tokens) > 5 and rank == 0:
            requests[1].cancelled = True  # rank 0 alone hears of it
    decoder, plan, _ = serve.open_batch(target, draft, requests[:2], 2, "ddtree", 12, False, False)
    decoder.limit.fill_(decoder.slots)
    serve.prefill(decoder, [r.tokens for r in requests[:2]], plan)
    sure = [decoder.step(Plan("ar", 0, ladder=(12,)), decoder.slots)[2][0] for _ in range(4)]
    return {"tokens": [r.tokens for r in results], "finish": [r.finish for r in results], "sure": sure}


def held(case: dict) -> dict:
    """What this rank holds: name -> [shape, offset, whole shape, sum]."""
    target, draft = pair(case)
    out = {}
    for which, model in (("target", target), ("draft", draft)):
        for path, m in model.named_modules() if model is not None else ():
            for name, p in m.named_parameters(recurse=False):
                offset, whole = getattr(m, "shares", {}).get(name, ((0,) * p.dim(), tuple(p.shape)))
                out[f"{which}.{path}.{name}"] = [list(p.shape), list(offset), list(whole), p.double().sum().item()]
    return out


def peak(case: dict) -> dict:
    """Bytes by which loading raises the peak of resident memory, mapped pages of the files included."""
    def status(key):
        return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(key))) * 1024
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, ordinary, Files.window = status("VmRSS"), Files.window, 8 << 20
    target, _ = pair(case)
    Files.window = ordinary
    return {"peak": status("VmHWM") - before, "holds": sum(p.nbytes for p in target.parameters())}


def main(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    if device == "cuda":  # NCCL wants a device of its own for each rank; gloo is content with one for all
        torch.cuda.set_device(rank % torch.cuda.device_count())
    two = device == "cuda" and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if two else "gloo", timeout=datetime.timedelta(seconds=120))
    assert agree(rank) == 0
    seen, ordinary = {}, torch.compile
    for case in cases:
        if case.get("compile"):
            torch._dynamo.reset()
        began = time.perf_counter()
        def compile(f, **settings):  # (inductor would take as long again for the prefill)
            backend = "eager" if f.__name__ != "round" and case["compile"] == "inductor" else case["compile"]
            return ordinary(f, backend=backend, fullgraph=True, dynamic=False)
        with patch.object(torch, "compile", compile):
            seen[case["id"]] = {"text": text, "kept": kept, "served": served, "held": held, "peak": peak}[case["what"]](case)
        seen[case["id"]]["seconds"] = time.perf_counter() - began
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
