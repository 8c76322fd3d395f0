"""A folder or hub id, and the safetensors files in it: what they hold, reading them piece by piece, writing one.

It knows no model: checkpoint.py does. `UserError` is what every file here raises where a user can mend what is wrong.
"""
import ctypes
import json
import math
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = {**FLOATS, "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


class UserError(Exception):
    """One line: what is wrong, what was found, what to do. The command line prints it and exits with code 2."""


def few(items: list, limit: int = 3) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(str(i) for i in items[:limit]) + more


# Folders and hub ids

WANTED = ("*.safetensors", "*.json", "tiktoken.model", "chat_template.jinja")  # *.json: index, configs and tokenizer.json


def resolve(name: str, wanted: tuple = WANTED) -> Path:
    """An existing folder, or a hub id with an optional @revision, downloaded (or found in the hub's cache).
    wanted: patterns of the files that are needed."""
    try:
        path = Path(name).expanduser()
        folder, file = path.is_dir() and bool(name), path.is_file()
    except (OSError, RuntimeError) as e:  # no such home, a name too long, a folder that may not be read
        raise UserError(f"{name[:200]} cannot be opened as a model folder: {e.strerror if isinstance(e, OSError) else e}") from None
    if folder:
        return path
    if file:
        raise UserError(f"{name} is a file; give the folder that holds config.json and the weights")
    hub_id, _, revision = name.partition("@")
    if name.startswith((".", "/", "~")) or hub_id.count("/") > 1 or not hub_id:
        raise UserError(f"no such model folder: {name}")
    from huggingface_hub import errors, snapshot_download  # here, so that a local run needs no network library
    where = f"{hub_id} at revision {revision}" if revision else hub_id
    try:
        return Path(snapshot_download(hub_id, revision=revision or None, allow_patterns=list(wanted)))
    except errors.GatedRepoError:
        why = "the model is gated: accept its terms on its page, then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        why = "the hub has no such model, or it is private: check the name, or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        why = "the model has no such revision"
    except errors.HFValidationError:
        why = "that is not a hub id either (owner/name)"
    except errors.OfflineModeIsEnabled:
        why = "it is not in the local cache, and offline mode is on (HF_HUB_OFFLINE)"
    except errors.LocalEntryNotFoundError:
        why = "it is not in the local cache, and the hub cannot be reached or offline mode is on"
    except Exception as e:  # whatever else a network does to a download is one line for the user, too
        why = f"the download failed with {type(e).__name__}: {' '.join(str(e).split())[:200]}"
    raise UserError(f"{where} is no folder here, and from the hub: {why}")


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:  # not UTF-8, or not JSON
        raise UserError(f"{path} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_config(folder: Path) -> dict:
    return read_json(Path(folder) / "config.json")


# Safetensors files

def canonical(name: str) -> str:
    """The hub's name -> ours: wrappers prefix the text model with `model.`, `language_model.` or both, and older drafters
    their heads with `logit_head.`."""
    while name.startswith(("model.", "language_model.", "logit_head.")):
        name = name.partition(".")[2]
    return name


class Files:
    """The safetensors files of a folder: which tensors they hold, and reading them one at a time."""
    window = 1 << 30  # bytes read before files are reopened: pages of a mapped file count as ours until it is closed

    def __init__(self, folder: Path):
        self.folder, self.open_files, self.where, self.mapped = Path(folder), {}, {}, 0
        if (self.folder / INDEX).exists():  # file names follow no rule; the index alone says what is where
            listing = read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(listing, dict) or not listing:
                raise UserError(f"{self.folder / INDEX} has no weight_map")
        elif (self.folder / SINGLE).exists():
            listing = dict.fromkeys(self.open(SINGLE).keys(), SINGLE)
        else:
            raise UserError(f"{self.folder} has neither {SINGLE} nor {INDEX}; only safetensors weights are read")
        for file in dict.fromkeys(str(f) for f in listing.values()):
            if "/" in file or "\\" in file or not (self.folder / file).is_file():
                raise UserError(f"{self.folder / INDEX} lists the file {file}, which is not in the folder; is the download complete?")
        for stored, file in listing.items():
            name = canonical(stored)
            if name in self.where:
                raise UserError(f"{self.folder}: {stored} and {self.where[name][1]} are the same tensor")
            self.where[name] = (file, stored)
        held = {}  # headers, one file after the other: shapes and kinds are checked before anything is read
        for name, (file, stored) in self.where.items():
            held.setdefault(file, []).append((name, stored))
        self.kinds, self.shapes = {}, {}
        for file, names in held.items():
            f = self.open(file)
            present = set(f.keys())
            absent = [stored for _, stored in names if stored not in present]
            if absent:
                raise UserError(f"{self.folder / file} lacks {few(absent)}, which {INDEX} says it holds")
            for name, stored in names:
                piece = f.get_slice(stored)
                self.kinds[name], self.shapes[name] = piece.get_dtype(), tuple(piece.get_shape())

    def __contains__(self, name: str) -> bool:
        return name in self.where

    def open(self, file: str):
        """A few files stay open: a weight and its scales may lie in different ones."""
        if file not in self.open_files:
            if len(self.open_files) >= 4:
                self.open_files.pop(next(iter(self.open_files)))
            try:
                self.open_files[file] = safe_open(self.folder / file, "pt")
            except (SafetensorError, OSError, ValueError) as e:
                raise UserError(f"{self.folder / file} is corrupt or cut short: {e}") from None
        return self.open_files[file]

    def spelling(self, name: str) -> str:
        """The name as the files spell it, or would."""
        if name in self.where:
            return self.where[name][1]
        return name if name in ("lm_head.weight",) or "fc.weight" in self.where else f"model.{name}"

    def read(self, name: str, at: tuple = (), shape: tuple = ()) -> Tensor:
        """A whole tensor, or the part of this shape that begins at `at`."""
        file, stored = self.where[name]
        if self.mapped > self.window:
            self.open_files.clear()
            self.mapped = 0
        try:
            f = self.open(file)
            tensor = f.get_slice(stored)[tuple(slice(i, i + n) for i, n in zip(at, shape))] if at else f.get_tensor(stored)
        except (SafetensorError, OSError, ValueError) as e:
            raise UserError(f"{self.folder / file}: {stored} cannot be read: {e}") from None
        self.mapped += math.prod(self.shapes[name]) * tensor.element_size()  # a piece may touch the pages of all of it
        return tensor

    def fail(self, name: str, what: str):
        raise UserError(f"{self.folder / self.where[name][0]}: {self.spelling(name)} {what}")


def write_safetensors(path: Path, tensors: dict) -> None:
    """tensors: name -> (shape, dtype, function that makes it). A header in JSON, then the bytes, one tensor in memory at a
    time. (The library's own writer holds them all, and needs numpy.)"""
    names, header, at = {dtype: kind for kind, dtype in KINDS.items()}, {"__metadata__": {"format": "pt"}}, 0
    for name, (shape, dtype, _) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the data begins aligned
    with open(f"{path}.part", "wb") as f:
        f.write(len(head).to_bytes(8, "little") + head)
        for shape, dtype, make in tensors.values():
            tensor = make().contiguous()
            assert tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype
            f.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b"")
    os.replace(f"{path}.part", path)
