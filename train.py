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
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model import Config, Router, Transformer

END, MASK = "<|endoftext|>", "<|mask|>"

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
        self.views = [[torch.nn.Parameter(m) for m in (p.data.unbind(0) if p.dim() == 3 else [p.data])] for p in self.matrices]
        self.parts = [torch.optim.Muon([v for views in self.views for v in views], lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
                      torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
        self.params = [p for _, p in named]

    def step(self, lr: float) -> None:
        """One update at this learning rate, gradients clipped to norm 1 and then dropped."""
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for p, views in zip(self.matrices, self.views):
            for v, g in zip(views, p.grad.unbind(0) if p.dim() == 3 else [p.grad]):
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
    work, steps = Path(args.work), args.steps or 1500
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
        if time.time() - saved > 120 or step + 1 == steps:
            save_atomically({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, path)
            saved = time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("step", choices=("target", "data", "draft"))
    parser.add_argument("--work", default="out")
    parser.add_argument("--out", default="checkpoints/tiny")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    {"target": train_target}[args.step](args)


if __name__ == "__main__":
    main()
