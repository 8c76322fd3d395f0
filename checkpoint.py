"""Checkpoints in the hub's own layout: a folder or hub id -> config and weights, and back.

`layout` is the one table between our parameters and the hub's tensors, used in both directions. Loading is strict: every
tensor of the files is used or is of a kind known not to matter, every parameter is filled, and whatever is wrong ends in
one `UserError` before memory for the weights is allocated. Tensors stream one at a time into their final storage.

Shapes: H heads, C latent rank, E experts, I expert width, h hidden size, L draft layers.
"""
import json
import math
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import torch
from torch import Tensor, nn

from draft import DraftConfig, Drafter
from hub import FLOATS, INDEX, SINGLE, Files, UserError, few, read_config, write_safetensors
from model import FFN, Attention, Config, Experts, MoE, Transformer
from quant import BLOCK, GROUP, WORD, PackedExperts, dequantize_fp8


def parse_config(cls, d: dict, path: Path = Path("config.json")):
    """What config.json holds -> Config or DraftConfig, with every number in range: sizes decide what is allocated, and a
    wrong type would otherwise surface as a traceback many layers down. `path` is for the message."""
    def demand(good, what, value):
        if not good:
            raise ValueError(f"{what}, got {value!r}")
    def number(value):
        return type(value) in (int, float) and 0 < value < math.inf
    try:
        c = cls.from_dict(d)
        for f in fields(c):
            value, least = getattr(c, f.name), 0 if f.name in ("shared_experts", "mask_id", "markov_rank") else 1
            if f.type is int:
                demand(type(value) is int and value >= least, f"{f.name} must be a whole number of at least {least}", value)
            elif f.type is float:
                demand(number(value), f"{f.name} must be a positive number", value)
            elif f.type is bool:
                demand(type(value) is bool, f"{f.name} must be true or false", value)
        for name in ("theta", "factor", "original", "beta_fast", "beta_slow"):
            demand(number(getattr(c.rope, name)), f"rope {name} must be a positive number", getattr(c.rope, name))
        demand(c.rope.dim % 2 == 0, "the rope dimension must be even", c.rope.dim)
        demand(c.rope.frequencies().isfinite().all() and number(c.rope.amplitude), "the rope parameters give no usable frequencies", c.rope)
        if cls is Config:
            demand(number(c.rope.softmax_factor), "rope mscale_all_dim must be a number", c.rope.mscale_all_dim)
            demand(c.q_lora_rank is None or type(c.q_lora_rank) is int and c.q_lora_rank > 0, "q_lora_rank must be null or a size", c.q_lora_rank)
            demand(all(type(i) is int for i in c.eos), "eos_token_id must be a token id or a list of them", list(c.eos))
            demand(c.num_experts % c.n_group == 0 and c.topk_group <= c.n_group and c.experts_per_token <= c.num_experts // c.n_group * c.topk_group,
                   "experts, groups and experts per token do not go together", (c.num_experts, c.n_group, c.topk_group, c.experts_per_token))
        else:
            demand(all(type(i) is int for i in c.taps), "target_layer_ids must be whole numbers", list(c.taps))
            demand(all(type(i) is int and i >= 0 for i in c.windows), "sliding_window must be a whole number", list(c.windows))
            demand(c.num_heads % c.num_kv_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads", (c.num_heads, c.num_kv_heads))
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, ArithmeticError) as e:
        raise UserError(f"{path}: {' '.join(str(e).split())}") from None
    return c


def ignored(name: str, layers: int) -> bool:
    """Tensors that are no part of the text decoder: vision towers, multi-token-prediction layers, derived rope tables."""
    first, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    return (first in ("vision_tower", "mm_projector") or name.endswith(".rotary_emb.inv_freq")
            or first == "layers" and index.isdecimal() and int(index) >= layers)


# The table between our parameters and the hub's tensors

class Slot(NamedTuple):
    """Where one tensor of the hub lives in a model: the tensor is cat(parts, dim) with the dims up to `dim` flattened."""
    name: str              # the hub's, without `model.`
    parts: tuple           # views of our parameters
    dim: int = 0
    exact: bool = False    # kept in the dtype it has: packed words and their scales
    says: tuple = ()       # no weight, but these numbers: the shape of a packed weight
    at: tuple = ()         # where ranks divide a model: the parts hold a piece of the hub's tensor that begins here …
    whole: tuple = ()      # … and has this shape

    @property
    def shape(self) -> tuple:
        """The hub's."""
        return self.whole or ((len(self.says),) if self.says else self.held)

    @property
    def held(self) -> tuple:
        """The shape of what the parts hold."""
        whole = list(self.parts[0].shape)
        whole[self.dim] = sum(p.shape[self.dim] for p in self.parts)
        return (math.prod(whole[:self.dim + 1]), *whole[self.dim + 1:])

    def fill(self, tensor: Tensor) -> None:
        whole = tensor.view(*self.parts[0].shape[:self.dim], -1, *self.parts[0].shape[self.dim + 1:])
        for part, piece in zip(self.parts, whole.split([p.shape[self.dim] for p in self.parts], self.dim)):
            part.copy_(piece)

    def saved_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self.says:
            return torch.int32
        if self.exact:
            return self.parts[0].dtype
        # the router's bias decides between near ties: the hub keeps it in fp32 everywhere
        return torch.float32 if self.name.endswith(".e_score_correction_bias") else dtype

    def gather(self, dtype: torch.dtype) -> Tensor:
        if self.says:
            return torch.tensor(self.says, dtype=torch.int32)
        return torch.cat([p.detach().to("cpu", self.saved_dtype(dtype)) for p in self.parts], self.dim).flatten(0, self.dim)


def share(m: nn.Module, name: str) -> tuple:
    """(offset, whole shape) of what this rank holds of a parameter; parallel.py notes it where it divides one."""
    p = getattr(m, name)
    return getattr(m, "shares", {}).get(name, ((0,) * p.dim(), tuple(p.shape)))


def layout(model: nn.Module, stored=()) -> Iterator[Slot]:
    """Every tensor of the hub that `model` (a Transformer or Drafter, whole or a rank's part) is made of. `stored`: names that the
    files have; experts come one by one, or fused per layer as transformers 5 may save them."""
    for slot in placed(model, stored):
        yield slot._replace(at=(), whole=()) if slot.says or slot.whole == slot.held else slot


def swiglu_slots(at: str, gate_up: Tensor, down: Tensor, i: int, I: int) -> Iterator[Slot]:
    """Of a dense FFN or one expert: this rank's width begins at i of I."""
    (gate, up), h = gate_up.chunk(2), len(down)
    yield Slot(f"{at}gate_proj.weight", (gate,), at=(i, 0), whole=(I, h))
    yield Slot(f"{at}up_proj.weight", (up,), at=(i, 0), whole=(I, h))
    yield Slot(f"{at}down_proj.weight", (down,), at=(0, i), whole=(h, I))


def placed(model: nn.Module, stored) -> Iterator[Slot]:
    for path, m in model.named_modules():
        at = f"{path}." if path else ""
        if isinstance(m, Attention):  # kv_b_proj is (H, nope + v, C), per head the key's rows first
            ((first, _, _), (H, _, C)), rows = share(m, "w_uk"), m.w_uk.shape[1] + m.w_uv.shape[1]
            yield Slot(f"{at}kv_b_proj.weight", (m.w_uk, m.w_uv), 1, at=(first * rows, 0), whole=(H * rows, C))
            q, kv = m.w_a.split((m.c.q_lora_rank or 0, m.c.latent_dim))
            if m.c.q_lora_rank:
                yield Slot(f"{at}q_a_proj.weight", (q,))
            yield Slot(f"{at}kv_a_proj_with_mqa.weight", (kv,))
            offset, whole = share(m, "w_q")
            yield Slot(f"{at}q_{'b_' if m.c.q_lora_rank else ''}proj.weight", (m.w_q,), at=offset, whole=whole)
        elif isinstance(m, FFN):
            (_, i), (_, I) = share(m, "down")
            yield from swiglu_slots(at, m.gate_up, m.down, i, I)
        elif isinstance(m, Experts):
            (first, _, i), (E, h, I) = share(m, "down")
            if f"{at}gate_up_proj" in stored:                                         # (E, 2I, h), and of a rank two pieces of it
                for begins, part in zip((i, I + i), m.gate_up.chunk(2, 1)):
                    yield Slot(f"{at}gate_up_proj", (part,), at=(first, begins, 0), whole=(E, 2 * I, h))
                yield Slot(f"{at}down_proj", (m.down,), at=(first, 0, i), whole=(E, h, I))
                continue
            for e, (gate_up, down) in enumerate(zip(m.gate_up, m.down), first):
                yield from swiglu_slots(f"{at}{e}.", gate_up, down, i, I)
        elif isinstance(m, PackedExperts):
            (first, _, i), (_, h, I) = share(m, "down_packed")
            i, I = i * WORD, I * WORD
            for e, (gate_up, gate_up_scale, down, down_scale) in enumerate(zip(m.gate_up_packed, m.gate_up_scale, m.down_packed, m.down_scale), first):
                gate, up = zip(gate_up.chunk(2), gate_up_scale.chunk(2))
                for which, (words, scale), (row, column), (rows, columns) in (("gate", gate, (i, 0), (I, h)), ("up", up, (i, 0), (I, h)),
                                                                              ("down", (down, down_scale), (0, i), (h, I))):
                    for what, part, of in (("packed", words, WORD), ("scale", scale, GROUP)):
                        yield Slot(f"{at}{e}.{which}_proj.weight_{what}", (part,), exact=True, at=(row, column // of), whole=(rows, columns // of))
                    yield Slot(f"{at}{e}.{which}_proj.weight_shape", (), says=(rows, columns))
        elif isinstance(m, Drafter):  # kv_proj is (L, 2, G*d, h)
            (_, _, first, _), (_, _, rows, h) = share(m, "kv_proj")
            for i, pair in enumerate(m.kv_proj):
                for which, part in zip("kv", pair):
                    yield Slot(f"layers.{i}.self_attn.{which}_proj.weight", (part,), at=(first, 0), whole=(rows, h))
        else:
            for name, p in m.named_parameters(recurse=False):
                offset, shape = share(m, name)
                yield Slot(at + name, (p,), at=offset, whole=shape)


def check(slots: list, files: Files, layers: float = math.inf, unused: list = ()) -> None:
    """Names, shapes and kinds of what the files hold against what the model needs. Reads no tensor. `layers`: tensors of
    layers from this one on are left alone, and so are the `unused`."""
    missing, wrong, used = [], [], set()
    def fits(name, shape, kinds):
        if name not in files:
            return missing.append(files.spelling(name))
        used.add(name)
        if files.kinds[name] not in kinds:
            wrong.append(f"{files.spelling(name)} is of type {files.kinds[name]}, expected {' or '.join(kinds)}")
        elif files.shapes[name] != shape:
            wrong.append(f"{files.spelling(name)} is {list(files.shapes[name])}, the config asks for {list(shape)}")
    for slot in {s.name: s for s in slots}.values():
        if slot.says or slot.exact and slot.parts[0].dtype == torch.int32:
            fits(slot.name, slot.shape, ("I32", "I64") if slot.says else ("I32",))
        elif files.kinds.get(slot.name) == "F8_E4M3" and len(slot.shape) > 1 and not slot.exact:
            fits(slot.name, slot.shape, ("F8_E4M3",))
            fits(f"{slot.name}_scale_inv", (*slot.shape[:-2], -(-slot.shape[-2] // BLOCK), -(-slot.shape[-1] // BLOCK)), FLOATS)
        else:
            fits(slot.name, slot.shape, FLOATS)
    left = [files.spelling(n) for n in files.where if n not in used and n not in unused and not ignored(n, layers)]
    problems = [f"{len(names)} tensor{'s' * (len(names) > 1)} {what}: {few(names)}" for what, names in
                (("missing", missing), ("that cannot fit", wrong), ("of no use here", left)) if names]
    if problems:
        raise UserError(f"{files.folder}: " + "; ".join(problems))


def fill(slots: list, files: Files, what: str) -> None:
    """Streams every tensor into its place, one at a time."""
    began = shown = time.monotonic()
    for i, slot in enumerate(slots):
        tensor = files.read(slot.name, slot.at, slot.held) if slot.at else files.read(slot.name)
        if slot.says:
            if tuple(tensor.tolist()) != slot.says:
                files.fail(slot.name, f"says {tensor.tolist()}, the config asks for {list(slot.says)}")
            continue
        if tensor.dtype == torch.float8_e4m3fn:  # dense from here on; on its device, where that is quick
            scale = files.read(f"{slot.name}_scale_inv").to(slot.parts[0].device)
            if not scale.isfinite().all():
                files.fail(f"{slot.name}_scale_inv", "has values that are not finite")
            tensor = dequantize_fp8(tensor.to(slot.parts[0].device), scale, slot.at[-2:] or (0, 0))
        slot.fill(tensor)
        for part in slot.parts:  # a sum needs no second copy, and one bad value spoils it
            if part.is_floating_point() and not part.sum(dtype=torch.float32 if part.dtype == torch.float16 else None).isfinite():
                files.fail(slot.name, f"has values that are not finite in {str(part.dtype).removeprefix('torch.')}")
        if sys.stderr.isatty() and time.monotonic() - shown > 0.2:
            shown = time.monotonic()
            print(f"\r\033[K{what}: {i + 1} of {len(slots)} tensors, {shown - began:.0f} s", end="", file=sys.stderr, flush=True)
    if shown > began:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def on_meta(build, config, dtype: torch.dtype) -> nn.Module:
    """A module without storage whose parameters have `dtype` (those that need at least fp32 have that)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return build(config).requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(before)


def keep_packed(moe: MoE, config: Config, scale_dtype: torch.dtype = torch.bfloat16) -> None:
    """On meta: int4 experts in the place of dense ones."""
    with torch.device("meta"):
        moe.experts = PackedExperts(config.num_experts, config.expert_ffn, config.hidden_size, scale_dtype)


def load_target(folder: Path, device="cpu", dtype: torch.dtype = torch.float32) -> Transformer:
    return open_target(folder, dtype)[1](device)


def open_target(folder: Path, dtype: torch.dtype) -> tuple:
    """Checks a target's folder by its headers -> its Config, and read(device, divide) -> Transformer. Memory for the weights is
    taken by `read` alone, so that what is wrong with either of a pair is said before. divide(model) may leave a part of it."""
    folder = Path(folder)
    config = parse_config(Config, read_config(folder), folder / "config.json")
    files = Files(folder)
    model = on_meta(Transformer, config, dtype)
    tied = config.tie and "lm_head.weight" not in files  # the head is loaded wherever it is present
    if tied:
        model.lm_head.weight = None
    for path, m in model.named_modules():
        first = f"{path}.experts.0.gate_proj.weight"
        if isinstance(m, MoE) and f"{first}_packed" in files:  # go by what is there, not by what quantization_config says
            keep_packed(m, config, FLOATS.get(files.kinds.get(f"{first}_scale"), torch.bfloat16))
    check(list(layout(model, files)), files, config.num_layers)

    @torch.no_grad()
    def read(device, divide: Callable = lambda model: None) -> Transformer:
        divide(model)
        model.to_empty(device=device)
        fill(list(layout(model, files)), files, "loading the target")
        if tied:
            model.lm_head.weight = model.embed_tokens.weight
        model.reset_frequencies()
        return model
    return config, read


# Drafters

EXTENSIONS = {"prefix_gru": "a recurrent head", "joint_proj": "DSpark's rnn head", "attention_conv": "DFlash2", "mlp_conv": "DFlash2",
              "candidate_selector": "DFlash2", "sinks": "attention sinks", "midlayer": "Eagle", "d2t": "Eagle", "t2d": "Eagle"}


def load_draft(folder: Path, target: Transformer, device="cpu", dtype: torch.dtype = torch.float32) -> Drafter:
    """A drafter that fits `target`: its own embedding and head where its file has them, else the target's, shared."""
    return open_draft(folder, target.config, dtype)[1](target, device)


def open_draft(folder: Path, target_config: Config, dtype: torch.dtype) -> tuple:
    """Checks a drafter's folder, and that it fits a target, by configs and headers -> the Drafter without its weights, and
    read(target, device, divide) that returns it with them. divide(draft) may leave a part of it."""
    folder = Path(folder)
    raw = read_config(folder)
    architecture = str((raw.get("architectures") or [""])[0])
    if "eagle" in architecture.lower():
        raise UserError(f"{folder / 'config.json'}: {architecture} is an Eagle drafter; only DFlash drafters are supported")
    files = Files(folder)
    for name in files.where:
        for part in name.split("."):
            if part in EXTENSIONS:
                raise UserError(f"{folder}: {files.spelling(name)} belongs to an extension ({EXTENSIONS[part]}) that is not supported")
    config = parse_config(DraftConfig, raw, folder / "config.json")
    check_pair(config, target_config, folder)
    head = [name for name in files.where if name.startswith("markov_head.")]
    if head and not config.markov_rank:
        raise UserError(f"{folder}: {files.spelling(head[0])} belongs to a Markov head, but config.json has no markov_rank")
    confidence = sorted(name for name in files.where if name.startswith("confidence_head."))
    draft = on_meta(Drafter, config, dtype)
    with torch.device("meta"):
        if "embed_tokens.weight" in files:
            draft.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        if "lm_head.weight" in files:
            draft.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
    check(list(layout(draft)), files, unused=confidence)

    @torch.no_grad()
    def read(target: Transformer, device, divide: Callable = lambda model: None) -> Drafter:
        divide(draft)
        draft.to_empty(device=device)
        if confidence:
            print(f"loading the drafter: its confidence head ({few(confidence)}) is not used", file=sys.stderr)
        fill(list(layout(draft)), files, "loading the drafter")
        own = {name: m.requires_grad_(False) for name, m in draft.named_children() if name in ("embed_tokens", "lm_head")}
        draft.share(target)
        for name, m in own.items():
            setattr(draft, name, m)
        draft.reset_frequencies()
        return draft.eval()
    return draft, read


def check_pair(draft: DraftConfig, target: Config, folder: Path) -> None:
    """A drafter for another target would load, run, and accept next to nothing."""
    def refuse(what):
        raise UserError(f"the drafter {folder} does not fit the target: {what}")
    for what, theirs, ours in (("hidden size", draft.hidden_size, target.hidden_size), ("vocabulary", draft.vocab_size, target.vocab_size),
                               ("number of target layers", draft.num_target_layers, target.num_layers)):
        if theirs is not None and theirs != ours:
            refuse(f"its {what} is {theirs}, the target's {ours}")
    if max(draft.taps) >= target.num_layers:
        refuse(f"it taps layer {max(draft.taps)}, the target has layers 0 to {target.num_layers - 1}")
    if max(draft.taps) == target.num_layers - 1:
        refuse(f"it taps the last layer, {max(draft.taps)}, whose output trainers saw before or after the final norm; that is not supported")
    if draft.mask_id >= target.vocab_size:
        refuse(f"its mask id is {draft.mask_id}, the embedding has {target.vocab_size} rows")


# Saving

def save(slots: list, config: dict, folder: Path, dtype: torch.dtype, hub_name, shard_bytes=None) -> None:
    """config.json, and one file of weights, or an index and shards of at most shard_bytes (or one tensor) each."""
    if any(slot.at for slot in slots):
        raise ValueError("this is a rank's part of a model; save a whole one")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    def size(slot):
        return math.prod(slot.shape) * slot.saved_dtype(dtype).itemsize
    shards, room = [[]], shard_bytes or math.inf
    for slot in slots:
        if shards[-1] and room < size(slot):
            shards, room = shards + [[]], shard_bytes
        shards[-1].append(slot)
        room -= size(slot)
    names = [SINGLE] if len(shards) == 1 else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards):
        write_safetensors(folder / name, {hub_name(s.name): (s.shape, s.saved_dtype(dtype), lambda s=s: s.gather(dtype)) for s in shard})
    if len(shards) > 1:
        listing = {hub_name(s.name): name for name, shard in zip(names, shards) for s in shard}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": sum(map(size, slots))}, "weight_map": listing}, indent=1) + "\n")
    else:
        (folder / INDEX).unlink(missing_ok=True)  # a stale index would win over the file just written
    config = {**{k: v for k, v in config.items() if k != "dtype"}, "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_target(model: Transformer, config: dict, folder: Path, dtype: torch.dtype = torch.bfloat16, shard_bytes=None) -> None:
    tied = model.lm_head.weight is model.embed_tokens.weight
    slots = [s for s in layout(model) if not (tied and s.name == "lm_head.weight")]
    save(slots, config, folder, dtype, lambda name: name if name == "lm_head.weight" else f"model.{name}", shard_bytes)


def save_draft(draft: Drafter, config: dict, folder: Path, dtype: torch.dtype = torch.bfloat16, own: tuple = ()) -> None:
    """What is the drafter's own; embedding and head are the target's, unless `own` names them."""
    slots = [s for s in layout(draft) if s.name in own or s.name not in ("embed_tokens.weight", "lm_head.weight")]
    save(slots, config, folder, dtype, lambda name: name)
