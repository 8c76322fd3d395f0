"""The draft tree: the `budget` most probable prefixes under a drafter's distributions (DDTree, best-first), exact, batched, on the device.

A prefix scores the sum of its tokens' log probabilities and never beats its own parent: the best `budget` prefixes are closed
under taking parents, and they ARE the tree that a best-first heap grows. So no heap is needed. Depth by depth the best `budget`
prefixes are extended; one last sort over all depths picks the tree. Everything has a static shape, and nothing is read on the host.

Two kinds of distributions. Marginals of different depths are independent: extensions are by the depth's most probable tokens,
and few pairs of prefix and token can survive. Conditionals (of a drafter with a Markov head) look at the token before: every kept
prefix scores its own children, and all pairs compete.

Ties go to the better parent, then to the lower token id: the same tree on every device.

Shapes: B sequences, D depths, V vocabulary, W kept tokens per depth, P kept prefixes of a depth, K candidates that conditionals score
per depth, M prefixes of all depths, N = budget + 1 nodes.
"""
import math
from typing import Callable, Optional

import torch
from torch import Tensor

from model import Tree, chain  # noqa: F401  (both belong to this interface)
from ranks import Vocabulary

CANDIDATES = 64  # tokens of a depth that conditionals score, the best by its marginal


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


def monotone(x: Tensor) -> Tensor:
    """Each value's fp32 bits as an integer (int64) that orders as the values do."""
    bits = (x.float() + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 and 0.0 one value
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def top(x: Tensor, count: int) -> Tensor:
    """x (…, M) -> indices (…, count) of the largest, largest first, the lowest index first among equals."""
    last = x.shape[-1] - 1
    key = (monotone(x) << 32) | (last - torch.arange(x.shape[-1], device=x.device))
    return last - (key.topk(count, -1).values & 0xFFFFFFFF)


def log_probability(x: Tensor) -> Tensor:
    """Never above 0, for a child must not beat its parent; and nothing where logits overflowed, for NaN would beat everything."""
    return x.clamp(max=0).nan_to_num(-math.inf, 0.0, -math.inf)


def ranked_tokens(logits: Tensor, width: int, vocab: Optional[Vocabulary] = None) -> tuple:
    """logits (B, D, V) -> (ids, log probabilities) (B, D, W) of the best tokens, best first, lower id first among equals.
    vocab: where ranks divide the vocabulary; the best of each rank's best are the best, after one gather.

    Sorted by one integer key per token: the logit's bits made monotone, then the id reversed. topk alone orders equals
    as it likes, and in bf16 equals are common."""
    x = logits.float()
    first, last = (0, logits.shape[-1] - 1) if vocab is None else (vocab.first, vocab.size * vocab.ranks - 1)
    key = (monotone(x) << 32) | (last - first - torch.arange(logits.shape[-1], device=logits.device))
    key, total = key.topk(min(width, logits.shape[-1]), -1).values, x.logsumexp(-1, keepdim=True)
    if vocab is not None:
        packed = vocab.gather(torch.cat((key, total.view(torch.int32).long()), -1))                  # (n, B, D, W + 1)
        key = packed[..., :-1].movedim(0, -2).flatten(-2).topk(width, -1).values
        total = packed[..., -1:].int().view(torch.float32).logsumexp(0)
    bits, ids = key >> 32, last - (key & 0xFFFFFFFF)
    value = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).int().view(torch.float32)
    return ids, log_probability(value - total)


def first(tree: Tree, nodes: int) -> Tree:
    """The tree of the first `nodes` nodes, parents being before their children."""
    return Tree(tree.tokens[:, :nodes], tree.parents[:, :nodes], tree.depth[:, :nodes], tree.ancestors[:, :nodes, :nodes],
                min(tree.max_depth, nodes - 1))


def scored_tokens(marginals: Tensor, candidates: Optional[int], vocab: Optional[Vocabulary] = None) -> tuple:
    """marginals (B, D, V) -> the K best tokens of each depth, by id, their log probabilities (B, D, K), and that of all others
    together (B, D): -inf where K = V."""
    V = marginals.shape[-1] if vocab is None else vocab.total
    K = V if candidates is None else min(candidates, V)
    ids, logp = ranked_tokens(marginals, K, vocab)
    ids, order = ids.sort(-1)
    logp = logp.gather(-1, order)
    others = torch.log1p(-logp.exp().sum(-1).clamp(max=1)) if K < V else torch.full_like(logp[..., 0], -torch.inf)
    return ids, logp, others


def given(depth: int, before: Tensor, tokens: tuple, conditional: Callable) -> Tensor:
    """log probabilities (B, P, K) of the scored tokens of a depth after each of the tokens before (B, P). Tokens that are not
    scored count with what the marginal gives them, as if nothing before them mattered; where K = V there are none."""
    ids, logp, others = (t[:, depth] for t in tokens)
    logits = logp.unsqueeze(1) + conditional(depth, before, ids).float()                 # (B, P, K)
    every = torch.cat((logits, others.view(-1, 1, 1).expand(-1, before.shape[1], 1)), -1)
    return log_probability(logits - every.logsumexp(-1, keepdim=True))


def greedy_chain(marginals: Tensor, root: Tensor, conditional: Callable, candidates: Optional[int] = CANDIDATES,
                 vocab: Optional[Vocabulary] = None) -> tuple:
    """(B, D) tokens, each the best after the one before, and the log probabilities (B, D) of the prefixes they end, as `grow`, which
    takes the same arguments, scores them."""
    tokens, line, score = scored_tokens(marginals, candidates, vocab), [root.unsqueeze(1)], [marginals.new_zeros(len(root), 1, dtype=torch.float32)]
    for d in range(marginals.shape[1]):
        logp, best = given(d, line[-1], tokens, conditional).max(-1)                     # (B, 1), the first among equals
        line.append(tokens[0][:, d].gather(1, best))
        score.append(score[-1] + logp)
    return torch.cat(line[1:], 1), torch.cat(score[1:], 1)


def build_tree(marginals: Tensor, root: Tensor, budget: int, spine: bool = False, tables: Optional[list] = None,
               vocab: Optional[Vocabulary] = None, conditional: Optional[Callable] = None, candidates: Optional[int] = None) -> Tree:
    """`grow` without the scores."""
    return grow(marginals, root, budget, spine, tables, vocab, conditional, candidates)[0]


def grow(marginals: Tensor, root: Tensor, budget: int, spine: bool = False, tables: Optional[list] = None,
         vocab: Optional[Vocabulary] = None, conditional: Optional[Callable] = None, candidates: Optional[int] = None) -> tuple:
    """marginals (B, D, V) logits, root (B,) -> the Tree of the root and the `budget` most probable prefixes, and the log
    probability (B, N) of every node's prefix, the root's 0. Without a spine nodes come best first, so the first n nodes ARE
    the tree of budget n - 1.

    spine: take the whole top-1 chain first and fill the rest best-first (needs budget >= D).
    tables: candidate_tables(D, V, budget), where they are kept. vocab: see ranked_tokens.
    conditional(depth, before (B, P), ids (B, K)) -> (B, P, K): what the last token of each prefix adds to the logits of ids at
    that depth; `before` is the root at depth 0. The distribution after a prefix is softmax(marginal + that) (`Drafter.proposal`).
    candidates: how many tokens of a depth, the best by its marginal, conditionals score; None: all V, which is exact. Otherwise the
    tree is exact for the distributions of `given`, and nothing of size P x V is made.
    ValueError on a budget that is too small. Where fewer than `budget` prefixes exist, all of them are taken."""
    B, D, V = marginals.shape
    V = V if vocab is None else vocab.total
    if budget < (D if spine else 1):
        raise ValueError(f"budget must be at least {D if spine else 1}, got {budget}")
    if conditional is None:
        tables = tables or candidate_tables(D, V, budget, marginals.device)
        ids, logp = ranked_tokens(marginals, min(budget, V), vocab)                       # (B, D, W)
    else:
        scored = scored_tokens(marginals, candidates, vocab)
        ids, K = scored[0], scored[0].shape[-1]
    score = torch.zeros(B, 1, device=root.device)                                    # of the kept prefixes of the last depth
    last = root.unsqueeze(1)                                                         # their last tokens (B, P)
    paths = torch.zeros(B, 1, 0, dtype=torch.long, device=root.device)               # their ancestors, as candidate numbers
    scores, tokens, lines, offset = [], [], [], 0
    for d in range(D):
        if conditional is None:
            r, t = tables[d].unbind(0)                                               # rank of parent, of token
            every = score[:, r] + logp[:, d, t]                                      # (B, pairs)
        else:
            pair = torch.arange(score.shape[1] * K, device=root.device)
            r, t = pair // K, pair % K
            every = (score.unsqueeze(-1) + given(d, last, scored, conditional)).flatten(1)
        rank = every
        if spine and conditional is not None:  # the best child of the chain so far, which is parent 0, may be worse than others
            rank = every.scatter(1, every[:, :K].argmax(-1, keepdim=True), 1.0)      # log probabilities never exceed 0
        kept = min(budget, len(r))
        pick = top(rank, kept)                                                       # (B, P)
        score, last = every.gather(1, pick), ids[:, d].gather(1, t[pick])
        number = torch.arange(offset, offset + kept, device=root.device).expand(B, kept)
        paths = torch.cat((paths.gather(1, r[pick].unsqueeze(-1).expand(-1, -1, d)), number.unsqueeze(-1)), -1)  # (B, P, d+1)
        scores.append(score)
        tokens.append(last)
        lines.append(torch.nn.functional.pad(paths, (0, D - d - 1), value=-1))
        offset += kept
    score, token, line = torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(lines, 1)  # (B, M), (B, M), (B, M, D)
    rank = score
    if spine:  # the first prefix of each depth is the top-1 chain
        first = [0, *(sum(s.shape[1] for s in scores[:i]) for i in range(1, D))]
        rank = score.index_fill(1, torch.tensor(first, device=root.device), 1.0)
    chosen = top(rank, min(budget, offset))                                          # (B, N-1); a parent before its children
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
