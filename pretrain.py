"""Trains the bundled target from nothing but the text every machine has: the standard library of the running interpreter.

    python pretrain.py --compile     tokenizer and target, on the library's source (held-out files set aside by a fixed rule)

and writes the prompts that `train.py` then trains the bundled drafter with: `python train.py draft --compile`. It resumes where it
stopped, exactly. Work files go to --work (default out/), the target to --out (checkpoints/tiny/target).

Shapes: B sequences, T tokens per sequence, V vocabulary, E experts.
"""
import argparse
import json
import math
import sys
import sysconfig
import time
import warnings
import zlib
from pathlib import Path

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # before torch says so; nothing here needs it
import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint import save_target
from corpus import progress, save_atomically
from generate import Parser
from hub import UserError
from model import Config, Router, Transformer
from show import exit_code
from train import MASK, Optimizer, schedule

END = "<|endoftext|>"
LENGTHS = (256, 512, 1024)  # tokens of a window, as training goes on
SAVE_SECONDS = 120  # between resumable states
PROMPTS = (16, 32, 64, 96)  # tokens of a prompt, by turns

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


def train_target(args) -> None:
    for name, low in (("steps", 1), ("tokens", LENGTHS[-1]), ("prompts", 1)):
        if getattr(args, name) < low:
            raise UserError(f"--{name} must be at least {low}, got {getattr(args, name)}")
    if not 0 < args.lr < math.inf:
        raise UserError(f"--lr must be a positive number, got {args.lr}")
    work, steps = Path(args.work), args.steps
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
        length = LENGTHS[(step >= 0.75 * steps) + (step >= 0.95 * steps)]
        loss = (compiled if length == LENGTHS[0] else loss_of)(windows(text, args.tokens // length, length + 1, 1_000_000 + step))
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
    save_target(model, TARGET, Path(args.out))
    write_tokenizer(tokenizer, Path(args.out))
    write_prompts(work, text, args.prompts)


def write_tokenizer(tokenizer, folder: Path) -> None:
    """tokenizer.json and the small files that say which token ends a text."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": TARGET["max_position_embeddings"]}, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": TARGET["eos_token_id"], "do_sample": False}, indent=2) + "\n")


def write_prompts(work: Path, text: Tensor, count: int) -> None:
    """prompts.jsonl for the drafter: three windows of the training text to continue for each that is taken as it is, of which the
    target's distribution is learned all the same."""
    lines = []
    for i in range(count):
        plain = i % 4 == 3
        ids = windows(text, 1, 256 if plain else PROMPTS[i // 4 % 4], 2_000_000 + i)[0].tolist()
        lines.append(json.dumps({"tokens": ids[:1], "response": ids[1:]} if plain else {"tokens": ids}))
    (work / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", default="out", help="work files: text, resumable state, prompts (default out)")
    parser.add_argument("--out", default="checkpoints/tiny/target")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per step, 1024 or more")
    parser.add_argument("--prompts", type=int, default=12288, help="lines of prompts.jsonl")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--compile", action="store_true", help="compile the step: slow to start, then faster")
    return parser.parse_args()


def main() -> int:
    return exit_code(lambda: train_target(parse_arguments()) or 0, "--tokens", "\ninterrupted; the same command goes on from the last saved state")


if __name__ == "__main__":
    sys.exit(main())
