"""A byte-level tokenizer in the layout of model folders, for the tests."""
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WORDS = ("def", "return", " x", "漢字", "    ", "\n    ")


def letters(data: bytes) -> str:
    """The letters that byte-level vocabularies write bytes with: GPT-2's table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in plain)}
    return "".join(table[b] for b in data)


def byte_tokenizer() -> Tokenizer:
    """256 bytes, merges that spell WORDS, and two special tokens."""
    vocab, merges = {letters(bytes([b])): b for b in range(256)}, []
    for word in WORDS:
        parts = letters(word.encode())
        for n in range(2, len(parts) + 1):
            if parts[:n] not in vocab:
                vocab[parts[:n]] = len(vocab)
                merges.append((parts[:n - 1], parts[n - 1]))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False), AddedToken("<|mask|>", special=True, normalized=False)])
    return tokenizer





def save_tokenizer(folder: Path, eos: str = "<|end|>") -> None:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
