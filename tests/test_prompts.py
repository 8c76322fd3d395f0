"""A file of prompts: what each line gets, what a crash leaves, what is said about lines and files that cannot be served."""
import fcntl
import json
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import generate
import prompts
from helpers import steps_that_end
from serve import Request
from test_cli import PROMPT, TOKENIZER, edit, endless, notes, objects, pair, refused, run, start  # noqa: F401  (pair, endless: fixtures)

LINES = [{"id": "a", "prompt": PROMPT}, {"id": 2, "prompt": "é", "max_new_tokens": 7}, {"id": "c", "prompt": "return 漢字 " * 9, "temperature": 0.8, "seed": 3},
         {"id": "d", "prompt": PROMPT, "temperature": 1.1, "seed": 4, "top_k": 50, "top_p": 0.9}, {"id": "e", "prompt": "x", "max_new_tokens": 1},
         {"id": "f", "prompt": "x" * 505, "max_new_tokens": 100}, {"id": "g", "prompt": "y", "max_new_tokens": 30}]
DDTREE = ("--mode", "ddtree")  # a mode that needs no measuring first
FLAGS = {"max_new_tokens": "--max-new-tokens", "temperature": "--temperature", "seed": "--seed", "top_k": "--top-k", "top_p": "--top-p", "stop": "--stop"}


@pytest.fixture
def file(tmp_path) -> Path:
    return write(tmp_path / "prompts.jsonl", LINES)


def write(path: Path, lines: list) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def served(pair, file: Path, *args, code: int = 0) -> tuple:
    """A run over a file with --out -> the results by id, stderr."""
    out = file.with_name("out.jsonl")
    got, stdout, err = run("--model", pair / "target", "--max-new-tokens", 20, "--prompts", file, "--out", out, *DDTREE[:0 if "--draft" in args else 2], *args)
    assert got == code and stdout == "", err
    lines = out.read_bytes().split(b"\n")
    assert lines.pop() == b""
    results = [json.loads(line) for line in lines]
    assert len({json.dumps(r["id"]) for r in results}) == len(results)
    return {r["id"]: r for r in results}, err


def by_itself(pair, line: dict, *args) -> dict:
    own = [x for k, v in line.items() if k in FLAGS for x in (FLAGS[k], v)]
    return objects(pair, "--prompt", line["prompt"], *own, *DDTREE, *args)[0]


# What it writes

@pytest.mark.parametrize("batch, mode", [(1, "ddtree"), (3, "auto"), (16, "ddtree")])
def test_each_line_gets_what_it_gets_alone(pair, file, batch, mode):
    results, err = served(pair, file, "--batch", batch, "--dtype", "float64", "--mode", mode)
    assert set(results) == {line["id"] for line in LINES}
    for line in LINES:
        r, alone = results[line["id"]], by_itself(pair, line, "--dtype", "float64")
        assert all(r[k] == alone[k] for k in ("text", "tokens", "finish")) and r["mode"] == mode and 0 < r["first_token_s"] <= r["seconds"]
        assert len(r["tokens"]) == 1 + sum(n + 1 for n in r["accepted"])
    tokens = sum(len(r["tokens"]) for r in results.values())
    assert f"{mode}: 7 of 7 done, " in err and f" of {min(batch, 7)} slots busy" in err and notes(err).count("\n") == 1 and tokens > 90


def test_results_go_to_stdout_without_out(pair, file):
    code, out, err = run("--model", pair / "target", "--max-new-tokens", 20, "--prompts", file, "--mode", "dflash")
    assert code == 0 and {json.loads(line)["id"] for line in out.splitlines()} == {line["id"] for line in LINES}
    assert notes(err).startswith("dflash: 7 of 7 done")


def test_stop_texts_of_a_line_are_its_own(pair, tmp_path):
    """The flag is for lines that have none; an empty list is none."""
    text = by_itself(pair, {"prompt": PROMPT})["text"]
    one, two = text[4:6], text[9:12]
    lines = [{"id": 1, "prompt": PROMPT}, {"id": 2, "prompt": PROMPT, "stop": two}, {"id": 3, "prompt": PROMPT, "stop": ["not there", two]},
             {"id": 4, "prompt": PROMPT, "stop": []}]
    results, _ = served(pair, write(tmp_path / "p.jsonl", lines), "--stop", one)
    for n, stop in ((1, one), (2, two), (3, two)):
        alone = by_itself(pair, {"prompt": PROMPT, "stop": stop})
        assert (results[n]["text"], results[n]["tokens"], results[n]["finish"]) == (text[:text.find(stop)], alone["tokens"], "stop")
    assert (results[4]["text"], results[4]["finish"]) == (text, "length")


def test_chats(pair, tmp_path):
    """messages are a chat; prompts are one where --chat or --system says so, as for --prompt."""
    copy = Path(shutil.copytree(pair, tmp_path / "copy"))
    (copy / "target" / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"}]
    (tmp_path / "m.json").write_text(json.dumps(messages))
    file = write(tmp_path / "p.jsonl", [{"id": 1, "prompt": PROMPT}, {"id": 2, "messages": messages}])
    chat = objects(copy, "--messages", tmp_path / "m.json")[0]["tokens"]
    for flags in ((), ("--chat",), ("--system", "be brief")):
        results, _ = served(copy, file, *flags)
        assert results[2]["tokens"] == chat and results[1]["tokens"] == objects(copy, "--prompt", PROMPT, *flags)[0]["tokens"]
        (tmp_path / "out.jsonl").unlink()


def test_the_drafters_absence_is_no_error(pair, file):
    results, err = served(pair, file, "--draft", "none")
    assert {r["mode"] for r in results.values()} == {"ar"} and all(not any(r["accepted"]) for r in results.values())


# A second run

def test_a_second_run_skips_what_is_done(pair, file):
    first, _ = served(pair, file)
    before = file.with_name("out.jsonl").read_bytes()
    again, err = served(pair, file)
    assert again == first and file.with_name("out.jsonl").read_bytes() == before
    assert err == "7 of 7 prompts were done before\n"  # and no weight was read
    write(file, [{"id": "new", "prompt": "z"}] + LINES)
    more, err = served(pair, file)
    assert file.with_name("out.jsonl").read_bytes().startswith(before) and set(more) == {"new", *first}
    assert "7 of 8 prompts were done before\n" in err and "1 of 1 done" in err


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt, 130), (RuntimeError("boom"), None), (OSError(28, "No space left on device"), 2),
                                         (torch.OutOfMemoryError("CUDA out of memory."), 2)])
@pytest.mark.parametrize("after", [0, 1, 9])
def test_whatever_ends_a_run_what_was_finished_is_kept(pair, file, error, code, after):
    whole, _ = served(pair, file, "--batch", 2)
    out = file.with_name("out.jsonl")
    out.unlink()
    args = ("--model", pair / "target", "--max-new-tokens", 20, "--prompts", file, "--out", out, "--batch", 2, *DDTREE)
    if code is None:
        with pytest.raises(RuntimeError, match="boom"), steps_that_end(after, error):
            run(*args)
    else:
        with steps_that_end(after, error):
            got, _, err = run(*args)
        assert got == code and notes(err).count("\n") == 1 and "Traceback" not in err
        assert ("interrupted; ddtree: " in err) == (code == 130) and ("out of memory" in err and "lower --batch" in err) == isinstance(error, torch.OutOfMemoryError)
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(kept) == 0 if after == 0 else 0 < len(kept) < 7 if after == 9 else True
    results, err = served(pair, file, "--batch", 2)
    assert {k: r["tokens"] for k, r in results.items()} == {k: r["tokens"] for k, r in whole.items()}
    assert all(results[r["id"]] == r for r in kept)


@pytest.mark.parametrize("cut", [1, 2, 7, 30, -2, -1, 0])
def test_a_last_line_that_was_cut_short_is_done_again(pair, file, cut):
    """Anywhere: after its first byte, inside, before its closing brace, or before its newline alone, which loses nothing."""
    whole, _ = served(pair, file)
    out = file.with_name("out.jsonl")
    lines = out.read_bytes().splitlines(keepends=True)
    last = json.loads(lines[-1])
    out.write_bytes(b"".join(lines[:-1]) + lines[-1].rstrip(b"\n")[:cut if cut else None])
    results, err = served(pair, file)
    assert ("cut short" in err) == (cut != 0) and ("1 of 1 done" in err) == (cut != 0)
    assert {k: r["tokens"] for k, r in results.items()} == {k: r["tokens"] for k, r in whole.items()}
    assert all(results[json.loads(line)["id"]] == json.loads(line) for line in lines[:-1])
    assert (results[last["id"]] == last) == (cut == 0)


def test_process_that_is_killed_loses_nothing_finished(endless, tmp_path):
    lines = [{"id": i, "prompt": "x" * (i + 1), "max_new_tokens": 3} for i in range(5)] + [{"id": "long", "prompt": PROMPT, "max_new_tokens": 20000}]
    file, out = write(tmp_path / "p.jsonl", lines), tmp_path / "out.jsonl"
    p = start(endless, "--prompts", file, "--out", out, "--batch", "2", "--temperature", "2", *DDTREE)
    until = time.time() + 120
    while time.time() < until and not (out.exists() and out.read_bytes().count(b"\n") == 5):
        time.sleep(0.05)
    p.send_signal(signal.SIGKILL)
    p.communicate()
    kept = out.read_bytes()
    assert {json.loads(line)["id"] for line in kept.splitlines()} == set(range(5))
    write(file, lines[:5] + [{"id": "long", "prompt": PROMPT, "max_new_tokens": 2}])
    code, _, err = run("--model", endless / "target", "--prompts", file, "--out", out, *DDTREE)
    assert code == 0 and "5 of 6 prompts were done before" in err
    assert out.read_bytes().startswith(kept) and json.loads(out.read_bytes().splitlines()[-1])["id"] == "long"


# Lines that cannot be served

BAD = [  # a line -> what must be said
    ("{", "not JSON in UTF-8"), ("[1]", "must be a JSON object, not a list"), ("null", "must be a JSON object"), ("[" * 5000, "not JSON"),
    ({"prompt": "x"}, 'needs an "id"'), ({"id": None, "prompt": "x"}, 'needs an "id"'), ({"id": True, "prompt": "x"}, 'needs an "id"'),
    ({"id": 1.5, "prompt": "x"}, 'needs an "id"'), ({"id": 9}, 'needs a "prompt" or "messages"'),
    ({"id": 9, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "and not both"), ({"id": 9, "prompt": 5}, "prompt must be text"),
    ({"id": 9, "prompt": ["x"]}, "prompt must be text"), ('{"id": 9, "prompt": "\\ud800"}', "half a surrogate pair"), ({"id": 9, "prompt": ""}, "the prompt is empty"),
    ({"id": 9, "prompt": "x" * 512}, "512 tokens and the context holds 512"), ({"id": 9, "messages": []}, "list of messages"),
    ({"id": 9, "messages": [{"role": "user", "content": "x"}]}, "no chat template"), ({"id": 9, "messages": "x"}, "list of messages"),
    ({"id": 9, "prompt": "x", "max_tokens": 5}, "'max_tokens' is unknown"), ({"id": 9, "prompt": "x", "max_new_tokens": 0}, "max-new-tokens"),
    ({"id": 9, "prompt": "x", "max_new_tokens": "5"}, "max_new_tokens must be a whole number"), ({"id": 9, "prompt": "x", "max_new_tokens": True}, "whole number"),
    ({"id": 9, "prompt": "x", "temperature": -1}, "temperature"), ({"id": 9, "prompt": "x", "temperature": "hot"}, "temperature must be a number"),
    ('{"id": 9, "prompt": "x", "temperature": NaN}', "temperature"), ('{"id": 9, "prompt": "x", "temperature": Infinity}', "temperature"),
    ({"id": 9, "prompt": "x", "temperature": 10 ** 400}, "temperature"), ({"id": 9, "prompt": "x", "top_p": 0}, "top-p"), ({"id": 9, "prompt": "x", "top_k": -1}, "top-k"),
    ({"id": 9, "prompt": "x", "seed": 2 ** 63}, "seed"), ({"id": 9, "prompt": "x", "seed": 1.5}, "seed"), ({"id": 9, "prompt": "x", "stop": ""}, "stop"),
    ({"id": 9, "prompt": "x", "stop": [3]}, "stop"), ({"id": "a", "prompt": "x"}, "the id 'a' is taken by line 1")]


def test_bad_lines_are_reported_and_the_rest_is_served(pair, tmp_path):
    """Ten reports at most, each with its line's number; blank lines are none, and count."""
    good = [{"id": "a", "prompt": "x", "max_new_tokens": 2}, "", "   "]
    for at in range(0, len(BAD), 9):
        some = BAD[at:at + 9]
        file = write(tmp_path / f"{at}.jsonl", good + [line for line, _ in some] + [{"id": "z", "prompt": "y", "max_new_tokens": 2}])
        results, err = served(pair, file, code=2)
        reports = [line for line in err.splitlines() if line.startswith("error: ")]
        assert set(results) == {"a", "z"} and len(reports) == len(some), err
        for n, (report, (_, says)) in enumerate(zip(reports, some), 4):
            assert report.startswith(f"error: {file}, line {n}: ") and says in report
        assert f"2 of 2 done" in err and f"{len(some)} lines could not be served" in err
        (tmp_path / "out.jsonl").unlink()


def test_half_a_surrogate_pair_spoils_its_line_alone_in_a_chat_too(pair, tmp_path):
    copy, file = Path(shutil.copytree(pair, tmp_path / "copy")), tmp_path / "p.jsonl"
    (copy / "target" / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}")
    file.write_text('{"id": 1, "prompt": "a\\ud800"}\n{"id": 2, "prompt": "b"}\n')
    code, out, err = run("--model", copy / "target", "--prompts", file, "--chat", "--max-new-tokens", 2)
    assert code == 2 and "line 1" in err and "surrogate" in err and json.loads(out)["id"] == 2


def test_bytes_that_are_not_utf8_spoil_their_line_alone(pair, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"id": 1, "prompt": "x"}\r\n{"id": 2, "prompt": "caf\xe9"}\r\n{"id": 3, "prompt": "caf\xc3\xa9"}')
    results, err = served(pair, file, code=2)
    assert set(results) == {1, 3} and f"{file}, line 2: it is not JSON in UTF-8" in err and results[3]["tokens"] == objects(pair, "--prompt", "café")[0]["tokens"]


def test_many_bad_lines_are_counted(pair, tmp_path):
    file = write(tmp_path / "p.jsonl", ["?"] * 25 + [{"id": 1, "prompt": "x"}])
    results, err = served(pair, file, code=2)
    assert set(results) == {1} and err.count("\nerror: ") == 10 and f"error: and 15 more lines of {file}: 11-25\n" in err
    assert prompts.ranges([3, 7, 8, 9, 11]) == "3, 7-9, 11"
    code, out, err = run("--model", pair / "target", "--prompts", write(tmp_path / "all.jsonl", ["?"]))
    assert code == 2 and out == "" and "memory" not in err


def test_a_line_nested_too_deeply_spoils_itself_alone(tmp_path):
    """Whatever it is that gives up on it: reading it, looking into it, or the template."""
    def encode(text):
        return encode(text) if text == "deep" else [1]
    nested = [{"id": d, "messages": [{"role": "user", "content": json.loads("[" * d + "]" * d)}]} for d in range(20, 900, 40)]
    file = write(tmp_path / "p.jsonl", [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "deep"}, *nested, {"id": "z", "prompt": "y"}])
    for depth in range(900, 1100):
        with open(file, "a") as f:
            f.write(f'{{"id": {depth}, "messages": [{{"role": "user", "content": {"[" * depth + "]" * depth}}}]}}\n')
    tasks, wrong = prompts.read_tasks(file, encode, Request([]), (), SimpleNamespace(max_positions=9, vocab_size=9))
    assert {"a", "z", 20} <= {t.id for t in tasks} and len(tasks) + len(wrong) == 3 + len(nested) + 200
    assert wrong[0] == (2, "it is nested too deeply") and all("nested" in what or "not JSON" in what for _, what in wrong)


def test_a_file_shows_how_far_it_is_before_anything_is_done(pair, tmp_path, monkeypatch):
    """A prompt is read in chunks, and rounds pass, before the first text ends."""
    heard, ordinary = [], generate.serve_file
    def listening(file, decoder, plan, tokenizer, stops, progress, pilot):
        return ordinary(file, decoder, plan, tokenizer, stops, heard.append, pilot)
    monkeypatch.setattr(generate, "serve_file", listening)
    monkeypatch.setattr(prompts, "SHOW_SECONDS", 0.0)
    served(pair, write(tmp_path / "p.jsonl", [{"id": 1, "prompt": "x" * 400, "max_new_tokens": 20}]))
    assert heard[0].startswith("0 of 1 done") and heard[0].endswith("; prompts read: 256 of 400 tokens")
    assert sum(text.startswith("0 of 1 done") for text in heard) > 3 and heard[-1] == ""


# Files that cannot be used

def test_files_that_cannot_be_used_are_refused(pair, file, tmp_path):
    model = ("--model", pair / "target")
    empty, other, folder = write(tmp_path / "empty.jsonl", ["", "  "]), tmp_path / "notes.txt", tmp_path / "folder"
    folder.mkdir()
    refused(*run(*model, "--prompts", tmp_path / "none.jsonl"), "none.jsonl cannot be read: No such file")
    refused(*run(*model, "--prompts", folder), "cannot be read: Is a directory")
    refused(*run(*model, "--prompts", empty), "empty.jsonl holds no prompt")
    refused(*run(*model, "--prompts", file, "--out", folder), "folder is not a file")
    refused(*run(*model, "--prompts", file, "--out", tmp_path / "no" / "where"), "cannot be written: No such file")
    before = file.read_bytes()
    refused(*run(*model, "--prompts", file, "--out", file), "holds the prompts")
    link = tmp_path / "link.jsonl"
    link.symlink_to(file)
    refused(*run(*model, "--prompts", file, "--out", link), "holds the prompts")
    assert file.read_bytes() == before
    for text, says in (("my notes", "ends in something"), ("my notes\n", "line 1 is no result"), ('{"id": 1}\n', "line 1 is no result"), ("\n", "line 1 is no result"),
                       ('{"id": 1, "theirs": 2}', "ends in something"), ('{"id": ' + "[" * 9999, "ends in something"), ('{"id": 1, "prompt": "x"}', "ends in")):
        other.write_text(text)
        refused(*run(*model, "--prompts", file, "--out", other), says)
        assert other.read_text() == text
    with open(tmp_path / "busy.jsonl", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        refused(*run(*model, "--prompts", file, "--out", tmp_path / "busy.jsonl"), "another run")


@pytest.mark.parametrize("args, says", [
    (["--prompt", "x"], "leave --prompt out"), (["--json"], "leave --json out"), (["--tree"], "leave --tree out"), (["--check", "--color"], "leave --check, --color out"), (["--messages", "m.json"], "leave --messages out"),
    (["--batch", "0"], "batch must be at least 1"), (["--batch", "-3"], "batch"), (["--context", "9"], "--plan"), (["--budget", "0"], "budget"), (["--max-new-tokens", "0"], "max-new-tokens")])
def test_flags_that_do_not_go_with_a_file(pair, file, args, says):
    refused(*run("--model", pair / "target", "--prompts", file, *args), says)


@pytest.mark.parametrize("args, says", [
    (["--batch", "4"], "--batch goes with --prompts"), (["--out", "x.jsonl"], "--out takes the results of --prompts"), (["--tree", "--json"], "leave --json out"),
    (["--tree", "--check"], "leave --check out"), (["--json", "--color"], "leave --color out")])
def test_flags_that_would_be_ignored_are_refused(pair, args, says):
    refused(*run("--model", pair / "target", "--prompt", PROMPT, *args), says)


@pytest.mark.parametrize("flags, says", [(["--system", "x"], "leave --system out"), (["--chat"], "leave --chat out")])
def test_flags_of_prompts_without_one(pair, tmp_path, flags, says):
    (tmp_path / "m.json").write_text(json.dumps([{"role": "user", "content": "hi"}]))
    refused(*run("--model", pair / "target", "--messages", tmp_path / "m.json", *flags), says)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError(),
                                   RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
                                   RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes")])
def test_out_of_memory_is_one_line(pair, monkeypatch, error):
    def step(*args):
        raise error
    monkeypatch.setattr(generate.Decoder, "step", step)
    code, _, err = run("--model", pair / "target", "--prompt", PROMPT)
    assert code == 2 and notes(err).count("\n") == 1 and "out of memory (" in err and "lower --batch, --max-new-tokens or --budget" in err


def test_other_errors_are_not_hidden(pair, monkeypatch):
    def step(*args):
        raise RuntimeError("shapes do not match")
    monkeypatch.setattr(generate.Decoder, "step", step)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run("--model", pair / "target", "--prompt", PROMPT)


def test_what_a_disk_takes_in_parts_is_written_whole(tmp_path):
    """A write may take less than it is given."""
    class Slow:
        taken = b""
        def write(self, data):
            self.taken += data[:5]
            return min(len(data), 5)
    slow = Slow()
    prompts.PromptFile([], 0, 0, slow).write({"id": "漢", "text": "é"})
    assert slow.taken == json.dumps({"id": "漢", "text": "é"}).encode() + b"\n"
