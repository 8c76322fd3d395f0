"""What decoding costs, and what to pick: modes side by side, stage times, bytes moved.

    python bench.py --quick          the modes at batch 1, budgets of the tree side by side
    python bench.py                  the same at concurrency 1, 4 and 16
    python bench.py --questions      and: (a) is the context read once? (b) what does a candidate cost? (c) what do compiled
                                     rounds bring? (d) what to pick?
    python bench.py --serve 200      requests of mixed length through 16 slots, against one by one
    python bench.py --trees          what building a tree costs where the vocabulary is large, from marginals and over conditionals
    torchrun --standalone --nproc-per-node 2 bench.py --quick --tp 2 --experts tp ep    the modes in each layout of two ranks
    python bench.py --random --config NAME --layers 2    layers of a real model's size with random weights, scaled to its full
                                     depth: what verification costs. It says nothing about acceptance

Text is real (bench/prompts.jsonl) and runs past end tokens, so that every row emits as many. Modes take turns batch by batch,
so that a disturbance of the machine hits all alike. Numbers are medians, [quartiles] behind them. The last line of stdout is one
JSON object; --out keeps it.

    python bench.py --simulate       what rounds would cost on machines that are not here: a model (simulate.py has its flags)

    tok/s          tokens after the first over the time after the prefill, all rows of a batch together
    ratio          tok/s over those of ar on the same prompts, in the same minute
    auto against   auto's tok/s over those of the fixed mode that does best against it, likewise
    tokens/round   emitted tokens per row and round, the target's own included, by prompt (batch); `pooled`: all over all
    propose, build, verify, accept+commit     median milliseconds of a round's stages, from a pass of their own, run eagerly
    host           share of the time that is spent outside the call of a round
    differs        texts that are not those of ar: an error in fp32 and fp64, rounding in narrower types
    repeated 4-grams    share of a text's 4-grams that it held before: repetition is easy to draft and inflates tokens/round
    copy           GB/s of copying a large tensor in this run, read and written. A model that fits the CPU's cache may beat it
    MB/round       what a round must read once: weights, the experts its nodes are routed to, the context. GB/s is the
                   verification's part of it over the time that took
    must win       tokens/round at which a mode is as fast as ar
    even at        the `x 1 node` at which it would be, at the tokens/round it has
"""
import argparse
import json
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Callable, NamedTuple, Optional
from unittest.mock import patch

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # before torch says so; nothing here needs it
import torch

from chat import encode
from checkpoint import load_draft
from costs import bench_random, bench_trees, candidate_costs, copy_gb_s, machine, nodes_of, progress, rounded, short, show_context, spread, table, verify_costs
from generate import BUNDLED, DTYPES, Parser, check_device, generate, load, locate
from hub import UserError
from launch import Launch, alike
from ranks import agree
from serve import MODES, Request, Usage, need, open_batch, serve
from show import exit_code
from timing import now
from verify import Decoder

PROMPTS = Path(__file__).parent / "bench" / "prompts.jsonl"
BATCHES = 12                    # at least so many, of different prompts each
THREADS = 1024                  # more are a slip
STAGES = ("propose", "build", "verify", "accept+commit")


class Case(NamedTuple):
    """One way to decode."""
    mode: str
    budget: Optional[int] = 32
    spine: bool = False
    compile: bool = False
    other: str = ""         # the name of the second drafter, where it is that one that drafts

    def __str__(self) -> str:
        tree = f" {self.budget}" + (" spine" if self.spine else "") if self.mode == "ddtree" else ""
        return self.mode + tree + (" compiled" if self.compile else "") + (f", {self.other}" if self.other else "")


# Modes side by side, on real text

def read_prompts(path: Path, count: Optional[int]) -> list:
    """The first `count` prompts (None: all) of a file of {"id", "prompt"} lines."""
    try:
        texts = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{path} must hold one {{\"id\": …, \"prompt\": …}} per line: {e!r}") from None
    need(bool(texts), f"{path} holds no prompt")
    wrong = next((t for t in texts if not isinstance(t, str)), None)
    need(wrong is None, f"{path} must hold prompts that are text, found {str(wrong)[:40]!r}")
    if not 1 <= (len(texts) if count is None else count) <= len(texts):
        raise UserError(f"prompts must be between 1 and the {len(texts)} of {path}, got {count}")
    return texts[:count]


def repeated_4grams(tokens: list) -> float:
    grams = list(zip(*(tokens[i:] for i in range(4))))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def cases_for(draft, args, other: str = "") -> list:
    cases = [Case("ar")]
    if draft is not None:
        cases += [Case("auto", None), Case("dflash"), *(Case("ddtree", b) for b in args.budgets)]
        cases += [Case("ddtree", 32, True)] if 32 in args.budgets and draft.depths <= 32 else []
        cases += [c._replace(other=other) for c in cases if other and c.mode not in ("ar", "auto") and not c.spine]
    return list(dict.fromkeys(c._replace(compile=args.compile) for c in cases))


def stage_times(run: Callable, device) -> dict:
    """Stage -> milliseconds of every round that run() decodes eagerly. On a GPU each stage waits for its end."""
    times, plain = {stage: [] for stage in STAGES}, Decoder.round
    def timed(decoder, *a):
        clock = [now(device)]
        def mark(stage):
            clock.append(now(device))
            times[stage].append((clock[-1] - clock[-2]) * 1e3)
        return plain(decoder, *a, mark=mark)
    with patch.object(Decoder, "round", timed):
        run()
    return times


def time_in_rounds(run: Callable) -> tuple:
    """What run() returns, and the seconds it spent in the calls of rounds, their reading back included."""
    spent, plain = [], Decoder.step
    def timed(decoder, *a):
        began = time.perf_counter()
        out = plain(decoder, *a)
        spent.append(time.perf_counter() - began)
        return out
    with patch.object(Decoder, "step", timed):
        return run(), sum(spent)


def compare(pair: tuple, prompts: list, cases: list, concurrency: int, temperature: float, args, other=None) -> list:
    """Decodes all prompts in every case, interleaved: a row of numbers per case, the first one being the baseline. A row's
    `texts` are its tokens by prompt number."""
    (target, draft, _), rows = pair, {}
    # all are full, and there are BATCHES even where they overlap: a median of two says little
    count = max(-(-len(prompts) // concurrency), min(BATCHES, len(prompts)))
    batches = [[(k * len(prompts) // count + i) % len(prompts) for i in range(concurrency)] for k in range(count)]
    def decode(case, batch, tokens=args.tokens):
        return generate(target, None if case.mode == "ar" else other if case.other else draft, [prompts[i] for i in batch], case.mode, case.budget, tokens,
                        temperature=temperature, seed=batch, spine=case.spine, compile=case.compile)
    for case in cases:  # a first run, not measured; one that is compiled meets all its spans here
        began = time.perf_counter()
        decode(case, batches[0], args.tokens if case.compile else min(args.tokens, 8))
        rows[case] = {"case": str(case), **case._asdict(), "concurrency": concurrency, "temperature": temperature, "first_run_s": time.perf_counter() - began,
                      "texts": {}, "tok_s": [], "tokens_per_round": [], "host": [], "emitted": 0, "rounds": 0, "modes": Counter(), "stages": {s: [] for s in STAGES}}
    for n, batch in enumerate(batches):
        for case in cases[n % len(cases):] + cases[:n % len(cases)]:
            progress(f"concurrency {concurrency}, temperature {temperature:g}, batch {n + 1} of {len(batches)}: {case}")
            row, (results, inside) = rows[case], time_in_rounds(lambda: decode(case, batch))
            emitted, steps = sum(len(r.tokens) - 1 for r in results), sum(len(r.accepted) for r in results)
            seconds = max(r.seconds for r in results) - max(r.first_token for r in results)
            row["tok_s"].append(emitted / seconds)
            row["host"].append(1 - inside / seconds)
            row["tokens_per_round"].append(emitted / steps)
            row["emitted"], row["rounds"] = row["emitted"] + emitted, row["rounds"] + steps
            row["modes"].update(m for r in results for m in r.modes)
            row["texts"].update((i, r.tokens) for i, r in zip(batch, results))
            if n % 4 == 0:  # a quarter of the batches is enough for medians over rounds
                for stage, ms in stage_times(lambda: decode(case._replace(compile=False), batch), target.norm.weight.device).items():
                    row["stages"][stage] += ms
    progress()
    base, speed = rows[cases[0]], rows[cases[0]]["tok_s"]
    auto = next((row["tok_s"] for row in rows.values() if row["mode"] == "auto"), None)
    for row in rows.values():
        row["ratio"] = spread([a / b for a, b in zip(row["tok_s"], speed)])
        row["auto"] = spread([a / b for a, b in zip(auto, row["tok_s"])]) if auto else None
        row["pooled"] = row.pop("emitted") / row.pop("rounds")
        row["differs"] = sum(tokens != base["texts"][i] for i, tokens in row["texts"].items())
        row["repeated_4grams"] = statistics.mean(map(repeated_4grams, row["texts"].values()))
        row["stages"] = {stage: spread(ms) for stage, ms in row["stages"].items()}
        row |= {key: spread(row[key]) for key in ("tok_s", "tokens_per_round", "host")}
    return list(rows.values())


def show_comparison(rows: list, prompts: list, tokenizer, args) -> None:
    base = rows[0]
    print(f"\nconcurrency {base['concurrency']}, temperature {base['temperature']:g}: {len(prompts)} prompts x {args.tokens} tokens, {args.dtype}")
    table(["mode", "tok/s", "ratio", "tokens/round", "pooled", *(f"{s} ms" for s in STAGES), "host", "differs"],
          [[r["case"], short(r["tok_s"], 1), r["ratio"], r["tokens_per_round"], r["pooled"],
            *(None if r["mode"] == "ar" and s in ("propose", "build") else r["stages"][s]["median"] for s in STAGES),
            f"{r['host']['median']:.0%}", f"{r['differs']} of {len(prompts)}"] for r in rows])
    show_auto(rows)
    text = tokenizer.decode(prompts[0], skip_special_tokens=False) + " >>> " + tokenizer.decode(base["texts"][0], skip_special_tokens=False)
    print(f"repeated 4-grams: {base['repeated_4grams']:.0%}. The first text:", *(f"    {line}" for line in text.splitlines()), sep="\n", flush=True)


def show_auto(rows: list) -> None:
    """Mode auto against the others that have its drafter: the one that it beats by least."""
    auto = next((r for r in rows if r["mode"] == "auto"), None)
    if auto is not None:
        fixed = min((r for r in rows if r is not auto and not r["other"]), key=lambda r: r["auto"]["median"])
        print(f"auto against the best fixed mode, {fixed['case']}: {short(fixed['auto'])}; its rounds: "
              + ", ".join(f"{mode} {n / sum(auto['modes'].values()):.0%}" for mode, n in auto["modes"].most_common()))


def bench_text(args, launch: Launch) -> dict:
    """Modes x concurrency x temperature, and the questions where they are asked."""
    texts, rows = agree(read_prompts(args.prompt_file, args.prompts)), []
    name = Path(args.beside).name if args.beside else ""
    for experts in args.experts:
        pair = other = None  # the weights of the last layout go before those of the next come
        launch.wait()
        pair = load(args.model, args.draft, args.device, DTYPES[args.dtype], experts=experts if args.tp > 1 else None)
        launch.ready()
        prompts = [encode(pair[2], text) for text in texts]
        longest, context = max(map(len, prompts)) + args.tokens, pair[0].config.max_positions
        if longest > context:
            raise UserError(f"the longest prompt and {args.tokens} tokens are {longest}, the context holds {context}; lower --tokens")
        other = load_draft(Path(args.beside), pair[0], args.device, DTYPES[args.dtype]) if name else None
        cases = cases_for(pair[1], args, name)
        for concurrency in args.concurrency:
            for temperature in args.temperature:
                new = compare(pair, prompts, cases, concurrency, temperature, args, other)
                if args.tp > 1:
                    print(f"\n{args.tp} ranks, --experts {experts}")
                    new = [{**r, "case": f"{r['case']} {experts}", "ranks": args.tp, "experts": experts} for r in new]
                show_comparison(new, prompts, pair[2], args)
                rows += new
    report = {"modes": rows}
    if args.transformers:
        report["transformers"] = against_transformers(pair, prompts, args)
    if args.questions:
        report["questions"] = answer_questions(pair, prompts, [r for r in rows[:len(cases)] if not r["other"] and r["mode"] != "auto"], args)
    fastest = {(r["concurrency"], r["temperature"]): r for r in sorted(rows, key=lambda r: r["tok_s"]["median"])}
    report["pick"] = [{k: r[k] for k in ("concurrency", "temperature", "case", "tok_s", "ratio")} for _, r in sorted(fastest.items())]
    print("\n(d) what to pick")
    table(["concurrency", "temperature", "mode", "tok/s", "ratio"],
          [[str(p["concurrency"]), f"{p['temperature']:g}", p["case"], short(p["tok_s"], 1), p["ratio"]] for p in report["pick"]])
    return report


# Requests through slots

def bench_serve(args) -> dict:
    """The throughput of slots that are refilled: the same requests, prompts and texts of 8 to 128 tokens, through one slot and
    through many. All slots go first and last, so that a drift of the machine does not favour them."""
    pair, g = load(args.model, args.draft, args.device, DTYPES[args.dtype]), random.Random(0)
    text, sizes = [encode(pair[2], t) for t in read_prompts(args.prompt_file, args.prompts)], (8, 16, 32, 64, 128)
    if max(sizes) * 2 > pair[0].config.max_positions:
        raise UserError(f"requests of {max(sizes) * 2} tokens exceed the {pair[0].config.max_positions} positions of the model")
    long = [sum((text[(i + k) % len(text)] for k in range(len(text))), []) for i in range(len(text))]  # real text, whatever is asked for
    requests = [Request(long[i % len(long)][:g.choice(sizes)], g.choice(sizes), args.temperature[0], seed=i) for i in range(args.serve)]
    case, slots, rows = Case("ar") if pair[1] is None else Case("ddtree", args.budgets[0]), max(args.concurrency), []
    for batch in (slots, 1, slots):
        decoder, plan, _ = open_batch(*pair[:2], requests, batch, case.mode, case.budget, False, args.compile)
        usage, texts, began, worked = Usage(), [[] for _ in requests], time.perf_counter(), time.process_time()
        for e in serve(decoder, requests, plan, usage=usage):
            texts[e.number] += e.tokens
            progress(f"{batch} slots: {usage.tokens} tokens")
        seconds = time.perf_counter() - began
        rows.append({"slots": batch, "seconds": seconds, "cpu_seconds": time.process_time() - worked, "tokens": usage.tokens, "rounds": usage.rounds,
                     "busy": usage.busy, "tokens_per_round": usage.per_round, "tok_s": usage.tokens / seconds, "texts": texts})
    progress()
    for row in rows:
        row |= {"ratio": row["tok_s"] / rows[1]["tok_s"], "differs": sum(a != b for a, b in zip(row["texts"], rows[1]["texts"]))}
    print(f"\n{len(requests)} requests, {sum(len(r.tokens) for r in requests)} prompt tokens, {case}, temperature {args.temperature[0]:g}, {args.dtype}")
    table(["slots", "tokens", "rounds", "slots busy", "tokens/round", "seconds", "CPU s", "tok/s", "ratio", "differs"],
          [[str(r["slots"]), str(r["tokens"]), str(r["rounds"]), f"{r['busy']:.0%}", r["tokens_per_round"], r["seconds"], r["cpu_seconds"], r["tok_s"], r["ratio"],
            str(r["differs"])] for r in rows])
    return {"serve": rows}


class Clock:
    """A streamer, as transformers calls it, that notes when tokens came; the first call brings the prompt."""

    def __init__(self):
        self.times = []

    def put(self, tokens) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def against_transformers(pair: tuple, prompts: list, args) -> dict:
    """Eager ar beside transformers' own greedy `generate` with its cache: the same weights and prompts, in turns, batch 1."""
    from transformers import AutoModelForCausalLM  # here, because only this needs it
    folder, speed, differs = locate(args.model, "none")[0], {"ar": [], "transformers": []}, 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[args.dtype]).to(args.device).eval()
    model.generation_config.eos_token_id = None  # past end tokens, as everywhere here
    for n, prompt in enumerate([prompts[0], *prompts]):  # the first twice: once to warm up
        clock, ids = Clock(), torch.tensor([prompt], device=args.device)
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.tokens, do_sample=False, streamer=clock, pad_token_id=0)
        ours, = generate(pair[0], None, [prompt], "ar", max_new_tokens=args.tokens)
        if n:
            speed["transformers"].append((args.tokens - 1) / (clock.times[-1] - clock.times[1]))
            speed["ar"].append((args.tokens - 1) / (ours.seconds - ours.first_token))
            differs += theirs[0, len(prompt):].tolist() != ours.tokens
    row = {"ratio": spread([a / b for a, b in zip(speed["ar"], speed["transformers"])]), "differs": differs, **{k: spread(v) for k, v in speed.items()}}
    print(f"\nar against transformers' generate, both eager: {short(row['ar'], 1)} and {short(row['transformers'], 1)} tok/s, "
          f"{short(row['ratio'])} x; {differs} of {len(prompts)} texts differ", flush=True)
    return row


# The questions: what the context, a candidate and compilation cost

def answer_questions(pair: tuple, prompts: list, alone: list, args) -> dict:
    """(a), (b) and (c). alone: the rows of the first concurrency and temperature."""
    copy = copy_gb_s(pair[0].norm.weight.device)
    print(f"\na copy moves {copy:.1f} GB/s")
    costs = verify_costs(pair, prompts, args.concurrency[0], sorted({1, *(nodes_of(r, pair[1]) for r in alone)}), copy, args)
    show_context(costs)
    answers = {"copy_gb_s": copy, "verify": costs, "candidates": candidate_costs(alone, costs, pair)}
    print("\n(c) what do compiled rounds bring?")
    best = {r["mode"]: r for r in sorted(alone, key=lambda r: r["tok_s"]["median"])}  # of each mode: every case costs a compilation
    cases = [Case(mode, best[mode]["budget"], best[mode]["spine"], on) for mode in MODES if mode in best for on in (False, True)]
    rows = answers["compiled"] = compare(pair, prompts[:6], cases, args.concurrency[0], args.temperature[0], args)
    show_comparison(rows, prompts[:6], pair[2], args)
    table(["mode", "compiled / eager", "first run s"],
          [[a["case"], b["tok_s"]["median"] / a["tok_s"]["median"], b["first_run_s"]] for a, b in zip(rows[::2], rows[1::2])])
    return answers


# The command line

def parse_arguments(argv: Optional[list]) -> argparse.Namespace:
    parser = Parser(description="Measures the modes of decoding side by side, on real text.",
                    epilog="--simulate: what rounds would cost on machines that are not here; it has flags of its own (--simulate --help)")
    add = parser.add_argument
    add("--quick", action="store_true", help="concurrency 1 only")
    add("--questions", action="store_true", help="also what the context, a candidate and compilation cost")
    add("--transformers", action="store_true", help="also ar beside transformers' generate, where that is installed")
    add("--random", action="store_true", help="layers of a real model's size, with random weights")
    add("--serve", type=int, metavar="N", help="N requests of mixed length through as many slots as the largest --concurrency, and through one")
    add("--trees", action="store_true", help="what building trees costs where the vocabulary is large")
    add("--config", metavar="NAME|FILE", help="with --random: a config.json, or a name in tests/configs")
    add("--layers", type=int, default=1, metavar="K", help="with --random: sparse layers to build (default 1)")
    add("--int4", action="store_true", help="with --random: packed experts")
    add("--capture", action="store_true", help="with --random on CUDA: graphs captured by hand")
    add("--nodes", type=int, nargs="+", default=[1, 8, 16, 32, 64], metavar="N", help="with --random: default 1 8 16 32 64")
    add("--model", default=BUNDLED, metavar="PATH|ID", help="the target (default: the bundled one)")
    add("--draft", default="auto", metavar="PATH|ID", help="the drafter; none for ar alone; default auto: the folder draft beside the target's")
    add("--beside", metavar="PATH", help="a second drafter, side by side (default: the folder draft-dflash beside the target's, with --draft auto)")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share the models, started by torchrun; rank 0 prints")
    add("--experts", nargs="+", default=["tp"], metavar="tp|ep|AxB", help="with --tp: layouts to measure one after the other (see generate.py)")
    add("--timeout", type=float, default=120, metavar="S", help="with --tp: see generate.py")
    add("--dtype", default="float32", choices=tuple(DTYPES))
    add("--device", default="cpu")
    add("--compile", action=argparse.BooleanOptionalAction, default=False, help="compile the round")
    add("--threads", type=int, help="CPU threads of torch")
    add("--prompts", type=int, metavar="N", help="the first N prompts (default all)")
    add("--prompt-file", type=Path, default=PROMPTS, metavar="FILE", help='lines of {"id", "prompt"}')
    add("--tokens", type=int, default=128, metavar="N", help="tokens per prompt (default 128)")
    add("--temperature", type=float, nargs="+", default=[0.0, 0.7], metavar="T", help="default 0 0.7")
    add("--budgets", type=int, nargs="+", default=[8, 16, 32, 64], metavar="N", help="drafted nodes of a tree (default 8 16 32 64)")
    add("--concurrency", type=int, nargs="+", metavar="B", help="rows decoded as one batch (default 1 4 16; with --random 1 8 32)")
    add("--contexts", type=int, nargs="+", metavar="S", help="committed tokens of timed verifications (default 64 256 512 896; with --random 1024 16384)")
    add("--repeats", type=int, default=20, metavar="N", help="of each timed verification (default 20)")
    add("--out", type=Path, metavar="FILE", help="keep the JSON object here, too")
    return parser.parse_args(argv)


def check_out(path: Path) -> None:
    """UserError where a file cannot be written; one that is not there yet is not left behind."""
    new = not path.exists()
    try:
        open(path, "ab").close()
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}") from None
    if new:
        path.unlink()


def run(args: argparse.Namespace, launch: Launch) -> int:
    need(args.tp == 1 or not (args.random or args.trees or args.questions or args.beside or args.serve),
         "--tp measures the modes; leave --random, --trees, --questions, --serve and --beside out")
    need(args.tp > 1 or args.experts == ["tp"], "--experts says how ranks share the experts; add --tp N, or leave it out")
    args.concurrency = args.concurrency or ([1] if args.quick else [1, 8, 32] if args.random else [1, 4, 16])
    for name, least in (("tokens", 2), ("concurrency", 1), ("threads", 1), ("repeats", 2), ("nodes", 1), ("contexts", 1), ("budgets", 1),
                        ("temperature", 0), ("serve", 1)):
        value = getattr(args, name)
        lowest = min(value) if isinstance(value, list) else value
        need(lowest is None or lowest >= least, f"{name} must be at least {least}, got {lowest}")
    need(args.threads is None or args.threads <= THREADS, f"threads must be at most {THREADS}, got {args.threads}")
    need(args.trees + args.random + (args.serve is not None) < 2, "--trees, --random and --serve are different benches; run one at a time")
    need(args.random == (args.config is not None), "--random and --config go together: name the model whose layers to build")
    need(not args.transformers or find_spec("transformers") is not None,
         "--transformers compares with the transformers package, which is not installed; pip install transformers")
    if args.out is not None and launch.rank == 0:
        check_out(args.out)
    need(not args.capture or args.random and args.device.startswith("cuda"), "--capture goes with --random on a CUDA device")
    if args.threads:
        torch.set_num_threads(args.threads)
    plain = locate(args.model, "none")[0].resolve().parent / "draft-dflash" if args.draft == "auto" and not (args.random or args.trees or args.tp > 1) else None
    args.beside = args.beside or (plain if plain is not None and plain.is_dir() else None)
    args.device = launch.join(args.tp, args.device, args.timeout)
    if launch.joined:
        alike("the flags", {name: value for name, value in vars(args).items() if name not in ("model", "draft", "beside", "device", "prompt_file", "out")})
    check_device(args.device)
    report = {"machine": machine(args), "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}}
    print(", ".join(f"{k} {v}" for k, v in report["machine"].items()))
    report |= bench_serve(args) if args.serve else bench_trees(args) if args.trees else bench_random(args) if args.random else bench_text(args, launch)
    line = json.dumps(rounded(report))
    rows = report.get("modes", report.get("serve", [])) + report.get("questions", {}).get("compiled", [])
    wrong = sum(row["differs"] for row in rows if args.dtype in ("float32", "float64"))
    if wrong:
        print(f"error: {wrong} texts differ in {args.dtype}; see the column differs", file=sys.stderr)
    print(line, flush=True)  # first: whatever becomes of the file, it is here
    if args.out and launch.rank == 0:
        try:
            args.out.write_text(line + "\n")
        except OSError as e:
            raise UserError(f"{args.out} cannot be written: {e.strerror}; the JSON object is on stdout") from None
    return 1 if wrong else 0


def main(argv: Optional[list] = None) -> int:
    """Exit codes: 0; 1 where modes disagree in fp32 or fp64; 2 with one line on stderr where the user can mend it; 130 on Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if "--simulate" in argv:  # for machines that are not here; it has flags of its own
        from simulate import run as simulated
        return exit_code(lambda: simulated([a for a in argv if a != "--simulate"]), "--contexts or --concurrency")
    launch = Launch()
    return exit_code(lambda: launch.leave(run(parse_arguments(argv), launch)), "--concurrency, --tokens, --contexts or --budgets", end=launch.fail)


if __name__ == "__main__":
    sys.exit(main())
