"""What decoding would cost on machines that are not here: a model, not a measurement.

    python bench.py --simulate                                        Kimi-K2.6 and its drafter on 8 devices, tensor and expert parallel
    python bench.py --simulate --machine h200 --concurrency 1 64 --contexts 1024 --chain 3.5
    python bench.py --simulate --fit                                  points that users reported, what was fitted to them, what is left over

The seconds of a round are counted from the configs: for every part of the model the bytes that each device must read, the products it
must make, the collectives and the launches. A part takes as long as the slower of its bytes and its products; parts do not overlap.
Distinct experts of T tokens are E (1 - (1 - K/E)^T) where routing is uniform, fewer where it is not (--skew). Expert parallel waits for
the device with the most of them. What a width wins comes from a drafter whose best token is right with one probability at every
depth, the rest falling as rank^-1.2 (which meets the widths measured on the bundled pair), and the tree is the one that ddtree.py grows. The
same controller that picks at run time (auto.py) picks here.

Shapes: B sequences, N nodes, T = B*N tokens, S context, L layers, E experts, K experts per token, D drafted depths, W widths.
"""
import argparse
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, NamedTuple

import torch

from auto import WIDTHS, Auto, candidates_for
from chat import encode
from checkpoint import check_pair, keep_packed, on_meta, parse_config
from costs import table
from ddtree import grow
from draft import DraftConfig, Drafter
from generate import Parser, load
from hub import UserError, read_json
from model import Config, MoE, Router, Transformer
from plan import memory_plan, shared, storage, weights
from ranks import traffic
from verify import Plan

CONFIGS, PROMPTS = Path(__file__).parent / "tests" / "configs", Path(__file__).parent / "bench" / "prompts.jsonl"
READ, MULTIPLY = 0.8, 0.5   # shares of a data sheet's bytes/s and flops that kernels reach: assumed, not fitted
RANK = 1.2                  # a drafter's other tokens: their odds fall with rank^-RANK
LAYOUTS = ("tp", "ep")


class Machine(NamedTuple):
    """Of one device, from data sheets: bytes/s of its memory, dense bf16 products (flops/s), bytes of memory; of the link between
    devices: bytes/s and the seconds a small collective takes."""
    bytes_s: float
    flops: float
    memory: float
    link: float
    collective: float


MACHINES = {
    "rtx-pro-6000": Machine(1.79e12, 0.5e15, 96e9, 50e9, 25e-6),     # PCIe 5
    "h100": Machine(3.35e12, 0.99e15, 80e9, 450e9, 10e-6),           # NVLink
    "h200": Machine(4.8e12, 0.99e15, 141e9, 450e9, 10e-6),
    "b200": Machine(8.0e12, 2.25e15, 180e9, 900e9, 10e-6),
    "mi300x": Machine(5.3e12, 1.3e15, 192e9, 448e9, 20e-6)}          # Infinity Fabric


class Engine(NamedTuple):
    """Seconds of a round that neither bytes nor products explain: launches, host, and waiting."""
    layer: float    # per layer, of target and drafter alike


@dataclass
class Pair:
    """Bytes and sizes of a target and its drafter, for n devices."""
    name: str
    config: dict
    draft_config: dict
    devices: int
    target: Config = field(init=False)
    draft: DraftConfig = field(init=False)
    held: dict = field(init=False)            # kind -> bytes of the target on each device
    draft_bytes: float = field(init=False)    # of the drafter, on each
    item: int = 2

    def __post_init__(self):
        self.target, self.draft = parse_config(Config, self.config), parse_config(DraftConfig, self.draft_config)
        check_pair(self.draft, self.target, "(its config)")
        model = on_meta(Transformer, self.target, torch.bfloat16)
        if storage(self.config) == "int4":
            for m in model.modules():
                if isinstance(m, MoE):
                    keep_packed(m, self.target)
        drafter = on_meta(Drafter, self.draft, torch.bfloat16)
        # (bytes are those of tp: with whole experts a device holds as much)
        of_target, of_draft = shared(self.target, storage(self.config) == "int4", torch.bfloat16, self.devices, "tp")
        self.held, shapes = weights(model, of_target(model)), of_draft(drafter)
        self.draft_bytes = sum(math.prod(shapes[name]) * p.element_size() for name, p in drafter.own_params().items())

    @property
    def depths(self) -> int:
        return self.draft.drafted(self.draft.block)


# What a round takes

def distinct(experts: int, chosen: int, tokens: int, skew: float = 0.0) -> float:
    """Expected distinct experts of `tokens` tokens that choose `chosen` of `experts` each, independently. skew: the odds of an expert
    fall with rank^-skew; 0 is uniform, E (1 - (1 - K/E)^T)."""
    odds = [(i + 1) ** -skew for i in range(experts)]
    total = sum(odds)
    return sum(1 - (1 - min(1.0, chosen * p / total)) ** tokens for p in odds)


def busiest(experts: int, devices: int, odds: float) -> float:
    """Expected distinct experts on the device that has the most, each of `experts` being wanted with these odds, experts/devices on each:
    the largest of `devices` binomial counts."""
    n, below, out = experts // devices, 0.0, 0.0
    for k in range(n):
        below += math.comb(n, k) * odds ** k * (1 - odds) ** (n - k)
        out += 1 - min(below, 1.0) ** devices
    return out


@torch.no_grad()
def measured_skew(target: Transformer, texts: list, windows: tuple = (2, 4, 8, 16)) -> float:
    """The skew under which `distinct` meets, on average over layers, the distinct experts of `windows` consecutive tokens of real texts
    (lists of token ids)."""
    c, counts = target.config, {T: [] for T in windows}
    def note(module, args, out):
        ids = out[1].tolist()
        for T in windows:
            counts[T] += [len(set().union(*ids[i:i + T])) for i in range(0, len(ids) - T + 1, T)]
    hooks = [m.register_forward_hook(note) for m in target.modules() if isinstance(m, Router)]
    try:
        for text in texts:
            target.score(torch.tensor([text], device=target.norm.weight.device))
    finally:
        for hook in hooks:
            hook.remove()
    found = {T: sum(n) / len(n) for T, n in counts.items()}
    def error(skew):
        return sum((distinct(c.num_experts, c.experts_per_token, T, skew) - n) ** 2 for T, n in found.items())
    return min((i / 50 for i in range(151)), key=error)


def collectives(pair: Pair, machine: Machine, plan: Plan, batch: int) -> float:
    """Seconds of a round's collectives, as ranks.traffic counts them: each waits once, and an all-reduce sends 2 (n-1)/n of its bytes and
    a gather n-1 times its bytes over a rank's link."""
    n = pair.devices
    sent = traffic(pair.target, pair.draft if plan.mode != "ar" else None, plan, batch, n, pair.item)
    return sum(s.count * (machine.collective + s.bytes * (2 * (n - 1) / n if s.kind == "all_reduce" else n - 1) / machine.link) for s in sent)


def round_parts(pair: Pair, machine: Machine, engine: Engine, layout: str, batch: int, plan: Plan, context: int, skew: float = 0.0) -> dict:
    """What -> seconds of a round of `batch` sequences."""
    drafted = plan.mode != "ar"
    c, d, n, T = pair.target, pair.draft, pair.devices, batch * (1 + plan.budget * drafted)
    read, multiply = machine.bytes_s * READ, machine.flops * MULTIPLY
    def part(size: float, weights: float, tokens: int, item: float = pair.item) -> float:
        """Reading size bytes, and multiplying `tokens` tokens with that many weights."""
        return max(size / read, 2 * weights * tokens / multiply)
    sparse, parts = c.moe_layers.count(True), {}
    routed = pair.held.get("routed experts", 0)
    if sparse:
        share = distinct(c.num_experts, c.experts_per_token, T, skew) / c.num_experts
        busy = busiest(c.num_experts, n, share) * n / c.num_experts if layout == "ep" else share
        one_expert = 3 * c.hidden_size * c.expert_ffn
        # a rank of ep multiplies its own experts with the tokens that want them, by the same share as it is the busiest
        parts["routed experts"] = max(routed * busy / read, 2 * sparse * one_expert * c.experts_per_token * T / n * (busy / share) / multiply)
    for kind in ("attention", "shared experts", "dense layers", "routers and norms"):
        if kind in pair.held:
            parts[kind] = part(pair.held[kind], pair.held[kind] / pair.item, T)
    head = c.vocab_size * c.hidden_size * pair.item / n
    parts["head"] = part(head, head / pair.item, T) + drafted * part(head, head / pair.item, batch * pair.depths)
    latents = batch * context * c.num_layers * c.latent_dim * pair.item  # a latent serves all heads: each device reads all of them
    products = 2 * T * context * c.num_layers * c.num_heads / n * (2 * c.kv_lora_rank + c.rope_dim)
    parts["context"] = max(latents / read, products / multiply)
    if drafted:
        kv = batch * context * 2 * d.num_layers * max(1, d.num_kv_heads // n) * d.head_dim * pair.item
        parts["drafter"] = part(pair.draft_bytes, pair.draft_bytes / pair.item, batch * d.block) + kv / read
    if n > 1:
        parts["collectives"] = collectives(pair, machine, plan, batch)
    parts["launches and host"] = engine.layer * (c.num_layers + drafted * d.num_layers)
    return parts


# What a width wins

def odds_of(q: float, depths: int, widths: tuple = WIDTHS, others: int = 400) -> list:
    """(W + 1, D): the odds that a draft is accepted at each depth, of the tree of each width and of the chain, where the drafter's best
    token is right with probability q at every depth."""
    rest = torch.arange(1, others + 1).double() ** -RANK
    odds = torch.cat((torch.tensor([q]).double(), (1 - q) * rest / rest.sum()))
    tree, score = grow(odds.log().float().expand(1, depths, len(odds)), torch.zeros(1, dtype=torch.long), max(*widths, depths))
    mass = score[0].exp().unsqueeze(-1) * (tree.depth[0].unsqueeze(-1) == torch.arange(1, depths + 1))
    return [mass.cumsum(0)[n].tolist() for n in widths] + [[q ** d for d in range(1, depths + 1)]]


def sureness(tokens: float, depths: int) -> float:
    """The q whose chain of `depths` drafts emits `tokens` tokens per round. UserError outside 1 … depths + 1."""
    if not 1 < tokens < depths + 1:
        raise UserError(f"a chain of {depths} drafts emits more than 1 and less than {depths + 1} tokens per round, got {tokens}")
    low, high = 0.0, 1.0
    for _ in range(50):
        q = (low + high) / 2
        low, high = (q, high) if sum(q ** d for d in range(depths + 1)) < tokens else (low, q)
    return q


def choice(pair: Pair, machine: Machine, engine: Engine, layout: str, batch: int, context: int, odds: list, widths: tuple = WIDTHS, skew: float = 0.0) -> tuple:
    """The controller's choice, and for every candidate (its Plan, tokens per second of the batch, parts of its round)."""
    candidates, D = candidates_for(pair.depths, widths), pair.depths
    parts = [round_parts(pair, machine, engine, layout, batch, c, context, skew) for c in candidates]
    seconds = [sum(p.values()) for p in parts]
    known = {"mass": [list(row) for row in odds], "accepted": [1.0] * D, "expected": [1.0] * D, "weight": [1.0] * len(odds)}
    auto = Auto(candidates, {batch: seconds}, D, {**known, "then": [0.5] * len(odds), "confidence": [0.5], "allowance": [0.0]})
    return auto.current, [(c, batch * auto.gain(i) / s, p) for i, (c, s, p) in enumerate(zip(candidates, seconds, parts))]


def because(parts: dict) -> str:
    """The two parts that take most of a round."""
    total, most = sum(parts.values()), sorted(parts.items(), key=lambda p: -p[1])[:2]
    return ", ".join(f"{kind} {seconds / total:.0%}" for kind, seconds in most)


# Points that others reported

class Point(NamedTuple):
    """tok/s of all sequences together that a user of a public engine reported. chain: drafts per round (0: plain decode)."""
    what: str
    tok_s: float
    layout: str
    batch: int
    chain: int
    source: str


CONTEXT = 2000   # of the reported points: none states it
# By users of public engines: a Kimi-K2.6 deployment on eight GPUs, and a user on 8 x MI300X. No link can be given.
REPORTED = (
    Point("EP8, plain decode", 65, "ep", 1, 0, "deployment"), Point("TP8 with graphs, plain decode", 98, "tp", 1, 0, "deployment"),
    Point("DFlash, block 8 (EP8 assumed)", 86, "ep", 1, 7, "deployment"), Point("high concurrency, plain decode", 1493, "ep", 0, 0, "deployment"),
    Point("high concurrency, DFlash", 1146, "ep", 0, 7, "deployment"),
    Point("8 requests, plain decode", 90.4, "tp", 8, 0, "mi300x user"), Point("8 requests, 2 drafts", 127.1, "tp", 8, 2, "mi300x user"),
    Point("12 requests, plain decode", 125.1, "tp", 12, 0, "mi300x user"), Point("12 requests, 2 drafts", 192.8, "tp", 12, 2, "mi300x user"))
USER_ACCEPTS = 2.0   # tokens per round with 2 drafts: the user reports 45-67 % of drafts accepted, about 50 % as the tuned value


def solve(target: float, of: Callable, low: float, high: float) -> float:
    """x where the falling function of(x) is `target`, between low and high; the end that is nearer where it is nowhere."""
    for _ in range(60):
        x = (low + high) / 2
        low, high = (x, high) if of(x) > target else (low, x)
    return x


def fit(pair: Pair, deployment: Machine, user: Machine) -> tuple:
    """Engines and assumptions fitted to REPORTED, and rows (point, model, residual, fitted on it?)."""
    def tok_s(machine, engine, point, tokens=1.0, batch=None):
        B, plan = batch or point.batch, Plan("dflash", point.chain) if point.chain else Plan("ar", 0)
        return B * tokens / sum(round_parts(pair, machine, engine, point.layout, B, plan, CONTEXT).values())
    eager_ar, graph_ar, dflash, many_ar, many_dflash, *users = REPORTED
    eager = Engine(solve(eager_ar.tok_s, lambda x: tok_s(deployment, Engine(x), eager_ar), 0, 1e-2))
    graph = Engine(solve(graph_ar.tok_s, lambda x: tok_s(deployment, Engine(x), graph_ar), 0, 1e-2))
    accepts = dflash.tok_s / tok_s(deployment, eager, dflash)           # tokens per round that would give 86
    many = min(range(1, 513), key=lambda B: abs(tok_s(deployment, eager, many_ar, batch=B) - many_ar.tok_s))
    def error(x):  # squared logs of four points, one unknown
        return sum(math.log(tok_s(user, Engine(x), p, USER_ACCEPTS if p.chain else 1.0) / p.tok_s) ** 2 for p in users)
    theirs = Engine(min((i * 1e-5 for i in range(400)), key=error))
    rows = []
    for p in REPORTED:
        machine, engine = (user, theirs) if p in users else (deployment, graph if p is graph_ar else eager)
        tokens = 1.0 if not p.chain else USER_ACCEPTS if p in users else accepts
        model = tok_s(machine, engine, p, tokens, many if not p.batch else None)
        rows.append((p, model, model / p.tok_s - 1, p in (eager_ar, graph_ar, dflash, many_ar)))
    return {"eager": eager, "graph": graph, "user": theirs, "accepts": accepts, "many": many}, rows


def show_fit(pair: Pair, name: str) -> None:
    found, rows = fit(pair, MACHINES[name], MACHINES["mi300x"])
    print(f"Points reported by users of public engines (a Kimi-K2.6 deployment on eight GPUs, a user on 8 x MI300X); no link can be given. {pair.name}, "
          f"8 devices; context {CONTEXT}, the layouts of three points and the deployment's devices ({name}) are assumed: no source states them. A model, "
          "not a measurement.")
    table(["point", "source", "reported tok/s", "model tok/s", "residual", ""],
          [[p.what, p.source, str(p.tok_s), f"{m:.1f}", f"{r:+.0%}", "fitted on this" if on else "one unknown for four" if p.source != "deployment" else "not fitted"]
           for p, m, r, on in rows])
    print(f"Fitted: {found['eager'].layer * 1e6:.0f} us per layer without graphs (from 65), {found['graph'].layer * 1e6:.0f} us with them (from 98), "
          f"{found['accepts']:.2f} tokens per round of DFlash (from 86), {found['many']} requests (from 1493), {found['user'].layer * 1e6:.0f} us per layer on "
          f"the user's machine (from their four points, {USER_ACCEPTS:g} tokens per round as reported). Four unknowns are spent on four of "
          "the deployment's five points: only the fifth, 1146, tests the model there.")


# The command line

def parse_arguments(argv: list) -> argparse.Namespace:
    parser = Parser(prog="bench.py --simulate", description="What rounds would cost elsewhere. A model, not a measurement.")
    add = parser.add_argument
    add("--config", default="kimi_k26", metavar="NAME|FILE", help="the target's config.json, or a name in tests/configs (default kimi_k26)")
    add("--draft-config", default="kimi_k25_dflash", metavar="NAME|FILE", help="the drafter's (default kimi_k25_dflash)")
    add("--machine", default="rtx-pro-6000", choices=tuple(MACHINES), help="figures of one device and its link (default rtx-pro-6000)")
    add("--bytes-s", type=float, metavar="X", help="instead: bytes/s of a device's memory")
    add("--flops", type=float, metavar="X", help="instead: dense bf16 flops/s of a device")
    add("--link", type=float, metavar="X", help="instead: bytes/s between devices")
    add("--collective-us", type=float, metavar="X", help="instead: microseconds of a small collective")
    add("--memory", type=float, metavar="X", help="instead: bytes of a device's memory")
    add("--devices", type=int, default=8, metavar="N")
    add("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    add("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64, 256], metavar="B")
    add("--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 131072], metavar="S")
    add("--widths", type=int, nargs="+", default=list(WIDTHS), metavar="N", help="drafted nodes of a tree")
    add("--chain", type=float, default=3.0, metavar="X", help="tokens per round of the drafter's chain (default 3)")
    add("--skew", default="0", metavar="X|measured", help="routing: odds of experts fall with rank^-X (default 0: uniform); measured: as the bundled target's do")
    add("--layer-us", type=float, metavar="X", help="microseconds per layer that bytes do not explain (default: fitted to a reported point with graphs)")
    add("--fit", action="store_true", help="the reported points and what is left over, and stop; takes no other flag")
    return parser.parse_args(argv)


def read_config(name: str) -> dict:
    path = Path(name) if Path(name).is_file() else CONFIGS / f"{name}.json"
    if not path.is_file():
        raise UserError(f"no config {name!r}; give a file, or one of {', '.join(sorted(p.stem for p in CONFIGS.glob('*.json'))) or '(none)'}")
    return read_json(path)


def run(argv: list) -> int:
    args = parse_arguments(argv)
    if args.fit and len(argv) > 1:
        raise UserError("--fit is about the reported points, whose pair and machines are given; leave the other flags out")
    for name in ("devices", "concurrency", "contexts", "widths", "bytes_s", "flops", "link", "collective_us", "memory"):
        value = getattr(args, name)
        least = min(value) if isinstance(value, list) else value
        if least is not None and not (0 < least < math.inf):
            raise UserError(f"--{name.replace('_', '-')} must be positive, got {least}")
    try:
        args.skew = args.skew if args.skew == "measured" else float(args.skew)
    except ValueError:
        raise UserError(f"--skew must be a number, or measured, got {args.skew!r}") from None
    if args.skew != "measured" and not 0 <= args.skew < 10 or args.layer_us is not None and not 0 <= args.layer_us < math.inf:
        raise UserError(f"--skew must be between 0 and 10 and --layer-us at least 0, got {args.skew} and {args.layer_us}")
    pair = Pair(args.config, read_config(args.config), read_config(args.draft_config), args.devices)
    if max(args.contexts) > pair.target.max_positions:
        raise UserError(f"a context of {max(args.contexts)} is longer than the model's, {pair.target.max_positions}")
    given = {"bytes_s": args.bytes_s, "flops": args.flops, "memory": args.memory, "link": args.link,
             "collective": args.collective_us and args.collective_us * 1e-6}
    machine = MACHINES[args.machine]._replace(**{k: v for k, v in given.items() if v is not None})
    if args.fit:
        show_fit(Pair("kimi_k26", read_config("kimi_k26"), read_config("kimi_k25_dflash"), 8), "rtx-pro-6000")
        return 0
    if args.layer_us is None:
        reference = Pair("kimi_k26", read_config("kimi_k26"), read_config("kimi_k25_dflash"), 8)
        engine = fit(reference, MACHINES["rtx-pro-6000"], MACHINES["mi300x"])[0]["graph"]
    else:
        engine = Engine(args.layer_us * 1e-6)
    if args.skew == "measured":
        target, _, tokenizer = load(draft="none")
        args.skew = measured_skew(target, [encode(tokenizer, json.loads(line)["prompt"]) for line in PROMPTS.read_text().splitlines()])
    widths = tuple(sorted(set(args.widths)))
    odds = odds_of(sureness(args.chain, pair.depths), pair.depths, widths)
    print(f"{args.config} on {args.devices} x {args.machine}: a model, not a measurement. tok/s of all sequences together; the chain gives {args.chain:g} tokens "
          f"per round, trees of {', '.join(map(str, widths))}: {', '.join(f'{1 + sum(row):.2f}' for row in odds[:-1])}; routing "
          f"{'uniform' if not args.skew else f'rank^-{args.skew:g}'}; {engine.layer * 1e6:.0f} us per layer beyond bytes and products")
    rows = []
    for layout in args.layouts:
        for context in args.contexts:
            for B in args.concurrency:
                best, found = choice(pair, machine, engine, layout, B, context, odds, widths, args.skew)
                total = memory_plan(pair.config, pair.draft_config, context, B, args.devices, max(found[best][0].budget, 1))["total"]
                fits = "" if total <= machine.memory else f" (needs {total / 1e9:.0f} GB)"
                rows.append([layout, f"{context // 1024}k" if context % 1024 == 0 else str(context), str(B), *(f"{tok_s:.0f}" for _, tok_s, _ in found),
                             found[best][0].name, f"{found[best][1] / found[0][1]:.2f}", because(found[best][2]) + fits])
    table(["layout", "context", "batch", *(c.name for c in candidates_for(pair.depths, widths)), "best", "x ar", "because of"], rows)
    return 0
