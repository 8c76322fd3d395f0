"""Text in and out: the model's tokenizer, its stop ids, its chat template.

What a user types never becomes a special token: `encode` reads it with a twin of the tokenizer that knows none. Only the
markup that a chat template itself writes may.
"""
import json
from pathlib import Path

from tokenizers import Tokenizer

from checkpoint import UserError, read_json
from model import Config


def optional_json(path: Path) -> dict:
    return read_json(path) if path.exists() else {}


def token_text(value):
    """tokenizer_config.json spells a token as a string or as {"content": …}."""
    return value.get("content") if isinstance(value, dict) else value


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. It carries two attributes: `plain`, its twin without special tokens, and `bos`,
    the id that starts every text, or None."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UserError(f"{folder} has no tokenizer.json")
    try:
        text = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(text)
        # added tokens of whitespace only are ordinary text that some vocabularies put there; the rest is markup
        twin = json.loads(text)
        twin["added_tokens"] = [t for t in twin.get("added_tokens") or [] if not t["special"] and not t["content"].strip()]
        tokenizer.plain = Tokenizer.from_str(json.dumps(twin))
    except Exception as e:  # the library raises bare Exception for whatever is wrong with the file
        raise UserError(f"{path} is not a tokenizer: {' '.join(str(e).split())[:200]}") from None
    tokenizer.encode_special_tokens = True
    config = optional_json(folder / "tokenizer_config.json")
    tokenizer.bos = tokenizer.token_to_id(token_text(config.get("bos_token")) or "") if config.get("add_bos_token") else None
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list:
    """Token ids of what a user typed; `<|im_end|>` in it is text like any other."""
    ids = tokenizer.plain.encode(text).ids
    return ids if tokenizer.bos is None or ids[:1] == [tokenizer.bos] else [tokenizer.bos] + ids


def stop_ids(folder: Path, config: Config, tokenizer: Tokenizer) -> tuple:
    """Every id that ends a text: of config.json, generation_config.json and the tokenizer. They disagree in many models:
    Kimi's config names one of [EOS] and <|im_end|>, and a turn ends with both."""
    folder, ids = Path(folder), set(config.eos)
    also = optional_json(folder / "generation_config.json").get("eos_token_id")
    ids.update(also if isinstance(also, list) else [] if also is None else [also])
    for text in (token_text(optional_json(folder / "tokenizer_config.json").get("eos_token")), "<|im_end|>"):
        if text and tokenizer.token_to_id(text) is not None:
            ids.add(tokenizer.token_to_id(text))
    if not all(type(i) is int for i in ids):
        raise UserError(f"{folder / 'generation_config.json'}: eos_token_id must be a token id or a list of them, got {also!r}")
    return tuple(sorted(ids))
