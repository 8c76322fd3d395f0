"""The text a drafter learns from: prompts, the target's responses to them, and the batch of every step.

The target writes its responses once, a shard at a time; `draw_batch` is a pure function of the step, the same on every rank. So a
run that was killed goes on as if it had not been, and more ranks train on the same batches.

Shapes: B sequences, T tokens per sequence, M blocks (anchors) per sequence.
"""
import datetime
import json
import os
import sys
import time
import zlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Union

import torch
import torch.distributed as dist
from torch import Tensor

from chat import encode, encode_chat
from hub import UserError
from launch import own_device
from model import Transformer
from serve import Request, open_batch, serve

SHARD = 128        # responses per file


def progress(text: str, end: bool = False) -> None:
    """One line on stderr, rewritten in place on a terminal."""
    tty = sys.stderr.isatty()
    print(("\r\033[K" if tty else "") + text, end="\n" if end or not tty else "", file=sys.stderr, flush=True)


def bar(done: int, total: int, width: int = 24) -> str:
    full = done * width // max(total, 1)
    return "█" * full + "░" * (width - full) + f" {done}/{total}"


def save_atomically(state: Union[dict, str], path: Path) -> None:
    """A state or a text: the whole of it, or what was there before."""
    part = Path(f"{path}.part")
    part.write_text(state) if isinstance(state, str) else torch.save(state, part)
    os.replace(part, path)


# Ranks

class Ranks(NamedTuple):
    """Who of how many this process is; torchrun says so in the environment."""
    rank: int = 0
    world: int = 1

    def sum(self, x: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def all_have(self, numbers: tuple) -> bool:
        """Whether every rank has the same integers."""
        if self.world == 1:
            return True
        most = torch.tensor([*numbers, *(-n for n in numbers)], device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(most, dist.ReduceOp.MAX)  # the largest of each, and the least with its sign turned
        return most.tolist() == [*numbers, *(-n for n in numbers)]


def join_ranks(device: str) -> tuple:
    """-> Ranks, and this rank's device. UserError where the launch cannot work."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Ranks(), device
    kind = device.partition(":")[0]
    if kind == "cuda":
        if "LOCAL_RANK" not in os.environ:
            raise UserError(f"WORLD_SIZE is {world} and LOCAL_RANK is not set; start the processes with torchrun")
        device = own_device(device, int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", world)), "processes")
    try:  # ranks wait for each other's honest work: responses written, prompts decoded
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=datetime.timedelta(days=1))
    except Exception as e:
        raise UserError(f"{world} processes could not join ({' '.join(str(e).split())[:150]}); start them with torchrun") from None
    return Ranks(dist.get_rank(), world), device


# The text

def read_prompts(path: Path, tokenizer, folder: Path, vocab: int, stops: tuple) -> list:
    """A file of lines -> [(prompt ids, response ids or None)]. UserError names the first line that is wrong."""
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--data {path} cannot be read: {getattr(e, 'strerror', None) or 'it is not UTF-8'}") from None
    items = []
    for number, line in enumerate(lines, 1):
        try:
            d = json.loads(line)
            if "tokens" in d:
                prompt = list(d["tokens"])
            elif "messages" in d:
                turns = d["messages"][:-1] if d["messages"][-1]["role"] == "assistant" else d["messages"]
                prompt = encode_chat(tokenizer, folder, turns)
            else:
                prompt = encode(tokenizer, d["prompt"])
            response = d.get("response")
            if isinstance(response, str):  # as the target would have ended it
                response = tokenizer.plain.encode(response, add_special_tokens=False).ids + list(stops[:1])
            bad = next((t for t in prompt + (response or []) if type(t) is not int or not 0 <= t < vocab), None)
            if bad is not None or not prompt:
                raise UserError("the prompt is empty" if not prompt else f"{bad!r} is no token id; the vocabulary has {vocab}")
        except UserError as e:
            raise UserError(f"{path}, line {number}: {e}") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
            raise UserError(f'{path}, line {number} must hold {{"prompt": TEXT}}, {{"messages": […]}} or {{"tokens": […]}} ({type(e).__name__}: {e})') from None
        items.append((prompt, response))
    if not items:
        raise UserError(f"--data {path} holds no line; give it one prompt a line")
    return items


class Document(NamedTuple):
    """A prompt and its response. Labels lie at positions first … len(tokens) - 1: in the response alone."""
    tokens: list
    first: int
    temperature: float  # the response was drawn at; 1 for one that came with the data
    written: bool       # by the target


def write_responses(args, target: Transformer, items: list, stops: tuple, ranks: Ranks) -> None:
    """The target's response to every prompt that came without one: work/responses/00000.jsonl, …, each whole or absent. Prompt i
    is continued at the i-th temperature, in turns, with seed i; the id that ends a response belongs to it."""
    folder, most = Path(args.work) / "responses", min(args.seq_len, target.config.max_positions)
    folder.mkdir(parents=True, exist_ok=True)
    same = {"target": str(args.target), "data": zlib.crc32(json.dumps(items).encode()), "temperature": args.temperature, "seq_len": most}
    known = folder / "settings.json"
    there = known.exists()
    try:
        other = there and json.loads(known.read_text()) != same
    except (OSError, ValueError) as e:
        raise UserError(f"{known} cannot be read ({type(e).__name__}: {e}); remove {folder}, or pass another --work") from None
    if other:
        raise UserError(f"{folder} was written for another target, --data, --temperature or --seq-len; pass another --work, or remove it")
    ranks.wait()  # all have looked before the first writes
    if ranks.rank == 0 and not there:
        save_atomically(json.dumps(same), known)
    todo = [i for i, (prompt, response) in enumerate(items) if response is None and len(prompt) < most]
    shards, began, made = [todo[at:at + SHARD] for at in range(0, len(todo), SHARD)], time.time(), 0
    for n, shard in enumerate(shards):
        path = folder / f"{n:05}.jsonl"
        if n % ranks.world != ranks.rank or path.exists():
            continue
        requests = [Request(items[i][0], most - len(items[i][0]), args.temperature[i % len(args.temperature)], seed=i) for i in shard]
        texts = [[] for _ in shard]
        decoder, plan, _ = open_batch(target, None, requests, min(args.write_batch, len(shard)), "ar", 1, False, False)
        def until(row, tokens):
            return next((k + 1 for k, t in enumerate(tokens) if t in stops), None)
        for e in serve(decoder, requests, plan, until=until):
            texts[e.number] += e.tokens
        lines = [json.dumps({"number": i, "temperature": r.temperature, "response": t}) for i, r, t in zip(shard, requests, texts)]
        save_atomically("\n".join(lines) + "\n", path)
        made += sum(map(len, texts))
        progress(f"responses {bar(n + 1, len(shards))} shards  {made / (time.time() - began):.0f} tokens/s", end=n + ranks.world >= len(shards))
    ranks.wait()


def read_documents(args, items: list) -> tuple:
    """(training, held-out) lists of Documents; those held out are written by the target, and drawn by a fixed rule."""
    documents = []
    for path in sorted((Path(args.work) / "responses").glob("*.jsonl")):
        for d in map(json.loads, path.read_text().splitlines()):
            documents.append(Document(items[d["number"]][0] + d["response"], len(items[d["number"]][0]), d["temperature"], True))
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0)).tolist()
    documents = [documents[i] for i in order]
    held, train = documents[:args.held_out], documents[args.held_out:]
    train += [Document((prompt + response)[:args.seq_len], len(prompt), 1.0, False) for prompt, response in items
              if response is not None and len(prompt) < args.seq_len]
    train = [d for d in train if len(d.tokens) > d.first]
    if not train or len(held) < args.held_out:
        raise UserError(f"--data gives {len(train)} texts to train on and {len(held)} of the {args.held_out} to hold out; give it more prompts "
                        f"that are shorter than --seq-len {args.seq_len}, or lower --held-out")
    return train, held


class Batch(NamedTuple):
    """What one step trains on, of this rank; a pure function of the step."""
    ids: Tensor          # (B, T)
    end: Tensor          # (B,) tokens of each row; the rest is padding
    temperature: Tensor  # (B,)
    anchors: Tensor      # (B, M) positions of block roots
    valid: Tensor        # (B, M) False where a response has fewer positions than M
    blocks: int          # valid ones on all ranks


def draw_batch(documents: list, step: int, args, ranks: Ranks, device: str) -> Batch:
    """Every rank draws the whole batch and takes its rows. A row is one document, so no block reaches into another."""
    numbers = range(step * args.batch, (step + 1) * args.batch)
    picked = [documents[shuffled(len(documents), i // len(documents))[i % len(documents)]] for i in numbers]
    ids = torch.zeros(args.batch, args.seq_len, dtype=torch.long)
    for row, d in zip(ids, picked):
        row[:len(d.tokens)] = torch.tensor(d.tokens)
    first, end = torch.tensor([d.first for d in picked]), torch.tensor([len(d.tokens) for d in picked])
    anchors, valid = draw_anchors(first, end, args.anchors, args.seq_len, step)
    own = slice(ranks.rank * args.batch // ranks.world, (ranks.rank + 1) * args.batch // ranks.world)
    parts = (ids, end, torch.tensor([d.temperature for d in picked]), anchors, valid)
    return Batch(*(t[own].to(device) for t in parts), int(valid.sum()))


@lru_cache(2)
def shuffled(count: int, epoch: int) -> list:
    """The order of an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000_000 + epoch)).tolist()


def draw_anchors(first: Tensor, end: Tensor, count: int, length: int, seed: int) -> tuple:
    """first, end (B,) -> distinct positions (B, M) of block roots, and which of them are valid: those in [first - 1, end - 1), so that
    a label follows and lies in the response. Always M of them, so that shapes stay: where there are fewer, the rest is invalid."""
    position = torch.arange(length)
    noise = torch.rand(len(first), length, generator=torch.Generator().manual_seed(2_000_000 + seed))
    fits = (position >= first.unsqueeze(1) - 1) & (position < end.unsqueeze(1) - 1)
    best = noise.masked_fill(~fits, -1).topk(count, -1)
    return best.indices, best.values >= 0
