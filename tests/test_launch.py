"""Launches by torchrun: who speaks, what a failure of one rank does to all, and what is refused."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import generate
from test_parallel import ROOT, Cases, places
from tokens import save_tokenizer


def torchrun(ranks: int, *command, **env) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *map(str, command)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **env})


def gone(folder: Path) -> bool:
    """Whether the processes that wrote their numbers there have ended."""
    for file in folder.iterdir():
        try:
            os.kill(int(file.read_text()), 0)
            state = Path(f"/proc/{file.read_text()}/stat")
            if not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z":
                return False
        except ProcessLookupError:
            pass
    return True


def errors(err: str) -> list:
    return [line for line in err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("fault, says", [
    ("raises", r"ZeroDivisionError: planted \(ranks_faulty\.py:\d+\)"),
    ("dies", r"no sign of life for \d+ s \(killed, out of memory, or stopped\), last at .*"),
    ("hangs", r"(stays|is) at ranks_faulty\.py:\d+ \(step\).*, while others wait for it")])
def test_a_rank_that_fails_ends_the_launch(tmp_path, fault, says):
    """One line says which, and why; no process is left."""
    began = time.monotonic()
    p = torchrun(2, "tests/ranks_faulty.py", f"{fault}:{tmp_path}", "--tp", 2, "--prompt", "def f(", "--max-new-tokens", 60)
    out, err = p.communicate(timeout=240)
    assert p.returncode != 0 and len(errors(err)) == 1 and re.fullmatch("error: rank 1: " + says, errors(err)[0]), err
    assert len(list(tmp_path.iterdir())) == 2 and gone(tmp_path)
    assert time.monotonic() - began < 120


def test_a_rank_that_fails_before_it_joined():
    """Where rank 0 fails, too, torchrun ends this one before it speaks."""
    done = subprocess.run([sys.executable, "generate.py", "--tp", "2", "--device", "cuda:1", "--prompt", "x"], env={**places(2), "RANK": "1", "LOCAL_RANK": "0"},
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and done.stderr.startswith("error: rank 1: each of the 2 ranks on a host takes a CUDA device of its own")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_leaves_no_process(tmp_path):
    p = torchrun(2, "tests/ranks_faulty.py", f"waits:{tmp_path}", "--tp", 2, "--prompt", "def f(", "--max-new-tokens", 900)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.1)
        assert p.poll() is None, p.communicate()[1]
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=120)
    assert p.returncode != 0 and gone(tmp_path)
    assert "interrupted" in err and not errors(err), err


def test_rank_0_alone_speaks():
    """Also where all ranks come to the same end, before they joined and after. The text is that of one process."""
    arguments = ("generate.py", "--prompt", "def f(", "--max-new-tokens", 12, "--dtype", "float64", "--json")
    p = torchrun(2, *arguments, "--tp", 2, "--experts", "1x2")
    alone = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, check=True)
    out, err = p.communicate(timeout=240)
    assert p.returncode == 0, err
    assert json.loads(out)["tokens"] == json.loads(alone.stdout)["tokens"] and err.count("tokens per round") == 1
    wrong = torchrun(2, *arguments, "--tp", 2, "--experts", "3x1"), torchrun(2, "bench.py", "--quick", "--tp", 2, "--nonsense")
    for p, says in zip(wrong, ("--experts must be tp, ep, or AxB where A groups hold whole experts and B ranks divide each of them, A times B being the number "
                               "of ranks, 2; got '3x1'", "unrecognized arguments: --nonsense; --help lists the flags")):
        out, err = p.communicate(timeout=240)
        assert p.returncode != 0 and not out and errors(err) == [f"error: {says}"], err


def test_a_file_of_prompts(tmp_path):
    """Rank 0 reads it, finds what was done before and what cannot be served, and writes the results: those of one process."""
    lines = [{"id": 1, "prompt": "def f(", "max_new_tokens": 20, "stop": ["\n"]}, {"id": 2, "prompt": "class A:", "temperature": 0.8, "seed": 3}, {"id": 3},
             {"id": 4, "prompt": "import os", "top_k": 3, "temperature": 1.0}, {"id": 5, "prompt": "x = "}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outs = [tmp_path / name for name in ("alone.jsonl", "ranks.jsonl")]
    for out in outs:
        out.write_text(json.dumps({"id": 5, "text": "", "finish": "length"}) + "\n")
    arguments = ("generate.py", "--prompts", tmp_path / "prompts.jsonl", "--batch", 2, "--max-new-tokens", 12, "--dtype", "float64", "--mode", "ddtree", "--budget", 8)
    p = torchrun(2, *arguments, "--out", outs[1], "--tp", 2, "--experts", "ep")
    alone = subprocess.run([sys.executable, *map(str, arguments), "--out", str(outs[0])], capture_output=True, text=True, cwd=ROOT)
    out, err = p.communicate(timeout=240)
    assert alone.returncode == 2 and p.returncode != 0 and not out and errors(err) == errors(alone.stderr) != []
    ours, theirs = ({r["id"]: (r.get("tokens"), r["text"], r["finish"]) for r in map(json.loads, out.read_text().splitlines())} for out in outs)
    assert ours == theirs and sorted(ours) == [1, 2, 4, 5] and ours[1][2] == "stop", err


@pytest.mark.parametrize("more, says", [
    (("--max-new-tokens", 5), "the flags are not those of rank 0: max_new_tokens is 5, there 6. Start every host with the same flags and files"),
    (("--draft", "none"), "the models' configs are not those of rank 0: a drafter is False, there True; ")])
def test_hosts_that_were_started_differently(more, says):
    """Their rounds would send other things, and wait for each other until the timeout."""
    env, command = places(2), [sys.executable, "generate.py", "--tp", 2, "--prompt", "def f(", "--max-new-tokens", 6]
    ranks = [subprocess.Popen([*map(str, command), *map(str, more if rank else ())], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=ROOT,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    out, err = zip(*(p.communicate(timeout=240) for p in ranks))
    assert ranks[0].returncode and ranks[1].returncode == 2 and out[0] == "" == out[1]
    assert len(lines := errors("".join(err))) == 1 and lines[0].startswith(f"error: rank 1: {says}"), err


def test_the_modes_are_measured_in_each_layout(tmp_path):
    """The tables and the JSON object come from rank 0; every mode wrote ar's text in every layout."""
    tiny_pair = Cases.small_pair(SimpleNamespace(folder=tmp_path, draft_config=Cases.draft_config), "bench", vocab_size=300)
    save_tokenizer(Path(tiny_pair[0]))
    p = torchrun(2, "bench.py", "--quick", "--tp", 2, "--experts", "tp", "ep", "--model", tiny_pair[0], "--draft", tiny_pair[1], "--prompts", 1, "--tokens", 6,
                 "--budgets", 5, "--temperature", 0.7, "--dtype", "float64", "--out", tmp_path / "out.json", XDG_CACHE_HOME=str(tmp_path))
    out, err = p.communicate(timeout=400)
    assert p.returncode == 0, err
    *tables, last = out.splitlines()
    report, cases = json.loads(last), ("ar", "auto", "dflash", "ddtree 5")
    assert report == json.loads((tmp_path / "out.json").read_text())
    assert [(r["case"], r["experts"]) for r in report["modes"]] == [(f"{case} {experts}", experts) for experts in ("tp", "ep") for case in cases]
    assert all(r["differs"] == 0 and r["ranks"] == 2 and r["tok_s"]["median"] > 0 for r in report["modes"])
    assert [line for line in tables if "--experts" in line] == ["2 ranks, --experts tp", "2 ranks, --experts ep"]


@pytest.mark.parametrize("env, arguments, says", [
    ({}, ("--tp", "2"), "--tp 2 needs 2 processes: start it as torchrun --standalone --nproc-per-node 2 generate.py --tp 2"),
    ({"RANK": "0", "WORLD_SIZE": "4"}, ("--tp", "2"), "torchrun started 4 ranks, and --tp is 2"),
    ({}, ("--tp", "0"), "--tp must be at least 1, got 0"),
    ({"RANK": "0", "WORLD_SIZE": "4"}, (), "torchrun started 4 ranks, and --tp is 1"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, ("--tp", "2", "--timeout", "0"), "--timeout must be between 1 and 1000000 seconds, got 0"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, ("--tp", "2", "--device", "cuda:1"), "--device is cuda:1; use cuda"),
    ({"RANK": "0", "WORLD_SIZE": "99"}, ("--tp", "99", "--device", "cuda"), r"each of the 99 ranks on a host takes a CUDA device of its own, and there are \d+"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, ("--tp", "2", "--device", "meta"), "several ranks run on cpu or cuda, not on 'meta'")])
def test_launches_that_are_not_as_asked(monkeypatch, capsys, env, arguments, says):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    assert generate.main(["--prompt", "x", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and re.search(f"error: .*{says}", err)
