"""The bench on a tiny pair: what it counts is right, and what it prints can be read by a program. No time is judged."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import bench
import costs
from costs import short, spread
from generate import load
from helpers import GOLDEN, golden_draft, golden_target, write
from model import MoE

SMALL = ["--prompts", "2", "--tokens", "9", "--budgets", "5", "--repeats", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A golden pair with a tokenizer of the 256 bytes."""
    at = tmp_path_factory.mktemp("pair")
    write(at / "target", *golden_target("deepseek_v3"))
    write(at / "draft", *golden_draft("full_b8"))
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(at / "target" / "tokenizer.json"))
    return str(at / "target")


def report(capsys, *argv, code: int = 0) -> dict:
    assert bench.main(list(argv)) == code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_prompts_are_beginnings_of_code():
    lines = [json.loads(line) for line in bench.PROMPTS.read_text().splitlines()]
    assert len(lines) == 24 == len({p["id"] for p in lines}) == len({p["prompt"] for p in lines})
    for p in lines:
        assert 2 <= p["prompt"].count("\n") + 1 <= 8 and p["prompt"] == p["prompt"].rstrip(), p["id"]


def test_modes_side_by_side(folder, capsys, tmp_path):
    out = report(capsys, "--model", folder, "--concurrency", "1", "3", "--out", str(tmp_path / "o.json"), *SMALL)
    assert out == json.loads((tmp_path / "o.json").read_text())
    assert [r["case"] for r in out["modes"]] == ["ar", "auto", "dflash", "ddtree 5"] * 4
    assert [(r["concurrency"], r["temperature"]) for r in out["modes"][::4]] == [(1, 0.0), (1, 0.7), (3, 0.0), (3, 0.7)]
    for r in out["modes"]:
        assert r["differs"] == 0 and r["tok_s"]["q1"] <= r["tok_s"]["median"] <= r["tok_s"]["q3"]
        assert r["pooled"] == 1 if r["mode"] == "ar" else r["pooled"] >= 1
        assert all(r["stages"][s]["median"] > 0 for s in bench.STAGES) and 0 <= r["host"]["median"] < 1
    assert all(r["ratio"]["median"] == 1 for r in out["modes"][::4])
    for ar, auto in zip(out["modes"][::4], out["modes"][1::4]):
        assert auto["auto"]["median"] == 1 and ar["auto"] == auto["ratio"]
    assert len(out["pick"]) == 4


def test_a_text_that_differs_is_counted_and_fails(folder, capsys, monkeypatch):
    honest = bench.generate
    def faulty(target, draft, prompts, mode, *args, **settings):
        results = honest(target, draft, prompts, mode, *args, **settings)
        if mode == "dflash":
            results[0].tokens[-1] ^= 1
        return results
    monkeypatch.setattr(bench, "generate", faulty)
    out = report(capsys, "--quick", "--model", folder, "--temperature", "0", *SMALL, code=1)
    assert [r["differs"] for r in out["modes"]] == [0, 0, 2, 0]


def test_costs(folder):
    pair, args = load(folder), bench.parse_arguments(["--contexts", "40", "100", "--repeats", "2"])
    target, K, E = pair[0], pair[0].config.experts_per_token, pair[0].config.num_experts
    rows, two = (costs.verify_costs(pair, [list(range(150)), [9, 8, 7]], batch, [1, 6, 9], 10.0, args) for batch in (1, 2))
    assert [(r["context"], r["nodes"]) for r in rows] == [(c, n) for c in (40, 100) for n in (1, 6, 9)]
    assert all(b["context_bytes"] == 2 * a["context_bytes"] and b["experts"] >= a["experts"] for a, b in zip(rows, two))
    for r in rows:
        # every latent whole for the scores, its first part for the values, however many nodes look at it
        assert r["context_bytes_taken"] / r["context_bytes"] == 1 + target.config.kv_lora_rank / target.config.latent_dim
        assert r["experts"] == K if r["nodes"] == 1 else K <= r["experts"] <= E
    experts = sum(p.nbytes for m in target.modules() if isinstance(m, MoE) for p in m.experts.parameters())
    one = target.weight_bytes() - target.embed_tokens.weight.nbytes - experts * (1 - K / E) + 64 * target.latent_bytes_per_token()
    assert rows[0]["bytes"] == pytest.approx(one) and rows[1]["x"]["median"] > 0
    modes = [{"case": m, "mode": m, "budget": 8, "concurrency": 2, "pooled": p, "tok_s": {"median": 100.0 * p}, "ratio": {"median": p / 2}}
             for m, p in (("ar", 1.0), ("dflash", 3.0), ("ddtree", 4.0))]
    rows = [{**r, "nodes": {6: pair[1].depths + 1}.get(r["nodes"], r["nodes"])} for r in two]
    for c in costs.candidate_costs(modes, rows, pair):
        assert c["must_win"] == 2 and c["bytes_per_token"] * 2 * c["tokens_per_round"] == pytest.approx(c["round_bytes"])


@pytest.mark.parametrize("more", [[], ["--int4"]])
def test_random_layers(capsys, more):
    out = report(capsys, "--random", "--config", str(GOLDEN / "targets" / "kimi_k2" / "config.json"), "--dtype", "bfloat16", "--layers", "2",
                 "--concurrency", "1", "2", "--contexts", "16", "--nodes", "4", "--repeats", "2", *more)
    assert [(r["batch"], r["nodes"]) for r in out["random"]] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert all(r["bytes"] > 0 and r["ms"]["median"] > r["sparse_layer_ms"] for r in out["random"])


@pytest.mark.parametrize("draft", ["auto", "none"])
def test_requests_through_slots(folder, capsys, draft):
    out = report(capsys, "--model", folder, "--draft", draft, "--serve", "6", "--concurrency", "3", "--temperature", "0.7", "--budgets", "4", "--dtype", "float64")
    assert [(r["slots"], r["differs"], r["tokens"]) for r in out["serve"]] == [(n, 0, out["serve"][0]["tokens"]) for n in (3, 1, 3)]
    assert out["serve"][1]["busy"] == 1 == out["serve"][1]["ratio"] and out["serve"][0]["rounds"] < out["serve"][1]["rounds"]


def test_numbers():
    assert bench.repeated_4grams([1, 2, 3, 4, 5]) == 0 and bench.repeated_4grams([7] * 8) == 0.8 and bench.repeated_4grams([1]) == 0
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "q1": 1.5, "q3": 2.5} and spread([4.0])["q3"] == 4.0
    assert short({"median": 2.0, "q1": 1.5, "q3": 2.5}, 1) == "2.0 [1.5, 2.5]" and short(None) == "-"


@pytest.mark.parametrize("argv, message", [
    (["--tokens", "1"], "tokens must be at least 2"), (["--prompts", "25"], "between 1 and the 24"), (["--budgets", "8", "0"], "budgets must be at least 1"),
    (["--concurrency", "0"], "concurrency must be at least 1"), (["--temperature", "-1"], "temperature must be at least 0"),
    (["--nonsense"], "--help lists the flags"), (["--out", "/"], "/ cannot be written: Is a directory"), (["--random"], "go together"), (["--serve", "0"], "serve must be at least 1"), (["--serve", "3", "--trees"], "one at a time"), (["--random", "--config", "nothing"], "no config 'nothing'"), (["--out", "/no/such/folder/x"], "cannot be written"),
    (["--random", "--config", "kimi_k26", "--layers", "61"], "between 1 and the 60"), (["--model", "/no/such/model"], "no such model folder"),
    (["--prompt-file", "/no/such/file"], "cannot be read"), (["--prompt-file", __file__], "one {\"id\""), (["--prompt-file", "/dev/null"], "/dev/null holds no prompt"), (["--threads", "100000000000"], "threads must be at most"), (["--device", "nope"], "device 'nope'")])
def test_user_errors(argv, message, capsys):
    assert bench.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_prompts_are_read_as_generate_reads_them(tmp_path, capsys):
    """A byte order mark and separators that JSON allows in a text; half a surrogate pair is none."""
    texts, file = ["a\u2028b\x85c", "d"], tmp_path / "p.jsonl"
    file.write_text("\ufeff" + "".join(json.dumps({"id": t, "prompt": t}, ensure_ascii=False) + "\r\n" for t in texts), encoding="utf-8")
    assert bench.read_prompts(file, None) == texts
    file.write_text('{"id": 1, "prompt": "a\\ud800"}')
    assert bench.main(["--quick", "--tokens", "4", "--prompt-file", str(file)]) == 2
    error = capsys.readouterr().err
    assert "half a surrogate pair" in error and error.count("\n") == 1


def test_prompts_that_are_not_text_and_packages_that_are_not_there(tmp_path, capsys, monkeypatch):
    (tmp_path / "p.jsonl").write_text('{"id": 1, "prompt": "x"}\n{"id": 2, "prompt": ["y"]}\n')
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "load", None)  # nothing is loaded before
    for argv, says in ((["--prompt-file", str(tmp_path / "p.jsonl")], "prompts that are text, found \"['y']\""), (["--transformers"], "is not installed")):
        assert bench.main(argv) == 2
        error = capsys.readouterr().err
        assert says in error and error.startswith("error: ") and error.count("\n") == 1


def test_what_counts_as_wrong_and_where_it_is_printed(capsys, monkeypatch, tmp_path):
    """Compiled rounds that differ fail, too; the JSON line comes even where the file can no longer be written."""
    out = tmp_path / "o.json"
    def found(args, *launch):
        out.mkdir()  # in the meantime
        return {"modes": [{"differs": 0}], "questions": {"compiled": [{"differs": 0}, {"differs": 1}]}}
    monkeypatch.setattr(bench, "bench_text", found)
    assert bench.main(["--questions", "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["questions"]["compiled"][1]["differs"] == 1
    assert "1 texts differ" in captured.err and "is on stdout" in captured.err
    monkeypatch.setattr(bench, "bench_text", lambda *args: {"modes": [{"differs": 0}], "questions": {"compiled": [{"differs": 1}]}})
    assert bench.main(["--questions"]) == 1


def test_auto_is_compared_with_its_own_drafter(capsys):
    def row(mode, auto, other=""):
        return {"mode": mode, "case": mode + other, "other": other, "auto": bench.spread([auto]), "modes": bench.Counter({mode: 1})}
    rows = [row("auto", 1.0), row("ar", 2.0), row("dflash", 0.5), row("dflash", 0.25, "another")]
    bench.show_auto(rows)
    assert "the best fixed mode, dflash: 0.50" in capsys.readouterr().out


def test_auto_has_the_ladder_of_its_kind_of_rounds(folder):
    args = bench.parse_arguments(["--compile"])
    auto, = (c for c in bench.cases_for(load(folder)[1], args) if c.mode == "auto")
    assert auto.compile and auto.budget is None


def test_trees_of_a_large_vocabulary(capsys, monkeypatch):
    """Over conditionals nothing larger is made than what ranking the tokens takes: no tensor of all prefixes by all tokens."""
    monkeypatch.setattr(bench, "bench_trees", lambda args: costs.bench_trees(args, 5, 2000, 8))
    rows = report(capsys, "--trees", "--concurrency", "1", "2", "--budgets", "4", "32", "--repeats", "2")["trees"]
    assert [(r["batch"], r["budget"]) for r in rows] == [(1, 4), (1, 32), (2, 4), (2, 32)]
    for r in rows:
        assert r["largest"]["rank"] == r["batch"] * 5 * 2000 * 8 >= r["largest"]["conditionals"]
        assert r["rank"]["median"] > 0 and r["conditionals"]["median"] > 0


def test_a_second_drafter_side_by_side(folder, capsys):
    """draft-dflash beside the target is benched along, by its name; its rows carry no spine."""
    write(Path(folder).parent / "draft-dflash", *golden_draft("yarn_b8"))
    try:
        rows = report(capsys, "--model", folder, "--concurrency", "1", "--temperature", "0", *SMALL)["modes"]
    finally:
        shutil.rmtree(Path(folder).parent / "draft-dflash")
    assert [r["case"] for r in rows] == ["ar", "auto", "dflash", "ddtree 5", "dflash, draft-dflash", "ddtree 5, draft-dflash"]
    assert all(r["differs"] == 0 for r in rows)


@pytest.mark.slow
def test_the_gpu_script_in_small(tmp_path):
    """Every step's command is one that the tools take."""
    script = Path(bench.__file__).parent / "bench" / "gpu.py"
    done = subprocess.run([sys.executable, script, "--out", tmp_path, "--dry-run"], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr + "".join(p.read_text()[-600:] for p in sorted(tmp_path.glob("*.txt")))
    assert len(done.stdout.splitlines()) == 8
