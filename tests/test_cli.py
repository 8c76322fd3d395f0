"""The command line: what it prints, and one line and exit code 2 for whatever a user can mend."""
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import generate
import tiny
from checkpoint import save_draft, save_target
from helpers import steps_that_end
from hub import write_safetensors
from show import DRAFTED, OWN, RESET, TextStream
from tokens import byte_tokenizer, save_tokenizer

ROOT = Path(__file__).parent.parent
TOKENIZER = byte_tokenizer()
END, MASK = TOKENIZER.token_to_id("<|end|>"), TOKENIZER.token_to_id("<|mask|>")
PROMPT = "def f(x):\n"


def save_pair(folder: Path, **changes) -> Path:
    """A random pair with a byte-level tokenizer, in the hub's layout: folder/target and folder/draft."""
    vocab = TOKENIZER.get_vocab_size()
    config = {**tiny.TARGET, "vocab_size": vocab, "eos_token_id": END, **changes}
    target = tiny.target(torch.float32, **{k: v for k, v in config.items() if tiny.TARGET.get(k) != v})
    draft_config = {**tiny.DRAFT, "vocab_size": vocab, "hidden_size": 32, "num_target_layers": 3, "mask_token_id": MASK}
    save_target(target, config, folder / "target", torch.float32)
    save_draft(tiny.drafter(target, mask_token_id=MASK), draft_config, folder / "draft", torch.float32)
    save_tokenizer(folder / "target")
    return folder


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def copy(pair, tmp_path) -> Path:
    """A copy of the pair, to be broken."""
    return Path(shutil.copytree(pair, tmp_path / "copy"))


def run(*args, stdin: bytes = b"") -> tuple:
    """generate.main in this process -> exit code, stdout, stderr."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = generate.main([str(a) for a in args])
            except SystemExit as e:
                code = e.code
    finally:
        sys.stdin = before
    return code, out.getvalue(), err.getvalue()


def notes(err: str) -> str:
    """stderr without the line of the memory plan, which a run that loads weights begins with."""
    first, _, rest = err.partition("\n")
    assert first.startswith("memory: ")
    return rest


def good(pair: Path, *args, **more) -> tuple:
    """A run that succeeds -> stdout, stderr after the memory plan."""
    code, out, err = run("--model", pair / "target", "--max-new-tokens", 20, *args, **more)
    assert code == 0, err
    return out, notes(err)


def objects(pair: Path, *args, **more) -> list:
    return [json.loads(line) for line in good(pair, "--json", *args, **more)[0].splitlines()]


# What it prints

def test_plain_run_prints_the_text_and_one_line(pair):
    o, = objects(pair, "--prompt", PROMPT)
    figures = r": 20 tokens, \d+ rounds, \d+\.\d\d tokens per round, \d+\.\d tok/s, first token after \d+ ms"
    for flags, line in ((("--mode", "ddtree"), "ddtree" + figures), ((), "auto" + figures + r"; .*\d+% of rounds: .* gives \d+\.\d\d tokens in .* ms, .*")):
        out, err = good(pair, "--prompt", PROMPT, *flags)
        assert out == o["text"] + "\n"
        assert re.fullmatch(line + "\n", err)


def test_json_tells_everything(pair):
    a, b = objects(pair, "--prompt", PROMPT, "--prompt", "é", "--mode", "ddtree", "--budget", 200)
    for o, prompt in ((a, PROMPT), (b, "é")):
        assert set(o) >= {"prompt", "text", "tokens", "accepted", "finish", "mode", "rounds", "why", "first_token_s", "seconds"}
        assert o["rounds"] == {"ddtree 200": len(o["accepted"])} and o["why"] is None
        assert o["prompt"] == prompt and o["mode"] == "ddtree" and o["finish"] == "length"
        assert len(o["tokens"]) == 20 == 1 + sum(n + 1 for n in o["accepted"])
        assert o["text"] == TOKENIZER.decode(o["tokens"], skip_special_tokens=False)
        assert 0 < o["first_token_s"] < o["seconds"]
    assert sum(a["accepted"]) + sum(b["accepted"]) > 0
    o, = objects(pair, "--prompt", PROMPT)
    assert o["mode"] == "auto" and sum(o["rounds"].values()) == len(o["accepted"]) and "ar gives 1.00 tokens" in o["why"]


def test_every_mode_prints_the_same_text(pair):
    for more in ((), ("--temperature", 0.8, "--seed", 3, "--top-k", 50, "--top-p", 0.9)):
        plain, = objects(pair, "--prompt", PROMPT, "--mode", "ar", *more)
        for shape in (("--mode", "dflash"), ("--mode", "ddtree"), ("--budget", 9, "--spine"), ("--budget", 100, "--no-spine")):
            o, = objects(pair, "--prompt", PROMPT, *shape, *more)
            assert (o["text"], o["tokens"]) == (plain["text"], plain["tokens"])


def test_settings_reach_the_decoder(pair):
    """No flag is accepted and then ignored."""
    def tokens(*more):
        return objects(pair, "--prompt", PROMPT, "--temperature", 1, *more)[0]["tokens"]
    base = tokens()
    assert base == tokens("--seed", 0)
    for other in (("--seed", 1), ("--temperature", 0), ("--temperature", 0.2), ("--top-k", 1), ("--top-p", 0.05)):
        assert tokens(*other) != base, other
    assert len(tokens("--max-new-tokens", 7)) == 7
    assert tokens("--top-k", 1) == tokens("--temperature", 0)


@pytest.mark.parametrize("flags, depths", [(["--block", 3], 2), (["--draft-window", 6], 5), (["--attention-factor", 1.4], 5)])
def test_overrides_of_the_drafter_change_drafts_and_no_text(pair, monkeypatch, flags, depths):
    seen = []
    ordinary = generate.Decoder.propose
    monkeypatch.setattr(generate.Decoder, "propose", lambda *args: seen.append(ordinary(*args)) or seen[-1])
    plain, = objects(pair, "--prompt", PROMPT, "--mode", "ddtree")
    first, _ = seen[0]
    seen.clear()
    o, = objects(pair, "--prompt", PROMPT, "--mode", "ddtree", *flags)
    assert o["tokens"] == plain["tokens"]
    assert seen[0][0].shape[1] == depths and not torch.equal(seen[0][0], first[:, :depths])


def test_prompts_together_print_what_each_prints_alone(pair):
    prompts = [PROMPT, "x", "return 漢字 " * 9]
    together = objects(pair, *(a for p in prompts for a in ("--prompt", p)))
    for p, o in zip(prompts, together):
        assert objects(pair, "--prompt", p)[0]["tokens"] == o["tokens"]
    out, _ = good(pair, *(a for p in prompts for a in ("--prompt", p)))
    assert out == "".join(f"--- prompt {i}: {p!r}\n{o['text']}\n" for i, (p, o) in enumerate(zip(prompts, together)))


def test_prompt_from_stdin(pair):
    a, b = objects(pair, "--prompt", "-", "--prompt", PROMPT, stdin="naïve 漢字\n".encode())
    assert a["prompt"] == "naïve 漢字\n" and b["prompt"] == PROMPT
    assert a["tokens"] == objects(pair, "--prompt", "naïve 漢字\n")[0]["tokens"]


def test_markup_in_a_prompt_is_text(pair):
    """`<|end|>` typed by a user is seven letters and no stop id."""
    o, = objects(pair, "--prompt", "<|end|>")
    assert o["tokens"] == objects(pair, "--prompt", "-", stdin=b"<|end|>")[0]["tokens"]
    target, _, tokenizer = generate.load(str(pair / "target"), "none")
    assert o["tokens"] == generate.generate(target, None, [list(b"<|end|>")], "ar", max_new_tokens=20, stop_ids=(END,))[0].tokens


def test_stop_strings_cut_text_tokens_and_counters(pair):
    """Any piece of the text, across tokens and blocks: the text ends before it, the tokens with the one that completes it."""
    whole, = objects(pair, "--prompt", PROMPT, "--budget", 200)
    tokens, text = whole["tokens"], whole["text"]
    for n in range(2, len(text) - 2, 3):
        stop = text[n:n + 3]
        if "\ufffd" in stop:
            continue
        o, = objects(pair, "--prompt", PROMPT, "--budget", 200, "--stop", stop, "--stop", "not there")
        assert o["text"] == text[:text.find(stop)] and o["finish"] == "stop"
        k = len(o["tokens"])
        assert o["tokens"] == tokens[:k] and stop in TOKENIZER.decode(tokens[:k]) and stop not in TOKENIZER.decode(tokens[:k - 1])
        assert k - 1 <= sum(a + 1 for a in o["accepted"]) <= k
        out, _ = good(pair, "--prompt", PROMPT, "--budget", 200, "--stop", stop)
        assert out == o["text"] + "\n"


def informed(monkeypatch, pair: Path, **settings) -> list:
    """Lets the command line load a drafter that knows the text; returns the text's tokens."""
    target, _, tokenizer = generate.load(str(pair / "target"), "none")
    text, = generate.generate(target, None, [list(tokenizer.encode(PROMPT).ids)], "ar", max_new_tokens=20, stop_ids=(END,), **settings)
    draft = tiny.drafter(target, mask_token_id=MASK)
    draft.tell([tokenizer.encode(PROMPT).ids + text.tokens])
    draft.forgets = False
    monkeypatch.setattr(generate, "open_draft", lambda *a: (draft, lambda t, device, divide: (draft.share(t), draft)[1]))
    return text.tokens


def test_stop_ids_of_the_folder_end_the_text(copy, monkeypatch):
    """From config.json, generation_config.json or the tokenizer; at any place of a block; the stop itself is not printed."""
    text = informed(monkeypatch, copy)
    for i in range(len(text)):
        (copy / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": [text[i], END]}))
        at = text.index(text[i])
        o, = objects(copy, "--prompt", PROMPT, "--mode", "dflash")
        assert o["tokens"] == text[:at] and o["finish"] == "stop"
        assert o["text"] == TOKENIZER.decode(text[:at], skip_special_tokens=False)


def test_color_marks_accepted_drafts_and_own_tokens(pair, monkeypatch):
    """The prefill's token and the last of every round are the target's own; without the colours it is the text."""
    text = informed(monkeypatch, pair)
    o, = objects(pair, "--prompt", PROMPT, "--mode", "dflash")
    own = [0]
    for a in o["accepted"]:
        own.append(own[-1] + a + 1)
    out, _ = good(pair, "--prompt", PROMPT, "--mode", "dflash", "--color")
    plain, _ = good(pair, "--prompt", PROMPT, "--mode", "dflash")
    assert re.sub(r"\x1b\[[\d;]*m", "", out) == plain
    painted = re.findall(r"(\x1b\[[\d;]+m)(.+?)\x1b\[0m", out, re.DOTALL)
    colors, at = {}, 0
    stream = TextStream(TOKENIZER)
    for i, t in enumerate(text):
        piece = stream.push(t)
        if piece:
            assert painted[at][1] == piece
            colors[i], at = painted[at][0], at + 1
    assert colors == {i: OWN if i in own else DRAFTED for i in colors} and set(colors.values()) == {OWN, DRAFTED}
    assert RESET not in plain


def test_check_passes_in_every_mode(pair):
    for more in (("--mode", "dflash"), ("--budget", 50), ("--temperature", 1, "--stop", "a"), ("--prompt", "é", "--mode", "ddtree")):
        _, err = good(pair, "--prompt", PROMPT, "--check", *more)
        assert err.endswith("emitted the same tokens\n")


def test_a_drafter_with_a_smaller_context_does_not_end_the_text(copy):
    edit(copy / "draft" / "config.json", max_position_embeddings=20)
    assert objects(copy, "--prompt", PROMPT)[0]["tokens"] == objects(copy, "--prompt", PROMPT, "--mode", "ar")[0]["tokens"]
    out, err = good(copy, "--prompt", PROMPT, "--check")
    assert err.endswith("emitted the same tokens\n")


def test_check_fails_on_a_wrong_token(pair, monkeypatch):
    """A planted fault: one row's drafts are taken unseen."""
    ordinary = generate.Decoder.step
    def wrong(self, plan, span):
        packed = ordinary(self, plan, span)
        return packed if plan.mode == "ar" else [[n, t ^ 1, *rest] for n, t, *rest in packed]
    monkeypatch.setattr(generate.Decoder, "step", wrong)
    code, _, err = run("--model", pair / "target", "--prompt", PROMPT, "--max-new-tokens", 20, "--check", "--mode", "ddtree")  # auto might not draft
    assert code == 1 and re.search(r"check failed: prompt 0 differs from ar at token 1: \[\d+\] against \[\d+\]\n$", err)


def test_tree_draws_a_round(pair, monkeypatch):
    text = informed(monkeypatch, pair)
    out, _ = good(pair, "--prompt", PROMPT, "--tree")
    lines = out.splitlines()
    assert len(lines) == 1 + 32 + 1 and lines[0].endswith("  root")
    assert lines[-1].startswith("32 nodes drafted, 5 accepted") and lines[-1].endswith("6 tokens in this round")
    assert sum(line.endswith("✓") for line in lines) == 5
    for line in lines[1:-1]:
        step, path = map(float, re.search(r"  (\d\.\d\d)  path (\d\.\d\d\d)", line).groups())
        assert 0 <= path <= step + 0.006 <= 1.006
    second, _ = good(pair, "--prompt", PROMPT, "--tree", 2, "--mode", "dflash")
    assert second.splitlines()[0] == f"{TOKENIZER.decode([text[6]])!r}  root" and len(second.splitlines()) == 1 + 5 + 1


def test_tree_in_color_and_sampled(pair, monkeypatch):
    settings = {"temperature": 0.9, "seed": 4}
    informed(monkeypatch, pair, **settings)
    out, _ = good(pair, "--prompt", PROMPT, "--tree", "--color", "--temperature", 0.9, "--seed", 4)
    assert out.count(DRAFTED) == 5 == out.count("✓") and "5 accepted" in out


def test_draft_none_and_auto(pair, copy):
    """`none` decodes plainly in silence; `auto` without a folder does and says so; `auto` with one speculates."""
    o, = objects(pair, "--prompt", PROMPT, "--draft", "none")
    assert o["mode"] == "ar" and good(pair, "--prompt", PROMPT, "--draft", "none")[1].count("\n") == 1
    asked, = objects(pair, "--prompt", PROMPT, "--draft", "none", "--mode", "auto")
    assert asked["mode"] == "ar" and asked["why"] is None and asked["tokens"] == o["tokens"]
    assert objects(pair, "--prompt", PROMPT)[0]["mode"] == "auto"
    shutil.rmtree(copy / "draft")
    out, err = good(copy, "--prompt", PROMPT)
    assert out == o["text"] + "\n"
    first, second = err.splitlines()
    assert "plain decode" in first and second.startswith("ar: ")


def test_dtypes(pair):
    for dtype in ("float64", "bfloat16", "float16"):
        o, = objects(pair, "--prompt", PROMPT, "--dtype", dtype)
        assert len(o["tokens"]) == 20
    assert objects(pair, "--prompt", PROMPT, "--dtype", "float64")[0]["tokens"] == objects(pair, "--prompt", PROMPT)[0]["tokens"]


def test_context_limit_is_length(pair):
    o, = objects(pair, "--prompt", "x" * 505, "--max-new-tokens", 100)
    assert o["finish"] == "length" and len(o["tokens"]) == 512 - 505


def test_library_loads_what_the_command_line_loads(pair):
    target, draft, tokenizer = generate.load(str(pair / "target"))
    assert draft is not None and tokenizer.decode(tokenizer.encode("é").ids) == "é"
    assert generate.load(str(pair / "target"), "none")[1] is None
    r, = generate.generate(target, draft, [tokenizer.encode(PROMPT).ids], max_new_tokens=20)
    assert r.tokens == objects(pair, "--prompt", PROMPT)[0]["tokens"]


@pytest.mark.parametrize("after", [0, 3])
def test_interrupt_keeps_the_text_so_far(pair, after):
    """Ctrl-C in the middle: the text so far, the closing line, 130, and in JSON `interrupted`."""
    whole, = objects(pair, "--prompt", PROMPT, "--mode", "dflash")
    with steps_that_end(after, KeyboardInterrupt):
        code, out, err = run("--model", pair / "target", "--prompt", PROMPT, "--mode", "dflash", "--max-new-tokens", 20)
    assert code == 130 and notes(err).startswith("interrupted; dflash: ") and notes(err).count("\n") == 1
    with steps_that_end(after, KeyboardInterrupt):
        code, out_json, _ = run("--model", pair / "target", "--prompt", PROMPT, "--mode", "dflash", "--max-new-tokens", 20, "--json")
    o = json.loads(out_json)
    assert code == 130 and o["finish"] == "interrupted" and len(o["accepted"]) == after
    assert o["tokens"] == whole["tokens"][:len(o["tokens"])] and len(o["tokens"]) == 1 + sum(a + 1 for a in o["accepted"])
    assert out == o["text"] + "\n" == TOKENIZER.decode(o["tokens"], skip_special_tokens=False) + "\n"


# Bad input

def edit(path: Path, **changes) -> None:
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def change(folder: Path, how) -> None:
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    write_safetensors(folder / "model.safetensors", {n: (t.shape, t.dtype, lambda t=t: t) for n, t in tensors.items()})


def misshape(name: str):
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


def lose_a_shard(folder: Path) -> None:
    save_target(tiny.target(torch.float32, vocab_size=TOKENIZER.get_vocab_size(), eos_token_id=END), json.loads((folder / "config.json").read_text()),
                folder, torch.float32, shard_bytes=20000)
    (folder / "model.safetensors").unlink()
    next(folder.glob("model-00002-of-*.safetensors")).unlink()


FOLDERS = {  # what is broken in a copy of the pair -> what the line must speak of
    "config.json missing": (lambda p: (p / "target/config.json").unlink(), "config.json is missing"),
    "config.json not JSON": (lambda p: (p / "target/config.json").write_text("{"), "config.json is not JSON"),
    "config.json a list": (lambda p: (p / "target/config.json").write_text("[]"), "config.json must hold"),
    "unknown architecture": (lambda p: edit(p / "target/config.json", architectures=["LlamaForCausalLM"]), "LlamaForCausalLM is not supported; supported: "),
    "no architecture": (lambda p: edit(p / "target/config.json", architectures=None), "(none) is not supported"),
    "a key missing": (lambda p: edit(p / "target/config.json", kv_lora_rank=None), "'kv_lora_rank' is missing"),
    "weights missing": (lambda p: (p / "target/model.safetensors").unlink(), "safetensors"),
    "weights cut short": (lambda p: (p / "target/model.safetensors").write_bytes((p / "target/model.safetensors").read_bytes()[:5000]), "cut short"),
    "missing shard": (lambda p: lose_a_shard(p / "target"), "model-00002-of-"),
    "missing tensor": (lambda p: change(p / "target", lambda t: t.pop("model.layers.1.self_attn.o_proj.weight")), "model.layers.1.self_attn.o_proj.weight"),
    "unused tensor": (lambda p: change(p / "target", lambda t: t.update({"model.layers.1.extra.weight": torch.zeros(2)})), "model.layers.1.extra.weight"),
    "misshapen tensor": (lambda p: change(p / "target", misshape("model.norm.weight")), "model.norm.weight is [31], the config asks for [32]"),
    "tokenizer missing": (lambda p: (p / "target/tokenizer.json").unlink(), "tokenizer.json"),
    "tokenizer broken": (lambda p: (p / "target/tokenizer.json").write_text("{}"), "tokenizer.json is not a tokenizer"),
    "drafter's config missing": (lambda p: (p / "draft/config.json").unlink(), "draft/config.json is missing"),
    "drafter's tensor missing": (lambda p: change(p / "draft", lambda t: t.pop("fc.weight")), "fc.weight"),
    "drafter's tensor unused": (lambda p: change(p / "draft", lambda t: t.update({"bias": torch.zeros(2)})), "bias"),
    "drafter's tensor misshapen": (lambda p: change(p / "draft", misshape("fc.weight")), "fc.weight is [31, 64], the config asks for [32, 64]"),
    "drafter for another hidden size": (lambda p: edit(p / "draft/config.json", hidden_size=64), "hidden size is 64, the target's 32"),
    "drafter for another vocabulary": (lambda p: edit(p / "draft/config.json", vocab_size=999), "vocabulary is 999, the target's"),
    "drafter for another depth": (lambda p: edit(p / "draft/config.json", num_target_layers=61), "number of target layers is 61, the target's 3"),
    "taps missing": (lambda p: edit(p / "draft/config.json", target_layer_ids=None), "'target_layer_ids' is missing"),
    "taps duplicated": (lambda p: edit(p / "draft/config.json", target_layer_ids=[1, 1]), "distinct"),
    "taps negative": (lambda p: edit(p / "draft/config.json", target_layer_ids=[-1, 1]), "target_layer_ids"),
    "taps past the target": (lambda p: edit(p / "draft/config.json", target_layer_ids=[0, 9]), "taps layer 9"),
    "taps the last layer": (lambda p: edit(p / "draft/config.json", target_layer_ids=[0, 2]), "taps the last layer"),
    "mask id missing": (lambda p: edit(p / "draft/config.json", mask_token_id=None), "'mask_token_id' is missing"),
    "mask id past the embedding": (lambda p: edit(p / "draft/config.json", mask_token_id=5000), "mask id is 5000"),
    "mask id negative": (lambda p: edit(p / "draft/config.json", mask_token_id=-2), "mask"),
    "a block of one": (lambda p: edit(p / "draft/config.json", block_size=1), "block")}


def refused(code, out: str, err: str, says: str) -> None:
    assert code == 2 and out == "" and err.count("\n") == 1 and err.endswith("\n"), (code, out, err)
    assert says in err and "Traceback" not in err, err


@pytest.mark.parametrize("what", FOLDERS)
def test_broken_folders_are_refused(what, copy):
    breaks, says = FOLDERS[what]
    breaks(copy)
    refused(*run("--model", copy / "target", "--prompt", PROMPT), says)


ARGUMENTS = [  # flags -> what the line must speak of
    (["--model", "/no/such/folder"], "no such model folder: /no/such/folder"), (["--model", "a/b/c/d"], "no such model folder"),
    (["--model", __file__], "is a file"), (["--draft", "/no/such/folder"], "no such model folder: /no/such/folder"),
    (["--prompt", ""], "prompt 1 is empty"), (["--prompt", "x" * 512], "prompt 1 has 512 tokens and the context holds 512"),
    (["--prompt", "\udcff\udcfe"], "prompt 1 is not UTF-8"), (["--system", "caf\udce9"], "the system message is not UTF-8"),
    (["--budget", "0"], "budget"), (["--budget", "-1"], "budget"), (["--budget", "5000"], "budget"), (["--budget", "many"], "budget"),
    (["--temperature", "-0.5"], "temperature"), (["--temperature", "nan"], "temperature"), (["--temperature", "inf"], "temperature"),
    (["--temperature", "hot"], "temperature"), (["--top-p", "0"], "top-p"), (["--top-p", "1.5"], "top-p"), (["--top-p", "nan"], "top-p"),
    (["--top-k", "-1"], "top-k"), (["--top-k", str(2 ** 70)], "top-k"), (["--seed", str(2 ** 64)], "seed"), (["--seed", "x"], "seed"),
    (["--max-new-tokens", "0"], "max-new-tokens"), (["--max-new-tokens", "-5"], "max-new-tokens"), (["--max-new-tokens", "1e3"], "max-new-tokens"),
    (["--device", "tpu9"], "device"), (["--device", "meta"], "device"), (["--device", ""], "device"), (["--dtype", "int3"], "dtype"),
    (["--mode", "medusa"], "mode"), (["--mode", "ddtree", "--draft", "none"], "needs a drafter"), (["--mode", "dflash", "--draft", "none"], "needs a drafter"),
    (["--tree", "0"], "--tree"), (["--tree", "-1"], "--tree"), (["--tree", "--mode", "ar"], "--tree"), (["--tree", "--draft", "none"], "--tree"),
    (["--tree", "--budget", "0"], "budget"), (["--no-such-flag"], "--no-such-flag")]


@pytest.mark.parametrize("args, says", ARGUMENTS, ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else "")
def test_bad_arguments_are_refused(pair, args, says):
    refused(*run("--model", pair / "target", "--prompt", PROMPT, *args), says)


@pytest.mark.parametrize("args, says", [
    (["--budget", "4", "--spine"], "budget must be at least the 5"), (["--tree", "9999"], "round 9999"), (["--block", "1"], "block must be between 2 and the 6"),
    (["--block", "7"], "block"), (["--draft-window", "5"], "window"), (["--attention-factor", "0"], "attention factor")])
def test_what_only_the_drafter_decides_is_refused_before_anything_is_read(pair, args, says):
    refused(*run("--model", pair / "target", "--prompt", "x" * 490, *args), says)


@pytest.mark.parametrize("args, says", [
    (["--stop", ""], "stop text"), (["--context", "100"], "--plan"), (["--plan", "--json"], "--plan reads no prompt; leave --prompt, --json out"), (["--tp", "2"], "torchrun --standalone --nproc-per-node 2"), (["--experts", "ep"], "add --tp N"), (["--temperature", "1e-38"], "temperature"),
    (["--device", "privateuseone"], "device"), (["--model", "~nosuchuser/x"], "cannot be opened"), (["--model", "x" * 5000], "")])
def test_odd_arguments_are_refused(pair, args, says):
    refused(*run("--model", pair / "target", "--prompt", PROMPT, *args), says)


def test_two_generations_cannot_share_a_targets_caches(pair):
    """The second one's caches replace the first one's: going on with the first would write other text in silence."""
    target, draft, _ = generate.load(str(pair / "target"))
    first = generate.stream(target, draft, [[1, 2, 3]], "ar", max_new_tokens=8)
    next(first)
    generate.generate(target, draft, [[4, 5]], "ar", max_new_tokens=2)
    with pytest.raises(RuntimeError, match="took over"):
        list(first)


def test_a_model_in_the_current_folder_finds_its_drafter(pair, monkeypatch):
    monkeypatch.chdir(pair / "target")
    code, out, err = run("--model", ".", "--prompt", PROMPT, "--max-new-tokens", "4")
    assert code == 0 and "no drafter" not in err and "auto: " in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_where_there_is_none_is_refused(pair):
    refused(*run("--model", pair / "target", "--prompt", PROMPT, "--device", "cuda"), "device 'cuda'")


def test_no_prompt_is_refused(pair):
    refused(*run("--model", pair / "target"), "no prompt")


def test_stdin_that_is_not_utf8_is_refused(pair):
    refused(*run("--model", pair / "target", "--prompt", "-", stdin=b"caf\xe9 au lait"), "not UTF-8 (byte 0xe9 at offset 3)")
    refused(*run("--model", pair / "target", "--prompt", "-"), "prompt 0 is empty")


# As a process

def start(pair: Path, *args, **more) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, ROOT / "generate.py", "--model", pair / "target", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "OMP_NUM_THREADS": "1", **more.pop("env", {})}, **more)


def test_process_streams_and_reads_stdin_from_any_folder(pair, tmp_path):
    p = start(pair, "--prompt", "-", "--max-new-tokens", "20", cwd=tmp_path, stdin=subprocess.PIPE)
    out, err = p.communicate("naïve 漢字".encode())
    assert p.returncode == 0 and out.decode() == good(pair, "--prompt", "naïve 漢字")[0]
    assert notes(err.decode()).startswith("auto: 20 tokens") and notes(err.decode()).count("\n") == 1


def test_process_refuses_with_one_line(pair, copy):
    (copy / "target" / "config.json").write_text("{")
    p = start(copy, "--prompt", PROMPT)
    out, err = p.communicate()
    refused(p.returncode, out.decode(), err.decode(), "config.json is not JSON")


@pytest.fixture(scope="session")
def endless(tmp_path_factory) -> Path:
    """A pair whose texts go on for minutes."""
    return save_pair(tmp_path_factory.mktemp("endless"), max_position_embeddings=30000)


@pytest.mark.parametrize("args", [("--draft", "none"), ("--mode", "dflash")])
def test_process_ends_cleanly_on_ctrl_c(endless, args):
    p = start(endless, "--prompt", PROMPT, "--max-new-tokens", "29000", "--temperature", "2", *args)
    first = p.stdout.read(40)  # it prints: it decodes
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and first and out.endswith(b"\n")
    assert notes(err.decode()).startswith("interrupted; ") and notes(err.decode()).count("\n") == 1


def test_process_whose_reader_leaves_ends_quietly(endless):
    """As in `generate.py … | head -c 1`."""
    p = start(endless, "--prompt", PROMPT, "--max-new-tokens", "29000", "--temperature", "2", "--draft", "none")
    p.stdout.read(1)
    p.stdout.close()
    assert notes(p.stderr.read().decode()) == "" and p.wait(60) == 0


def test_process_on_a_terminal_that_knows_no_unicode(pair):
    """Text is UTF-8 whatever the locale says: a byte-exact stream has no other way."""
    p = start(pair, "--prompt", "naïve", "--tree", env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    out, err = p.communicate()
    assert p.returncode == 0 and "└─" in out.decode() and b"Traceback" not in err
