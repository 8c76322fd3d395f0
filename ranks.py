"""What runs on every rank of a launch: collectives, one decision for all, and what happens when a rank fails.

Shapes: B sequences, N nodes, V vocabulary, v = V/n token ids of a rank (rounded up), n ranks.
"""
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


def agree(value):
    """Rank 0's value, on every rank: any object that pickles. For what the host decides from something that differs between ranks
    (a clock, stdin); all ranks must call it at the same place. Alone it returns its argument. It goes over the hosts' network, in
    about a millisecond, and does not wait for the device."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
