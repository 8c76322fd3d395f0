"""What runs on every rank of a launch: collectives, one decision for all, and what happens when a rank fails.

Shapes: B sequences, N nodes, V vocabulary, v = V/n token ids of a rank (rounded up), n ranks.
"""
import pickle
from typing import NamedTuple, Optional

import torch
from torch import Tensor


# Collectives. They are torch's functional ones: nodes of a graph like any other, so that a compiled round stays one graph

def all_sum(x: Tensor, group: str) -> Tensor:
    """The sum of x over all ranks, on every rank, to the same bits."""
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))


def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """x of every rank: (n, *x.shape), in the order of ranks."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), ranks, group)
    return torch.ops._c10d_functional.wait_tensor(gathered).unflatten(0, (ranks, -1))


# One decision for all ranks

class Vocabulary(NamedTuple):
    """This rank's logits are those of `size` of the `total` token ids, from `first` on; those past the last id are -inf."""
    first: int
    size: int
    total: int
    ranks: int
    group: str  # the name of the group of all ranks

    def gather(self, x: Tensor) -> Tensor:
        return all_gather(x, self.ranks, self.group)

    def whole(self, logits: Tensor) -> Tensor:
        """logits (…, v) of each rank -> (…, V), exactly what one rank would have."""
        return self.gather(logits).movedim(0, -2).flatten(-2)[..., :self.total]


def best(logits: Tensor, vocab: Optional[Vocabulary] = None) -> Tensor:
    """argmax over the last dim: token ids, the lowest among equals, whether one rank holds all logits (None) or each some."""
    ids = logits.argmax(-1)
    if vocab is None:
        return ids
    # one gather: the value's bits travel beside the id. Ranks hold ascending ids, so the first maximum has the lowest
    value = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1).double().view(torch.int64)
    value, ids = vocab.gather(torch.stack((value, ids + vocab.first), -1)).unbind(-1)                # (n, …)
    return ids.gather(0, value.view(torch.float64).argmax(0, keepdim=True)).squeeze(0)


def alone() -> bool:
    """Whether no other rank takes part."""
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def agree(value, shared: bool = True):
    """Rank 0's value, on every rank: any object that pickles. For what the host decides from something that differs between ranks
    (a clock, stdin); all ranks must call it at the same place. Alone, or where ranks do not share a model (shared: its `vocab` is not
    None), it returns its argument. It goes over the hosts' network, in about a millisecond, and does not wait for the device."""
    if not shared or alone():
        return value
    dist = torch.distributed
    # torch's own broadcast of objects wants numpy, which nothing else here does
    mine = dist.get_rank() == 0
    text = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if mine else None
    size = torch.tensor(len(text) if mine else 0)
    dist.broadcast(size, 0)
    text = text if mine else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, 0)
    return value if mine else pickle.loads(bytes(text.tolist()))


def least(value: int) -> int:
    """The least of all ranks' values, on every rank; alone, its argument."""
    if alone():
        return value
    box = torch.tensor(value)
    torch.distributed.all_reduce(box, torch.distributed.ReduceOp.MIN)
    return box.item()


# What a round sends

def draft_misfits(d, size: int) -> list:
    """What keeps `size` ranks from dividing a drafter (DraftConfig), in words: then each rank has all of it."""
    wrong = [f"{what} {n} over {size}" for what, n in (("heads", d.num_heads), ("FFN width", d.ffn), ("input", len(d.taps) * d.hidden_size)) if n % size]
    return wrong + [f"kv heads {d.num_kv_heads} over {size}"] * bool(d.num_kv_heads % size and size % d.num_kv_heads)


class Collective(NamedTuple):
    what: str
    kind: str    # "all_reduce" or "all_gather"
    count: int   # in one round
    bytes: int   # of each: what a rank gives to it. An all-reduce returns as much, a gather n times as much


def traffic(config, draft, plan, batch: int, size: int, item: int, block: Optional[int] = None) -> list:
    """The Collectives of one round of `batch` rows on `size` ranks; the same for every way to divide the experts.

    config, draft: Config, and DraftConfig (or None in mode ar); plan: verify.Plan; item: bytes of a number; block: the drafter's, if
    smaller than trained. Counted from the shapes; a test counts the same in a traced round. [] on one rank."""
    if size == 1:
        return []
    h, D, P, nodes = config.hidden_size * item, 0, 1, 1
    sent, copied = [], draft is not None and bool(draft_misfits(draft, size))
    if draft is not None:
        b = block or draft.block
        D = draft.drafted(b)
    if plan.mode != "ar":
        budget = plan.ladder[-1] if plan.ladder and plan.mode == "ddtree" else plan.budget
        W = min(plan.candidates if draft.markov_rank else budget, config.vocab_size)
        chain = 16 if not draft.markov_rank else 8 * (min(W, -(-config.vocab_size // size)) + 1)
        tree = 8 * (min(W, -(-config.vocab_size // size)) + 1)
        nodes = 1 + (D if plan.mode == "dflash" else plan.budget)
        P = 1 + min(D, nodes - 1)
        sent += [Collective("the drafter's embedding", "all_reduce", 1, batch * b * h)]
        sent += [] if copied else [Collective("the drafter's layers", "all_reduce", 2 * draft.num_layers, batch * b * h)]
        sent += [Collective("draft candidates", "all_gather", 1, batch * D * (chain if plan.mode == "dflash" else tree))]
    logits = -(-config.vocab_size // size) * item
    sent += [Collective("the target's embedding", "all_reduce", 1, batch * nodes * h),
             Collective("the target's layers", "all_reduce", 2 * config.num_layers, batch * nodes * h),
             Collective("the target's tokens", "all_gather", 1, batch * nodes * (logits if plan.filtered else 16))]
    if plan.ladder:
        sent += [Collective("the target's confidence", "all_gather", 1, 2 * batch * max(item, 4))]
    if draft is not None and not copied:
        sent += [Collective("taps to draft K/V", "all_reduce", 1, batch * P * h)]
    return sent
