"""Training of the bundled target: what resumes is what would have been."""
import json
import zlib
from pathlib import Path

import pytest
import torch

import pretrain
from checkpoint import load_target

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
         "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 16, "intermediate_size": 32, "moe_intermediate_size": 16,
         "n_routed_experts": 4}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """pretrain.main in small: a corpus of two texts, a tiny model, every step saved."""
    for i in range(3):
        (tmp_path / f"{i}.py").write_text("".join(f"def f{i}_{j}(x):\n    return x + {j}\n\n" for j in range(200)))
    files = [tmp_path / f"{i}.py" for i in range(3)]
    monkeypatch.setattr(pretrain, "library_files", lambda: (files[:2], files[2:]))
    monkeypatch.setattr(pretrain, "TARGET", {**pretrain.TARGET, **SMALL})
    monkeypatch.setattr(pretrain, "SAVE_SECONDS", -1)

    def run(name: str, *flags) -> int:
        monkeypatch.setattr("sys.argv", ["pretrain.py", "--work", str(tmp_path / name), "--out", str(tmp_path / name / "target"), *map(str, flags)])
        return pretrain.main()
    return run


def test_an_interrupted_run_goes_on_exactly_and_writes_prompts(small, monkeypatch, tmp_path):
    flags = ("--steps", 4, "--tokens", 1024, "--prompts", 10)
    assert small("whole", *flags) == 0
    with monkeypatch.context() as m:
        plain, calls = pretrain.schedule, []
        def interrupted(*args):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return plain(*args)
        m.setattr(pretrain, "schedule", interrupted)
        assert small("broken", *flags) == 130
    assert small("broken", *flags) == 0
    a, b = (load_target(tmp_path / name / "target") for name in ("whole", "broken"))
    for (n, x), (_, y) in zip(a.named_parameters(), b.named_parameters()):
        assert torch.equal(x, y), n
    lines = [json.loads(line) for line in (tmp_path / "whole" / "prompts.jsonl").read_text().splitlines()]
    assert [len(d["tokens"]) for d in lines] == [16, 16, 16, 1, 32, 32, 32, 1, 64, 64] and len(lines[3]["response"]) == 255
    assert (tmp_path / "whole" / "prompts.jsonl").read_text() == (tmp_path / "broken" / "prompts.jsonl").read_text()


@pytest.mark.parametrize("flag, value, says", (("--tokens", 1023, "--tokens must be at least 1024, got 1023"), ("--steps", 0, "--steps must be at least 1"),
                                               ("--lr", "nan", "--lr must be a positive number"), ("--nope", 1, "--help lists the flags")))
def test_what_cannot_train_is_refused(small, capsys, flag, value, says):
    assert small("x", flag, value) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_balance_moves_bias_to_idle_experts():
    model = pretrain.Transformer(pretrain.Config.from_dict({**pretrain.TARGET, **SMALL}))
    router, *_ = routers = pretrain.count_loads(model)
    for r in routers:
        r.load.fill_(2)
    router.load.copy_(torch.tensor([6., 0., 1., 1.]))
    assert pretrain.balance(routers, 0.25) == 3.0
    assert router.e_score_correction_bias.tolist() == [-0.25, 0.25, 0.25, 0.25] and not router.load.any()


def test_held_out_files_follow_the_rule():
    kept, held = pretrain.library_files()
    root = Path(pretrain.sysconfig.get_paths()["stdlib"])
    assert held and not set(kept) & set(held)
    assert all(zlib.crc32(p.relative_to(root).as_posix().encode()) % 20 == 0 for p in held)
    assert 0.02 < len(held) / (len(kept) + len(held)) < 0.1
