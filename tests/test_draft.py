"""The drafter against its goldens, its training body against `propose`, and its slots."""
import pytest
import torch

import tiny
from draft import DraftConfig
from invariants import UNWRITTEN, close, draft_equals_golden

every_kind = pytest.mark.parametrize("kind", tiny.KINDS)


def grafted(kind: str, lengths: list, slots: int = 40, **changes) -> tuple:
    """A drafter with random taps grafted to ragged lengths; its caches hold junk elsewhere. -> drafter, taps, lengths."""
    draft = tiny.drafter(tiny.target(), kind, **changes)
    taps = torch.randn(len(lengths), max(lengths), 64, generator=torch.Generator().manual_seed(3)).double()
    draft.setup_cache(len(lengths), slots)
    draft.k_cache.fill_(UNWRITTEN), draft.v_cache.fill_(UNWRITTEN)
    draft.graft(taps, torch.zeros(len(lengths), dtype=torch.long), torch.tensor(lengths))
    return draft, taps, torch.tensor(lengths)


@pytest.mark.parametrize("variant", ["full_b8", "yarn_b8", "sliding_b16", "sliding_bidir_b16"])
def test_drafter_equals_golden(variant):
    draft_equals_golden(variant)


@every_kind
def test_training_body_equals_propose(kind):
    """Many blocks over one context, as training runs them, give what `propose` gives at each prefix."""
    target = tiny.target()
    draft = tiny.drafter(target, kind)
    ids = torch.tensor(tiny.prompts(13, 30, 30))
    taps = torch.cat([target.score(ids)[1][i + 1] for i in draft.config.taps], -1)
    anchors = torch.tensor([[0, 1, 4, 9, 17, 29], [29, 3, 2, 11, 5, 20]])
    k, v = draft.context(taps, torch.arange(30).expand(2, 30))
    blocks = torch.full((2, 6, draft.block), draft.config.mask_id)
    blocks[:, :, 0] = ids.gather(1, anchors)
    trained = draft.logits(draft.blocks(blocks, anchors, k, v))                       # (B, M, D, V)
    for m in range(6):
        draft.setup_cache(2, 30)
        draft.graft(taps, torch.zeros(2, dtype=torch.long), anchors[:, m])
        close(draft.propose(blocks[:, m, 0], anchors[:, m]), trained[:, m], 1e-11)


@every_kind
def test_slots_of_both_conventions(kind):
    """`masked`: slot j >= 1 predicts position length + j. `next`: slot j >= 0 predicts length + j + 1. Depth d is always position
    length + d + 1."""
    draft, _, length = grafted(kind, [7, 12])
    ids = torch.tensor([[[5] + [1] * 5], [[9] + [1] * 5]])
    x = draft.blocks(ids, length.unsqueeze(1), draft.k_cache[:, :, :40], draft.v_cache[:, :, :40])[:, 0]
    slots = range(0, 6) if kind.startswith("next") else range(1, 6)
    assert draft.depths == len(slots)
    marginals = draft.propose(torch.tensor([5, 9]), length)
    for d, slot in enumerate(slots):
        close(marginals[:, d], draft.lm_head(x[:, slot]), 1e-11)


@every_kind
def test_propose_sees_the_committed_slots_and_no_others(kind):
    """A changed slot before `length` (within a full layer's reach) changes the marginals; one from `length` on never does."""
    draft, _, length = grafted(kind, [7, 12])
    root = torch.tensor([5, 9])
    base = draft.propose(root, length)
    draft.v_cache[:, :, 12:] = -3.0
    draft.k_cache[:, 0, 7:], draft.v_cache[:, 0, 7:] = 5.0, 5.0
    assert torch.equal(draft.propose(root, length), base)
    draft.v_cache[:, 0, 6] += 1.0
    draft.v_cache[:, 1, 0] += 1.0
    changed = draft.propose(root, length) - base
    assert (changed.abs().amax((1, 2)) > 1e-6).all()


@pytest.mark.parametrize("kind, sees", [("sliding", "causal"), ("bidirectional", "both"), ("full", "both")])
def test_what_a_block_slot_sees_of_its_block(kind, sees):
    """Causal sliding layers hide later slots from earlier ones, bidirectional and full layers show them."""
    layers = {"layer_types": ["sliding_attention"] * 2} if kind != "full" else {}
    draft, _, length = grafted(kind, [7], **layers)
    ids = torch.tensor([[[5, 1, 1, 1, 1, 1]]])
    other = ids.clone()
    other[0, 0, 4] = 8
    out = [draft.blocks(i, length.unsqueeze(1), draft.k_cache[:, :, :7], draft.v_cache[:, :, :7])[0, 0] for i in (ids, other)]
    earlier = (out[0][:4] - out[1][:4]).abs().amax(-1) > 1e-9
    assert earlier.any() == (sees == "both")
    assert ((out[0][4:] - out[1][4:]).abs().amax(-1) > 1e-9).all()


def test_sliding_layers_forget():
    """With window 5 and 2 layers, slot j at position length + j sees keys with q - k < 5 only."""
    draft, _, length = grafted("sliding", [20], layer_types=["sliding_attention"] * 2)
    base = draft.propose(torch.tensor([3]), length)
    draft.v_cache[:, :, :16] += 1.0            # position 20 sees 16 … 20
    assert torch.equal(draft.propose(torch.tensor([3]), length), base)
    draft.v_cache[:, :, 16] += 1.0
    assert not torch.equal(draft.propose(torch.tensor([3]), length), base)


def test_graft_in_pieces_equals_graft_at_once():
    draft, taps, _ = grafted("full", [20, 20])
    whole = draft.k_cache.clone(), draft.v_cache.clone()
    draft.k_cache.fill_(UNWRITTEN), draft.v_cache.fill_(UNWRITTEN)
    for start, end in ((0, 7), (7, 8), (8, 20)):
        draft.graft(taps[:, start:end], torch.full((2,), start))
    for got, want in zip((draft.k_cache, draft.v_cache), whole):
        close(got[:, :, :40], want[:, :, :40], 1e-12)


def test_graft_writes_count_tokens_of_each_row():
    draft, _, lengths = grafted("full", [3, 0, 9])
    written = (draft.k_cache[:, :, :40] != UNWRITTEN).flatten(3)
    want = torch.arange(40) < lengths.unsqueeze(1)
    assert torch.equal(written.all(-1), want.expand(2, -1, -1)) and torch.equal(written.any(-1), want.expand(2, -1, -1))


@every_kind
def test_a_row_proposes_alone_what_it_proposes_in_a_batch(kind):
    draft, taps, length = grafted(kind, [7, 12, 1])
    whole = draft.propose(torch.tensor([5, 9, 2]), length)
    draft.setup_cache(1, 15)
    draft.graft(taps[1:2], torch.tensor([0]))
    close(draft.propose(torch.tensor([9]), length[1:2]), whole[1:2], 1e-11)


def test_span_is_only_a_bound():
    draft, _, length = grafted("full", [7, 12])
    root = torch.tensor([5, 9])
    close(draft.propose(root, length, 12), draft.propose(root, length, 40), 1e-11)


def test_a_lowered_block_drafts_less():
    """A block below the trained size is what a block of that size is."""
    for kind, depths in (("full", 3), ("next", 4)):
        draft, _, length = grafted(kind, [7])
        draft.adapt(block=4)
        marginals = draft.propose(torch.tensor([5]), length)
        assert marginals.shape == (1, depths, 13)
        short, _, _ = grafted(kind, [7], block_size=4)
        close(marginals, short.propose(torch.tensor([5]), length), 1e-12)


def test_a_draft_window_is_what_full_layers_see():
    """With window 6, position 20 sees 15 … 20: what lies before changes nothing, 15 does."""
    draft, _, length = grafted("full", [20])
    draft.adapt(window=6)
    base = draft.propose(torch.tensor([3]), length)
    draft.v_cache[:, :, :15] += 1.0
    assert torch.equal(draft.propose(torch.tensor([3]), length), base)
    draft.v_cache[:, :, 15] += 1.0
    assert not torch.equal(draft.propose(torch.tensor([3]), length), base)


def test_an_attention_factor_scales_cos_and_sin():
    draft, _, _ = grafted("full", [7])
    plain = draft.rope(torch.tensor([3, 4]))
    draft.adapt(attention_factor=1.41589)
    for got, want in zip(draft.rope(torch.tensor([3, 4])), plain):
        close(got, want * 1.41589, 1e-12)


@pytest.mark.parametrize("changes", [{"block": 1}, {"block": 7}, {"window": 5}, {"window": -1}, {"attention_factor": 0.0}, {"attention_factor": float("inf")}])
def test_overrides_out_of_range_are_refused(changes):
    draft, _, _ = grafted("full", [7])
    with pytest.raises(ValueError):
        draft.adapt(**changes)


@pytest.mark.parametrize("own", [True, False])
def test_keys_at_the_top_or_in_dflash_config(own):
    base = {**tiny.DRAFT, "vocab_size": 13, "hidden_size": 32}
    keys = {k: base.pop(k) for k in ("target_layer_ids", "mask_token_id", "block_size")}
    c = DraftConfig.from_dict({**base, "dflash_config": keys} if own else {**base, **keys})
    assert (c.taps, c.mask_id, c.block, c.slots) == ((0, 1), 1, 6, "masked")


@pytest.mark.parametrize("gone", ["target_layer_ids", "mask_token_id", "block_size"])
def test_no_key_is_guessed(gone):
    d = {**tiny.DRAFT, "vocab_size": 13, "hidden_size": 32}
    del d[gone]
    with pytest.raises(ValueError, match=gone):
        DraftConfig.from_dict(d)


def test_cost_accounting_leaves_out_what_is_shared():
    draft = tiny.drafter(tiny.target())
    assert draft.num_params() == sum(p.numel() for p in draft.parameters()) - 2 * 13 * 32
    assert draft.weight_bytes() == 8 * draft.num_params()
    assert draft.kv_bytes_per_token() == 2 * 2 * 2 * 8 * 8  # k and v, layers, heads, dims, bytes


# The Markov head

@pytest.mark.parametrize("kind", ["markov", "next gated"])
def test_what_the_token_before_adds(kind):
    """By hand: W2 W1[x], gated by σ(Wg [h ; e]); all tokens or some of them; and training sees what proposing sees."""
    draft, _, length = grafted(kind, [7, 12])
    root, before = torch.tensor([5, 9]), torch.tensor([[3, 0, 12], [1, 1, 7]])
    marginals, conditional = draft.proposal(root, length)
    ids = torch.tensor([[[5] + [1] * 5], [[9] + [1] * 5]])
    x = draft.blocks(ids, length.unsqueeze(1), draft.k_cache[:, :, :40], draft.v_cache[:, :, :40])
    hidden, w = x[:, 0, 6 - draft.depths:], dict(draft.markov_head.named_parameters())
    for d in range(draft.depths):
        e = w["markov_w1.weight"][before]
        if kind == "next gated":
            stacked = torch.cat((hidden[:, d:d + 1].expand(-1, 3, -1), e), -1)
            e = torch.sigmoid(stacked @ w["gate_proj.weight"].T + w["gate_proj.bias"]) * e
        want = e @ w["markov_w2.weight"].T
        close(conditional(d, before), want, 1e-12)
        few = torch.tensor([[2, 8], [12, 0]])
        close(conditional(d, before, few), want.gather(-1, few.unsqueeze(1).expand(-1, 3, -1)), 1e-12)
    close(marginals, draft.lm_head(hidden), 1e-12)
    text = torch.randint(13, (2, 1, draft.depths), generator=torch.Generator().manual_seed(1))
    told = torch.stack([marginals[:, d] + conditional(d, text[:, 0, d:d + 1])[:, 0] for d in range(draft.depths)], 1)
    close(draft.logits(x, text)[:, 0], told, 1e-11)
    close(draft.logits(x)[:, 0], marginals, 1e-11)


def test_a_fresh_head_adds_nothing_and_learns():
    """A drafter given a new head drafts what it drafted; its first gradient reaches the head."""
    for kind in ("vanilla", "gated"):
        draft = tiny.drafter(tiny.target(), markov_rank=4, markov_head_type=kind).requires_grad_(True)
        draft.init_head(torch.Generator().manual_seed(0))
        added = draft.markov_head(torch.tensor([[1, 2]]), torch.randn(1, 1, 32).double())
        assert not added.any()
        added[0, 0, 3].backward()
        assert draft.markov_head.markov_w2.weight.grad.any() and draft.markov_head.markov_w1.weight.grad is not None


@pytest.mark.parametrize("where", ["dflash_config", "dspark_config", None])
def test_keys_of_the_markov_head(where):
    base, head = {**tiny.DRAFT, "vocab_size": 13, "hidden_size": 32}, {"markov_rank": 4, "markov_head_type": "gated"}
    c = DraftConfig.from_dict({**base, **({where: head} if where else head)})
    assert (c.markov_rank, c.markov_type) == (4, "gated")
    assert DraftConfig.from_dict(base).markov_rank == DraftConfig.from_dict({**base, "markov_rank": None}).markov_rank == 0
    assert DraftConfig.from_dict({**base, "markov_rank": 4}).markov_type == "vanilla"


@pytest.mark.parametrize("kind, says", [("rnn", "rnn is not supported: its state depends on the whole path"), ("fir", "must be vanilla or gated, got 'fir'")])
def test_other_markov_heads_are_refused_by_name(kind, says):
    with pytest.raises(ValueError, match=says):
        DraftConfig.from_dict({**tiny.DRAFT, "vocab_size": 13, "hidden_size": 32, "markov_rank": 4, "markov_head_type": kind})


def test_a_deepspec_config():
    """Top-level keys, no sliding layers, block 7 with the `next` slots."""
    d = {**tiny.DRAFT, "vocab_size": 13, "hidden_size": 32, "architectures": ["Qwen3DSparkModel"], "block_size": 7, "num_anchors": 512,
         "layer_types": ["full_attention"] * 2, "enable_confidence_head": True, "confidence_head_with_markov": True, "markov_rank": 256,
         "markov_head_type": "vanilla", "tie_word_embeddings": False}
    c = DraftConfig.from_dict(d)
    assert (c.slots, c.block, c.taps, c.mask_id, c.markov_rank, c.windows, c.causal) == ("next", 7, (0, 1), 1, 256, (0, 0), (False, False))
