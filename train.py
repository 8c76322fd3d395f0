"""Trains the bundled pair from nothing but the text every machine has: the standard library of the running interpreter.

    python train.py target      tokenizer and target, on the library's source (held-out files set aside by a fixed rule)
    python train.py data        the target writes its own continuations, greedy and sampled
    python train.py draft       the DFlash drafter, on what the target wrote and on the target's own distributions

Each step resumes where it stopped, exactly. Work files go to --work (default out/), results to --out (checkpoints/tiny).
On small machines page faults dominate the allocator: MALLOC_MMAP_THRESHOLD_=2000000000
MALLOC_TRIM_THRESHOLD_=8000000000 MALLOC_TOP_PAD_=500000000 in the environment make training several times faster.

Shapes: B sequences, T tokens per sequence, V vocabulary, E experts.
"""
import argparse
import json
import os
import sys
import sysconfig
import time
import warnings
import zlib
from pathlib import Path
from typing import Optional

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # before torch says so; nothing here needs it
import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint import UserError, load_target, save_draft, save_target
from ddtree import build_tree
from draft import DraftConfig, Drafter
from generate import generate
from model import Config, Router, Transformer
from show import exit_code

END, MASK = "<|endoftext|>", "<|mask|>"
SAVE_SECONDS = 120  # between resumable states

TARGET = {  # a genuine DeepSeek-V3 in small: deep and narrow, so that a drafter is as cheap beside it as in real life
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu", "attention_bias": False,
    "vocab_size": 1024, "hidden_size": 192, "num_hidden_layers": 10, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "qk_head_dim": 48, "head_dim": 16,
    "v_head_dim": 48, "intermediate_size": 512, "moe_intermediate_size": 96, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 2.0, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0, "rope_theta": 10000.0, "rope_scaling": None, "rope_interleave": True,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    "initializer_range": 0.02, "torch_dtype": "bfloat16"}


def progress(text: str, end: bool = False) -> None:
    """One line on stderr, rewritten in place on a terminal."""
    tty = sys.stderr.isatty()
    print(("\r\033[K" if tty else "") + text, end="\n" if end or not tty else "", file=sys.stderr, flush=True)


def save_atomically(state: dict, path: Path) -> None:
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)


# The text

def library_files() -> tuple:
    """(training, held-out) lists of the interpreter's library files, tests included. A file is held out when the CRC of
    its path within the library divides by 20."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    held = [p for p in files if zlib.crc32(p.relative_to(root).as_posix().encode()) % 20 == 0]
    return [p for p in files if p not in set(held)], held


def read_texts(files: list) -> list:
    texts = []
    for p in files:
        try:
            texts.append(p.read_text(encoding="utf-8"))
        except UnicodeDecodeError:  # the library's tests hold files broken on purpose
            continue
    return texts


def train_tokenizer(texts: list, vocab_size: int):
    """Byte-level BPE; ids 0 and 1 are the end of text and the drafter's mask."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END, MASK], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tokenizer


def prepare_text(work: Path, vocab_size: int) -> tuple:
    """The tokenizer and the token streams (training, held-out), int16, documents separated by END; cached in `work`."""
    from tokenizers import Tokenizer
    path, streams = work / "tokenizer.json", work / "text.pt"
    if not path.exists() or not streams.exists():
        progress("reading the standard library and training the tokenizer …")
        texts = [read_texts(files) for files in library_files()]
        tokenizer = train_tokenizer(texts[0], vocab_size)
        encoded = [[torch.tensor(e.ids + [0], dtype=torch.int16) for e in tokenizer.encode_batch(t)] for t in texts]
        tokenizer.save(str(path))
        save_atomically({"train": torch.cat(encoded[0]), "held_out": torch.cat(encoded[1])}, streams)
    data = torch.load(streams)
    return Tokenizer.from_file(str(path)), data["train"], data["held_out"]


def windows(stream: Tensor, count: int, length: int, seed: int) -> Tensor:
    """`count` random windows (count, length) of a token stream; a pure function of the seed, so that resuming is exact."""
    starts = torch.randint(len(stream) - length, (count, 1), generator=torch.Generator().manual_seed(seed))
    return stream[starts + torch.arange(length)].long()


# The target

class CountingRouter(Router):
    """A router that counts the tokens each expert got, for the balance of DeepSeek-V3 (arXiv 2412.19437, 2.1.2)."""

    def forward(self, x: Tensor) -> tuple:
        weights, ids = super().forward(x)
        self.load += F.one_hot(ids, self.c.num_experts).sum((0, 1))
        return weights, ids


def count_loads(model: Transformer) -> list:
    routers = [m for m in model.modules() if isinstance(m, Router)]
    for r in routers:
        r.__class__ = CountingRouter
        r.register_buffer("load", torch.zeros(r.c.num_experts), persistent=False)
    return routers


@torch.no_grad()
def balance(routers: list, speed: float) -> float:
    """Moves each expert's bias by ±speed towards an even load; returns the worst overload (1 = even)."""
    worst = max(float(r.load.max() / r.load.mean()) for r in routers)
    for r in routers:
        r.e_score_correction_bias += speed * (r.load.mean() - r.load).sign()
        r.load.zero_()
    return worst


class Optimizer:
    """Muon for the matrices inside the layers, AdamW for embedding, head, norms and biases, as Moonlight was trained
    (arXiv 2502.16982). torch's Muon takes 2-D parameters only, so stacked experts go in as views of one expert each."""

    def __init__(self, model: torch.nn.Module, inner: tuple, lr: float, decay: float = 0.1):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.matrices = [p for n, p in named if p.dim() > 1 and n.startswith(inner)]
        rest = [p for n, p in named if not (p.dim() > 1 and n.startswith(inner))]
        self.views = [[torch.nn.Parameter(m) for m in self.split(p.data)] for p in self.matrices]
        self.parts = [torch.optim.Muon([v for views in self.views for v in views], lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
                      torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
        self.params = [p for _, p in named]

    @staticmethod
    def split(t: Tensor) -> tuple:
        return t.reshape(-1, *t.shape[-2:]).unbind(0)

    def step(self, lr: float) -> None:
        """One update at this learning rate, gradients clipped to norm 1 and then dropped."""
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for p, views in zip(self.matrices, self.views):
            for v, g in zip(views, self.split(p.grad)):
                v.grad = g
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
        for p in self.params:
            p.grad = None

    def state_dict(self) -> list:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list) -> None:
        for part, state in zip(self.parts, states):
            part.load_state_dict(state)


def schedule(step: int, steps: int, lr: float, warmup: int = 100) -> float:
    """Linear warm-up, then a straight line to zero."""
    return lr * min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1))


def train_target(args) -> None:
    work, steps = Path(args.work), args.steps or 1300
    work.mkdir(parents=True, exist_ok=True)
    tokenizer, text, held_out = prepare_text(work, TARGET["vocab_size"])
    torch.manual_seed(0)
    model = Transformer(Config.from_dict(TARGET))
    model.init_weights(torch.Generator().manual_seed(0))
    for layer in model.layers:  # residual writes start smaller, as in GPT-2
        for p in (layer.self_attn.o_proj.weight, *(p for n, p in layer.mlp.named_parameters() if "down" in n)):
            p.data.div_((2 * len(model.layers)) ** 0.5)
    routers, optimizer = count_loads(model), Optimizer(model, ("layers.",), args.lr)
    path, start = work / "target.pt", 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits, _ = model.score(ids[:, :-1], expanded=True)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    compiled = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    began, saved, smooth = time.time(), time.time(), None
    print(f"target: {model.num_params() / 1e6:.1f} M parameters, {model.active_params() / 1e6:.1f} M active; {len(text) / 1e6:.1f} M training tokens; "
          f"steps {start} to {steps}", file=sys.stderr)
    for step in range(start, steps):
        # most steps on short windows, which are cheap; the last ones long, so that the whole context is usable
        length = 256 if step < 0.75 * steps else 512 if step < 0.95 * steps else 1024
        loss = (compiled if length == 256 else loss_of)(windows(text, args.tokens // length, length + 1, 1_000_000 + step))
        loss.backward()
        optimizer.step(schedule(step, steps, args.lr))
        worst = balance(routers, 1e-3 if step < 0.9 * steps else 0.0)
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        done = step + 1 - start
        if done % 10 == 0 or done <= 3:
            rate = done * args.tokens / (time.time() - began)
            progress(f"target {step + 1}/{steps}  loss {smooth:.3f}  worst load {worst:.2f}  {rate / 1e3:.2f}k tokens/s  "
                     f"{(steps - step - 1) * args.tokens / rate / 60:.1f} min left")
        if (step + 1) % 250 == 0 or step + 1 == steps:
            with torch.no_grad():
                losses = [loss_of(windows(held_out, 16, 257, i)).item() for i in range(8)]
            for r in routers:
                r.load.zero_()
            progress(f"target {step + 1}/{steps}  held-out loss {sum(losses) / len(losses):.4f}", end=True)
        if time.time() - saved > SAVE_SECONDS or step + 1 == steps:
            save_atomically({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, path)
            saved = time.time()
    save_target(model, TARGET, Path(args.out) / "target")
    write_tokenizer(tokenizer, Path(args.out) / "target")


def write_tokenizer(tokenizer, folder: Path) -> None:
    """tokenizer.json and the small files that say which token ends a text."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": TARGET["max_position_embeddings"]}, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": TARGET["eos_token_id"], "do_sample": False}, indent=2) + "\n")


# The target's own text

TEMPERATURES = (0.0, 0.7, 0.7, 1.0)  # of successive shards; a drafter meets greedy and sampled decoding
SHARD, LENGTH = 128, 256             # sequences per shard, tokens per sequence


def write_data(args) -> None:
    """Shards of (128, 256) tokens: a prompt from the training text, then the target's own continuation; and, for one in
    four, plain training text, of which the target's distribution is learned all the same."""
    folder = Path(args.work) / "data"
    folder.mkdir(parents=True, exist_ok=True)
    target = load_target(Path(args.out) / "target", "cpu", torch.bfloat16)
    _, text, _ = prepare_text(Path(args.work), target.config.vocab_size)
    shards, began, made = args.steps or 52, time.time(), 0
    for shard in range(shards):
        path = folder / f"{shard:05}.pt"
        if path.exists():
            continue
        prompt = (16, 32, 64, 96)[shard // len(TEMPERATURES) % 4]
        temperature = TEMPERATURES[shard % len(TEMPERATURES)]
        prompts = windows(text, SHARD, prompt, 2_000_000 + shard)
        results = generate(target, None, prompts.tolist(), "ar", max_new_tokens=LENGTH - prompt, temperature=temperature,
                           seed=[shard * SHARD + i for i in range(SHARD)])
        written = torch.cat((prompts, torch.tensor([r.tokens for r in results])), 1)
        save_atomically({"tokens": written.short(), "prompt": prompt, "temperature": temperature}, path)
        made += 1
        rate = made * SHARD * (LENGTH - prompt) / (time.time() - began)
        progress(f"data {shard + 1}/{shards} shards  temperature {temperature}  {repeated_share(written[:, prompt:]):.0%} repeated 4-grams  "
                 f"{rate / 1e3:.1f}k tokens/s  {(shards - shard - 1) * (time.time() - began) / made / 60:.1f} min left", end=shard + 1 == shards)
    for i in range(shards // 3):
        save_atomically({"tokens": windows(text, SHARD, LENGTH, 5_000_000 + i).short(), "prompt": 1, "temperature": 1.0}, folder / f"text_{i:05}.pt")


def repeated_share(tokens: Tensor) -> float:
    """(B, T) -> the share of 4-grams that occurred before in their row: high where the text loops."""
    grams = [[tuple(row[i:i + 4]) for i in range(len(row) - 3)] for row in tokens.tolist()]
    return 1 - sum(len(set(g)) for g in grams) / sum(map(len, grams))


# The drafter

DRAFT = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": TARGET["vocab_size"], "hidden_size": TARGET["hidden_size"],
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 512, "hidden_act": "silu",
    "attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": TARGET["max_position_embeddings"],
    "tie_word_embeddings": False, "block_size": 8, "num_target_layers": TARGET["num_hidden_layers"], "sliding_window": None,
    "layer_types": ["full_attention"] * 4, "dflash_config": {"target_layer_ids": [1, 3, 5, 7, 8], "mask_token_id": 1}, "torch_dtype": "bfloat16"}
GAMMA = 4.0  # a depth's weight in the loss falls as exp(-(depth - 1) / GAMMA): what is behind a rejected token is worth nothing


def draw_anchors(count: int, first: int, length: int, depths: int, rows: int, seed: int) -> Tensor:
    """(rows, count) distinct positions of block roots per row, in [first, length - depths): every drafted position has a label."""
    noise = torch.rand(rows, length - depths - first, generator=torch.Generator().manual_seed(seed))
    return first + noise.topk(count, -1).indices


def draft_loss(draft: Drafter, taps: Tensor, ids: Tensor, logits: Tensor, anchors: Tensor, temperature: Tensor) -> Tensor:
    """taps (B, T, n*h), ids (B, T), the target's logits (B, T, V), anchors (B, M), temperature (B,) the text was written at.
    Cross entropy to what the target would say at each drafted position: its distribution where it sampled, its
    token where it was greedy."""
    B, T = ids.shape
    D = draft.depths
    at = anchors.unsqueeze(-1) + torch.arange(D)                                        # (B, M, D) where each depth's label was decided
    rows = torch.arange(B).view(-1, 1, 1)
    soft = (logits[rows, at] / temperature.clamp(min=0.1).view(-1, 1, 1, 1)).softmax(-1)  # (B, M, D, V)
    hard = F.one_hot(ids[rows, at + 1], logits.shape[-1]).to(soft.dtype)
    labels = torch.where(temperature.view(-1, 1, 1, 1) > 0, soft, hard)
    before = ids[rows, at]                                                              # the text's own token before each depth
    entropy = -(labels * block_logits(draft, taps, ids, anchors, before).float().log_softmax(-1)).sum(-1)  # (B, M, D)
    weight = torch.exp(-torch.arange(D) / GAMMA)
    return (entropy * weight).mean() / weight.mean()


def block_logits(draft: Drafter, taps: Tensor, ids: Tensor, anchors: Tensor, before: Optional[Tensor] = None) -> Tensor:
    """One block at every anchor (B, M), by the code that `propose` runs -> logits (B, M, D, V); given the tokens before."""
    B, T = ids.shape
    blocks = torch.full((*anchors.shape, draft.block), draft.config.mask_id)
    blocks = torch.cat((ids.gather(1, anchors).unsqueeze(-1), blocks[..., 1:]), -1)     # root, mask, mask, …
    k, v = draft.context(taps, torch.arange(T).expand(B, T))
    return draft.logits(draft.blocks(blocks, anchors, k, v), before)


@torch.no_grad()
def read_target(target: Transformer, ids: Tensor, taps: tuple) -> tuple:
    """ids (B, T) -> logits (B, T, V) fp32, taps (B, T, n*h) fp32."""
    logits, hidden = target.score(ids, expanded=True)
    return logits.float(), torch.cat([hidden[i + 1] for i in taps], -1).float()


@torch.no_grad()
def held_out_acceptance(draft: Drafter, target: Transformer, shards: list, budget: int) -> tuple:
    """Tokens per round (root included) of the chain and of a tree, on text the target wrote: a draft is accepted when
    it is the token that follows. `bench.py` measures the same with the engine itself."""
    chain, tree = [], []
    for s in shards:
        ids = s["tokens"][:32].long()
        logits, taps = read_target(target, ids, draft.config.taps)
        anchors = draw_anchors(24, s["prompt"], ids.shape[1], draft.depths, len(ids), 0)
        labels = ids[torch.arange(len(ids)).view(-1, 1, 1), anchors.unsqueeze(-1) + 1 + torch.arange(draft.depths)].flatten(0, 1)
        marginals = block_logits(draft, taps, ids, anchors).float().flatten(0, 1)                    # (B*M, D, V)
        chain.append((marginals.argmax(-1) == labels).cumprod(-1).sum(-1).float().mean() + 1)
        t = build_tree(marginals, labels[:, 0], budget)
        match = t.tokens == labels.gather(1, (t.depth - 1).clamp(min=0))
        match[:, 0] = True
        tree.append((~(t.ancestors & ~match.unsqueeze(1)).any(-1)).sum(-1).float().mean())
    return float(sum(chain) / len(chain)), float(sum(tree) / len(tree))


def train_draft(args) -> None:
    work, out, steps, anchors = Path(args.work), Path(args.out), args.steps or 1800, args.anchors
    target = load_target(out / "target", "cpu", torch.bfloat16)
    wide = load_target(out / "target", "cpu", torch.float32)  # its embedding and head, at the drafter's precision
    files = sorted((work / "data").glob("*.pt"))
    if len(files) < 8:
        raise UserError(f"{work / 'data'} holds {len(files)} shards; run `python train.py data` first")
    held_out, data = [torch.load(f) for f in files[:4]], [torch.load(f) for f in files[4:]]  # one of each temperature held out
    torch.manual_seed(0)
    draft = Drafter(DraftConfig.from_dict(DRAFT))
    draft.init_weights(torch.Generator().manual_seed(0))
    draft.share(wide)
    optimizer, path, start = Optimizer(draft, ("layers.", "fc.", "kv_proj"), args.lr), work / "draft.pt", 0
    if path.exists():
        state = torch.load(path)
        draft.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]

    def loss_of(taps, ids, logits, at, temperature):
        with torch.autocast("cpu", torch.bfloat16):
            return draft_loss(draft, taps, ids, logits, at, temperature)
    compiled = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    began, saved, smooth, rows = time.time(), time.time(), None, args.tokens // LENGTH
    print(f"draft: {draft.num_params() / 1e6:.2f} M parameters, {len(data)} shards of {SHARD} sequences, steps {start} to {steps}", file=sys.stderr)
    for step in range(start, steps):
        pick = torch.Generator().manual_seed(3_000_000 + step)
        parts = [data[i] for i in torch.randint(len(data), (4,), generator=pick).tolist()]  # a batch mixes temperatures
        ids = torch.cat([s["tokens"][torch.randperm(SHARD, generator=pick)[:rows // 4]].long() for s in parts])
        at = torch.cat([draw_anchors(anchors, s["prompt"] - 1, LENGTH, draft.depths, rows // 4, 4_000_000 + 4 * step + i) for i, s in enumerate(parts)])
        temperature = torch.tensor([s["temperature"] for s in parts]).repeat_interleave(rows // 4)
        logits, taps = read_target(target, ids, draft.config.taps)
        loss = compiled(taps, ids, logits, at, temperature)
        loss.backward()
        optimizer.step(schedule(step, steps, args.lr))
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        done = step + 1 - start
        if done % 10 == 0 or done <= 3:
            progress(f"draft {step + 1}/{steps}  loss {smooth:.3f}  {(time.time() - began) / done:.2f} s/step  "
                     f"{(steps - step - 1) * (time.time() - began) / done / 60:.1f} min left")
        if (step + 1) % 200 == 0 or step + 1 == steps:
            figures = "  ".join(f"temperature {s['temperature']}: chain {c:.2f}, tree of 32 {t:.2f}"
                                for s in held_out[:2] for c, t in [held_out_acceptance(draft, target, [s], 32)])
            progress(f"draft {step + 1}/{steps}  held-out tokens per round: {figures}", end=True)
        if time.time() - saved > SAVE_SECONDS or step + 1 == steps:
            save_atomically({"model": draft.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, path)
            saved = time.time()
    save_draft(draft, DRAFT, out / "draft")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("step", choices=("target", "data", "draft"))
    parser.add_argument("--work", default="out", help="work files: text, shards, resumable states (default out)")
    parser.add_argument("--out", default="checkpoints/tiny", help="where target/ and draft/ are written")
    parser.add_argument("--steps", type=int, help="optimizer steps, or shards of data (default: those of the bundled pair)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per step")
    parser.add_argument("--anchors", type=int, default=48, help="draft blocks per sequence")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--compile", action="store_true", help="compile the step: slow to start, then faster")
    args = parser.parse_args()
    step = {"target": train_target, "data": write_data, "draft": train_draft}[args.step]
    return exit_code(lambda: step(args) or 0, "--tokens or --anchors", "\ninterrupted; the same command goes on from the last saved state")


if __name__ == "__main__":
    sys.exit(main())
