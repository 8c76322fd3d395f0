"""Many ranks: one text in every layout, each weight held where the table says, two all-reduces per layer.

Two launches, of 2 and of 4 gloo ranks, run all their cases in one go (ranks_worker.py); the tests look at what they wrote.
"""
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from checkpoint import keep_packed, layout, load_target, on_meta, parse_config, save_draft, save_target
from draft import DraftConfig, Drafter
from helpers import GOLDEN, golden_target, to_fp8, to_int4, write
from hub import UserError, write_safetensors
from model import Config, MoE, Transformer
from parallel import check_layout, dividers, parse_layout
from plan import chunk_room, memory_plan, score_bytes
from ranks import traffic
from serve import Request, open_batch, serve
from verify import ODDS, Decoder, Plan

ROOT = Path(__file__).parent.parent
WORKER = ROOT / "tests" / "ranks_worker.py"
LAYOUTS = {2: ("tp", "ep"), 4: ("tp", "ep", "2x2")}
MODES = ("ar", "dflash", "ddtree", "auto")
PROMPTS = tiny.prompts(256, 1, 5, 37, 20)
SETTINGS = {  # of each row; a batch of several kinds holds every prompt once for each
    "greedy": [{}] * 4,
    "sampled": [{"temperature": 0.9, "seed": seed} for seed in (7, -1, 2 ** 62, 7)],
    "filtered": [{"temperature": 1.0, "seed": 5, "top_k": 9, "top_p": 0.8}] * 4}
TOKENS = {2: 12, 4: 7}
KINDS = {**dict(zip(tiny.ARCHITECTURES, tiny.KINDS)), "odd": "full", "tied": "markov", "int4": "next gated"}  # of drafter, for each target
NAMES = (*KINDS, "bundled")


def runs(ranks: int, number: int, layout: int) -> list:
    """(mode, kinds of rows) of one pair in one layout. Two ranks: every mode greedy, and sampled. On four, where a collective takes long, one
    batch holds both kinds of rows. What a batch of one kind does, and filters, each pair shows in some mode, so that all modes meet all layouts."""
    turn = MODES[(number + layout) % 4]
    if ranks == 2:
        return [(mode, kind) for mode in MODES for kind in ("greedy", "sampled")] + [(turn, "filtered+greedy+sampled")]
    return [(mode, "greedy+sampled") for mode in MODES] + [(turn, ("greedy", "filtered")[number // 4 % 2])]


# Compiled: (ranks, pair, layout, mode, kinds of rows, backend). Inductor's C++ takes long for one layer; the others run the graph as it was traced
COMPILED = [(2, "single", "tp", "ar", "greedy", "inductor"), (2, "short", "tp", "ddtree", "sampled", "aot_eager"),
            (2, "short", "ep", "auto", "greedy+sampled", "eager"), (2, "kimi_k2", "ep", "ddtree", "filtered+greedy+sampled", "eager"),
            (2, "bundled", "tp", "dflash", "greedy+sampled", "eager"),  # with a Markov head
            (2, "deepseek_v2_lite", "tp", "ddtree", "greedy+sampled", "eager"), (2, "deepseek_v3", "ep", "dflash", "sampled", "eager"),
            (2, "glm4_moe_lite", "tp", "dflash", "greedy", "eager"), (2, "moonlight", "ep", "ddtree", "greedy", "eager"),
            (4, "short", "2x2", "ddtree", "greedy+sampled", "eager")]
HELD = ("deepseek_v3", "glm4_moe_lite", "odd", "int4")


def places(ranks: int) -> dict:
    """What torchrun would tell the ranks of a launch, but for their numbers."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    return {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}


def start(folder: Path, ranks: int, cases: list, device: str = "cpu") -> list:
    """The processes of a launch."""
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    env = {**places(ranks), "DEVICE": device}
    return [subprocess.Popen([sys.executable, str(WORKER), str(folder)], stderr=open(folder / f"{rank}.err", "w"),
                             env={**env, "RANK": str(rank), "XDG_CACHE_HOME": str(folder / f"cache{rank}")}) for rank in range(ranks)]


def results(folder: Path, processes: list) -> list:
    """What each rank saw."""
    try:
        for i, p in enumerate(processes):
            assert p.wait(timeout=1200) == 0, (folder / f"{i}.err").read_text()[-3000:]
    finally:
        for p in processes:
            p.kill()
    return [json.loads((folder / f"rank{i}.json").read_text()) for i in range(len(processes))]


class Cases:
    """The models, the one-process texts, and the launches, made once."""

    def __init__(self, folder: Path):
        self.folder, self.plain, self.cases, self.launches = folder, {}, {2: [], 4: []}, {}
        self.pairs = {name: self.golden_pair(name, KINDS[name]) for name in tiny.ARCHITECTURES}
        self.pairs["odd"] = self.small_pair("odd", vocab_size=13)
        self.pairs["tied"] = self.small_pair("tied", vocab_size=17, tie_word_embeddings=True)
        self.pairs["int4"] = self.packed_pair()
        self.pairs["short"] = self.small_pair("short", vocab_size=13, num_hidden_layers=2)
        self.pairs["single"] = self.small_pair("single", vocab_size=13, num_hidden_layers=1, first_k_dense_replace=0)[0], None
        self.pairs["bundled"] = (str(ROOT / "checkpoints/tiny/target"), str(ROOT / "checkpoints/tiny/draft"))
        for number, name in enumerate(NAMES):
            self.add_texts(name)
            for ranks, layouts in LAYOUTS.items():
                for place, experts in enumerate(layouts):
                    for mode, kinds in runs(ranks, number, place):
                        self.cases[ranks].append(self.case(f"{name} {experts} {mode} {kinds}", kinds, ranks, scattered=kinds != "greedy"))
        for ranks, layouts in LAYOUTS.items():
            asked = self.requests("kimi_k2", "greedy", 12)
            self.cases[ranks].append({**self.case("kimi_k2 tp ddtree served", "greedy", ranks), "what": "served", "slots": 2, "requests": asked + asked[::-1]})
            self.cases[ranks] += [{"id": f"{name} {e} - held", "what": "held", **self.pair(name, e)} for name in HELD for e in layouts]
        self.cases[2].append({**self.case("odd tp auto kept", "greedy+sampled", 2), "what": "kept"})
        self.fp8, self.large = self.fp8_target(), self.large_target()
        self.cases[2] += [{"id": f"fp8 {e} - held", "what": "held", "target": self.fp8, "experts": e, "dtype": "float64"} for e in LAYOUTS[2]]
        self.cases[2] += [{"id": f"large {e} - peak", "what": "peak", "target": self.large, "experts": e, "dtype": "bfloat16"} for e in LAYOUTS[2]]
        self.add_texts("short")
        self.add_texts("single")
        for ranks, name, experts, mode, kinds, backend in COMPILED:
            self.cases[ranks].append(self.case(f"{name} {experts} {mode} {kinds} {backend}", kinds, 4, compile=backend, scattered=True))

    def golden_pair(self, name: str, kind: str) -> tuple:
        folder = self.folder / name
        save_draft(tiny.drafter(tiny.golden(name), kind), self.draft_config(tiny.golden(name), kind), folder, torch.float64)
        return str(GOLDEN / "targets" / name), str(folder)

    @staticmethod
    def draft_config(target, kind: str = "full") -> dict:
        c = target.config
        return {**tiny.DRAFT, "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "num_target_layers": c.num_layers,
                "max_position_embeddings": c.max_positions, **tiny.KINDS[kind]}

    def small_pair(self, name: str, **changes) -> tuple:
        config = {**tiny.TARGET, "num_attention_heads": 4, "n_routed_experts": 8, **changes}
        target, taps = tiny.target(num_attention_heads=4, n_routed_experts=8, **changes), list(range(max(config["num_hidden_layers"] - 1, 1)))
        if changes.get("tie_word_embeddings"):
            target.lm_head.weight = target.embed_tokens.weight
        save_target(target, config, self.folder / f"{name}_target", torch.float64)
        kind = KINDS.get(name, "full")
        save_draft(tiny.drafter(target, kind, target_layer_ids=taps), {**self.draft_config(target, kind), "target_layer_ids": taps}, self.folder / f"{name}_draft", torch.float64)
        return str(self.folder / f"{name}_target"), str(self.folder / f"{name}_draft")

    def packed_pair(self) -> tuple:
        """Wide enough that four ranks get whole groups of 32."""
        changes = {"moe_intermediate_size": 128, "vocab_size": 256}
        target, draft = map(Path, self.small_pair("int4", **changes))
        config = json.loads((target / "config.json").read_text())
        tensors = {k: t.float() for k, t in load_file(target / "model.safetensors").items()}
        return str(write(self.folder / "packed", config, to_int4(tensors)[0], shards=2)), str(draft)

    def fp8_target(self) -> str:
        config, tensors = golden_target("deepseek_v3")
        return str(write(self.folder / "fp8", {**config, "quantization_config": {"quant_method": "fp8"}}, to_fp8(tensors)[0], shards=3))

    def large_target(self) -> str:
        """About 200 MB, most of it experts."""
        config = {**tiny.TARGET, "hidden_size": 512, "n_routed_experts": 16, "moe_intermediate_size": 1024, "num_hidden_layers": 5, "vocab_size": 1024}
        model = on_meta(Transformer, Config.from_dict(config), torch.bfloat16)
        folder = self.folder / "large"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        write_safetensors(folder / "model.safetensors", {s.name if s.name.startswith("lm_head") else f"model.{s.name}": (
            s.shape, torch.bfloat16, lambda s=s: torch.full(s.shape, 0.01, dtype=torch.bfloat16)) for s in layout(model)})
        return str(folder)

    def pair(self, name: str, experts: str) -> dict:
        target, draft = self.pairs[name]
        return {"target": target, "draft": draft, "experts": experts, "dtype": "float64"}

    def case(self, title: str, kinds: str, ranks: int, **more) -> dict:
        """title: pair, layout, mode, and whatever tells it from others."""
        name, experts, mode, *_ = title.split()
        told = [] if name == "bundled" or "compile" in more else [r["tokens"] + t for kind in kinds.split("+") for r, t in zip(
            self.requests(name, kind, 1), self.plain[name, kind])]
        return {"id": title, "what": "text", **self.pair(name, experts), "mode": mode, "budget": 12, "told": told, **more,
                "requests": [r for kind in kinds.split("+") for r in self.requests(name, kind, TOKENS[ranks])]}

    def requests(self, name: str, kind: str, tokens: int) -> list:
        vocab = {"odd": 13, "tied": 17, "short": 13, "single": 13}.get(name, 256)
        rows = list(zip(PROMPTS, SETTINGS[kind]))[:3 if name == "bundled" else 4]
        return [{"tokens": [t % vocab for t in p], "max_new_tokens": tokens, **settings} for p, settings in rows]

    def add_texts(self, name: str) -> None:
        """What one process writes."""
        target = load_target(Path(self.pairs[name][0]), dtype=torch.float64)
        for kind in SETTINGS:
            requests = [Request(**r) for r in self.requests(name, kind, max(TOKENS.values()))]
            self.plain[name, kind] = [[] for _ in requests]
            for e in serve(*open_batch(target, None, requests, len(requests), "ar", None, False, False)[:1], requests, Plan("ar", 0)):
                self.plain[name, kind][e.number] += e.tokens

    def want(self, case: dict) -> list:
        """The texts of a case."""
        name, kinds = case["id"].split()[0], case["id"].split()[3]
        return [t[:r["max_new_tokens"]] for t, r in zip([t for kind in kinds.split("+") for t in self.plain[name, kind]], case["requests"])]

    def seen(self, ranks: int) -> list:
        if ranks not in self.launches:
            folder, self.launches[ranks] = self.folder / f"launch{ranks}", None
            self.launches[ranks] = results(folder, start(folder, ranks, self.cases[ranks]))
        assert self.launches[ranks] is not None, "the launch failed before"
        return self.launches[ranks]


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Cases:
    return Cases(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_one_text_in_every_layout(cases, ranks, name):
    seen, met = cases.seen(ranks), set()
    for case in cases.cases[ranks]:
        if case["what"] != "text" or case["id"].split()[0] != name or "compile" in case:
            continue
        mine = [s[case["id"]] for s in seen]
        for s in mine:
            assert s["tokens"] == cases.want(case), case["id"]
            assert s["accepted"] == mine[0]["accepted"] and s["modes"] == mine[0]["modes"], case["id"]
        if case["mode"] in ("dflash", "ddtree"):
            assert max(a for row in mine[0]["accepted"] for a in row) >= (1 if name == "bundled" else 2), case["id"]
        if case.get("scattered") and case["mode"] == "auto":
            assert max(len(set(modes)) for modes in mine[0]["modes"]) >= 3, case["id"]
        met |= {(case["experts"], case["mode"], kind) for kind in case["id"].split()[3].split("+")}
    assert {(e, m, k) for e in LAYOUTS[ranks] for m in MODES for k in ("greedy", "sampled")} <= met


@pytest.mark.parametrize("ranks", [2, 4])
def test_refill_cancelling_and_a_mode_that_changes(cases, ranks):
    """Every rank would choose another mode at every round, and rank 0 alone hears of a cancellation: rank 0 decides."""
    mine = [s["kimi_k2 tp ddtree served"] for s in cases.seen(ranks)]
    plain = [t[:12] for t in cases.plain["kimi_k2", "greedy"]]
    for s in mine:
        assert s["tokens"] == mine[0]["tokens"] and s["finish"] == mine[0]["finish"]
    for i, (tokens, finish, want) in enumerate(zip(mine[0]["tokens"], mine[0]["finish"], plain + plain[::-1])):
        assert finish == ("cancelled" if i == 1 else "length")
        assert tokens == want[:len(tokens)] and (len(tokens) == len(want) or i == 1 and 5 < len(tokens) < len(want))
    target, asked = load_target(Path(cases.pairs["kimi_k2"][0]), dtype=torch.float64), cases.requests("kimi_k2", "greedy", 12)[:2]
    p = [target.score(torch.tensor([r["tokens"] + t]))[0][0, len(r["tokens"]):].softmax(-1).amax(-1) for r, t in zip(asked, plain)]
    for s in mine:  # how sure the target is of the token after the root, whichever rank holds it
        assert s["sure"] == [pytest.approx(n * ODDS, abs=2) for n in (p[0] + p[1])[:4].tolist()]


def test_a_file_of_costs_that_some_ranks_have(cases):
    """Costs are measured where rank 0 does not know them, by all; it alone writes them down."""
    mine = [s["odd tp auto kept"] for s in cases.seen(2)]
    want = [t for kind in ("greedy", "sampled") for t in cases.plain["odd", kind]]
    for s in mine:
        assert [(measured, texts) for measured, texts, _ in s["runs"]] == [(4, want), (4, want), (8, want)] and s["runs"] == mine[0]["runs"]
    assert [s["files"] for s in mine] == [2, 0]  # costs, and what the drafter wins


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_ranks_on_cuda(cases):
    """On two devices by NCCL, on one by gloo: the texts of one process on the CPU."""
    some = [c for c in cases.cases[2] if c["what"] == "text" and not c.get("compile") and c["id"].split()[0] in ("deepseek_v3", "odd", "int4")]
    folder = cases.folder / "cuda"
    for seen in results(folder, start(folder, 2, some, "cuda")):
        for case in some:
            assert seen[case["id"]]["tokens"] == cases.want(case), case["id"]


@pytest.mark.parametrize("ranks, name, experts, mode, kinds, backend", COMPILED)
def test_compiled_is_eager_and_one_graph(cases, ranks, name, experts, mode, kinds, backend):
    """A graph for each plan and shape, no more, as on one rank."""
    case = next(c for c in cases.cases[ranks] if c["id"] == f"{name} {experts} {mode} {kinds} {backend}")
    for s in (s[case["id"]] for s in cases.seen(ranks)):
        assert s["tokens"] == cases.want(case)
        assert s["breaks"] == 0 and s["graphs"] == s["shapes"] >= (4 if mode == "auto" else 2)
        assert name != "bundled" or max(a for row in s["accepted"] for a in row) >= 1


# Loading

COPIED = ("layernorm", "norm.weight", ".w_a", ".gate.", "q_norm", "k_norm", "markov_head")


@pytest.mark.parametrize("ranks, experts", [(n, e) for n, layouts in LAYOUTS.items() for e in layouts])
@pytest.mark.parametrize("name", HELD)
def test_no_weight_is_held_twice(cases, name, ranks, experts):
    """The ranks' parts cover each parameter once; what is copied is what the table says."""
    mine = [s[f"{name} {experts} - held"] for s in cases.seen(ranks)]
    for weight in mine[0]:
        if weight == "seconds":
            continue
        parts = [tuple(map(tuple, m[weight][:3])) for m in mine]
        whole, size = parts[0][2], 1
        for n in whole:
            size *= n
        copies = ranks // 2 if weight == "draft..kv_proj" else ranks if any(c in weight for c in COPIED) else 1  # two kv heads
        held = sum(torch.Size(shape).numel() for shape, _, _ in parts)
        assert held == size * copies, weight
        assert len({offset for _, offset, _ in parts}) == ranks // copies, weight


@pytest.mark.parametrize("experts", LAYOUTS[2])
def test_fp8_slices_are_those_of_the_whole(cases, experts):
    """Blocks of 128 do not end where a rank's part does."""
    whole = dict(load_target(Path(cases.fp8), dtype=torch.float64).named_parameters())
    mine = [s[f"fp8 {experts} - held"] for s in cases.seen(2)]
    for name, p in whole.items():
        at = f"target.{name}"
        for s in mine:
            shape, offset, total, got = s[at]
            piece = p[tuple(slice(o, o + n) for o, n in zip(offset, shape))]
            if name.endswith("gate_up") and shape[-2] < total[-2]:  # each half, of one FFN or of every expert here, is divided
                first = s[f"target.{name.removesuffix('gate_up')}down"][1][-1]
                ours = p if p.dim() == 2 else p[offset[0]:offset[0] + shape[0]]
                piece = torch.cat([half[..., first:first + shape[-2] // 2, :] for half in ours.chunk(2, -2)], -2)
            assert got == pytest.approx(piece.double().sum().item(), abs=1e-9), name


@pytest.mark.parametrize("experts", LAYOUTS[2])
def test_a_rank_reads_no_more_than_its_part(cases, experts):
    """The peak of memory while loading: the rank's own half, and a little."""
    for s in cases.seen(2):
        peak, holds = (s[f"large {experts} - peak"][key] for key in ("peak", "holds"))
        assert holds > 100e6
        assert 0.5 * holds < peak < 1.15 * holds + 24e6


# Sizes that do not divide

def real(name: str):
    return parse_config(Config, json.loads((ROOT / "tests/configs" / f"{name}.json").read_text()))


@pytest.mark.parametrize("name, ranks, experts, packed, says", [
    ("glm_47_flash", 8, "tp", False, r"8 ranks with --experts tp .*: heads 20 over 8\. What would work: --tp 2 or 4"),
    ("deepseek_v2_lite", 16, "ep", False, None),
    ("deepseek_v3", 16, "tp", False, None),
    ("kimi_k26", 8, "tp", True, None),
    ("kimi_k26", 64, "tp", True, None),
    ("kimi_k26", 128, "ep", True, r"heads 64 over 128"),
    ("deepseek_v2_lite", 8, "tp", True, r"expert width 1408 over 8 in whole groups of 32"),
    ("moonlight_16b_a3b", 3, "tp", False, r"heads 16 over 3; .*shared experts' width 2816 over 3; .*What would work: --tp 2 or 4 or 8 or 16")])
def test_sizes_that_do_not_divide(name, ranks, experts, packed, says):
    if says is None:
        return check_layout(parse_layout(ranks, experts), experts, real(name), packed, torch.bfloat16)
    with pytest.raises(UserError, match=says) as e:
        check_layout(parse_layout(ranks, experts), experts, real(name), packed, torch.bfloat16)
    assert "\n" not in str(e.value)


def test_what_would_work_works():
    c = real("deepseek_v2_lite")
    with pytest.raises(UserError, match="--tp 2 or 4, or --experts 2x4 or 4x2 or 8x1") as e:
        check_layout(parse_layout(8, "tp"), "tp", c, True, torch.bfloat16)
    for experts in re.findall(r"\d+x\d+", str(e.value).partition("What would work")[2]):
        check_layout(parse_layout(8, experts), experts, c, True, torch.bfloat16)


# Eight ranks without a machine: a fake process group, and models without storage

@pytest.fixture
def eight():
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")
    dist.init_process_group("fake", rank=0, world_size=8)
    yield
    dist.destroy_process_group()


class Sent(TorchDispatchMode):
    """What each collective is given: (kind, bytes)."""

    def __init__(self):
        super().__init__()
        self.sent = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = {"_c10d_functional::all_reduce": "all_reduce", "_c10d_functional::all_gather_into_tensor": "all_gather"}.get(func.name())
        if kind:
            self.sent[kind, args[0].nbytes] += 1
        return func(*args, **(kwargs or {}))


def kimi(experts: str, layers: int = 61) -> tuple:
    """Rank 0's part of Kimi-K2.6 in int4 and its drafter, on the meta device; all of its layers, or the first."""
    config, d = real("kimi_k26"), parse_config(DraftConfig, json.loads((ROOT / "tests/configs/kimi_k25_dflash.json").read_text()))
    config = replace(config, num_layers=layers, moe_layers=config.moe_layers[:layers])
    d = replace(d, num_target_layers=layers, taps=tuple(t for t in d.taps if t < layers - 1))
    target, draft = on_meta(Transformer, config, torch.bfloat16), on_meta(Drafter, d, torch.bfloat16)
    for m in target.modules():
        if isinstance(m, MoE):
            keep_packed(m, config)
    divide_target, divide_draft = dividers(experts, "cpu")
    divide_target(target), divide_draft(draft)
    draft.share(target)
    return target, draft


def sends(decoder: Decoder, plan: Plan, span: int) -> list:
    """Sees that a round sends what `traffic` says, and returns that."""
    decoder.prepare(plan)
    with Sent() as seen:
        decoder.round(plan, span)
    want, expected = traffic(decoder.target.config, decoder.draft.config, plan, 8, 8, 2), Counter()
    for s in want:
        expected[s.kind, s.bytes] += s.count
    assert seen.sent == expected, plan
    return want


@pytest.mark.parametrize("experts", ["tp", "ep", "2x4"])
def test_kimi_k26_on_eight_ranks(eight, experts):
    """Bytes per rank at batch 8 and 32k of context: what is allocated is what the plan says, and it fits a card of 96 GiB. What a
    round sends."""
    target, draft = kimi(experts)
    decoder = Decoder(target, draft, 8, 32768)
    raw, raw_draft = (json.loads((ROOT / "tests/configs" / f"{name}.json").read_text()) for name in ("kimi_k26", "kimi_k25_dflash"))
    plan = memory_plan(raw, raw_draft, 32768, 8, 8, experts=experts)
    weights = sum(p.nbytes for p in target.parameters()) + sum(p.nbytes for p in draft.own_params().values())
    caches = target.cache.nbytes + draft.k_cache.nbytes + draft.v_cache.nbytes
    assert weights + caches + plan["workspace"] == plan["total"]
    assert plan["total"] < 92 * 2 ** 30
    if experts != "2x4":
        counts = {s.what: s.count for s in sends(decoder, Plan("ddtree", 32), 32768)}
        assert counts == {"the drafter's embedding": 1, "the drafter's layers": 12, "draft candidates": 1, "the target's embedding": 1,
                          "the target's layers": 122, "the target's tokens": 1, "taps to draft K/V": 1}


@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_two_all_reduces_a_layer_and_one_gather_a_head(eight, experts):
    target, draft = kimi(experts, 4)
    decoder, c = Decoder(target, draft, 8, 1024), target.config
    for plan in (Plan("ar", 0), Plan("dflash", 0), Plan("ddtree", 32), Plan("ddtree", 32, sampled=True), Plan("ddtree", 32, sampled=True, filtered=True),
                 Plan("ddtree", 8, ladder=(8, 32)), Plan("dflash", 0, ladder=(8, 32)), Plan("ar", 0, ladder=(8, 32))):
        want = sends(decoder, plan, 512)
        reduced = {s.what: s.count for s in want if s.kind == "all_reduce"}
        assert reduced["the target's layers"] == 2 * c.num_layers and reduced["the target's embedding"] == 1
        assert plan.mode == "ar" or reduced["the drafter's layers"] == 2 * draft.config.num_layers
        assert sum(s.kind == "all_gather" for s in want) == 1 + (plan.mode != "ar") + bool(plan.ladder)
    for layer in target.layers:
        x = torch.empty(8, 33, c.hidden_size, device="meta", dtype=torch.bfloat16)
        bias = torch.empty(8, 33, 1, 512 + 33, device="meta")
        with Sent() as seen:
            layer(x, target.rope(torch.empty(8, 33, device="meta", dtype=torch.long)), target.cache[0, :, :512], bias)
        assert [(kind, count) for (kind, _), count in seen.sent.items()] == [("all_reduce", 2)]


def test_the_prefill_sends_as_little(eight):
    target, draft = kimi("tp", 4)
    decoder, meta = Decoder(target, draft, 2, 1024), dict(device="meta", dtype=torch.long)
    with Sent() as seen:
        decoder.prefill(torch.empty(2, 64, **meta), torch.empty(2, **meta), torch.empty(2, device="meta", dtype=torch.bool), torch.empty(2, **meta), Plan("ar", 0), 256)
    item = 2 * 7168
    assert seen.sent == {("all_reduce", 2 * 64 * item): 2 * 4 + 1 + 1, ("all_gather", 2 * 16): 1}  # layers, embedding and fc; tokens


def test_a_weight_that_no_table_names_is_an_error(eight):
    target = on_meta(Transformer, real("deepseek_v2_lite"), torch.bfloat16)
    target.layers[3].self_attn.extra = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(AssertionError, match="do not agree"):
        dividers("tp", "cpu")[0](target)


def test_a_chunk_shrinks_with_its_context():
    """Kimi-K2.6 on 8 ranks: the scores of a prefill stay below 1.5 GiB, whatever the context."""
    rooms = [chunk_room(8, span, 2) for span in (0, 4096, 32768, 131072)]
    assert rooms == sorted(rooms, reverse=True) and rooms[1] >= 8 * 256 and rooms[-1] >= 16
    for span, room in zip((4096, 32768, 131072), rooms[1:]):
        assert room * (span + 256) * score_bytes(8, 2) <= 3 << 29
