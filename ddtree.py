"""The draft tree: the `budget` most probable prefixes under a drafter's marginals (DDTree, best-first), exact, batched, on the device.

Marginals of different depths are independent, so a prefix scores the sum of its tokens' log probabilities and never beats
its own parent: the best `budget` prefixes are closed under taking parents, and they ARE the tree that a best-first heap grows.
So no heap is needed. Depth by depth the best `budget` prefixes are extended by the most probable tokens; one last sort
over all depths picks the tree. Everything has a static shape, and nothing is read on the host.

Ties go to the lower token id, then to the better parent: the same tree on every device.

Shapes: B sequences, D depths, V vocabulary, W kept tokens per depth, P kept prefixes of a depth, M candidates of all depths,
N = budget + 1 nodes.
"""
from typing import Optional

import torch
from torch import Tensor

from model import Tree, chain  # noqa: F401  (both belong to this interface)
from parallel import Vocabulary


def candidate_pairs(parents: int, width: int, budget: int, device=None) -> Tensor:
    """(2, pairs): the (parent rank, token rank) of the extensions that can survive, those with
    (parent rank + 1) * (token rank + 1) <= budget. Any other is beaten by all extensions of no worse parents by no worse
    tokens, and they are more than `budget`."""
    pairs = [(r, t) for r in range(parents) for t in range(min(width, budget // (r + 1)))]
    return torch.tensor(pairs, device=device).T.contiguous()


def candidate_tables(depths: int, vocab: int, budget: int, device=None) -> list:
    """candidate_pairs of every depth. They depend on shapes alone: keep them where rounds repeat."""
    tables, parents, width = [], 1, min(budget, vocab)
    for _ in range(depths):
        tables.append(candidate_pairs(parents, width, budget, device))
        parents = min(budget, tables[-1].shape[1])
    return tables


def ranked_tokens(logits: Tensor, width: int, vocab: Optional[Vocabulary] = None) -> tuple:
    """logits (B, D, V) -> (ids, log probabilities) (B, D, W) of the best tokens, best first, lower id first among equals.
    vocab: where ranks divide the vocabulary; the best of each rank's best are the best, after one gather.

    Sorted by one integer key per token: the logit's bits made monotone, then the id reversed. topk alone orders equals
    as it likes, and in bf16 equals are common."""
    x = logits.float() + 0.0  # + 0.0 makes -0.0 and 0.0 one value
    bits = x.view(torch.int32).long()
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    first, last = (0, logits.shape[-1] - 1) if vocab is None else (vocab.first, vocab.size * vocab.ranks - 1)
    key = (bits << 32) | (last - first - torch.arange(logits.shape[-1], device=logits.device))
    key, total = key.topk(min(width, logits.shape[-1]), -1).values, x.logsumexp(-1, keepdim=True)
    if vocab is not None:
        packed = vocab.gather(torch.cat((key, total.view(torch.int32).long()), -1))                  # (n, B, D, W + 1)
        key = packed[..., :-1].movedim(0, -2).flatten(-2).topk(width, -1).values
        total = packed[..., -1:].int().view(torch.float32).logsumexp(0)
    bits, ids = key >> 32, last - (key & 0xFFFFFFFF)
    value = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).int().view(torch.float32)
    return ids, (value - total).clamp(max=0)  # never above 0: a child must not beat its parent


def first(tree: Tree, nodes: int) -> Tree:
    """The tree of the first `nodes` nodes, parents being before their children."""
    return Tree(tree.tokens[:, :nodes], tree.parents[:, :nodes], tree.depth[:, :nodes], tree.ancestors[:, :nodes, :nodes],
                min(tree.max_depth, nodes - 1))


def build_tree(marginals: Tensor, root: Tensor, budget: int, spine: bool = False, tables: Optional[list] = None,
               vocab: Optional[Vocabulary] = None) -> Tree:
    """`grow` without the scores."""
    return grow(marginals, root, budget, spine, tables, vocab)[0]


def grow(marginals: Tensor, root: Tensor, budget: int, spine: bool = False, tables: Optional[list] = None,
         vocab: Optional[Vocabulary] = None) -> tuple:
    """marginals (B, D, V) logits, root (B,) -> the Tree of the root and the `budget` most probable prefixes, and the log
    probability (B, N) of every node's prefix, the root's 0. Without a spine nodes come best first, so the first n nodes ARE
    the tree of budget n - 1.

    spine: take the whole top-1 chain first and fill the rest best-first (needs budget >= D).
    tables: candidate_tables(D, V, budget), where they are kept. vocab: see ranked_tokens.
    ValueError on a budget that is too small. Where fewer than `budget` prefixes exist, all of them are taken."""
    B, D, V = marginals.shape
    V = V if vocab is None else vocab.total
    if budget < (D if spine else 1):
        raise ValueError(f"budget must be at least {D if spine else 1}, got {budget}")
    tables = tables or candidate_tables(D, V, budget, marginals.device)
    ids, logp = ranked_tokens(marginals, min(budget, V), vocab)                      # (B, D, W)
    score = torch.zeros(B, 1, device=root.device)                                    # of the kept prefixes of the last depth
    paths = torch.zeros(B, 1, 0, dtype=torch.long, device=root.device)               # their ancestors, as candidate numbers
    scores, tokens, lines, offset = [], [], [], 0
    for d, (r, t) in enumerate(table.unbind(0) for table in tables):
        candidates = score[:, r] + logp[:, d, t]                                     # (B, pairs)
        order = candidates.sort(dim=-1, descending=True, stable=True)                    # stable: equals stay in (parent, token) order
        kept = min(budget, len(r))
        score, pick = order.values[:, :kept], order.indices[:, :kept]                # (B, P)
        number = torch.arange(offset, offset + kept, device=root.device).expand(B, kept)
        paths = torch.cat((paths.gather(1, r[pick].unsqueeze(-1).expand(-1, -1, d)), number.unsqueeze(-1)), -1)  # (B, P, d+1)
        scores.append(score)
        tokens.append(ids[:, d].gather(1, t[pick]))
        lines.append(torch.nn.functional.pad(paths, (0, D - d - 1), value=-1))
        offset += kept
    score, token, line = torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(lines, 1)  # (B, M), (B, M), (B, M, D)
    rank = score
    if spine:  # the first prefix of each depth is the top-1 chain
        first = [0, *(sum(s.shape[1] for s in scores[:i]) for i in range(1, D))]
        rank = score.index_fill(1, torch.tensor(first, device=root.device), 1.0)     # log probabilities never exceed 0
    chosen = rank.sort(dim=-1, descending=True, stable=True).indices[:, :min(budget, offset)]  # (B, N-1); a parent before its children
    # candidate number -> node; candidates that were not chosen, and the padding -1, point past the end
    N = chosen.shape[1] + 1
    node = torch.full((B, offset + 1), N, device=root.device).scatter(1, chosen, torch.arange(1, N, device=root.device).expand(B, -1))
    line = node.gather(1, (line % (offset + 1)).gather(1, chosen.unsqueeze(-1).expand(-1, -1, D)).flatten(1)).view(B, N - 1, D)
    depth = (line < N).sum(-1)                                                       # (B, N-1)
    above = torch.cat((torch.zeros_like(line[..., :1]), line), -1).gather(-1, (depth - 1).unsqueeze(-1)).squeeze(-1)
    ancestors = torch.zeros(B, N, N + 1, dtype=torch.bool, device=root.device)
    ancestors[:, :, 0] = True
    ancestors[:, 1:].scatter_(2, line, True)
    edge = torch.zeros(B, 1, dtype=torch.long, device=root.device)
    tree = Tree(torch.cat((root.unsqueeze(1), token.gather(1, chosen)), 1), torch.cat((edge - 1, above), 1),
                torch.cat((edge, depth), 1), ancestors[..., :N], min(D, N - 1))
    return tree, torch.cat((torch.zeros(B, 1, device=root.device), score.gather(1, chosen)), 1)
