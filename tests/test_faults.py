"""Planted faults: each check of invariants.py notices what it is there for, and passes where nothing is planted."""
from contextlib import nullcontext

import pytest
import torch

import draft as draft_module
import generate
import model
import tiny
import verify
from invariants import close, decode, draft_equals_golden, load_golden_draft, nodes_score_like_their_paths, texts

PROMPTS = tiny.prompts(256, 5, 18)


@pytest.fixture(scope="module")
def pair() -> tuple:
    """target, a drafter that knows most of the texts, the texts."""
    target = tiny.golden("kimi_k2")
    plain = generate.generate(target, None, PROMPTS, "ar", max_new_tokens=24)
    draft = tiny.drafter(target)
    draft.tell([p + r.tokens for p, r in zip(PROMPTS, plain)])
    return target, draft, texts(plain)


def faulty_tree(build):
    """Changes every tree that has a second child of some node."""
    ordinary = verify.grow
    def built(*args):
        tree, score = ordinary(*args)
        siblings = (tree.parents.unsqueeze(1) == tree.parents.unsqueeze(2)) & (tree.parents.unsqueeze(1) >= 0)
        return tree._replace(**build(tree, siblings)), score
    return verify, "grow", built


def faulty_bias(change):
    ordinary = model.attention_bias
    return model, "attention_bias", lambda tree, length, span, dtype: ordinary(tree, change(length), span, dtype)


def faulty_block(change):
    ordinary = draft_module.block_bias
    return draft_module, "block_bias", lambda positions, start, *rest, **more: ordinary(positions, change(start), *rest, **more)


def faulty_commit(change):
    ordinary = verify.commit
    return verify, "commit", lambda target, latents, path, length, count, rows=None: ordinary(
        target, latents, *change(path, length, count), rows)


def faulty_graft(change):
    ordinary = draft_module.Drafter.graft
    return draft_module.Drafter, "graft", lambda self, taps, length, count=None, rows=None: ordinary(
        self, *change(taps, length, count), rows)


def faulty_taps(step):
    ordinary = model.Transformer.forward
    return model.Transformer, "forward", lambda self, tree, length, span, taps=(), last=None, rows=None: ordinary(
        self, tree, length, span, tuple(t + step for t in taps), last, rows)


def dense(path):
    return torch.arange(path.shape[1]).expand_as(path)


# Faults of the target's pass, for the check that a node scores like its path

def tree_with(change):
    tree = tiny.random_tree(2, 12, 256, seed=4)
    return tree._replace(**change(tree))


def sibling_visible(tree):
    siblings = (tree.parents.unsqueeze(1) == tree.parents.unsqueeze(2)) & (tree.parents.unsqueeze(1) >= 0)
    return {"ancestors": tree.ancestors | siblings}


SCORING = {
    "a parent hidden": lambda t: {"ancestors": t.ancestors & ~torch.nn.functional.one_hot(t.parents.clamp(min=0), 12).bool() | torch.eye(12).bool()},
    "all earlier nodes visible": lambda t: {"ancestors": torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 12, 12)},
    "depth off by one": lambda t: {"depth": t.depth + (t.depth > 0)},
    "depth counts nodes": lambda t: {"depth": torch.arange(12).expand(2, 12)}}


def test_nothing_planted_in_scoring():
    nodes_score_like_their_paths(tiny.golden("kimi_k2"), tree_with(lambda t: {}), [9, 4])


@pytest.mark.parametrize("fault", SCORING)
def test_scoring_check_notices(fault, monkeypatch):
    """The pass is handed a faulty tree; the paths are read from the true one."""
    target, tree = tiny.golden("kimi_k2"), tree_with(lambda t: {})
    bad = tree_with(SCORING[fault])
    monkeypatch.setattr(type(target), "forward", lambda self, t, *args, _f=type(target).forward, **more: _f(
        self, bad if t is tree else t, *args, **more))
    with pytest.raises(AssertionError, match="off by"):
        nodes_score_like_their_paths(target, tree, [9, 4])


@pytest.mark.parametrize("shift", [-1, 1])
def test_scoring_check_notices_a_shifted_mask(shift, monkeypatch):
    """One committed slot too few, or one uncommitted slot too many."""
    monkeypatch.setattr(*faulty_bias(lambda length: length + shift))
    with pytest.raises(AssertionError, match="off by"):
        nodes_score_like_their_paths(tiny.golden("kimi_k2"), tree_with(lambda t: {}), [9, 4])


# Faults of a round, for the checks of text and caches

ROUND = {
    "a sibling made visible": lambda: faulty_tree(lambda t, siblings: {"ancestors": t.ancestors | siblings}),
    "a sibling made visible to the target alone": lambda: (model, "attention_bias", lambda tree, *rest, _f=model.attention_bias: _f(
        tree._replace(ancestors=tree.ancestors | sibling_visible(tree)["ancestors"]), *rest)),
    "depth off by one": lambda: faulty_tree(lambda t, _: {"depth": t.depth + (t.depth > 0)}),
    "depth one too small": lambda: faulty_tree(lambda t, _: {"depth": (t.depth - 1).clamp(min=0)}),
    "a mask slot shifted up": lambda: faulty_bias(lambda length: length + 1),
    "a mask slot shifted down": lambda: faulty_bias(lambda length: length - 1),
    "a tap off by one, up": lambda: faulty_taps(1),
    "latents of the first nodes, not of the path": lambda: faulty_commit(lambda path, length, count: (dense(path), length, count)),
    "latents one slot late": lambda: faulty_commit(lambda path, length, count: (path, length + 1, count)),
    "one latent too many": lambda: faulty_commit(lambda path, length, count: (path, length, count + 1)),
    "one latent too few": lambda: faulty_commit(lambda path, length, count: (path, length, count - 1)),
    "a graft one slot late": lambda: faulty_graft(lambda taps, length, count: (taps, length + 1, count)),
    "a graft of the last token only": lambda: faulty_graft(lambda taps, length, count: (taps, length, count.clamp(max=1))),
    "taps of the neighbour": lambda: faulty_graft(lambda taps, length, count: (taps.roll(1, 1), length, count)),
    "taps of another row": lambda: faulty_graft(lambda taps, length, count: (taps.flip(0), length, count)),
    "refused drafts emitted": lambda: (verify, "accept", lambda tree, tokens, _f=verify.accept: (
        lambda path, accepted, root: (path, (accepted + 1).clamp(max=tree.max_depth), root))(*_f(tree, tokens))),
    "one draft too few, but its token skipped": lambda: (verify, "token_after", lambda tokens, path, accepted, _f=verify.token_after: _f(
        tokens, path, (accepted - 1).clamp(min=0)))}


def run(pair, mode: str = "ddtree") -> None:
    target, draft, plain = pair
    assert texts(decode(target, draft, PROMPTS, mode, budget=20, max_new_tokens=24)) == plain


def test_nothing_planted_in_a_round(pair):
    run(pair)
    run(pair, "dflash")


@pytest.mark.parametrize("fault", ROUND)
def test_round_checks_notice(fault, pair, monkeypatch):
    monkeypatch.setattr(*ROUND[fault]())
    with pytest.raises(AssertionError):
        run(pair)


def test_sampling_at_the_wrong_position_changes_the_text(pair, monkeypatch):
    """A node's token is drawn for position length + depth + 1, the root's included."""
    target, draft, _ = pair
    settings = dict(max_new_tokens=24, temperature=1.0, seed=4)
    plain = texts(decode(target, None, PROMPTS, "ar", **settings))
    assert texts(decode(target, draft, PROMPTS, "ddtree", **settings)) == plain
    ordinary = verify.sample
    monkeypatch.setattr(verify, "sample", lambda logits, position, *rest: ordinary(logits, position - int(position.shape[1] > 1), *rest))
    with pytest.raises(AssertionError):
        assert texts(decode(target, draft, PROMPTS, "ddtree", **settings)) == plain


# Faults of the drafter, for its goldens

@pytest.mark.parametrize("plant", [None, lambda: faulty_block(lambda start: start + 1), lambda: faulty_block(lambda start: start - 1),
                                   lambda: faulty_graft(lambda taps, length, count: (taps, length + 1, count)),
                                   lambda: (draft_module.Drafter, "hidden", lambda self, x, start, *kv, _f=draft_module.Drafter.hidden: _f(self, x, start + 1, *kv))],
                         ids=["nothing", "a mask slot too many", "a mask slot too few", "a graft one slot late", "positions off by one"])
@pytest.mark.parametrize("variant", ["full_b8", "sliding_b16"])
def test_draft_golden_notices(variant, plant, monkeypatch):
    if plant is not None:
        monkeypatch.setattr(*plant())
    with pytest.raises(AssertionError, match="off by") if plant else nullcontext():
        draft_equals_golden(variant)


def test_draft_golden_notices_a_norm_that_is_not_applied():
    """Of each norm in the file: setting it to ones, as if it were skipped or overwritten, is seen."""
    draft, e = load_golden_draft("full_b8")
    draft.setup_cache(2, 26)
    def out():
        draft.graft(e["target_hidden"][:, :21], torch.tensor([0, 0]))
        return draft.hidden(e["block1"].unsqueeze(1), torch.full((2, 1), 21), draft.k_cache[:, :, :21], draft.v_cache[:, :, :21]).squeeze(1)
    close(out(), e["out1"], 1e-5)
    norms = [m for m in draft.modules() if isinstance(m, model.RMSNorm)]
    assert len(norms) == 2 + 3 * 4
    for m in norms:
        kept = m.weight.data.clone()
        m.weight.data.fill_(1.0)
        with pytest.raises(AssertionError, match="off by"):
            close(out(), e["out1"], 1e-5)
        m.weight.data.copy_(kept)
