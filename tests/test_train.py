"""Training: what resumes is what would have been, and the drafter is trained by the code that drafts."""
import zlib
from pathlib import Path

import pytest
import torch

import train
from checkpoint import load_draft, load_target
from generate import generate

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
         "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 16, "intermediate_size": 32, "moe_intermediate_size": 16,
         "n_routed_experts": 4}
SMALL_DRAFT = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
               "intermediate_size": 32, "num_target_layers": 3, "layer_types": ["full_attention"] * 2,
               "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 1}}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """train.main in small: a corpus of two texts, tiny models, every step saved."""
    for i in range(3):
        (tmp_path / f"{i}.py").write_text("".join(f"def f{i}_{j}(x):\n    return x + {j}\n\n" for j in range(200)))
    files = [tmp_path / f"{i}.py" for i in range(3)]
    monkeypatch.setattr(train, "library_files", lambda: (files[:2], files[2:]))
    monkeypatch.setattr(train, "TARGET", {**train.TARGET, **SMALL})
    monkeypatch.setattr(train, "DRAFT", {**train.DRAFT, **SMALL_DRAFT})
    monkeypatch.setattr(train, "SAVE_SECONDS", -1)
    monkeypatch.setattr(train, "SHARD", 8)
    monkeypatch.setattr(train, "LENGTH", 112)

    def run(step: str, name: str, *flags) -> int:
        monkeypatch.setattr("sys.argv", ["train.py", step, "--work", str(tmp_path / name), "--out", str(tmp_path / name / "pair"), *map(str, flags)])
        return train.main()
    return run


def interrupt_once(monkeypatch, function: str, call: int) -> None:
    """Ctrl-C at the n-th call of one of train's functions."""
    plain, calls = getattr(train, function), []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return plain(*args)
    monkeypatch.setattr(train, function, interrupted)


def test_the_three_steps_make_a_pair_that_decodes_and_resume_exactly(small, monkeypatch, tmp_path):
    steps = {"target": ("--steps", 4, "--tokens", 1024), "data": ("--steps", 12), "draft": ("--steps", 4, "--tokens", 896, "--anchors", 4)}
    for step, flags in steps.items():
        assert small(step, "whole", *flags) == 0
    for step, function, call in (("target", "schedule", 3), ("data", "windows", 6), ("draft", "schedule", 3)):
        with monkeypatch.context() as m:
            interrupt_once(m, function, call)
            assert small(step, "broken", *steps[step]) == 130
        assert small(step, "broken", *steps[step]) == 0
    pairs = []
    for name in ("whole", "broken"):
        target = load_target(tmp_path / name / "pair" / "target")
        pairs.append((target, load_draft(tmp_path / name / "pair" / "draft", target)))
    for a, b in zip(*pairs):
        for (n, x), (_, y) in zip(a.named_parameters(), b.named_parameters()):
            assert torch.equal(x, y), n
    target, draft = (m.double() for m in pairs[0])
    target.reset_frequencies(), draft.reset_frequencies()
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    assert [r.tokens for r in generate(target, draft, prompts, "ddtree", budget=8, max_new_tokens=30)] == \
        [r.tokens for r in generate(target, draft, prompts, "ar", max_new_tokens=30)]


def test_a_drafter_needs_data(small, capsys):
    assert small("target", "w", "--steps", 1, "--tokens", 1024) == 0
    capsys.readouterr()
    assert small("draft", "w") == 2
    assert "run `python train.py data` first" in capsys.readouterr().err


def test_balance_moves_bias_to_idle_experts():
    model = train.Transformer(train.Config.from_dict({**train.TARGET, **SMALL}))
    router, *_ = routers = train.count_loads(model)
    for r in routers:
        r.load.fill_(2)
    router.load.copy_(torch.tensor([6., 0., 1., 1.]))
    assert train.balance(routers, 0.25) == 3.0
    assert router.e_score_correction_bias.tolist() == [-0.25, 0.25, 0.25, 0.25] and not router.load.any()


def test_anchors_are_distinct_and_every_draft_has_a_label():
    anchors = train.draw_anchors(20, 5, 60, 7, 64, 0)
    assert anchors.shape == (64, 20) and anchors.min() >= 5 and anchors.max() + 7 <= 59
    assert all(len(set(row)) == 20 for row in anchors.tolist())
    assert not torch.equal(anchors, train.draw_anchors(20, 5, 60, 7, 64, 1))


def test_held_out_files_follow_the_rule():
    kept, held = train.library_files()
    root = Path(train.sysconfig.get_paths()["stdlib"])
    assert held and not set(kept) & set(held)
    assert all(zlib.crc32(p.relative_to(root).as_posix().encode()) % 20 == 0 for p in held)
    assert 0.02 < len(held) / (len(kept) + len(held)) < 0.1


def test_training_blocks_are_what_propose_proposes():
    """block_logits at every anchor == propose over the same grafted prefix; the labels' positions are tested with it:
    a loss of zero is reached by logits that name the following tokens."""
    torch.manual_seed(0)
    target = train.Transformer(train.Config.from_dict({**train.TARGET, **SMALL})).double()
    target.init_weights(torch.Generator().manual_seed(0))
    target.reset_frequencies()
    draft = train.Drafter(train.DraftConfig.from_dict({**train.DRAFT, **SMALL_DRAFT})).double()
    draft.init_weights(torch.Generator().manual_seed(1))
    draft.share(target)
    draft.reset_frequencies()
    ids = torch.randint(300, (2, 40))
    with torch.no_grad():
        _, hidden = target.score(ids, expanded=True)
        taps = torch.cat([hidden[i + 1] for i in draft.config.taps], -1)
        anchors = train.draw_anchors(6, 3, 40, draft.depths, 2, 0)
        logits = train.block_logits(draft, taps, ids, anchors)
        for m in range(6):
            for b in range(2):
                at = anchors[b:b + 1, m]
                draft.setup_cache(1, 40)
                draft.graft(taps[b:b + 1, :at], torch.zeros(1, dtype=torch.long))
                alone = draft.propose(ids[b, at], at)
                assert (alone[0] - logits[b, m]).abs().max() < 1e-12

        def perfect(draft, taps, ids, anchors):
            labels = ids[torch.arange(2).view(-1, 1, 1), anchors.unsqueeze(-1) + 1 + torch.arange(draft.depths)]
            return torch.nn.functional.one_hot(labels, 300).double() * 1e3
        plain, train.block_logits = train.block_logits, perfect
        try:
            assert train.draft_loss(draft, taps, ids, target.score(ids)[0], anchors, torch.zeros(2)) < 1e-6
        finally:
            train.block_logits = plain
        assert train.draft_loss(draft, taps, ids, target.score(ids)[0], anchors, torch.zeros(2)) > 1


def test_repeated_share():
    assert train.repeated_share(torch.arange(20).view(2, 10)) == 0
    assert train.repeated_share(torch.ones(1, 23, dtype=torch.long)) == 0.95
