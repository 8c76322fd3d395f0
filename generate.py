"""Generates text with a DFlash drafter and a DDTree verifier, or with the target alone.

    python generate.py --prompt "def merge_sort(items):"

Three ways to decode, one text: `ar` one token per forward, `dflash` a chain of drafts, `ddtree` a tree of drafts. Greedy or
seeded, all three emit the same tokens; they differ in how many forwards of the target it takes, and `auto` picks among them
round by round. (In bf16 and fp16 a forward of many nodes rounds differently from a forward of one, so near ties may fall the other way.)
"""
import argparse
import json
import os
import sys
import time
import warnings
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Callable, Iterator, Optional, Union

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # before torch says so; nothing here needs it
import torch

from auto import ladder, ring_for
from chat import encode, encode_chat, load_tokenizer, read_messages, stop_ids as read_stop_ids
from checkpoint import open_draft, open_target, parse_config
from draft import Drafter
from hub import WANTED, UserError, read_config, resolve
from launch import Launch, alike
from model import Config, Transformer
from plan import check_fits, memory_of, memory_plan, table
from prompts import PromptFile, open_file, serve_file
from ranks import agree, least
from serve import (BATCH, BUDGET, CHUNK, MODES, SPINE, Event, Request, Result, check_pair_for, check_prompts, check_settings, need, open_batch, prefill,
                   record, serve, slots_for)
from show import DIM, RESET, Screen, draw_tree, exit_code, node_probabilities, summary
from verify import Decoder, Plan

BUNDLED = "checkpoints/tiny/target"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


# The library: load, generate, stream

def locate(model: str, draft: str, wanted: tuple = WANTED) -> tuple:
    """Folders or hub ids -> the target's folder, and the drafter's or None."""
    if model == BUNDLED and not Path(model).exists():
        model = str(Path(__file__).parent / BUNDLED)  # the bundled pair is found from any folder
    folder = resolve(model, wanted)
    beside = folder.resolve().parent / "draft"
    return folder, None if draft == "none" else (beside if beside.is_dir() else None) if draft == "auto" else resolve(draft, wanted)


def load(model: str = BUNDLED, draft: str = "auto", device: str = "cpu", dtype: torch.dtype = torch.float32,
         block: Optional[int] = None, draft_window: Optional[int] = None, attention_factor: Optional[float] = None, experts: Optional[str] = None) -> tuple:
    """A folder or hub id -> target, drafter (or None), tokenizer.

    draft: a folder or hub id, "none", or "auto": the folder `draft` beside the target's, None where there is none.
    block, draft_window, attention_factor: see Drafter.adapt. experts: "tp", "ep" or "AxB": the ranks of the initialized
    torch.distributed share the two models, see parallel.py; None: each process has its own. UserError on whatever does not fit."""
    folder, draft_folder = locate(model, draft)
    tokenizer = load_tokenizer(folder)
    return *load_models(folder, draft_folder, device, dtype, block, draft_window, attention_factor, experts), tokenizer


def load_models(folder: Path, draft_folder: Optional[Path], device: str, dtype: torch.dtype, block: Optional[int], draft_window: Optional[int],
                attention_factor: Optional[float], experts: Optional[str] = None, checked: Callable = lambda draft: None) -> tuple:
    """`load` from folders, without the tokenizer. checked(drafter or None) is called when both folders have been found sound and
    no weight is read yet."""
    config, read_target = open_target(folder, dtype)
    drafter, read_draft = open_draft(draft_folder, config, dtype) if draft_folder else (None, None)
    try:
        if drafter is not None:
            drafter.adapt(block, draft_window, attention_factor)
    except ValueError as e:
        raise UserError(str(e)) from None
    shared = experts is not None and torch.distributed.get_world_size() > 1
    if shared:
        alike("the models' configs", {"a drafter": drafter is not None, **{f"the target's {k}": v for k, v in vars(config).items()},
                                      **{f"the drafter's {k}": v for k, v in (vars(drafter.config).items() if drafter else ())}})
    checked(drafter)
    divide = (lambda model: None,) * 2
    if shared:
        from parallel import dividers  # here, because its imports take as long as half of torch's own
        divide = dividers(experts, device)
    target = read_target(device, divide[0])
    return target, drafter and read_draft(target, device, divide[1])


def generate(target: Transformer, draft: Optional[Drafter], prompts: list, mode: str = "auto", budget: Optional[int] = None,
             max_new_tokens: int = 128, **settings) -> list:
    """prompts: lists of token ids, ragged -> a Result per prompt. The settings are those of `rounds`."""
    results, began = [Result() for _ in prompts], []
    for e in rounds(target, draft, prompts, mode, budget, max_new_tokens, ready=lambda: began.append(time.perf_counter()), **settings):
        record(results[e.number], e, time.perf_counter() - began[0])
    return results


def stream(*args, **settings) -> Iterator[tuple]:
    """The arguments of `generate` -> (row, tokens) of each round, as they come."""
    return ((e.number, e.tokens) for e in rounds(*args, **settings) if e.tokens)


def rounds(target: Transformer, draft: Optional[Drafter], prompts: list, mode: str = "auto", budget: Optional[int] = None,
           max_new_tokens: int = 128, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0,
           seed: Union[int, list] = 0, stop_ids: tuple = (), compile: bool = False, spine: bool = SPINE,
           until: Optional[Callable] = None, progress: Callable = lambda text: None,
           controller: Callable = lambda auto: None, ready: Callable = lambda: None) -> Iterator[Event]:
    """Decodes all prompts as one batch and yields an Event per row and round.

    mode: one of MODES; auto is plain decode where there is no drafter, and else measures what rounds cost here (once: auto.py) and
    picks. controller(auto) gets the Auto that does. budget: drafted nodes of a ddtree (None: 32), the most of them for auto (None: 64).
    seed: one for all rows, or one per prompt. stop_ids end a row and are not emitted. until(row, tokens) may end a row
    too: it returns how many of these new tokens to keep, or None to go on. progress(text) hears of the prefill.
    ready() is called when all is measured and compiled and serving begins. UserError on arguments out of range."""
    check_settings(mode, budget, max_new_tokens, temperature, top_p, top_k, seed, len(prompts))
    check_pair_for(mode, budget, spine, draft)
    check_prompts(prompts, target.config.max_positions, target.config.vocab_size)
    seeds = [seed] * len(prompts) if isinstance(seed, int) else seed
    requests = [Request(p, max_new_tokens, temperature, top_p, top_k, s) for p, s in zip(prompts, seeds)]
    decoder, plan, pilot = open_batch(target, draft, requests, len(prompts), mode, budget, spine, compile, progress)
    if pilot is not None:
        controller(pilot.auto)
    ready()
    try:
        yield from serve(decoder, requests, plan, pilot, stop_ids, until, progress)
    finally:
        if pilot is not None:
            pilot.keep()


# The command line

class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UserError(f"{message}; --help lists the flags")


def parse_arguments(argv: Optional[list]) -> argparse.Namespace:
    parser = Parser(description="Speculative decoding with DFlash drafts and DDTree trees on sparse MLA models.")
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="what to continue; repeat it for a batch; - reads stdin")
    add("--prompts", type=Path, metavar="FILE.jsonl", help='a file of {"id", "prompt" or "messages"} lines, served --batch at a time; a line may hold'
        ' max_new_tokens, temperature, top_p, top_k, seed and stop of its own')
    add("--out", type=Path, metavar="FILE.jsonl", help="--prompts: where results go; what is there already is not done again (default: stdout)")
    add("--model", default=BUNDLED, metavar="PATH|ID", help="the target: a folder or a hub id (default: the bundled one)")
    add("--draft", default="auto", metavar="PATH|ID", help="the drafter; none for plain decode; default auto: the folder draft beside the target's")
    add("--mode", choices=MODES, help="how to decode (default auto: whatever is fastest, round by round; ar where there is no drafter)")
    add("--budget", type=int, help="drafted nodes of a ddtree round (default 32), the most of them for auto (default 64)")
    add("--spine", action=argparse.BooleanOptionalAction, default=SPINE, help="put the whole top-1 chain into every tree first")
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0, help="0 keeps all (default)")
    add("--seed", type=int, default=0)
    add("--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable")
    add("--chat", action="store_true", help="the prompts are a user's turns: render the model's chat template")
    add("--system", metavar="TEXT", help="the system message of a chat (implies --chat)")
    add("--messages", action="append", default=[], metavar="FILE.json", help="a chat to continue: [{\"role\": …, \"content\": …}, …]; repeatable")
    add("--block", type=int, metavar="N", help="slots of a draft block, if fewer than trained")
    add("--draft-window", type=int, metavar="N", help="the drafter sees the last N tokens only")
    add("--attention-factor", type=float, metavar="X", help="the drafter's rope amplitude, where its config's is not meant")
    add("--plan", action="store_true", help="print the memory plan from the configs alone, and stop")
    add("--context", type=int, metavar="N", help="--plan: tokens per sequence (default 4096, or what the model holds)")
    add("--batch", type=int, metavar="N", help="--prompts: how many are decoded at once (default 16); --plan: sequences at once (default 1)")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share the models, started by torchrun; with --plan, devices")
    add("--experts", metavar="tp|ep|AxB", help="divide each expert's width (tp, the default), hold whole ones (ep), or A groups of B ranks do both")
    add("--timeout", type=float, default=120, metavar="S", help="seconds after which a rank that keeps the others waiting ends the launch (default 120)")
    add("--device", default="cpu")
    add("--dtype", choices=tuple(DTYPES), help="default float32 on the CPU, bfloat16 elsewhere")
    add("--compile", action=argparse.BooleanOptionalAction, help="compile rounds and prefill (default: on a GPU; the first use takes minutes, then a cache serves)")
    add("--json", action="store_true", help="one JSON object per prompt: text, tokens, accepted per round, timings, finish")
    add("--color", action="store_true", help="accepted drafts in green, the target's own tokens in yellow")
    add("--check", action="store_true", help="decode with ar too; fail unless the tokens are identical")
    add("--tree", type=int, nargs="?", const=1, metavar="K", help="draw the tree of round K (default 1) of the first prompt, and stop")
    args = parser.parse_args(argv)
    args.compile = args.device.split(":")[0] == "cuda" if args.compile is None else args.compile
    args.dtype = args.dtype or ("float32" if args.device.split(":")[0] == "cpu" and not args.plan else "bfloat16")
    return args


def print_plan(args: argparse.Namespace) -> None:
    """The memory plan of --model and --draft; of a hub id, nothing but config.json is fetched."""
    folder, draft_folder = locate(args.model, args.draft, ("config.json",))
    config, draft = read_config(folder), draft_folder and read_config(draft_folder)
    budget = BUDGET if args.budget is None else args.budget
    need(1 <= budget <= 4096, f"budget must be between 1 and 4096, got {budget}")
    context = args.context if args.context is not None else min(4096, parse_config(Config, config, folder / "config.json").max_positions)
    print(table(memory_plan(config, draft, context, 1 if args.batch is None else args.batch, args.tp, budget, CHUNK, DTYPES[args.dtype],
                            args.experts), args.tp))


def check_memory(args: argparse.Namespace, config: dict, draft: Optional[dict], context: int, batch: int) -> None:
    """Prints the memory plan as one line before any weight is read. config, draft: what their config.json says. UserError where it
    cannot fit."""
    there = memory_of(args.device)
    if args.tp > 1 and not args.device.startswith("cuda"):  # the ranks of a host share its memory
        there //= int(os.environ.get("LOCAL_WORLD_SIZE", args.tp))
    there = least(there)  # all ranks decide alike, whatever each has
    more = dict(chunk=CHUNK, dtype=DTYPES[args.dtype], experts=args.experts)
    budget = args.budget or BUDGET
    more["ring"] = ring_for(args.mode, args.compile)
    if args.mode == "auto" and draft is not None:  # the widest tree that fits is the most auto may pick
        widths = ladder(args.budget, args.compile)
        while len(widths) > 1 and memory_plan(config, draft, context, batch, args.tp, widths[-1], **more)["total"] > there:
            widths = widths[:-1]
        budget = args.budget = widths[-1]
    plan = check_fits(there, config, draft, context, batch, args.tp, budget=budget, **more)
    caches = plan["target latents"] + plan.get("drafter K/V", 0) + plan.get("waiting taps", 0)
    print(f"memory: {(plan['total'] - caches - plan['workspace']) / 1e9:.3f} GB of weights, {caches / 1e9:.3f} GB of caches, "
          f"{plan['workspace'] / 1e9:.3f} GB of workspace; {there / 1e9:.1f} GB there" + f", for each of {args.tp} ranks" * (args.tp > 1), file=sys.stderr)


def check_last(args: argparse.Namespace, draft: Optional[Drafter], folders: tuple, requests: list, slots: int, config: Config) -> None:
    """What only the drafter's config decides, then memory: nothing is read before. folders: the target's, and the drafter's or None."""
    check_pair_for(args.mode, args.budget, args.spine, draft)
    room = config.max_positions - len(requests[0].tokens) - 1
    need(args.tree is None or args.tree <= room, f"the context ends before round {args.tree}; ask for one up to {room}")
    check_memory(args, *(f and read_config(f) for f in folders), slots_for(requests, config.max_positions, args.compile), slots)


def check_flags(args: argparse.Namespace) -> None:
    """UserError on flags that do not go together. Of those that say what to decode, none is ignored in silence."""
    def apart(name, others, why):
        given = [f"--{other.replace('_', '-')}" for other in others if getattr(args, other)]
        need(not given, f"{name} {why}; leave {', '.join(given)} out")
    if args.plan:
        return apart("--plan", ("prompt", "prompts", "messages", "chat", "system", "stop", "out", "tree", "check", "color", "json"), "reads no prompt")
    need(args.context is None, "--context is a question to --plan; add it, or leave it out")
    need(args.batch is None or args.prompts is not None, "--batch goes with --prompts or --plan; add one, or leave it out (all of --prompt are one batch)")
    need(args.batch is None or args.batch >= 1, f"batch must be at least 1, got {args.batch}")
    need(args.out is None or args.prompts is not None, "--out takes the results of --prompts; add it, or redirect stdout")
    need(all(args.stop), "a stop text must not be empty")
    if args.prompts is not None:
        apart("--prompts", ("prompt", "messages", "tree", "check", "color", "json"), "serves a file, and its results are JSON")
    elif args.messages and not args.prompt:
        apart("--messages", ("chat", "system"), "holds a whole chat")
    if args.tree is not None:
        apart("--tree", ("check", "json"), "draws a round and stops")
    if args.json:
        apart("--json", ("color",), "prints no colours")


def read_chats(args: argparse.Namespace) -> list:
    """What is to be continued: texts (str), and chats (lists of messages)."""
    texts = read_prompts(args.prompt) if args.prompt or not args.messages else []
    return [as_chat(args, t) for t in texts] + [read_messages(Path(f)) for f in args.messages]


def as_chat(args: argparse.Namespace, text: str) -> Union[str, list]:
    """A prompt's text, or, where --chat or --system say so, the chat whose turn it is."""
    if not (args.chat or args.system):
        return text
    check_utf8(args.system or "", "the system message")
    return [*([{"role": "system", "content": args.system}] if args.system else []), {"role": "user", "content": text}]


def read_prompts(texts: Optional[list]) -> list:
    """The prompts' texts, stdin in the place of every '-'. UserError where stdin is not UTF-8 or there is no prompt."""
    if not texts:
        raise UserError("there is no prompt; pass --prompt TEXT, or --prompt - to read stdin")
    for i, t in enumerate(texts):
        check_utf8(t, f"prompt {i}")
    try:
        need("-" not in texts or sys.stdin is not None, "stdin is closed; give --prompt a text")
        return [sys.stdin.buffer.read().decode("utf-8") if t == "-" else t for t in texts]
    except UnicodeDecodeError as e:
        raise UserError(f"stdin is not UTF-8 (byte {e.object[e.start]:#04x} at offset {e.start}); convert it, e.g. with iconv") from None


def check_utf8(text: str, what: str) -> None:
    if any("\udc80" <= c <= "\udcff" for c in text):  # what Python makes of other bytes on the command line
        raise UserError(f"{what} is not UTF-8; convert it, e.g. with iconv")


def check_device(name: str) -> str:
    try:
        torch.zeros(1, device=name).item()  # meta has no values to read
    except Exception as e:  # every backend has its own way to be absent
        raise UserError(f"device {name!r} cannot be used ({str(e).splitlines()[0][:120]}); use cpu, or cuda where torch finds a GPU") from None
    return name


def draw_round(target, draft, tokenizer, prompt: list, number: int, args) -> str:
    """The tree of one round of one prompt, drawn."""
    keep = {}
    class Watching(Decoder):
        def build(self, marginals, conditional, plan):
            tree, score = super().build(marginals, conditional, plan)
            every = marginals if target.vocab is None else target.vocab.whole(marginals)
            keep["tree"], keep["probabilities"] = tree, node_probabilities(tree, every, conditional)
            return tree, score
    decoder = Watching(target, draft, 1, min(len(prompt) + (number + 1) * (draft.depths + 1), target.config.max_positions))
    r = Request(prompt, decoder.slots, args.temperature, args.top_p, args.top_k, args.seed)
    decoder.enter([0], [(decoder.slots, r.seed, r.temperature, r.top_k, r.top_p)])
    plan = Plan(args.mode, args.budget or BUDGET, args.spine, r.sampled, r.filtered)
    decoder.prepare(plan)
    prefill(decoder, [prompt], plan)
    for _ in range(number):
        if not decoder.active.item():
            raise UserError(f"the context ends before round {number}; ask for an earlier one")
        count, *tokens = decoder.round(plan, decoder.slots)[0].tolist()
    tree = keep["tree"]
    path, node = [0], 0
    for token in tokens[:count - 1]:  # follow what was emitted; siblings differ, so there is one way
        node = next(j for j in range(tree.tokens.shape[1]) if tree.parents[0, j] == node and tree.tokens[0, j] == token)
        path.append(node)
    return draw_tree(tree, keep["probabilities"], path, tokens[:count], lambda t: tokenizer.decode([t], skip_special_tokens=False), args.color)


def run(args: argparse.Namespace, launch: Launch) -> int:
    need(args.tp >= 1, f"--tp must be at least 1, got {args.tp}")
    need(args.experts is None or args.tp > 1, "--experts says how ranks share the experts; add --tp N, or leave it out")
    args.experts = args.experts or "tp"
    check_flags(args)
    if args.plan:
        print_plan(args)
        return 0
    args.device = launch.join(args.tp, args.device, args.timeout)
    if launch.joined:  # (where files lie may depend on the host)
        alike("the flags", {name: value is None if name in ("prompts", "out") else value for name, value in vars(args).items() if name not in ("model", "draft", "device")})
    texts = agree(read_chats(args) if args.prompts is None and launch.rank == 0 else [])  # there is one stdin
    folder, draft_folder = locate(args.model, args.draft)
    launch.wait()
    missed = draft_folder is None and args.mode in (None, "auto") and args.draft != "none"
    if args.mode in (None, "auto") and draft_folder is None:
        args.mode = "ar"
    if args.mode is None:  # a spine, and a drawing, are a ddtree's
        args.mode = "ddtree" if args.spine or args.tree is not None else "auto"
    need(args.mode in ("ar", "auto") or draft_folder is not None, f"mode {args.mode} needs a drafter and there is none; pass --draft, or use --mode ar")
    need(args.tree is None or args.mode in ("dflash", "ddtree") and args.tree >= 1,
         f"--tree draws a drafted round, numbered from 1; got round {args.tree} of mode {args.mode}")
    check_device(args.device)
    tokenizer, config = load_tokenizer(folder), parse_config(Config, read_config(folder), folder / "config.json")
    if launch.joined:  # (each rank looks for stop texts by itself)
        alike("the tokenizers", {"its checksum": zlib.crc32(tokenizer.to_str().encode())})
    def encoded(text: Union[str, list]) -> list:
        return encode(tokenizer, text) if isinstance(text, str) else encode_chat(tokenizer, folder, text)
    # whatever can be known to fail is said before weights are read
    check_settings(args.mode, args.budget, args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.seed, 1)
    default = Request([], args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.seed)
    file = None
    if args.prompts:
        if launch.rank == 0:
            file = open_file(args.prompts, args.out, lambda text: encoded(as_chat(args, text) if isinstance(text, str) else text), default,
                             tuple(args.stop), config)
        tasks, wrong = agree(file and (file.tasks, file.wrong))
        file = file or PromptFile(tasks, wrong, 0)  # the other ranks' results go where all their output goes
    if file and not file.tasks:
        return file.close()
    requests = [t.request for t in file.tasks] if file else agree([replace(default, tokens=encoded(t)) for t in texts])
    prompts, slots = [r.tokens for r in requests], min((args.batch or BATCH) if file else len(requests), len(requests))
    check_prompts(prompts, config.max_positions, config.vocab_size)
    target, draft = load_models(folder, draft_folder, args.device, DTYPES[args.dtype], args.block, args.draft_window, args.attention_factor,
                                args.experts if args.tp > 1 else None, checked=lambda draft: check_last(args, draft, (folder, draft_folder), requests, slots, config))
    launch.ready()
    if missed:
        print("no drafter beside the target: plain decode (pass --draft to speculate)", file=sys.stderr)
    stops = agree(read_stop_ids(folder, target.config, tokenizer))
    def progress(text: str) -> None:
        kept = text.startswith("compiled ")  # how long each graph took stays to be read
        if kept or sys.stderr.isatty():
            print(("\r\033[K" if sys.stderr.isatty() else "") + text, end="\n" if kept else "", file=sys.stderr, flush=True)

    if file:
        decoder, plan, pilot = open_batch(target, draft, requests, slots, args.mode, args.budget, args.spine, args.compile, progress)
        return serve_file(file, decoder, plan, tokenizer, stops, progress, pilot)
    settings = dict(budget=args.budget, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p,
                    top_k=args.top_k, seed=args.seed, stop_ids=stops, spine=args.spine, compile=args.compile)
    if args.tree is not None:
        print(draw_round(target, draft, tokenizer, prompts[0], args.tree, args))
        return 0
    live = len(prompts) == 1 and not args.json
    screen, results = Screen(tokenizer, len(prompts), tuple(args.stop), live, args.color), [Result() for _ in prompts]
    began = [time.perf_counter()]
    def ready():
        began[0] = time.perf_counter()
    interrupted, autos = False, []
    try:
        for e in rounds(target, draft, prompts, args.mode, until=screen.until, progress=progress, controller=autos.append, ready=ready, **settings):
            record(results[e.number], e, time.perf_counter() - began[0])
            if live and e.prefill:
                progress(f"{DIM}{texts[0]}{RESET}" if isinstance(texts[0], str) and sys.stdout.isatty() else "")
            screen.show(e)
            if not live:
                progress(f"{sum(bool(r.finish) for r in results)} of {len(results)} done, {sum(len(r.tokens) for r in results)} tokens")
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - began[0]
    screen.close()
    if live:
        print(flush=True)
    else:
        progress("")
    for i, (r, s) in enumerate(zip(results, screen.streams)):
        if args.json:
            print(json.dumps({"prompt": texts[i], "text": s.text, "tokens": r.tokens, "accepted": r.accepted, "finish": r.finish or "interrupted",
                              "mode": args.mode, "rounds": dict(Counter(r.modes)), "why": autos[0].why() if autos else None,
                              "first_token_s": round(r.first_token, 6), "seconds": round(r.seconds, 6)}), flush=True)
        elif not live:
            print(f"--- prompt {i}: {texts[i]!r}\n{screen.painted[i]}", flush=True)
    print(("interrupted; " if interrupted else "") + summary(args.mode, results, seconds) + (f"; {autos[0].summary()}" if autos else ""), file=sys.stderr)
    if interrupted:
        return 130
    if args.check:
        plain = Screen(tokenizer, len(prompts), tuple(args.stop), False, False)
        oracle = generate(target, draft, prompts, "ar", until=plain.until, **settings)
        for i, (a, b) in enumerate(zip(results, oracle)):
            if a.tokens != b.tokens:
                at = next((k for k, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), min(len(a.tokens), len(b.tokens)))
                print(f"check failed: prompt {i} differs from ar at token {at}: {a.tokens[at:at + 1]} against {b.tokens[at:at + 1]}", file=sys.stderr)
                return 1
        print(f"check passed: {args.mode} and ar emitted the same tokens", file=sys.stderr)
    return 0


def main(argv: Optional[list] = None) -> int:
    """Exit codes: 0; 1 where --check fails; 2 with one line on stderr where the user can mend it; 130 on Ctrl-C. A rank of a launch
    does not return: it ends here, with 1 and one line on any other error."""
    launch = Launch()
    return exit_code(lambda: launch.leave(run(parse_arguments(argv), launch)),
                     "--batch, --max-new-tokens or --budget, or take a smaller --dtype; --plan counts bytes", end=launch.fail)


if __name__ == "__main__":
    sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")  # None where closed
    for channel in (sys.stdout, sys.stderr):  # text is UTF-8 whatever the locale says
        channel.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.exit(main())
