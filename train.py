"""Trains a DFlash drafter, with or without DSpark's Markov head, for any target that loads here.

    python train.py draft --target DIR|ID --data prompts.jsonl --out DIR
    torchrun --nproc-per-node 8 train.py draft …          data-parallel: every rank holds the whole target

1. The target writes a response to every prompt, a shard at a time; what is written is never written again.
2. The drafter learns to say, from the target's hidden states before a position, the block that follows. The states are
   recomputed as they are needed, so nothing but text is stored; the target stays frozen, quantized or not.

A line of --data is {"prompt": TEXT}, {"messages": [{"role": …, "content": …}, …]} (an assistant's last turn is left out: the target
writes its own) or {"tokens": [ids]}. Where it has a "response" (text, or ids), that is taken instead of the target's.

Work files go to --work: responses/, state.pt (written every --save-every seconds, and --resume goes on from it, exactly) and
curve.jsonl: the loss, and the tokens per round that the engine itself reaches on held-out prompts while training. The defaults are
those of the bundled drafter. On small machines page faults dominate the allocator: MALLOC_MMAP_THRESHOLD_=2000000000
MALLOC_TRIM_THRESHOLD_=8000000000 MALLOC_TOP_PAD_=500000000 in the environment make training several times faster.

Shapes: B sequences, T tokens per sequence, M blocks (anchors) per sequence, b slots, D drafted depths, V vocabulary, h hidden size,
n taps.
"""
import argparse
import copy
import json
import math
import os
import sys
import time
import warnings
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Optional

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # before torch says so; nothing here needs it
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from chat import load_tokenizer, stop_ids
from checkpoint import check_pair, load_draft, load_target, parse_config, save_draft
from corpus import SHARD, Ranks, bar, draw_batch, join_ranks, progress, read_documents, read_prompts, save_atomically, write_responses
from draft import DraftConfig, Drafter
from generate import BUNDLED, DTYPES, Parser, check_device, generate, locate
from hub import UserError, few, read_config, resolve
from model import Config, Transformer, chain, upcast
from show import exit_code, told

MASK = "<|mask|>"  # the token that stands for what is to be drafted, where the vocabulary has one of this name
LOG_EVERY = 10     # steps between lines of the curve
PATIENCE = 3.0     # seconds other ranks leave rank 0 to say what is wrong


# The losses

ALPHA = 0.5  # how far D-PACE smooths the drafter's confidence


@torch.no_grad()
def read_target(target: Transformer, ids: Tensor, taps: tuple) -> tuple:
    """ids (B, T) -> taps (B, T, n*h), and what the target's head reads (B, T, h). Attention is the textbook form: nothing is cached."""
    x, rope, tapped = target.embed_tokens(ids), target.rope(chain(ids).depth), {}
    for i, layer in enumerate(target.layers):
        x = layer(x, rope)[0]
        if i in taps:
            tapped[i] = x
    return torch.cat([tapped[i] for i in taps], -1), target.norm(x)


def block_logits(draft: Drafter, taps: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
    """One block at every anchor (B, M), by the code that `propose` runs -> logits (B, M, D, V), each given the text's own token before
    it where there is a Markov head. The residual stream is at least fp32, whatever the target's embedding is."""
    B, T = ids.shape
    blocks = torch.full((*anchors.shape, draft.block), draft.config.mask_id, device=ids.device)
    blocks = torch.cat((ids.gather(1, anchors).unsqueeze(-1), blocks[..., 1:]), -1)      # root, mask, mask, …
    k, v = draft.context(taps, torch.arange(T, device=ids.device).expand(B, T))
    x = draft.hidden(upcast(draft.embed_tokens(blocks)), anchors, k, v)                  # (B, M, b, h)
    at = (anchors.unsqueeze(-1) + torch.arange(draft.depths, device=ids.device)).clamp(max=T - 1)
    return draft.logits(x, ids[rows_of(ids), at])


def rows_of(ids: Tensor) -> Tensor:
    return torch.arange(len(ids), device=ids.device).view(-1, 1, 1)


class DraftLoss(nn.Module):
    """The loss as a module, which is what DistributedDataParallel wraps."""

    def __init__(self, draft: Drafter, head: nn.Module, kind: str, gamma: float = 4.0):
        super().__init__()
        self.draft, self.kind, self.gamma, self.heads = draft, kind, gamma, [head]  # in a list: the target's head is no part of what is trained

    def forward(self, taps: Tensor, last: Tensor, ids: Tensor, end: Tensor, temperature: Tensor, anchors: Tensor, valid: Tensor) -> Tensor:
        """The sum over blocks of the weighted distances of their depths; last (B, T, h) is what the target's head reads.

        ce    -log q(the text's token), depth j weighted by exp(-(j - 1) / gamma): what is behind a rejected draft is worth little
        soft  KL(p || q), p what the target says at the text's temperature (its token, where that is 0), the same weights
        dpace -log q weighted by w_j = Σ_{m>=j} Π_{i<=m} q̃_i, q̃ = (1 - ALPHA) q + ALPHA: where the drafter stands, the gradient of the
              drafts it expects to have accepted (D-PACE)"""
        D, T = self.draft.depths, ids.shape[1]
        at = anchors.unsqueeze(-1) + torch.arange(D, device=ids.device)                  # (B, M, D): where each depth's label was decided
        counts = (at + 1 < end.view(-1, 1, 1)) & valid.unsqueeze(-1)                     # its label is there
        at, rows = at.clamp(max=T - 2), rows_of(ids)
        label = ids[rows, at + 1]
        logq = upcast(block_logits(self.draft, taps, ids, anchors)).log_softmax(-1)      # (B, M, D, V)
        if self.kind == "soft":
            with torch.no_grad():
                hot = temperature.view(-1, 1, 1, 1)
                p = (upcast(self.heads[0](last[rows, at])) / torch.where(hot > 0, hot, 1.0)).softmax(-1)
                p = torch.where(hot > 0, p, F.one_hot(label, p.shape[-1]).to(p.dtype))
            distance = (torch.special.xlogy(p, p) - p * logq).sum(-1)
        else:
            distance = -logq.gather(-1, label.unsqueeze(-1)).squeeze(-1)                 # (B, M, D)
        return (distance * weights(distance, counts, self.kind, self.gamma)).sum()


def weights(distance: Tensor, counts: Tensor, kind: str, gamma: float) -> Tensor:
    """distance, counts (B, M, D) -> what each depth counts, 0 where there is no label. Of ce and soft they add up to 1 in a whole block."""
    if kind != "dpace":
        weight = torch.exp(-torch.arange(distance.shape[-1], device=distance.device) / gamma)
        return counts * (weight / weight.sum())
    q = (1 - ALPHA) * torch.exp(-distance.detach()) + ALPHA
    reached = (q * counts).cumprod(-1)                                                   # all up to m accepted
    return reached.flip(-1).cumsum(-1).flip(-1) * counts


# Training

class Optimizer:
    """Muon for the matrices inside the layers, AdamW for embedding, head, norms and biases, as Moonlight was trained
    (arXiv 2502.16982). torch's Muon takes 2-D parameters only, so stacked experts go in as views of one expert each."""

    def __init__(self, model: torch.nn.Module, inner: tuple, lr: float, decay: float = 0.1):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.matrices = [p for n, p in named if p.dim() > 1 and n.startswith(inner)]
        rest = [p for n, p in named if not (p.dim() > 1 and n.startswith(inner))]
        self.views = [[torch.nn.Parameter(m) for m in self.split(p.data)] for p in self.matrices]
        self.parts = [torch.optim.Muon([v for views in self.views for v in views], lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
                      torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
        self.params = [p for _, p in named]

    @staticmethod
    def split(t: Tensor) -> tuple:
        return t.reshape(-1, *t.shape[-2:]).unbind(0)

    def step(self, lr: float) -> None:
        """One update at this learning rate, gradients clipped to norm 1 and then dropped."""
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for p, views in zip(self.matrices, self.views):
            for v, g in zip(views, self.split(p.grad)):
                v.grad = g
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
        for p in self.params:
            p.grad = None

    def state_dict(self) -> list:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list) -> None:
        for part, state in zip(self.parts, states):
            part.load_state_dict(state)


def schedule(step: int, steps: int, lr: float, warmup: int = 100) -> float:
    """Linear warm-up, then a straight line to zero."""
    return lr * min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1))


def default_taps(layers: int, count: int = 5) -> list:
    """Up to `count` layers, spread from layer 1 to the fourth from the end (of few layers: from what there is, never the last)."""
    first, last = min(1, layers - 2), max(min(1, layers - 2), layers - 4)
    return sorted({first + round(i * (last - first) / max(count - 1, 1)) for i in range(count)})


def draft_config(args, c: Config, tokenizer) -> tuple:
    """config.json of the drafter to train, in the published layout, and what it says. Sizes follow from the target's config c unless
    given; with --init they are that drafter's, which gets a head where --markov-rank asks for one it lacks."""
    head = {"markov_rank": args.markov_rank, "markov_head_type": args.markov_type or "vanilla"} if args.markov_rank else {}
    if args.init is not None:
        folder = resolve(args.init)
        raw = read_config(folder)
        has = parse_config(DraftConfig, raw, folder / "config.json")
        if has.markov_rank == 0:
            if args.markov_type and not head:
                raise UserError("the drafter of --init has no Markov head; --markov-rank gives it one, or leave --markov-type out")
            (raw.get("dflash_config") or raw.get("dspark_config") or raw).update(head)
        elif args.markov_rank not in (None, has.markov_rank) or args.markov_type not in (None, has.markov_type):
            raise UserError(f"the drafter of --init has a {has.markov_type} Markov head of rank {has.markov_rank}; leave --markov-rank and --markov-type out")
    else:
        wide = args.head_dim or (128 if c.hidden_size >= 1024 else 32)
        heads = args.heads or max(c.hidden_size // wide, 1)
        groups = args.kv_heads or next(g for g in range(max(heads // 3, 1), 0, -1) if heads % g == 0)
        mask = args.mask_id if args.mask_id is not None else tokenizer.token_to_id(MASK)
        if mask is None:
            raise UserError(f"the vocabulary has no token {MASK}; pass --mask-id, the id of a token that texts never hold (a reserved one)")
        own = {"target_layer_ids": args.taps or default_taps(c.num_layers), "mask_token_id": mask}
        own |= {"shift_label": True, **head} if args.slots == "next" else head
        raw = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": c.vocab_size, "hidden_size": c.hidden_size,
               "num_hidden_layers": args.layers, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": wide,
               "intermediate_size": args.ffn or -(-8 * c.hidden_size // (3 * 64)) * 64, "hidden_act": "silu", "attention_bias": False,
               "rms_norm_eps": c.eps, "rope_theta": c.rope.theta, "rope_scaling": None, "max_position_embeddings": c.max_positions,
               "tie_word_embeddings": False, "block_size": args.block, "num_target_layers": c.num_layers, "sliding_window": None,
               "layer_types": ["full_attention"] * args.layers, "dflash_config": own}
    config = parse_config(DraftConfig, raw, Path(args.init or args.out) / "config.json")
    check_pair(config, c, Path(args.init or args.out))
    return raw, config


def make_draft(args, config: DraftConfig, target: Transformer, device: str) -> Drafter:
    """The drafter to train, in at least fp32, from nothing or from --init."""
    wide = torch.float64 if target.norm.weight.dtype == torch.float64 else torch.float32
    draft = Drafter(config).to(wide)
    draft.init_weights(torch.Generator().manual_seed(args.seed))
    draft = draft.to(device)
    draft.share(target)
    draft.reset_frequencies()
    if args.init is not None:
        before = load_draft(resolve(args.init), target, device, wide)
        fresh = draft.load_state_dict(before.own_params(), strict=False).missing_keys
        assert all(k.startswith(("embed_tokens.", "lm_head.", "markov_head.")) for k in fresh)
        draft.embed_tokens, draft.lm_head = before.embed_tokens, before.lm_head  # the target's, or its own, which stay as they are
    return draft


def own_ends(draft: Drafter, target: Transformer) -> list:
    """Which of embed_tokens and lm_head are the drafter's own, and not the target's."""
    return [name for name in ("embed_tokens", "lm_head") if getattr(draft, name) is not getattr(target, name)]


def engine_acceptance(draft: Drafter, raw: dict, target: Transformer, held: list, tokens: int) -> dict:
    """Temperature -> tokens per round of the chain and of a tree of 32 on held-out prompts: what generate.py would reach now."""
    twin = Drafter(parse_config(DraftConfig, raw)).to(target.norm.weight)
    twin.load_state_dict(draft.own_params(), strict=False)
    twin.share(target)
    for name in own_ends(draft, target):  # trained beside fp32, they are fp32 here
        setattr(twin, name, copy.deepcopy(getattr(draft, name)).to(target.norm.weight))
    twin.requires_grad_(False).reset_frequencies()
    figures = {}
    for temperature in sorted({d.temperature for d in held}):
        prompts = [d.tokens[:d.first] for d in held if d.temperature == temperature]
        for mode in ("dflash", "ddtree"):
            results = generate(target, twin, prompts, mode, 32, tokens, temperature=temperature, seed=list(range(len(prompts))))
            rounds = sum(len(r.accepted) for r in results)
            figures.setdefault(f"{temperature:g}", {})["chain" if mode == "dflash" else "tree"] = sum(len(r.tokens) - 1 for r in results) / max(rounds, 1)
    return figures


class Curve:
    """curve.jsonl: a line per entry; going on from a state drops what was written after it."""

    def __init__(self, path: Path, step: int):
        lines = path.read_text().splitlines() if step and path.exists() else []
        kept = []
        for line in lines:
            try:
                kept += [line] if json.loads(line)["step"] <= step else []
            except ValueError:  # cut short when the process was killed
                break
        path.write_text("".join(f"{line}\n" for line in kept))
        self.file = open(path, "a")

    def add(self, **entry) -> None:
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()


def train_draft(args, ranks: Ranks, device: str) -> None:
    folder = locate(args.target, "none")[0]
    check_arguments(args, ranks)
    tokenizer, work, path = load_tokenizer(folder), Path(args.work), Path(args.work) / "state.pt"
    if path.exists() and not args.resume:
        raise UserError(f"{path} is of an earlier run; add --resume to go on from it, or pass another --work")
    config = parse_config(Config, read_config(folder), folder / "config.json")
    if args.seq_len > config.max_positions:
        raise UserError(f"--seq-len is {args.seq_len} and the target's context holds {config.max_positions}; lower it")
    stops = stop_ids(folder, config, tokenizer)
    items = read_prompts(Path(args.data), tokenizer, folder, config.vocab_size, stops)
    raw, shape = draft_config(args, config, tokenizer)
    target = load_target(folder, device, DTYPES[args.dtype])
    draft = make_draft(args, shape, target, device)
    write_responses(args, target, items, stops, ranks)
    documents, held = read_documents(args, items)
    optimizer, start, smooth = Optimizer(draft, ("layers.", "fc.", "kv_proj"), args.lr), 0, None
    settings = {k: v for k, v in vars(args).items() if k in FIXED} | {"texts": len(documents), "config": raw}
    if path.exists():
        state = torch.load(path, map_location=device)
        changed = [k for k in settings if state["settings"].get(k) != settings[k]]
        if changed:
            raise UserError(f"{path} is of a run with another {few(changed)}; go on with the same settings, or pass another --work")
        draft.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        start, smooth = state["step"], state["loss"]
    if not ranks.all_have((start, len(documents), zlib.crc32(json.dumps(documents).encode()))):
        raise UserError(f"the processes do not see the same texts and state in --work {work}; put it on a disk that all hosts share")
    model = DraftLoss(draft, target.lm_head, args.loss, args.gamma)
    if ranks.world > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a flag will be called one day
            model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    model = torch.compile(model, dynamic=False) if args.compile else model
    narrow = target.norm.weight.dtype in (torch.bfloat16, torch.float16)
    curve = Curve(work / "curve.jsonl", start) if ranks.rank == 0 else None
    began = saved = time.time()
    if ranks.rank == 0:
        progress(f"draft: {draft.num_params() / 1e6:.2f} M parameters, {len(documents)} texts, {len(held)} held out, steps {start} to {args.steps}", end=True)
    for step in range(start, args.steps):
        batch = draw_batch(documents, step, args, ranks, device)
        taps, last = read_target(target, batch.ids, draft.config.taps)
        with torch.autocast(torch.device(device).type, torch.bfloat16) if narrow else nullcontext():
            total = model(taps, last, *batch[:-1])
        (total * ranks.world / batch.blocks).backward()  # ranks' gradients are averaged: this way as one process has them
        optimizer.step(schedule(step, args.steps, args.lr, max(min(100, args.steps // 4), 1)))
        loss = ranks.sum(total.detach()).item() / batch.blocks
        smooth = loss if smooth is None else 0.98 * smooth + 0.02 * loss
        done, ends = step + 1 - start, step + 1 == args.steps
        pace = (time.time() - began) / done
        if ranks.rank == 0 and ((step + 1) % LOG_EVERY == 0 or done <= 3 or ends):
            curve.add(step=step + 1, loss=smooth, seconds=round(time.time() - began, 1))
            progress(f"draft {bar(step + 1, args.steps)}  loss {smooth:.3f}  {pace:.2f} s/step  {(args.steps - step - 1) * pace / 60:.1f} min left")
        if ranks.rank == 0 and held and ((step + 1) % args.eval_every == 0 or ends):
            figures = engine_acceptance(draft, raw, target, held, args.eval_tokens)
            curve.add(step=step + 1, held_out=figures)
            progress(f"draft {step + 1}/{args.steps}  held-out tokens per round: " + "  ".join(
                f"temperature {t}: chain {f['chain']:.2f}, tree of 32 {f['tree']:.2f}" for t, f in figures.items()), end=True)
        if ranks.rank == 0 and (time.time() - saved > args.save_every or ends):
            save_atomically({"model": draft.own_params(), "optimizer": optimizer.state_dict(), "step": step + 1, "loss": smooth, "settings": settings}, path)
            saved = time.time()
    if ranks.rank == 0:
        save_draft(draft, raw, Path(args.out), own=tuple(f"{name}.weight" for name in own_ends(draft, target)))
        progress(f"written to {args.out}: python generate.py --model {args.target} --draft {args.out} --prompt …", end=True)
    ranks.wait()


# The command line

FIXED = ("target", "data", "init", "layers", "block", "slots", "taps", "markov_rank", "markov_type", "loss", "gamma", "anchors", "seq_len", "batch", "lr",
         "steps", "seed", "held_out", "temperature", "dtype")  # a run that is resumed must have them as it began
SHAPES = ("layers", "block", "slots", "taps", "mask_id", "heads", "kv_heads", "head_dim", "ffn")  # what --init brings


def check_arguments(args, ranks: Ranks) -> None:
    """UserError on the first argument that cannot work; fills in the defaults that --init would contradict."""
    given = [k for k in SHAPES if getattr(args, k) is not None]
    if args.init is not None and given:
        raise UserError(f"--{few(given).replace('_', '-')} cannot be given with --init, whose drafter has its own")
    for name, value in (("layers", 4), ("block", 8), ("slots", "masked")):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.init is None:
        args.markov_rank, args.markov_type = 128 if args.markov_rank is None else args.markov_rank, args.markov_type or "vanilla"
    for name in ("layers", "anchors", "batch", "steps", "eval_every", "eval_tokens", "write_batch"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.batch % ranks.world:
        raise UserError(f"--batch {args.batch} cannot be divided over {ranks.world} processes")
    if not args.anchors < args.seq_len:
        raise UserError(f"--anchors must be less than --seq-len {args.seq_len}, got {args.anchors}")
    if not -2 ** 63 <= args.seed < 2 ** 63:
        raise UserError(f"--seed must fit 64 bits, got {args.seed}")
    numbers = 0 < args.lr < math.inf and 0 < args.gamma < math.inf and all(t == 0 or 1e-4 <= t < math.inf for t in args.temperature)
    if min(args.markov_rank or 0, args.held_out) < 0 or not numbers:
        raise UserError("--markov-rank and --held-out must not be negative, --temperature 0 or at least 0.0001, and --lr and --gamma must be positive numbers")


def parse_arguments(argv: Optional[list]) -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("what", choices=("draft",), help="what to train: a drafter")
    add("--target", default=BUNDLED, metavar="DIR|ID", help="what the drafter drafts for (default: the bundled target)")
    add("--data", default="out/prompts.jsonl", metavar="FILE.jsonl", help="prompts, one JSON object a line (default: those pretrain.py wrote)")
    add("--out", default="checkpoints/tiny/draft", metavar="DIR", help="where the drafter is written")
    add("--work", default="out/draft", metavar="DIR", help="responses, the resumable state, the curve (default out/draft)")
    add("--init", metavar="DIR", help="start from this drafter; with --markov-rank, one without a head is given one")
    add("--resume", action="store_true", help="go on from the state in --work, if there is one")
    add("--layers", type=int, help="of the drafter (default 4)")
    add("--block", type=int, help="slots of a block, the root included (default 8)")
    add("--slots", choices=("masked", "next"), help="masked: a slot predicts its own position (default); next: the one after")
    add("--taps", type=int, nargs="+", metavar="LAYER", help="target layers whose outputs it sees (default: 5, from layer 1 to the fourth from the end)")
    add("--mask-id", type=int, help=f"a token that no text holds (default: {MASK}, where there is one)")
    add("--heads", type=int, help="query heads (default: hidden size / head dim)")
    add("--kv-heads", type=int, help="key and value heads (default: a third of the query heads, or fewer)")
    add("--head-dim", type=int, help="default 128; 32 for a hidden size below 1024")
    add("--ffn", type=int, help="width of its FFNs (default: 8/3 of the hidden size)")
    add("--markov-rank", type=int, help="rank of the Markov head; 0 for none (default 128; with --init, what that drafter has)")
    add("--markov-type", choices=("vanilla", "gated"), help="default vanilla; with --init, what that drafter has")
    add("--loss", choices=("ce", "soft", "dpace"), default="soft", help="see DraftLoss (default soft)")
    add("--gamma", type=float, default=4.0, help="of ce and soft: how slowly later depths lose weight (default 4)")
    add("--anchors", type=int, default=48, help="blocks per text and step (default 48)")
    add("--seq-len", type=int, default=256, help="tokens of a text, prompt included (default 256)")
    add("--batch", type=int, default=32, help="texts per step, of all processes together (default 32)")
    add("--lr", type=float, default=2e-3)
    add("--steps", type=int, default=1800)
    add("--temperature", type=float, nargs="+", default=[0.7, 0.7, 0.0, 1.0], help="of responses, by turns (default 0.7 0.7 0 1)")
    add("--write-batch", type=int, default=SHARD, help="responses written at once")
    add("--held-out", type=int, default=16, help="prompts kept aside, to measure with (default 16)")
    add("--eval-every", type=int, default=200, metavar="STEPS")
    add("--eval-tokens", type=int, default=64, help="tokens per held-out prompt")
    add("--save-every", type=float, default=120, metavar="SECONDS", help="between states to resume from (default 120)")
    add("--seed", type=int, default=0, help="of the first weights")
    add("--device", default="cpu")
    add("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of the target (default bfloat16); the drafter is trained in at least fp32")
    add("--compile", action="store_true", help="compile the step: slow to start, then faster")
    return parser.parse_args(argv)


def main(argv: Optional[list] = None) -> int:
    """Exit codes: those of generate.py."""
    ranks = Ranks()
    def run() -> int:
        nonlocal ranks
        args = parse_arguments(argv)
        ranks, device = join_ranks(args.device)
        train_draft(args, ranks, check_device(device))
        return 0
    def end(line: str, code: int, error: Optional[BaseException] = None) -> int:
        rank = int(os.environ.get("RANK", "0"))
        if rank and error is None:  # what fails on all ranks, rank 0 has said before, and torchrun has ended the others
            time.sleep(PATIENCE)
            line = line.replace("error: ", f"error: rank {rank}: ", 1) if code == 2 else ""
        return told(line, code, error)
    code = exit_code(run, "--batch, --anchors or --seq-len", "\ninterrupted; the same command with --resume goes on from the last saved state", end)
    if ranks.world > 1:
        if code == 0:
            dist.barrier()
            dist.destroy_process_group()
        sys.stderr.flush(), sys.stdout.flush()
        os._exit(code)  # gloo's threads may outlive the interpreter's end otherwise
    return code


if __name__ == "__main__":
    sys.exit(main())
