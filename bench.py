"""What decoding costs, and what to pick: modes side by side, stage times, bytes moved.

    python bench.py --quick          the three modes at batch 1, budgets of the tree side by side
    python bench.py                  the same at concurrency 1, 4 and 16

All runs decode real text (bench/prompts.jsonl) past any end token, so that every row emits the same number of tokens.
Modes are interleaved batch by batch, so that a disturbance of the machine hits all of them alike. Numbers are medians,
[first quartile, third quartile] behind them. The last line of stdout is one JSON object; --out keeps it.

    tok/s          tokens after the first, over the time after the prefill, all rows of the batch together
    ratio          tok/s over that of ar on the same prompts, in the same minute
    tokens/round   emitted tokens per row and round, the target's own token included: 1 for ar, by definition. `pooled` is
                   all tokens over all rounds; the quartiles are over prompts (batches)
    propose, build, verify, accept+commit     milliseconds of the four stages of a round, from a pass of their own, run eagerly
    differs        texts that are not the tokens of ar: an error in fp32 and fp64, rounding in narrower types
    repeated 4-grams    share of the 4-grams of a text that occurred in it before. A text that repeats itself is easy to
                   draft, so tokens/round says little where this is high
"""
import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple, Optional

import torch

from chat import encode
from checkpoint import UserError
from generate import BUNDLED, DTYPES, check_device, generate, load, prefill, span_for
from verify import Decoder, Plan

PROMPTS = Path(__file__).parent / "bench" / "prompts.jsonl"
STAGES = ("propose", "build", "verify", "accept+commit")
MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


class Case(NamedTuple):
    """One way to decode."""
    mode: str
    budget: int = 32
    spine: bool = False
    compile: bool = False

    def __str__(self) -> str:
        tree = f" {self.budget}" + (" spine" if self.spine else "") if self.mode == "ddtree" else ""
        return self.mode + tree + (" compiled" if self.compile else "")


# Numbers and tables

def spread(values: list) -> dict:
    """Median and quartiles."""
    values = sorted(values)
    q1, _, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": statistics.median(values), "q1": q1, "q3": q3}


def short(x, digits: int = 2) -> str:
    """A cell: '-' for None, a spread as `median [q1, q3]`."""
    if isinstance(x, dict):
        return f"{short(x['median'], digits)} [{short(x['q1'], digits)}, {short(x['q3'], digits)}]"
    return "-" if x is None else x if isinstance(x, str) else f"{x:.{digits}f}" if isinstance(x, float) else str(x)


def table(head: list, rows: list) -> None:
    """Columns as wide as their cells; the first one to the left, numbers to the right."""
    cells = [head] + [[short(c) for c in row] for row in rows]
    width = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, width))).rstrip(), flush=True)


def progress(text: str = "") -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def rounded(x):
    """What goes to JSON: six digits are more than any clock here gives."""
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    return [rounded(v) for v in x] if isinstance(x, (list, tuple)) else float(f"{x:.6g}") if isinstance(x, float) else x


def machine(args) -> dict:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), cpu)
    return {"device": torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else cpu, "cores": os.cpu_count(),
            "threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version(), "dtype": args.dtype,
            "malloc": "tuned" if all(name in os.environ for name in MALLOC) else "default"}


def now(device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# Decoding real text

def read_prompts(path: Path, count: Optional[int]) -> list:
    """The first `count` prompts of a file of {"id", "prompt"} lines (all without a count)."""
    try:
        texts = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} must hold one {{\"id\": …, \"prompt\": …}} per line: {e!r}") from None
    if not 1 <= (len(texts) if count is None else count) <= len(texts):
        raise UserError(f"prompts must be between 1 and the {len(texts)} of {path}, got {count}")
    return texts[:count]


def repeated_4grams(tokens: list) -> float:
    grams = list(zip(*(tokens[i:] for i in range(4))))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def batches_of(prompts: list, size: int) -> list:
    """Lists of prompt numbers; the last one is filled from the start, so that all are full."""
    return [[i % len(prompts) for i in range(at, at + size)] for at in range(0, len(prompts), size)]


def stage_times(target, draft, prompts: list, case: Case, temperature: float, tokens: int, seeds: list) -> dict:
    """Stage -> milliseconds of every round of one batch, decoded eagerly. On a GPU each stage waits for its end."""
    device = target.norm.weight.device
    limit = torch.tensor([len(p) + tokens for p in prompts], device=device)
    decoder = Decoder(target, None if case.mode == "ar" else draft, len(prompts), int(limit.max()))
    decoder.limit.copy_(limit), decoder.seed.copy_(torch.tensor(seeds)), decoder.temperature.fill_(temperature)
    plan, times = Plan(case.mode, case.budget, case.spine, temperature > 0), {stage: [] for stage in STAGES}
    for _ in prefill(decoder, prompts, plan, device):
        pass
    while decoder.active.any():
        span, clock = span_for(int(decoder.length.max()), decoder.slots), [now(device)]
        def mark(stage):
            clock.append(now(device))
            times[stage].append((clock[-1] - clock[-2]) * 1e3)
        decoder.round(plan, span, mark)
    return times


def compare(pair: tuple, prompts: list, cases: list, concurrency: int, temperature: float, args) -> list:
    """Decodes all prompts in every case, interleaved, and returns one row of numbers per case; the first case is the
    baseline. Rows also hold `texts`: prompt number -> tokens."""
    target, draft, _ = pair
    batches, row_of = batches_of(prompts, concurrency), {}
    for case in cases:
        row_of[case] = {"case": str(case), **case._asdict(), "concurrency": concurrency, "temperature": temperature, "texts": {},
                        "tok_s": [], "tokens_per_round": [], "first_token_ms": [], "emitted": 0, "rounds": 0, "stages": {s: [] for s in STAGES}}
    def decode(case, batch, tokens):
        return generate(target, None if case.mode == "ar" else draft, [prompts[i] for i in batch], case.mode, case.budget, tokens,
                        temperature=temperature, seed=batch, spine=case.spine, compile=case.compile)
    for case in cases:  # what is compiled, or allocated for good, is not measured; a compiled run meets all its spans here
        began = time.perf_counter()
        decode(case, batches[0], args.tokens if case.compile else min(args.tokens, 8))
        row_of[case]["warm_up_s"] = time.perf_counter() - began
    for n, batch in enumerate(batches):
        for case in cases[n % len(cases):] + cases[:n % len(cases)]:
            progress(f"concurrency {concurrency}, temperature {temperature:g}, batch {n + 1} of {len(batches)}: {case}")
            row, results = row_of[case], decode(case, batch, args.tokens)
            first, end = max(r.first_token for r in results), max(r.seconds for r in results)
            emitted, steps = sum(len(r.tokens) - 1 for r in results), sum(len(r.accepted) for r in results)
            row["tok_s"].append(emitted / (end - first))
            row["tokens_per_round"].append(emitted / steps)
            row["first_token_ms"].append(first * 1e3)
            row["emitted"] += emitted
            row["rounds"] += steps
            row["texts"].update((i, r.tokens) for i, r in zip(batch, results))
        if n % 4 == 0:  # a quarter of the batches is enough for medians over rounds
            for case in cases:
                progress(f"concurrency {concurrency}, temperature {temperature:g}, batch {n + 1} of {len(batches)}: stages of {case}")
                for stage, ms in stage_times(target, draft, [prompts[i] for i in batch], case, temperature, args.tokens, batch).items():
                    row_of[case]["stages"][stage] += ms
    progress()
    base = row_of[cases[0]]
    speed = base["tok_s"]  # per batch: ratios are taken before the quartiles
    for row in row_of.values():
        row["ratio"] = spread([a / b for a, b in zip(row["tok_s"], speed)])
        row["tokens_per_round_pooled"] = row.pop("emitted") / row.pop("rounds")
        row["round_ms"] = spread([sum(ms) for ms in zip(*row["stages"].values())])
        row["stages"] = {stage: spread(ms) for stage, ms in row["stages"].items()}
        row["differs"] = sum(tokens != base["texts"][i] for i, tokens in row["texts"].items())
        row["repeated_4grams"] = statistics.mean(map(repeated_4grams, row["texts"].values()))
        for key in ("tok_s", "tokens_per_round", "first_token_ms"):
            row[key] = spread(row[key])
    return list(row_of.values())


def show_comparison(rows: list, prompts: list, tokenizer, args) -> None:
    base = rows[0]
    heat = f"temperature {base['temperature']:g}" if base["temperature"] else "greedy"
    print(f"\nconcurrency {base['concurrency']}, {heat}: {len(prompts)} prompts x {args.tokens} tokens, {args.dtype}")
    table(["mode", "tok/s", "ratio", "tokens/round", "pooled", *(f"{s} ms" for s in STAGES), "first token ms", "differs"],
          [[r["case"], short(r["tok_s"], 1), r["ratio"], r["tokens_per_round"], r["tokens_per_round_pooled"],
            *(None if r["mode"] == "ar" and s in ("propose", "build") else r["stages"][s]["median"] for s in STAGES),
            short(r["first_token_ms"]["median"], 1), f"{r['differs']} of {len(prompts)}"] for r in rows])
    print(f"repeated 4-grams: {base['repeated_4grams']:.0%}. The first text:")
    text = tokenizer.decode(prompts[0], skip_special_tokens=False) + " >>> " + tokenizer.decode(base["texts"][0], skip_special_tokens=False)
    print("\n".join(f"    {line}" for line in text.splitlines()), flush=True)


def pick(rows: list) -> list:
    """The fastest case of each concurrency and temperature."""
    best = {}
    for r in rows:
        key = r["concurrency"], r["temperature"]
        if key not in best or r["tok_s"]["median"] > best[key]["tok_s"]["median"]:
            best[key] = r
    return [{"concurrency": c, "temperature": t, "pick": r["case"], "tok_s": r["tok_s"]["median"], "ratio": r["ratio"]} for (c, t), r in best.items()]


def show_picks(picks: list) -> None:
    print("\nwhat to pick")
    table(["concurrency", "temperature", "mode", "tok/s", "ratio to ar"],
          [[str(p["concurrency"]), f"{p['temperature']:g}", p["pick"], short(p["tok_s"], 1), p["ratio"]] for p in picks])


def cases_for(draft, args, compile: bool) -> list:
    cases = [Case("ar", compile=compile)]
    if draft is not None:
        cases += [Case("dflash", compile=compile)] + [Case("ddtree", b, False, compile) for b in args.budgets]
        cases += [Case("ddtree", 32, True, compile)] if 32 in args.budgets and draft.depths <= 32 else []
    return list(dict.fromkeys(cases))


def bench_pair(pair: tuple, prompts: list, args) -> dict:
    """Modes x concurrency x temperature on real text."""
    cases, rows = cases_for(pair[1], args, args.compile), []
    for concurrency in args.concurrency:
        for temperature in args.temperature:
            rows += compare(pair, prompts, cases, concurrency, temperature, args)
            show_comparison(rows[-len(cases):], prompts, pair[2], args)
    picks = pick(rows)
    show_picks(picks)
    return {"modes": rows, "picks": picks}


# The command line

def parse_arguments(argv: Optional[list]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures the modes of decoding side by side, on real text.")
    add = parser.add_argument
    add("--quick", action="store_true", help="concurrency 1 only")
    add("--model", default=BUNDLED, metavar="PATH|ID", help="the target (default: the bundled one)")
    add("--draft", default="auto", metavar="PATH|ID", help="the drafter; none for ar alone; default auto: the folder draft beside the target's")
    add("--dtype", default="float32", choices=tuple(DTYPES))
    add("--device", default="cpu")
    add("--compile", action=argparse.BooleanOptionalAction, default=False, help="compile the round")
    add("--threads", type=int, help="CPU threads of torch")
    add("--prompts", type=int, metavar="N", help="the first N prompts (default all)")
    add("--prompt-file", type=Path, default=PROMPTS, metavar="FILE", help='lines of {"id", "prompt"}')
    add("--tokens", type=int, default=128, metavar="N", help="tokens per prompt (default 128)")
    add("--temperature", type=float, nargs="+", default=[0.0, 0.7], metavar="T", help="default 0 0.7")
    add("--budgets", type=int, nargs="+", default=[8, 16, 32, 64], metavar="N", help="drafted nodes of a tree (default 8 16 32 64)")
    add("--concurrency", type=int, nargs="+", metavar="B", help="prompts decoded as one batch (default 1 4 16)")
    add("--out", type=Path, metavar="FILE", help="keep the JSON object here, too")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    def need(ok: bool, message: str) -> None:
        if not ok:
            raise UserError(message)
    args.concurrency = args.concurrency or ([1] if args.quick else [1, 4, 16])
    need(args.tokens >= 2, f"tokens must be at least 2, got {args.tokens}")
    need(min(args.concurrency) >= 1, f"concurrency must be at least 1, got {min(args.concurrency)}")
    need(args.threads is None or args.threads >= 1, f"threads must be at least 1, got {args.threads}")
    need(args.out is None or args.out.absolute().parent.is_dir(), f"{args.out} cannot be written: its folder does not exist")
    if args.threads:
        torch.set_num_threads(args.threads)
    check_device(args.device)
    texts = read_prompts(args.prompt_file, args.prompts)
    pair = load(args.model, args.draft, args.device, DTYPES[args.dtype])
    prompts = [encode(pair[2], text) for text in texts]
    context = pair[0].config.max_positions
    longest = max(map(len, prompts)) + args.tokens
    need(longest <= context, f"the longest prompt and {args.tokens} tokens are {longest}, the context holds {context}; lower --tokens")
    report = {"machine": machine(args), "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}}
    print(", ".join(f"{k} {v}" for k, v in report["machine"].items()))
    report |= bench_pair(pair, prompts, args)
    wrong = sum(row["differs"] for row in report["modes"])
    for row in report["modes"]:
        row.pop("texts")
    line = json.dumps(rounded(report))
    if args.out:
        args.out.write_text(line + "\n")
    exact = args.dtype in ("float32", "float64")
    if wrong and exact:
        print(f"error: {wrong} texts differ from ar in {args.dtype}; see the column differs", file=sys.stderr)
    print(line, flush=True)
    return 1 if wrong and exact else 0


def main(argv: Optional[list] = None) -> int:
    """Exit codes: 0; 1 where modes disagree in fp32 or fp64; 2 with one line on stderr where the user can mend it; 130 on Ctrl-C."""
    try:
        return run(parse_arguments(argv))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
