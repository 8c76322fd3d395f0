"""What forwards cost: timing tools, bytes moved, verification on real text, and layers of a real model's size with random weights.
bench.py prints with it.

Shapes: B sequences, N nodes, T tokens.
"""
import os
import platform
import statistics
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Iterator

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # before torch says so; nothing here needs it
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoint import keep_packed, on_meta, parse_config
from ddtree import CANDIDATES, build_tree, candidate_tables, grow, ranked_tokens
from draft import MarkovHead
from generate import DTYPES
from hub import UserError, read_json
from model import Config, MoE, Router, Transformer, attention_bias, chain
from plan import memory_of, workspace
from serve import prefill, span_for
from timing import device_name, now
from verify import Decoder, Plan

CONFIGS = Path(__file__).parent / "tests" / "configs"
CONTEXTS = (64, 256, 512, 896)  # as many as the model's context holds
MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


# Numbers and tables

def spread(values: list) -> dict:
    """Median and quartiles."""
    q1, _, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3
    return {"median": statistics.median(values), "q1": q1, "q3": q3}


def short(x, digits: int = 2) -> str:
    """A cell: '-' for None, a spread as `median [q1, q3]`."""
    if isinstance(x, dict):
        return f"{short(x['median'], digits)} [{short(x['q1'], digits)}, {short(x['q3'], digits)}]"
    return "-" if x is None else f"{x:.{digits}f}" if isinstance(x, float) else str(x)


def table(head: list, rows: list) -> None:
    """Columns as wide as their cells; the first one to the left, numbers to the right."""
    cells = [head] + [[short(c) for c in row] for row in rows]
    width = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print("  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, width))).rstrip(), flush=True)


def rounded(x):
    """What goes to JSON: six digits are more than any clock here gives."""
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items() if k != "texts"}
    return [rounded(v) for v in x] if isinstance(x, (list, tuple)) else float(f"{x:.6g}") if isinstance(x, float) else x


def progress(text: str = "") -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def machine(args) -> dict:
    return {"device": device_name(torch.device(args.device)), "cores": os.cpu_count(),
            "threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version(), "dtype": args.dtype,
            "malloc": "tuned" if all(name in os.environ for name in MALLOC) else "default"}


def timings(calls: dict, device, repeats: int, warm: int = 3) -> dict:
    """Name -> milliseconds of every repeat, the calls taking turns."""
    times = {name: [] for name in calls}
    for n in range(warm + repeats):
        for name, call in calls.items():
            began = now(device)
            call()
            times[name] += [(now(device) - began) * 1e3] if n >= warm else []
    return times


def copy_gb_s(device) -> float:
    source = torch.ones(2 ** (28 if device.type == "cuda" else 26), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(timings({"copy": lambda: target.copy_(source)}, device, 9)["copy"]) / 1e6


# Bytes and times of a forward

class Reads(TorchDispatchMode):
    """Counts the bytes that operators take from one tensor; making a view takes none."""

    def __init__(self, tensor: Tensor):
        super().__init__()
        self.storage, self.bytes = tensor.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        def ours(t):
            return isinstance(t, Tensor) and t.untyped_storage().data_ptr() == self.storage
        views = ours(out[0] if isinstance(out, (tuple, list)) and out else out)
        self.bytes += 0 if views else sum(t.nbytes for t in args if ours(t))
        return out


@contextmanager
def watching(model: nn.Module) -> Iterator[list]:
    """A list to which every call of a router adds how many distinct experts it touched."""
    touched = []
    hooks = [m.register_forward_hook(lambda m, args, out: touched.append(len(out[1].unique()))) for m in model.modules() if isinstance(m, Router)]
    try:
        yield touched
    finally:
        for hook in hooks:
            hook.remove()


def compiled(fn: Callable, on: bool) -> Callable:
    if on:
        torch._dynamo.config.recompile_limit = 256  # one graph per shape is meant here
    return torch.compile(fn, mode="reduce-overhead", fullgraph=True, dynamic=False) if on else fn


def captured(call: Callable) -> Callable:
    """One CUDA graph of what call() launches, captured by hand: quick to make, and nothing is fused."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # first calls set libraries up, which a capture forbids
        call()
    side.synchronize()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def weight_bytes(module: nn.Module, routed: bool = False) -> int:
    """Bytes of the routed experts, or of all else."""
    return sum(p.nbytes for name, p in module.named_parameters() if (".experts." in name) == routed)


def cost(ms: list, base: list, touched: list, moved: float, copy: float, **where) -> dict:
    """A row about one verification: base is the time of the one it is compared with, touched the experts of each layer."""
    gb_s = moved / statistics.median(ms) / 1e6
    return {**where, "ms": spread(ms), "x": spread([a / b for a, b in zip(ms, base)]), "experts": float(statistics.mean(touched or [0])),
            "bytes": moved, "gb_s": gb_s, "of_copy": gb_s / copy}


# Verification, on real text

@torch.no_grad()
def verify_costs(pair: tuple, prompts: list, batch: int, nodes: list, copy: float, args) -> list:
    """A row per number of nodes and context. The context is real text, the trees are the drafter's."""
    (target, draft, _), c, device = pair, pair[0].config, pair[0].norm.weight.device
    text = [sum(prompts[i % len(prompts):] + prompts[:i % len(prompts)], []) for i in range(batch)]  # another beginning for every row
    text = torch.tensor([(row * (c.max_positions // len(row) + 1))[:c.max_positions] for row in text], device=device)
    contexts = [n for n in args.contexts or CONTEXTS if n + max(nodes) <= c.max_positions]
    if not contexts:
        raise UserError(f"a context of {min(args.contexts or CONTEXTS)} and {max(nodes)} nodes exceed the {c.max_positions} positions of the model")
    decoder = Decoder(target, draft, batch, max(contexts) + max(nodes))
    prefill(decoder, text[:, :max(contexts)].tolist(), Plan("ar"))
    lookup = 0 if target.lm_head.weight is target.embed_tokens.weight else target.embed_tokens.weight.nbytes
    expert = weight_bytes(target, routed=True) / (sum(c.moe_layers) * c.num_experts or 1)
    forward, points, calls = compiled(lambda *a: target(*a, decoder.taps), args.compile), {}, {}
    for context in contexts:  # a shorter context is the same cache with fewer slots in sight
        root, length, span = text[:, context], torch.full((batch,), context, device=device), span_for(context, decoder.slots)
        for N in nodes:
            tree = chain(text[:, context:context + N])
            if draft is not None and N > 1:
                marginals, conditional = draft.proposal(root, length, span)
                tree = build_tree(marginals, root, N - 1, conditional=conditional, candidates=CANDIDATES)
            with watching(target) as touched, Reads(target.cache) as reads:
                target(tree, length, span, decoder.taps)
            points[N, context] = touched, batch * span * target.latent_bytes_per_token(), reads.bytes
            calls[N, context] = lambda tree=tree, length=length, span=span: forward(tree, length, span)
    times = timings(calls, device, args.repeats)
    return [cost(times[N, context], times[nodes[0], context], touched, weight_bytes(target) - lookup + sum(touched) * expert + seen, copy,
                 batch=batch, nodes=N, context=context, context_bytes=seen, context_bytes_taken=taken) for (N, context), (touched, seen, taken) in points.items()]


def show_context(rows: list) -> None:
    contexts, nodes = sorted({r["context"] for r in rows}), sorted({r["nodes"] for r in rows})
    at = {(r["nodes"], r["context"]): r for r in rows}
    print("\n(a) is the context read once? Milliseconds of a verification by nodes and context; MB of latents that its operators take at the longest")
    table(["nodes", *(f"{c} tokens" for c in contexts), "longest - shortest", "MB taken", "of the context"],
          [[str(N), *(at[N, c]["ms"] for c in contexts), at[N, contexts[-1]]["ms"]["median"] - at[N, contexts[0]]["ms"]["median"],
            at[N, contexts[-1]]["context_bytes_taken"] / 1e6, at[N, contexts[-1]]["context_bytes_taken"] / at[N, contexts[-1]]["context_bytes"]] for N in nodes])
    print("Scores take a latent whole, values its first part again: below 2 of the context, whatever the nodes, means once per layer and product.")


def candidate_costs(rows: list, costs: list, pair: tuple) -> list:
    """What the round of each case (rows: of one concurrency and temperature) reads, takes, and must win."""
    (target, draft, _), B = pair, rows[0]["concurrency"]
    context = min((c["context"] for c in costs), key=lambda c: abs(c - 256))
    at, ar_ms, out = {c["nodes"]: c for c in costs if c["context"] == context}, B / rows[0]["tok_s"]["median"] * 1e3, []
    for r in rows:
        c, pooled = at[nodes_of(r, draft)], r["pooled"]
        moved = c["bytes"] if r["mode"] == "ar" else c["bytes"] + draft.weight_bytes() + draft.lm_head.weight.nbytes + B * context * draft.kv_bytes_per_token()
        besides = B * pooled / r["tok_s"]["median"] * 1e3 - c["ms"]["median"]  # milliseconds of a round that are not verification
        out.append({**c, "case": r["case"], "tokens_per_round": pooled, "round_bytes": moved, "bytes_per_token": moved / pooled / B,
                    "must_win": pooled / r["ratio"]["median"], "even_at": (pooled * ar_ms - besides) / at[1]["ms"]["median"]})
    print(f"\n(b) what does a candidate cost? Batch {B}, {context} tokens of context; {target.config.num_experts} experts, {target.config.experts_per_token} per token")
    table(["mode", "nodes", "verify ms", "x 1 node", "experts/layer", "MB/round", "tokens/round", "MB/token", "GB/s", "of copy", "must win", "even at"],
          [[o["case"], str(o["nodes"]), o["ms"], o["x"], o["experts"], o["round_bytes"] / 1e6, o["tokens_per_round"], o["bytes_per_token"] / 1e6,
            o["gb_s"], f"{o['of_copy']:.0%}", o["must_win"], o["even_at"]] for o in out])
    return out


def nodes_of(row: dict, draft) -> int:
    return 1 if row["mode"] == "ar" else draft.depths + 1 if row["mode"] == "dflash" else row["budget"] + 1


# Layers of a real model's size, with random weights

def read_model_config(name: str) -> Config:
    path = Path(name) if Path(name).is_file() else CONFIGS / f"{name}.json"
    if not path.is_file():
        raise UserError(f"no config {name!r}; give a file, or one of {', '.join(sorted(p.stem for p in CONFIGS.glob('*.json'))) or '(none)'}")
    return parse_config(Config, read_json(path), path)


def random_target(config: Config, args) -> Transformer:
    """Filled where it will live. UserError where it does not fit there."""
    target, device = on_meta(Transformer, config, DTYPES[args.dtype]), torch.device(args.device)
    for m in target.modules():
        if args.int4 and isinstance(m, MoE):
            keep_packed(m, config)
    B, S, N, item = max(args.concurrency), max(args.contexts), max(args.nodes), DTYPES[args.dtype].itemsize
    need = target.weight_bytes() + B * S * target.latent_bytes_per_token() + workspace(config, B * N, N, S, 1, item, B * N)
    free = memory_of(args.device)
    if need > free:
        raise UserError(f"{config.num_layers} layers at batch {B}, context {S} and {N} nodes need {need / 1e9:.1f} GB, {args.device} has {free / 1e9:.1f} GB; "
                        "lower --layers, --concurrency, --contexts or --nodes")
    target.to_empty(device=device)
    for name, p in target.named_parameters():
        if p.dtype == torch.int32:
            p.random_(-2 ** 31, 2 ** 31 - 1)
        elif p.dim() > 1:
            p.normal_(std=0.005 if name.endswith("_scale") else 0.02)
        else:
            p.fill_(float("bias" not in name))
    target.reset_frequencies()
    return target


@torch.no_grad()
def bench_random(args) -> dict:
    """Times the head, a dense layer and some sparse ones each by themselves, and adds up as many as the full model has."""
    full = read_model_config(args.config)
    dense, sparse = full.moe_layers.count(False), full.moe_layers.count(True)
    if not 1 <= args.layers <= sparse:
        raise UserError(f"layers must be between 1 and the {sparse} sparse ones of {args.config}, got {args.layers}")
    kinds, nodes = (False,) * min(dense, 1) + (True,) * args.layers, sorted({1, *args.nodes})
    args.contexts = sorted({min(c, full.max_positions - nodes[-1]) for c in args.contexts or (1024, 16384)})
    target = random_target(replace(full, num_layers=len(kinds), moe_layers=kinds), args)
    device, expert, latents = target.norm.weight.device, weight_bytes(target, routed=True) / args.layers / full.num_experts, target.latent_bytes_per_token()
    weights = weight_bytes(target.lm_head) + dense * weight_bytes(target.layers[0]) + sparse * weight_bytes(target.layers[-1])
    parts = {"head": [], "dense": range(len(kinds) - args.layers), "sparse": range(len(kinds) - args.layers, len(kinds))}  # the layers of each
    count = {"head": 1, "dense": dense, "sparse": sparse / args.layers}  # how often each measured part stands in the full model

    def run(part, span, x, rope, bias):
        for i in parts[part]:
            x, _ = target.layers[i](x, rope, target.cache[i, :, :span], bias)
        return x if parts[part] else target.lm_head(target.norm(x))
    call, copy, rows = compiled(run, args.compile), copy_gb_s(device), []
    for B, context in ((B, context) for B in args.concurrency for context in args.contexts):
        progress(f"batch {B}, context {context}")
        calls, experts = {}, {}
        try:
            target.setup_cache(B, context)
            target.cache.normal_()
            for N in nodes:
                tree, length = chain(torch.randint(full.vocab_size, (B, N), device=device)), torch.full((B,), context, device=device)
                a = (context, target.embed_tokens(tree.tokens), target.rope(length.unsqueeze(1) + tree.depth),
                     attention_bias(tree, length, context, target.frequencies.dtype))
                with watching(target) as experts[N]:
                    run("sparse", *a)
                calls |= {(N, part): lambda part=part, a=a: call(part, *a) for part in parts if part == "head" or parts[part]}
            times = timings({k: captured(f) for k, f in calls.items()} if args.capture else calls, device, args.repeats)
        except torch.OutOfMemoryError:
            progress()
            print(f"batch {B}, context {context}: out of memory")
            continue
        ms = {N: [sum(times[N, p][i] * count[p] for p in parts if (N, p) in times) for i in range(args.repeats)] for N in nodes}
        for N in nodes:
            moved = weights + sparse * statistics.mean(experts[N]) * expert + B * context * latents / len(kinds) * full.num_layers
            rows.append(cost(ms[N], ms[1], experts[N], moved, copy, batch=B, context=context, nodes=N,
                             sparse_layer_ms=statistics.median(times[N, "sparse"]) / args.layers))
    progress()
    print(f"\n{args.config}: {len(kinds)} of {full.num_layers} layers measured, numbers are those of all {full.num_layers}; {args.dtype}"
          f"{', int4 experts' if args.int4 else ''}; {full.num_experts} experts, {full.experts_per_token} per token; a copy moves {copy:.1f} GB/s")
    table(["batch", "context", "nodes", "verify ms", "x 1 node", "ms of a sparse layer", "experts/layer", "MB/round", "GB/s", "of copy"],
          [[str(r["batch"]), str(r["context"]), str(r["nodes"]), r["ms"], r["x"]["median"], r["sparse_layer_ms"], r["experts"], r["bytes"] / 1e6,
            r["gb_s"], f"{r['of_copy']:.0%}"] for r in rows])
    print("Random weights route almost evenly; trained ones touch fewer experts. A draft must win more tokens/round than `x 1 node`.")
    return {"copy_gb_s": copy, "random": rows}


# Building trees of a large vocabulary

class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that operators make."""
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.bytes = max([self.bytes, *(t.nbytes for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor))])
        return out


@torch.no_grad()
def bench_trees(args, depths: int = 7, vocab: int = 163840, rank: int = 256) -> dict:
    """Milliseconds to rank the tokens, and to build whole trees from marginals and over a Markov head's conditionals: random values,
    for the work does not depend on them. What conditionals cost more is bounded: they score prefixes x CANDIDATES pairs per depth."""
    device, dtype, rows = torch.device(args.device), DTYPES[args.dtype], []
    head = MarkovHead(SimpleNamespace(vocab_size=vocab, markov_rank=rank, markov_type="vanilla", hidden_size=1)).to(device, dtype)
    def conditional(depth, before, ids):
        return head(before, None, ids)
    for B in args.concurrency:
        marginals, root = torch.randn(B, depths, vocab, device=device, dtype=dtype), torch.zeros(B, dtype=torch.long, device=device)
        for budget in args.budgets:
            progress(f"batch {B}, budget {budget}")
            tables = candidate_tables(depths, vocab, budget, device)
            calls = {"rank": lambda: ranked_tokens(marginals, CANDIDATES), "marginals": lambda: grow(marginals, root, budget, tables=tables),
                     "conditionals": lambda: grow(marginals, root, budget, conditional=conditional, candidates=CANDIDATES)}
            calls = {name: compiled(call, args.compile) for name, call in calls.items()}
            largest = {}
            for name in ("rank", "conditionals"):
                with Largest() as mode:
                    ranked_tokens(marginals, CANDIDATES) if name == "rank" else grow(marginals, root, budget, conditional=conditional, candidates=CANDIDATES)
                largest[name] = mode.bytes
            times = timings(calls, device, args.repeats)
            rows.append({"batch": B, "budget": budget, **{name: spread(ms) for name, ms in times.items()}, "largest": largest})
    progress()
    print(f"\nbuilding a tree: {depths} depths, {vocab} tokens, a Markov head of rank {rank}, {CANDIDATES} candidates; {args.dtype}; milliseconds")
    table(["batch", "budget", "rank tokens", "from marginals", "over conditionals", "largest tensor, MB", "of ranking, MB"],
          [[str(r["batch"]), str(r["budget"]), r["rank"], r["marginals"], r["conditionals"], r["largest"]["conditionals"] / 1e6,
            r["largest"]["rank"] / 1e6] for r in rows])
    return {"trees": rows}
