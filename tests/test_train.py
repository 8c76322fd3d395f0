"""Training a drafter for any target: the text it learns from, its losses, and that a run is the same however it is cut or divided."""
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import corpus
import generate
import tiny
import train
from checkpoint import load_draft, load_target, save_draft, save_target
from helpers import to_fp8, write
from hub import UserError

ROOT = Path(__file__).parent.parent
LOSSES = ("ce", "soft", "dpace")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A tiny target's folder, with a byte-level tokenizer of 258 tokens: an end, a mask, and the bytes."""
    folder = tmp_path_factory.mktemp("train") / "target"
    config = {**tiny.TARGET, "vocab_size": 258, "num_hidden_layers": 4, "eos_token_id": 0}
    save_target(tiny.target(torch.float32, vocab_size=258, num_hidden_layers=4, eos_token_id=0), config, folder, torch.float32)
    vocab = {t: i for i, t in enumerate(["<|endoftext|>", "<|mask|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|mask|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template":
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"}))
    return folder


@pytest.fixture(scope="module")
def data(target) -> Path:
    path = target.parent / "data.jsonl"
    lines = [{"prompt": f"line {i}"} for i in range(14)]
    lines += [{"tokens": [5, 6, 7], "response": [9] * 30}, {"prompt": "q", "response": "an answer that came with the data"},
              {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "left out"}]}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def command(target, data, folder, *flags) -> list:
    return ["draft", "--target", str(target), "--data", str(data), "--out", str(folder / "draft"), "--work", str(folder / "work"), "--dtype", "float32",
            *"--layers 2 --block 4 --markov-rank 4 --seq-len 48 --anchors 6 --batch 4 --steps 6 --held-out 4 --eval-every 3 --eval-tokens 8".split(),
            *map(str, flags)]


def weights_of(folder: Path) -> dict:
    return load_file(folder / "draft" / "model.safetensors")


def losses(folder: Path) -> dict:
    lines = [json.loads(line) for line in (folder / "work" / "curve.jsonl").read_text().splitlines()]
    return {d["step"]: d["loss"] for d in lines if "loss" in d}


def same_weights(a: Path, b: Path, tolerance: float = 0.0) -> None:
    a, b = weights_of(a), weights_of(b)
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].float() - b[name].float()).abs().max() <= tolerance, name


@pytest.fixture(scope="module")
def whole(target, data, tmp_path_factory) -> Path:
    """A run from start to end."""
    folder = tmp_path_factory.mktemp("whole")
    assert train.main(command(target, data, folder)) == 0
    return folder


# The text

def test_prompts_of_every_kind(target, data):
    tokenizer = train.load_tokenizer(target)
    items = corpus.read_prompts(data, tokenizer, target, 258, (0,))
    def text(s):
        return tokenizer.encode(s).ids
    assert items[3] == (text("line 3"), None) and items[14] == ([5, 6, 7], [9] * 30)
    assert items[15] == (text("q"), text("an answer that came with the data") + [0])
    assert items[16] == (text("[user]hi[assistant]"), None)


@pytest.mark.parametrize("line, says", (
    ("nonsense", "line 2 must hold"), ("[1]", "line 2 must hold"), ('{"text": "x"}', "line 2 must hold"), ('{"messages": []}', "line 2 must hold"),
    ('{"prompt": 3}', "line 2 must hold"), ('{"tokens": []}', "line 2: the prompt is empty"), ('{"tokens": [258]}', "line 2: 258 is no token id"),
    ('{"tokens": ["a"]}', "line 2: 'a' is no token id"), ('{"tokens": [1], "response": [true]}', "line 2: True is no token id")))
def test_a_wrong_line_is_named(line, says, target, tmp_path, capsys):
    (tmp_path / "d.jsonl").write_text('{"prompt": "x"}\n' + line + "\n")
    assert train.main(command(target, tmp_path / "d.jsonl", tmp_path)) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_responses_are_the_targets_own(whole, target, data):
    """Each is what generate writes alone at its temperature and seed, up to and with the id that ends it, and no longer than --seq-len."""
    model = load_target(target)
    items = corpus.read_prompts(data, train.load_tokenizer(target), target, 258, (0,))
    written = [json.loads(line) for p in sorted((whole / "work" / "responses").glob("*.jsonl")) for line in p.read_text().splitlines()]
    assert [d["number"] for d in written] == [*range(14), 16]
    for d in written:
        prompt, i = items[d["number"]][0], d["number"]
        assert d["temperature"] == (0.7, 0.7, 0.0, 1.0)[i % 4]
        alone, = generate.generate(model, None, [prompt], "ar", max_new_tokens=48 - len(prompt), temperature=d["temperature"], seed=i, stop_ids=(0,))
        assert d["response"] == alone.tokens + [0] * (alone.finish == "stop")


def test_written_shards_stay(target, data, tmp_path, monkeypatch):
    """A shard that is there is not written again; other settings are refused."""
    monkeypatch.setattr(corpus, "SHARD", 5)
    assert train.main(command(target, data, tmp_path, "--steps", 1)) == 0
    files = sorted((tmp_path / "work" / "responses").glob("*.jsonl"))
    assert len(files) == 3
    before, kept = files[1].read_text(), [f.stat().st_mtime_ns for f in files]
    files[1].unlink()
    (tmp_path / "work" / "state.pt").unlink()
    assert train.main(command(target, data, tmp_path, "--steps", 1)) == 0
    assert files[1].read_text() == before and files[0].stat().st_mtime_ns == kept[0] and files[2].stat().st_mtime_ns == kept[2]
    assert train.main(command(target, data, tmp_path, "--steps", 1, "--resume", "--seq-len", 40)) == 2


def test_anchors_stay_in_the_response():
    """Distinct, as many as asked for, valid where a label follows within the response; all positions where there are fewer."""
    first, end = torch.tensor([1, 10, 30, 5]), torch.tensor([60, 40, 33, 6])
    anchors, valid = corpus.draw_anchors(first, end, 20, 64, 0)
    assert anchors.shape == valid.shape == (4, 20) and valid.sum(1).tolist() == [20, 20, 3, 1]
    for row in range(4):
        good = anchors[row][valid[row]]
        assert len(set(anchors[row].tolist())) == 20
        assert ((good >= first[row] - 1) & (good + 1 < end[row])).all()
    assert anchors[2][valid[2]].sort().values.tolist() == [29, 30, 31]
    assert not torch.equal(anchors, corpus.draw_anchors(first, end, 20, 64, 1)[0])


def test_every_rank_takes_its_rows_of_one_batch():
    documents = [corpus.Document(list(range(2 + i, 20 + i)), 4, 0.7, True) for i in range(5)]
    class Args:
        batch, seq_len, anchors = 4, 24, 6
    for step in range(4):
        one = corpus.draw_batch(documents, step, Args, corpus.Ranks(), "cpu")
        parts = [corpus.draw_batch(documents, step, Args, corpus.Ranks(r, 2), "cpu") for r in range(2)]
        for a, b, c in zip(one[:-1], parts[0][:-1], parts[1][:-1]):
            assert torch.equal(a, torch.cat((b, c)))
        assert one.blocks == parts[0].blocks == parts[1].blocks == 24
    seen = [tuple(row.tolist()) for step in range(5) for row in corpus.draw_batch(documents, step, Args, corpus.Ranks(), "cpu").ids]
    assert all(seen.count(row) == 4 for row in set(seen))  # four epochs of five texts


# The losses

def pair(markov: int = 4, slots: dict = {}, seed: int = 0):
    target = tiny.target(vocab_size=40, num_hidden_layers=4)
    return target, tiny.drafter(target, markov_rank=markov, **slots) if markov else tiny.drafter(target, **slots)


@pytest.mark.parametrize("kind", ["full", "next", "sliding", "markov", "next gated"])
def test_training_blocks_are_what_propose_proposes(kind):
    """At every anchor the logits of `proposal` over the same grafted prefix, given the text's own tokens."""
    target = tiny.target(vocab_size=40, num_hidden_layers=4)
    draft = tiny.drafter(target, kind)
    ids = torch.randint(40, (2, 40), generator=torch.Generator().manual_seed(0))
    taps, last = train.read_target(target, ids, draft.config.taps)
    logits, hidden = target.score(ids)
    assert (target.lm_head(last) - logits).abs().max() < 1e-10
    assert (taps - torch.cat([hidden[i + 1] for i in draft.config.taps], -1)).abs().max() < 1e-10
    anchors = torch.tensor([[3, 30, 11], [8, 20, 1]])
    got = train.block_logits(draft, taps, ids, anchors)
    for b in range(2):
        for m in range(3):
            at = anchors[b:b + 1, m]
            draft.setup_cache(1, 40)
            draft.graft(taps[b:b + 1, :at], torch.zeros(1, dtype=torch.long))
            marginals, conditional = draft.proposal(ids[b, at], at)
            for d in range(draft.depths):
                want = marginals[0, d]
                if conditional is not None:
                    want = want + conditional(d, ids[b:b + 1, at + d])[0, 0]
                assert (got[b, m, d] - want).abs().max() < 1e-10


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_by_hand(kind):
    """Block by block and depth by depth, with rows that end early, invalid blocks, and greedy and sampled rows."""
    target, draft = pair()
    D = draft.depths
    ids = torch.randint(40, (3, 20), generator=torch.Generator().manual_seed(0))
    end, temperature = torch.tensor([20, 9, 20]), torch.tensor([0.0, 0.7, 1.0]).double()
    anchors, valid = torch.tensor([[3, 9], [6, 7], [2, 14]]), torch.tensor([[True, True], [True, True], [True, False]])
    taps, last = train.read_target(target, ids, draft.config.taps)
    got = train.DraftLoss(draft, target.lm_head, kind)(taps, last, ids, end, temperature, anchors, valid)
    logits, want = train.block_logits(draft, taps, ids, anchors).log_softmax(-1), 0.0
    shares = [torch.exp(torch.tensor(-j / 4.0)).item() for j in range(D)]
    for b in range(3):
        for m in range(2):
            depths = [d for d in range(D) if valid[b, m] and anchors[b, m] + d + 1 < end[b]]
            distance = []
            for d in depths:
                label, q = ids[b, anchors[b, m] + d + 1], logits[b, m, d]
                p = torch.zeros(40).double()
                p[label] = 1
                if kind == "soft" and temperature[b] > 0:
                    p = (target.lm_head(last[b, anchors[b, m] + d]) / temperature[b]).softmax(-1)
                distance.append(sum(float(p[v] * (p[v].log() - q[v])) for v in range(40) if p[v] > 0))
            if kind == "dpace":
                smooth = [0.5 * torch.exp(torch.tensor(-x)).item() + 0.5 for x in distance]
                reach = [torch.tensor(smooth[:m + 1]).prod().item() for m in range(len(smooth))]
                want += sum(sum(reach[j:]) * x for j, x in enumerate(distance))
            else:
                want += sum(shares[d] / sum(shares) * x for d, x in zip(depths, distance))
    assert got.item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_drafter_that_says_the_text_loses_nothing(kind, monkeypatch):
    """And labels outside the response do not reach the loss."""
    target, draft = pair()
    ids = torch.randint(40, (2, 20), generator=torch.Generator().manual_seed(0))
    at = torch.tensor([[3, 9], [6, 14]])
    monkeypatch.setattr(train, "block_logits", lambda draft, taps, ids, anchors: 1e3 * torch.nn.functional.one_hot(
        ids[train.rows_of(ids), (anchors.unsqueeze(-1) + 1 + torch.arange(draft.depths)).clamp(max=19)], 40).double())
    taps, last = train.read_target(target, ids, draft.config.taps)
    def loss(text, end):
        return train.DraftLoss(draft, target.lm_head, kind)(taps, last, text, torch.tensor(end), torch.zeros(2), at, torch.ones(2, 2, dtype=torch.bool))
    assert loss(ids, [20, 20]).item() < 1e-6
    said = train.block_logits(draft, taps, ids, at)
    monkeypatch.setattr(train, "block_logits", lambda *_: said)
    other = ids.clone()
    other[1, 16:] = (other[1, 16:] + 1) % 40
    assert loss(other, [20, 16]).item() < 1e-6 and loss(other, [20, 20]).item() > 1


def test_the_loss_compiles_to_one_graph_and_its_gradients_reach_all_weights():
    target, draft = pair()
    draft = draft.requires_grad_(True)
    for name in ("embed_tokens", "lm_head"):
        getattr(draft, name).requires_grad_(False)
    ids = torch.randint(40, (2, 20), generator=torch.Generator().manual_seed(0))
    taps, last = train.read_target(target, ids, draft.config.taps)
    for kind in LOSSES:
        loss = train.DraftLoss(draft, target.lm_head, kind)
        inputs = (taps, last, ids, torch.tensor([20, 18]), torch.tensor([0.0, 0.7]), torch.tensor([[3, 9], [6, 14]]), torch.ones(2, 2, dtype=torch.bool))
        eager = loss(*inputs)
        compiled = torch.compile(loss, backend="eager", fullgraph=True, dynamic=False)(*inputs)
        assert torch.equal(eager, compiled)
        compiled.backward()
        for name, p in draft.own_params().items():
            assert p.grad is not None and p.grad.any(), name
            p.grad = None
    draft.requires_grad_(False)


# Whole runs

def test_what_is_written_loads_and_decodes(whole, target):
    """The published names and layout; every mode writes the target's text with it."""
    config = json.loads((whole / "draft" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 4 and config["num_target_layers"] == 4
    assert config["dflash_config"] == {"target_layer_ids": [1], "mask_token_id": 1, "markov_rank": 4, "markov_head_type": "vanilla"}
    names = set(weights_of(whole))
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_proj.weight", "markov_head.markov_w1.weight"} <= names
    assert not any(n.startswith(("embed_tokens", "lm_head")) for n in names)
    model = load_target(target, dtype=torch.float64)
    draft = load_draft(whole / "draft", model, dtype=torch.float64)
    prompts = [[5, 6, 7], [30, 31]]
    plain = generate.generate(model, None, prompts, "ar", max_new_tokens=20)
    for mode in ("dflash", "ddtree"):
        assert [r.tokens for r in generate.generate(model, draft, prompts, mode, max_new_tokens=20)] == [r.tokens for r in plain]


def test_the_curve_holds_losses_and_what_the_engine_reached(whole, target, data):
    lines = [json.loads(line) for line in (whole / "work" / "curve.jsonl").read_text().splitlines()]
    assert [d["step"] for d in lines if "loss" in d] == [1, 2, 3, 6] and all(d["loss"] > 0 for d in lines if "loss" in d)
    measured = [d for d in lines if "held_out" in d]
    assert [d["step"] for d in measured] == [3, 6]
    assert all(f["tree"] >= 1 and f["chain"] >= 1 for d in measured for f in d["held_out"].values())


def test_a_killed_run_goes_on_exactly(whole, target, data, tmp_path):
    """kill -9 after a saved state; the rest is what it would have been."""
    process = subprocess.Popen([sys.executable, "train.py", *command(target, data, tmp_path, "--save-every", 0)], cwd=ROOT, stderr=subprocess.PIPE,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        for line in process.stderr:  # the state of step 3 is written before the next line appears
            if b" 3/6  held-out" in line:
                break
        deadline = time.time() + 60
        while not (tmp_path / "work" / "state.pt").exists() and time.time() < deadline:
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
    assert 1 <= torch.load(tmp_path / "work" / "state.pt")["step"] < 6 and not (tmp_path / "draft").exists()
    assert train.main(command(target, data, tmp_path)) == 2  # not by accident
    assert train.main(command(target, data, tmp_path, "--resume", "--lr", 1e-3)) == 2
    assert train.main(command(target, data, tmp_path, "--resume")) == 0
    same_weights(whole, tmp_path)
    assert losses(tmp_path)[6] == losses(whole)[6]


def test_two_ranks_train_what_one_process_trains(whole, target, data, tmp_path):
    """Two processes under gloo: the same responses, the same loss, the same weights."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    running = [subprocess.Popen([sys.executable, "train.py", *command(target, data, tmp_path)], cwd=ROOT, stderr=subprocess.PIPE,
                                env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2",
                                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}) for r in range(2)]
    try:
        errors = [p.communicate(timeout=300)[1].decode() for p in running]
    finally:
        for p in running:
            p.kill()
    assert [p.returncode for p in running] == [0, 0], errors
    for a in sorted((whole / "work" / "responses").glob("*")):
        assert (tmp_path / "work" / "responses" / a.name).read_text() == a.read_text()
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-5)
    same_weights(whole, tmp_path, 2e-3)  # two steps of the largest weights in bf16
    first = tmp_path / "first"
    assert train.main(command(target, data, first, "--held-out", 4, "--lr", 1e-30)) == 0
    trained, start = weights_of(whole), weights_of(first)
    assert max((trained[k].float() - start[k].float()).abs().max() for k in trained) > 5e-3  # which training has moved by more


def test_a_drafter_is_given_a_head(target, data, tmp_path, whole):
    """--init: what it was, plus a head that adds nothing at first; its shape is not for the command line to change."""
    bare, head = tmp_path / "bare", tmp_path / "head"
    flags = ("--steps", 1, "--held-out", 0)
    assert train.main(command(target, data, bare, *flags, "--markov-rank", 0)) == 0
    assert not any(n.startswith("markov_head") for n in weights_of(bare))
    start = [f for f in command(target, data, head, *flags, "--init", bare / "draft", "--lr", 1e-30)]
    for flag in ("--layers", "--block"):
        at = start.index(flag)
        del start[at:at + 2]
    assert train.main(start) == 0
    old, new = weights_of(bare), weights_of(head)
    assert all(torch.equal(new[k], old[k]) for k in old)
    assert set(new) - set(old) == {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"} and new["markov_head.markov_w2.weight"].abs().max() < 1e-20
    assert json.loads((head / "draft" / "config.json").read_text())["dflash_config"]["markov_rank"] == 4
    assert train.main(command(target, data, tmp_path / "no", *flags, "--init", bare / "draft")) == 2


def go_on(command: list) -> list:
    """The command without what --init brings."""
    gone = {i + j for i, f in enumerate(command) for j in (0, 1) if f in ("--layers", "--block", "--markov-rank")}
    return [f for i, f in enumerate(command) if i not in gone]


@pytest.mark.parametrize("own", (("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")))
def test_a_drafter_with_ends_of_its_own(own, target, data, tmp_path, whole):
    """--init of one with an embedding or head of its own, for a target in bf16: the engine decodes with it, and it keeps them, and its head."""
    model = load_target(target)
    draft = load_draft(whole / "draft", model)
    for name in own:
        setattr(draft, name, copy.deepcopy(getattr(model, name)))
    raw = json.loads((whole / "draft" / "config.json").read_text())
    save_draft(draft, raw, tmp_path / "init", own=tuple(f"{n}.weight" for n in own))
    flags = ("--init", tmp_path / "init", "--dtype", "bfloat16", "--steps", 1)
    assert train.main([*go_on(command(target, data, tmp_path)), *map(str, flags)]) == 0
    names = set(weights_of(tmp_path))
    assert {n for n in names if n.startswith(("embed_tokens", "lm_head"))} == {f"{n}.weight" for n in own}
    assert any(n.startswith("markov_head.") for n in names)
    assert "held_out" in (tmp_path / "work" / "curve.jsonl").read_text()


def test_init_and_a_head(target, data, tmp_path, whole, capsys):
    """Without --markov-rank a drafter keeps what it has; what contradicts it is refused."""
    def config_of(**flags):
        args = train.parse_arguments(["draft", "--target", str(target), "--data", str(data), *(str(x) for k, v in flags.items() for x in (f"--{k}", v))])
        train.check_arguments(args, corpus.Ranks())
        return train.draft_config(args, load_target(target).config, None)[1]
    bare = tmp_path / "bare"
    bare.mkdir()
    raw = json.loads((whole / "draft" / "config.json").read_text())
    for key in ("markov_rank", "markov_head_type"):
        del raw["dflash_config"][key]
    raw |= raw.pop("dflash_config") | {"dflash_config": None}
    (bare / "config.json").write_text(json.dumps(raw))
    assert config_of(init=whole / "draft").markov_rank == 4 and config_of(init=bare).markov_rank == 0
    assert config_of(init=bare, **{"markov-rank": 7}).markov_rank == 7 and config_of(**{"mask-id": 1}).markov_rank == 128
    for init, flags in ((whole / "draft", {"markov-rank": 5}), (whole / "draft", {"markov-rank": 0}), (whole / "draft", {"markov-type": "gated"}),
                        (bare, {"markov-type": "gated"})):
        with pytest.raises(UserError, match="the drafter of --init has"):
            config_of(init=init, **flags)


def test_settings_that_cannot_be_read(target, data, tmp_path, capsys):
    (tmp_path / "work" / "responses").mkdir(parents=True)
    (tmp_path / "work" / "responses" / "settings.json").write_text('{"tar')
    assert train.main(command(target, data, tmp_path)) == 2
    err = capsys.readouterr().err
    assert "settings.json cannot be read" in err and err.count("\n") == 1


@pytest.mark.parametrize("env, device, says", (
    ({}, "cuda", "LOCAL_RANK is not set; start the processes with torchrun"), ({"LOCAL_RANK": "0"}, "cuda:1", "--device is cuda:1; use cuda"),
    ({"LOCAL_RANK": "0"}, "cuda", r"each of the 99 processes on a host takes a CUDA device of its own, and there are \d+"),
    ({"LOCAL_RANK": "0"}, "cpu", "99 processes could not join")))
def test_launches_that_cannot_work(env, device, says, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "99", **env}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=says):
        corpus.join_ranks(device)


def test_a_quantized_target(data, target, tmp_path):
    """fp8 files are targets like any other."""
    config = json.loads((target / "config.json").read_text())
    folder = write(tmp_path / "target", config, to_fp8(load_file(target / "model.safetensors"))[0])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((target / name).read_text())
    assert train.main(command(folder, data, tmp_path, "--steps", 2, "--loss", "dpace", "--markov-type", "gated", "--slots", "next", "--dtype", "bfloat16")) == 0
    draft = load_draft(tmp_path / "draft", load_target(folder))
    assert draft.config.slots == "next" and draft.config.markov_type == "gated" and draft.depths == 4


@pytest.mark.parametrize("flags, says", (
    (("--anchors", 48), "--anchors must be less than --seq-len"), (("--layers", 0), "--layers must be at least 1"),
    (("--lr", -1), "--lr and --gamma must be positive numbers"), (("--loss", "l2"), "invalid choice"), (("--taps", 3), "taps the last layer"),
    (("--taps", 1, 1), "distinct"), (("--mask-id", 999), "its mask id is 999, the embedding has 258 rows"), (("--block", 1), "block_size must be at least 2"),
    (("--seed", 2 ** 64), "--seed must fit 64 bits"), (("--seq-len", 10 ** 6), "the target's context holds"), (("--temperature", 1e-5), "at least 0.0001"),
    (("--held-out", 99), "of the 99 to hold out"), (("--device", "nope"), "device 'nope' cannot be used")))
def test_bad_arguments(flags, says, target, data, tmp_path, capsys):
    assert train.main(command(target, data, tmp_path, *flags)) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_default_taps_are_spread():
    assert train.default_taps(61) == [1, 15, 29, 43, 57] and train.default_taps(10) == [1, 2, 3, 5, 6]
    for layers in range(2, 60):
        taps = train.default_taps(layers)
        assert taps == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= layers - 2


def test_a_curve_is_drawn(whole, tmp_path):
    """What train.py wrote becomes an SVG with a line per temperature and mode."""
    out = tmp_path / "curve.svg"
    assert subprocess.run([sys.executable, "bench/curve.py", str(whole / "work" / "curve.jsonl"), str(out)], cwd=ROOT).returncode == 0
    drawn = ElementTree.parse(out).getroot()
    measured = {t for d in map(json.loads, (whole / "work" / "curve.jsonl").read_text().splitlines()) for t in d.get("held_out", {})}
    lines = [e.get("points") for e in drawn if e.tag.endswith("polyline")]
    assert len(lines) == 2 * len(measured & {"0", "0.7"} or measured) and all("nan" not in p for p in lines)


@pytest.mark.parametrize("text, code, says", (
    ("", 2, "no held_out figures yet"), ('{"step": 1, "loss": 2.0}\n', 2, "no held_out figures yet"), (None, 2, "No such file"), ("x\n{}\n", 2, "line 1"),
    ('{"step": 1, "held_out": {"0": {"chain": 1.0, "tree": 1.0}}}\n', 0, ""),
    ('{"step": 1, "held_out": {"0": {"chain": 1.5, "tree": 2.0}}}\n{"step": 2, "hel', 0, "")))
def test_curves_that_have_just_begun(text, code, says, tmp_path):
    if text is not None:
        (tmp_path / "c.jsonl").write_text(text)
    p = subprocess.run([sys.executable, "bench/curve.py", str(tmp_path / "c.jsonl"), str(tmp_path / "c.svg")], cwd=ROOT, capture_output=True, text=True)
    assert p.returncode == code and says in p.stderr and p.stderr.count("\n") == (code > 0)
    if not code:
        ElementTree.parse(tmp_path / "c.svg")
