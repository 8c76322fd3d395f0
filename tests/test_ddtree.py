"""The tree against the DDTree authors' results, a plain heap, and the chain."""
import heapq

import pytest
import torch
from safetensors.torch import load_file

from ddtree import build_tree, chain, greedy_chain, grow, ranked_tokens
from helpers import GOLDEN
from verify import accept

E = load_file(GOLDEN / "trees" / "expected.safetensors")
CASES = sorted({k.split(".")[0] for k in E})


def paths(tree, row: int = 0) -> list:
    """Every node's tokens from below the root down to itself."""
    found = []
    for i in range(tree.tokens.shape[1]):
        line, node = (), i
        while node > 0:
            assert tree.parents[row, node] < node
            line, node = (int(tree.tokens[row, node]), *line), int(tree.parents[row, node])
        found.append(line)
    return found


def sound(tree) -> None:
    """What every Tree promises."""
    B, N = tree.tokens.shape
    for row in range(B):
        lines, parents = paths(tree, row), tree.parents[row].tolist()
        assert len(set(lines)) == N                                                  # siblings differ
        assert parents[0] == -1 and all(0 <= p < i for i, p in enumerate(parents[1:], 1))
        assert tree.depth[row].tolist() == [len(line) for line in lines] and max(map(len, lines)) <= tree.max_depth
        for i in range(N):
            assert tree.ancestors[row, i].tolist() == [lines[i][:len(lines[j])] == lines[j] for j in range(N)]


def heap_tree(marginals: torch.Tensor, budget: int) -> set:
    """Best-first, one node at a time: pop the best prefix, push its first child and its next sibling. marginals (D, V)."""
    logp = marginals.float() - marginals.float().logsumexp(-1, keepdim=True)
    order = [sorted(range(len(row)), key=lambda v: (-row[v], v)) for row in logp.tolist()]
    heap, taken = [(-logp[0][order[0][0]].item(), (0,))], []
    def score(ranks):
        total = logp[0][order[0][ranks[0]]]
        for d, r in enumerate(ranks[1:], 1):
            total = total + logp[d][order[d][r]]  # in fp32, as the tree sums
        return total.item()
    while heap and len(taken) < budget:
        _, ranks = heapq.heappop(heap)
        taken.append(tuple(order[d][r] for d, r in enumerate(ranks)))
        if len(ranks) < len(order):
            heapq.heappush(heap, (-score(ranks + (0,)), ranks + (0,)))
        if ranks[-1] + 1 < len(order[0]):
            heapq.heappush(heap, (-score(ranks[:-1] + (ranks[-1] + 1,)), ranks[:-1] + (ranks[-1] + 1,)))
    return set(taken)


def random_marginals(seed: int) -> tuple:
    g = torch.Generator().manual_seed(seed)
    D, V = int(torch.randint(1, 9, (), generator=g)), int(torch.randint(2, 60, (), generator=g))
    budget = int(torch.randint(1, 70, (), generator=g))
    return torch.randn(D, V, generator=g) * float(torch.rand((), generator=g) * 5 + 0.2), budget


@pytest.mark.parametrize("case", CASES)
def test_tree_equals_golden(case):
    logits, budget, tokens, parents = (E[f"{case}.{k}"] for k in ("logits", "budget", "tokens", "parents"))
    root = torch.tensor([7])
    tree = build_tree(logits.unsqueeze(0), root, int(budget))
    sound(tree)
    assert tree.tokens[0, 0] == 7
    lines = [()]
    for token, parent in zip(tokens.tolist(), parents.tolist()[1:]):
        lines.append((*lines[parent], token))
    ours = paths(tree)
    assert set(ours) == set(lines) and len(ours) == len(lines)
    to_theirs = torch.tensor([lines.index(line) for line in ours])
    assert torch.equal(tree.ancestors[0], E[f"{case}.ancestors"][to_theirs][:, to_theirs])
    assert torch.equal(tree.depth[0, 1:], E[f"{case}.depths"][to_theirs[1:] - 1])

    path, accepted, next_root = accept(tree, E[f"{case}.target_tokens"][to_theirs].unsqueeze(0))
    walk = [lines[i] for i in E[f"{case}.accepted"].tolist()]
    assert [ours[i] for i in path[0, :accepted + 1]] == walk and next_root.item() == E[f"{case}.next_token"]


def test_tree_equals_a_heap_in_300_random_cases():
    for seed in range(300):
        marginals, budget = random_marginals(seed)
        tree = build_tree(marginals.unsqueeze(0), torch.tensor([0]), budget)
        assert set(paths(tree)[1:]) == heap_tree(marginals, budget), f"case {seed}"


@pytest.mark.parametrize("seed", range(20))
def test_tree_keeps_its_promises(seed):
    marginals, budget = random_marginals(seed)
    sound(build_tree(marginals.unsqueeze(0), torch.tensor([3]), budget))
    sound(build_tree(marginals.unsqueeze(0), torch.tensor([3]), budget + len(marginals), spine=True))


@pytest.mark.parametrize("spine", [False, True])
def test_tree_in_a_batch_equals_the_tree_alone(spine):
    marginals, root = torch.randn(5, 6, 40, generator=torch.Generator().manual_seed(0)) * 3, torch.arange(5)
    whole = build_tree(marginals, root, 24, spine)
    sound(whole)
    for row in range(5):
        alone = build_tree(marginals[row:row + 1], root[row:row + 1], 24, spine)
        for a, b in zip(alone[:4], whole[:4]):
            assert torch.equal(a[0], b[row])


def test_spine_is_the_top_chain_and_the_rest_is_best_first():
    """The chain first; the other places go to the best prefixes outside it."""
    for seed in range(60):
        marginals, budget = random_marginals(seed)
        D, V = marginals.shape
        budget = min(budget + D, sum(V ** d for d in range(1, D + 1)))
        top = tuple(marginals.argmax(-1).tolist())
        spine = {top[:d] for d in range(1, D + 1)}
        ours = set(paths(build_tree(marginals.unsqueeze(0), torch.tensor([0]), budget, spine=True))[1:])
        assert spine <= ours and len(ours) == budget
        n = budget - D  # best-first trees grow by one prefix a time: the smallest that holds n prefixes outside the spine
        while len(heap_tree(marginals, n) - spine) < budget - D:
            n += 1
        assert ours == spine | heap_tree(marginals, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_width_one_tree_is_the_chain(dtype):
    """A spine with no budget left over, and a best-first tree over peaked marginals: byte for byte the chain of top tokens."""
    marginals, root = torch.randn(3, 5, 50, generator=torch.Generator().manual_seed(0)).to(dtype), torch.tensor([9, 8, 7])
    line = chain(torch.cat((root.unsqueeze(1), marginals.argmax(-1)), 1))
    peaked = marginals.scatter(-1, marginals.argmax(-1, keepdim=True), 30)
    for tree in (build_tree(marginals, root, 5, spine=True), build_tree(peaked, root, 5)):
        for a, b in zip(tree[:4], line[:4]):
            assert torch.equal(a, b) and a.dtype == b.dtype
        assert tree.max_depth == line.max_depth


def test_budget_one_is_the_best_first_token():
    marginals = torch.tensor([[[0., 3., 1.], [9., 0., 0.]]])
    assert paths(build_tree(marginals, torch.tensor([0]), 1)) == [(), (1,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_rank_by_lowest_id(dtype):
    """In bf16 equals are common: 200 tokens with 7 different logits, and both zeros, which are one value."""
    g = torch.Generator().manual_seed(0)
    logits = (torch.randint(-3, 4, (2, 4, 200), generator=g).float() * 0.37).to(dtype)
    logits[logits == 0] *= torch.where(torch.rand(int((logits == 0).sum()), generator=g) < 0.5, 1.0, -1.0).to(dtype)
    ids, logp = ranked_tokens(logits, 150)
    for b in range(2):
        for d in range(4):
            row = (logits[b, d].float() + 0.0).tolist()
            assert ids[b, d].tolist() == sorted(range(200), key=lambda v: (-row[v], v))[:150]
    assert torch.equal(logp, (logits.float() - logits.float().logsumexp(-1, keepdim=True)).gather(-1, ids))


def test_all_tokens_equal():
    """With nothing to choose by: the lowest ids, and the tree is sound."""
    tree = build_tree(torch.zeros(1, 3, 8), torch.tensor([5]), 8)
    sound(tree)
    assert set(paths(tree)) == {(), *((v,) for v in range(8))}
    sound(build_tree(torch.zeros(1, 3, 8), torch.tensor([5]), 100))


def test_certain_tokens_keep_parents_first():
    """Where a token has probability 1 the child scores what its parent scores, and still comes after it."""
    marginals = torch.full((1, 6, 9), -1e4)
    marginals[:, :, 4] = 1e4
    for spine in (False, True):
        for budget in (6, 7, 20):
            tree = build_tree(marginals, torch.tensor([0]), budget, spine)
            sound(tree)
            assert {(4,) * d for d in range(7)} <= set(paths(tree))


def test_budget_past_all_prefixes_takes_all():
    """3 + 9 prefixes exist; the tree holds them all and no more."""
    tree = build_tree(torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1]), 50)
    sound(tree)
    assert tree.tokens.shape == (2, 13)


@pytest.mark.parametrize("budget, spine", [(0, False), (-3, False), (4, True)])
def test_too_small_a_budget_is_refused(budget, spine):
    with pytest.raises(ValueError, match="budget must be at least"):
        build_tree(torch.zeros(1, 5, 9), torch.tensor([0]), budget, spine)


def test_accept_follows_a_walk():
    """`accept` looks at all nodes at once; here is the walk, over random trees and targets that agree often."""
    deepest = 0
    for seed in range(100):
        g = torch.Generator().manual_seed(seed)
        tree = build_tree(torch.randn(3, 4, 4, generator=g), torch.tensor([0, 1, 2]), 40)
        target = torch.randint(4, tree.tokens.shape, generator=g)
        path, accepted, root = accept(tree, target)
        for b in range(3):
            walk, node = [0], 0
            while True:
                child = [j for j in range(tree.tokens.shape[1]) if tree.parents[b, j] == node and tree.tokens[b, j] == target[b, node]]
                if not child:
                    break
                node, = child
                walk.append(node)
            assert path[b, :accepted[b] + 1].tolist() == walk and root[b] == target[b, node] and accepted[b] == len(walk) - 1
        deepest = max(deepest, int(accepted.max()))
    assert deepest == 4


def test_accept_ignores_what_hangs_on_a_refused_node():
    """A grandchild that matches its refused parent's target token is not accepted."""
    tree = chain(torch.tensor([[5, 6, 7, 8]]))
    path, accepted, root = accept(tree, torch.tensor([[6, 9, 8, 1]]))
    assert accepted.item() == 1 and path[0, :2].tolist() == [0, 1] and root.item() == 9


def test_scores_and_prefixes_of_a_tree():
    """grow's scores are the paths' log probabilities, and the first nodes of a tree are the smaller tree."""
    torch.manual_seed(3)
    marginals, root = 3 * torch.randn(3, 5, 20), torch.tensor([1, 2, 3])
    tree, score = grow(marginals, root, 40)
    logp = marginals.log_softmax(-1)
    for b in range(3):
        for i in range(41):
            path = [j for j in range(1, 41) if tree.ancestors[b, i, j]]
            assert abs(score[b, i] - sum(logp[b, tree.depth[b, j] - 1, tree.tokens[b, j]] for j in path)) < 1e-4
    for budget in (1, 4, 8, 16):
        small, few = grow(marginals, root, budget)
        assert torch.equal(small.tokens, tree.tokens[:, :budget + 1]) and torch.equal(small.parents, tree.parents[:, :budget + 1])
        assert torch.equal(small.ancestors, tree.ancestors[:, :budget + 1, :budget + 1]) and torch.equal(few, score[:, :budget + 1])
    spined, logps = grow(marginals, root, 12, spine=True)
    assert (logps <= 0).all() and torch.equal(spined.depth.amax(1), torch.full((3,), 5))


# Trees over conditionals

def random_conditionals(seed: int, rows: int = 1) -> tuple:
    """Marginals, a root, a budget, what every token adds to the logits after it (D, V, V), and that as `grow` takes it."""
    g = torch.Generator().manual_seed(seed)
    D, V = int(torch.randint(1, 5, (), generator=g)), int(torch.randint(2, 8, (), generator=g))
    budget, spread = int(torch.randint(1, 50, (), generator=g)), float(torch.rand((), generator=g) * 3 + 0.2)
    marginals, adds = torch.randn(rows, D, V, generator=g) * spread, torch.randn(D, V, V, generator=g) * spread
    return marginals, torch.randint(V, (rows,), generator=g), budget, adds, from_table(adds)


def from_table(adds: torch.Tensor):
    def conditional(depth, before, ids):
        return adds[depth][before].gather(-1, ids.unsqueeze(1).expand(-1, before.shape[1], -1))
    return conditional


def every_prefix(marginals: torch.Tensor, root: int, adds: torch.Tensor, scored: list = None) -> dict:
    """All prefixes -> log probability, one by one. marginals (D, V). scored: the tokens of each depth that count by themselves;
    the others keep their marginal, and are no candidates."""
    D, V = marginals.shape
    found, front = {}, {(): 0.0}
    for d in range(D):
        grown = {}
        for prefix, score in front.items():
            before = prefix[-1] if prefix else root
            kept = set(range(V)) if scored is None else set(scored[d])
            logits = marginals[d].double() + torch.tensor([adds[d, before, v].item() if v in kept else 0.0 for v in range(V)])
            for v in kept:
                grown[(*prefix, v)] = score + (logits[v] - logits.logsumexp(0)).item()
        found |= grown
        front = grown
    return found


def same_as_brute_force(tree, score, row: int, prefixes: dict, budget: int) -> None:
    best = sorted(prefixes.values(), reverse=True)[:budget]
    lines = paths(tree, row)
    assert len(lines) == len(best) + 1
    assert score[row, 1:].tolist() == pytest.approx([prefixes[line] for line in lines[1:]], abs=1e-4)
    assert sorted(prefixes[line] for line in lines[1:]) == pytest.approx(sorted(best), abs=1e-4)


@pytest.mark.parametrize("batch", range(5))
def test_conditional_trees_equal_brute_force(batch):
    """60 random cases: the best prefixes of all there are, in the order of their scores."""
    for seed in range(batch * 12, batch * 12 + 12):
        marginals, root, budget, adds, conditional = random_conditionals(seed, 2)
        tree, score = grow(marginals, root, budget, conditional=conditional)
        sound(tree)
        assert (score[:, 1:-1] >= score[:, 2:]).all()
        for row in range(2):
            same_as_brute_force(tree, score, row, every_prefix(marginals[row], int(root[row]), adds), budget)


@pytest.mark.parametrize("candidates", [1, 2, 5, 8, 99])
def test_a_cap_on_candidates_scores_the_best_by_marginal(candidates):
    """What is not scored keeps its marginal in the norm; a cap of the whole vocabulary is none."""
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        marginals, adds, root = torch.randn(1, 3, 8, generator=g), 2 * torch.randn(3, 8, 8, generator=g), torch.tensor([seed % 8])
        scored = [row.topk(min(candidates, 8)).indices.tolist() for row in marginals[0]]
        tree, score = grow(marginals, root, 12, conditional=from_table(adds), candidates=candidates)
        sound(tree)
        same_as_brute_force(tree, score, 0, every_prefix(marginals[0], seed % 8, adds, scored), 12)


def test_conditionals_that_add_nothing_give_the_tree_of_marginals():
    for seed in range(30):
        marginals, budget = random_marginals(seed)
        marginals, root = marginals.unsqueeze(0), torch.tensor([0])
        flat = lambda depth, before, ids: torch.zeros(1, before.shape[1], ids.shape[1])
        plain, want = grow(marginals, root, budget)
        for candidates in (None, 64):
            tree, score = grow(marginals, root, budget, conditional=flat, candidates=candidates)
            assert set(paths(tree)) == set(paths(plain)) and torch.allclose(score, want, atol=1e-4)


@pytest.mark.parametrize("candidates", [None, 3])
def test_the_spine_of_conditionals_is_the_greedy_chain(candidates):
    """One branch: every token the best after the one before. The chain, the tree of width 1 and the first nodes of a tree with a
    spine are the same."""
    for seed in range(40):
        marginals, root, _, adds, conditional = random_conditionals(seed, 2)
        D = marginals.shape[1]
        chained, prices = greedy_chain(marginals, root, conditional, candidates)
        narrow = build_tree(marginals, root, D, spine=True, conditional=conditional, candidates=candidates)
        assert all(torch.equal(a, b) for a, b in zip(chain(torch.cat((root.unsqueeze(1), chained), 1))[:4], narrow[:4]))
        for row in range(2):
            before, line = int(root[row]), []
            for d in range(D):
                best = marginals[row, d].topk(min(candidates or 99, marginals.shape[-1])).indices.sort().values
                before = int(best[(marginals[row, d] + adds[d, before])[best].argmax()])
                line.append(before)
            assert chained[row].tolist() == line
            wide = build_tree(marginals, root, D + 6, spine=True, conditional=conditional, candidates=candidates)
            sound(wide)
            assert tuple(line) in paths(wide, row)
            prefixes = every_prefix(marginals[row], int(root[row]), adds, [marginals[row, d].topk(min(candidates or 99, marginals.shape[-1])).indices.tolist() for d in range(D)])
            assert prices[row].tolist() == pytest.approx([prefixes[tuple(line[:d])] for d in range(1, D + 1)], abs=1e-4)


def test_the_chain_scores_what_its_path_scores_in_the_tree():
    for seed in range(40):
        marginals, root, _, adds, conditional = random_conditionals(seed, 3)
        D = marginals.shape[1]
        for candidates in (None, 3):
            line, prices = greedy_chain(marginals, root, conditional, candidates)
            tree, score = grow(marginals, root, D + 20, spine=True, conditional=conditional, candidates=candidates)
            for row in range(3):
                for node, path in enumerate(paths(tree, row)[1:], 1):
                    if path == tuple(line[row, :len(path)].tolist()):
                        torch.testing.assert_close(prices[row, len(path) - 1], score[row, node], rtol=0, atol=1e-5)


def test_the_first_nodes_of_a_conditional_tree_are_the_smaller_tree():
    for seed in range(20):
        marginals, root, _, adds, conditional = random_conditionals(seed, 3)
        whole, score = grow(marginals, root, 40, conditional=conditional)
        for budget in (1, 3, 8, 17):
            small, few = grow(marginals, root, budget, conditional=conditional)
            n = few.shape[1]
            assert torch.equal(small.tokens, whole.tokens[:, :n]) and torch.equal(small.parents, whole.parents[:, :n])
            assert torch.equal(few, score[:, :n])


def test_a_conditional_tree_in_a_batch_equals_the_tree_alone():
    marginals, root, _, adds, conditional = random_conditionals(7, 6)
    whole = build_tree(marginals, root, 20, conditional=conditional)
    for row in range(6):
        alone = build_tree(marginals[row:row + 1], root[row:row + 1], 20, conditional=conditional)
        assert all(torch.equal(a[row:row + 1], b) for a, b in zip(whole[:4], alone[:4]))


def test_certain_conditionals_keep_parents_first():
    adds = torch.full((5, 6, 6), -1e4)
    adds[:, torch.arange(6), (torch.arange(6) + 1) % 6] = 1e4  # after v comes v + 1
    tree = build_tree(torch.zeros(1, 5, 6), torch.tensor([2]), 9, conditional=from_table(adds))
    sound(tree)
    assert {(3, 4, 5, 0, 1)[:d] for d in range(6)} <= set(paths(tree))


def test_conditional_trees_compile_to_one_graph():
    marginals, root, _, adds, conditional = random_conditionals(11, 2)
    for budget, spine, candidates in ((12, False, None), (12, True, 4)):
        f = lambda m, r: grow(m, r, budget, spine, conditional=conditional, candidates=candidates)
        (tree, score), (want, wanted) = torch.compile(f, backend="eager", fullgraph=True)(marginals, root), f(marginals, root)
        assert all(torch.equal(a, b) for a, b in zip(tree[:4], want[:4])) and torch.equal(score, wanted)
