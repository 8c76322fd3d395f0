"""Text in and out: the model's tokenizer, its stop ids, its chat template.

What a user types never becomes a special token: `encode` reads it with a twin of the tokenizer that knows none. Only the
markup that a chat template itself writes does (`encode_chat`), never markup that a message smuggles in.
"""
import base64
import datetime
import json
import re
from pathlib import Path
from typing import Optional

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from hub import UserError, read_json
from model import Config


def optional_json(path: Path) -> dict:
    return read_json(path) if path.exists() else {}


def token_text(value) -> Optional[str]:
    """tokenizer_config.json spells a token as a string or as {"content": …}."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


# Tokenizers

def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. It carries two attributes: `plain`, its twin without special tokens, and `bos`,
    the id that starts every text, or None."""
    folder = Path(folder)
    path = next((p for p in (folder / "tokenizer.json", folder / "tiktoken.model") if p.exists()), None)
    if path is None:
        raise UserError(f"{folder} has neither tokenizer.json nor tiktoken.model")
    config = optional_json(folder / "tokenizer_config.json")
    try:
        tokenizer = from_tiktoken(path.read_bytes(), config) if path.name == "tiktoken.model" else from_json(path.read_text(encoding="utf-8"))
    except Exception as e:  # the tokenizers library raises bare Exception for whatever is wrong with a file
        raise UserError(f"{path} is not a tokenizer: {' '.join(str(e).split())[:200]}") from None
    tokenizer.encode_special_tokens = True
    tokenizer.bos = tokenizer.token_to_id(token_text(config.get("bos_token")) or "") if config.get("add_bos_token") else None
    return tokenizer


def from_json(text: str) -> Tokenizer:
    tokenizer, twin = Tokenizer.from_str(text), json.loads(text)
    # Added tokens of blanks only are ordinary text that some vocabularies put there; all others are markup. Markup leaves
    # its id to a spelling with a raw blank, which byte-level words never have: the library numbers added tokens by itself.
    added, vocab = twin.get("added_tokens") or [], twin["model"]["vocab"]
    twin["added_tokens"] = [t for t in added if not t["special"] and not t["content"].strip()]
    if isinstance(vocab, dict):
        vocab.update({f" {t['id']}": t["id"] for t in added if t not in twin["added_tokens"] and vocab.get(t["content"]) != t["id"]})
    tokenizer.plain = Tokenizer.from_str(json.dumps(twin))
    return tokenizer


KIMI_SPLIT = "|".join((
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+"))
KIMI_SPECIALS = 256  # ids after the ranks, all of them special, named in tokenizer_config.json or reserved


def byte_letters() -> list:
    """One printable character per byte, as GPT-2's vocabulary spells bytes: printable Latin-1 stands for itself, the other
    bytes get the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def from_tiktoken(data: bytes, config: dict) -> Tokenizer:
    """tiktoken.model (base64 token and rank per line) -> the same tokenizer as byte-level BPE.

    tiktoken always merges the pair whose union ranks lowest; BPE merges by a list of pairs. So every split of a token into
    two tokens is listed, lowest union first, and a whole word that is a token is taken as it is (ignore_merges)."""
    ranks = {}
    for line in data.split(b"\n"):
        if line.strip():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise ValueError(f"its {len(ranks)} ranks have gaps or doubles")
    letters = byte_letters()
    def spell(token):
        return "".join(letters[b] for b in token)
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        merges += sorted((ranks[l], ranks[r], l, r) for l, r in splits if l in ranks and r in ranks)
    bpe = models.BPE({spell(t): rank for t, rank in ranks.items()}, [(spell(l), spell(r)) for *_, l, r in merges],
                     ignore_merges=True, fuse_unk=False)
    def build():
        t = Tokenizer(bpe)
        t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(KIMI_SPLIT), "isolated"),
                                                   pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        t.decoder = decoders.ByteLevel()
        return t
    tokenizer, named = build(), config.get("added_tokens_decoder") or {}
    for i in range(len(ranks), len(ranks) + KIMI_SPECIALS):  # in order and without gaps: the library numbers them itself
        entry = named.get(str(i), {})
        text = token_text(entry) or f"<|reserved_token_{i}|>"
        tokenizer.add_tokens([AddedToken(text, special=bool(entry.get("special", True)), normalized=False)])
        if tokenizer.token_to_id(text) != i:
            raise ValueError(f"the special token {text} of tokenizer_config.json cannot have id {i}")
    tokenizer.plain = build()
    return tokenizer


def check_surrogates(text: str, what: str) -> None:
    if re.search("[\ud800-\udfff]", text):
        raise UserError(f"{what} holds half a surrogate pair, which is no text")


def encode(tokenizer: Tokenizer, text: str) -> list:
    """Token ids of what a user typed; `<|im_end|>` in it is text like any other. UserError where JSON brought what is no text."""
    check_surrogates(text, "the prompt")
    ids = tokenizer.plain.encode(text).ids
    return ids if tokenizer.bos is None or ids[:1] == [tokenizer.bos] else [tokenizer.bos] + ids


def stop_ids(folder: Path, config: Config, tokenizer: Tokenizer) -> tuple:
    """Every id that ends a text: of config.json, generation_config.json and the tokenizer. They disagree in many models:
    Kimi's config names one of [EOS] and <|im_end|>, and a turn ends with both."""
    folder, ids = Path(folder), set(config.eos)
    also = optional_json(folder / "generation_config.json").get("eos_token_id")
    also = also if isinstance(also, list) else [] if also is None else [also]
    if not all(type(i) is int for i in also):
        raise UserError(f"{folder / 'generation_config.json'}: eos_token_id must be a token id or a list of them, got {also}")
    for text in (token_text(optional_json(folder / "tokenizer_config.json").get("eos_token")), "<|im_end|>"):
        if text and tokenizer.token_to_id(text) is not None:
            ids.add(tokenizer.token_to_id(text))
    return tuple(sorted(ids.union(also)))


# Chat

def read_messages(path: Path) -> list:
    """A JSON file [{"role": …, "content": …}, …], or an object that holds it as "messages"."""
    try:
        messages = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is not JSON: {e}") from None
    return check_messages(messages.get("messages") if isinstance(messages, dict) else messages, str(path))


def check_messages(messages, what: str) -> list:
    """The messages, or a UserError about `what` holds them."""
    check_surrogates(json.dumps(messages, ensure_ascii=False), what)
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages):
        raise UserError(f'{what} must hold a list of messages, [{{"role": "user", "content": "…"}}, …]')
    return messages


def find_template(folder: Path, name: str = "default") -> Optional[str]:
    """chat_template.jinja, else tokenizer_config.json's: one template, or several with names. None where there is none."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{path} cannot be read: {e}") from None
    template = optional_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        if name not in named:
            raise UserError(f"{folder / 'tokenizer_config.json'} has no chat template {name!r}, only {', '.join(map(str, named)) or 'none'}")
        template = named[name]
    if not (template is None or isinstance(template, str)):
        raise UserError(f"{folder / 'tokenizer_config.json'}: chat_template must be text, not a {type(template).__name__}")
    return template


def environment():
    """Jinja as transformers sets it up, because templates on the hub are written against that."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} … {% endgeneration %} marks what the assistant wrote, for training; here it is just its body."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True)).set_lineno(line)

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson  # Jinja's own escapes HTML
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


def render_chat(folder: Path, messages: list, add_generation_prompt: bool = True, **variables) -> str:
    """Messages [{"role", "content"}, …] -> the text that the model's own template makes of them. `variables` reach the
    template (tools, thinking, …)."""
    folder = Path(folder)
    config, template = optional_json(folder / "tokenizer_config.json"), find_template(folder)
    if template is None:
        return render_kimi(folder, config, messages, add_generation_prompt)
    from jinja2 import TemplateError
    specials = {k: token_text(v) for k, v in config.items() if k.endswith("_token") and token_text(v)}
    try:
        return environment().from_string(template).render(
            **{"messages": messages, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt, **specials, **variables})
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as e:
        raise UserError(f"the chat template of {folder} does not accept these messages: {' '.join(str(e).split())[:300]}") from None


def render_kimi(folder: Path, config: dict, messages: list, add_generation_prompt: bool) -> str:
    """Kimi's format, for its files that come without a template."""
    if "<|im_middle|>" not in {token_text(t) for t in (config.get("added_tokens_decoder") or {}).values()}:
        raise UserError(f"{folder} has no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json; use --prompt without --chat")
    text = ""
    for m in messages:
        if m["role"] not in ("system", "user", "assistant") or not isinstance(m["content"], str):
            raise UserError(f"without a chat template, messages must be text by system, user or assistant; got one by {m['role']!r}")
        text += f"<|im_{m['role']}|>{m['role']}<|im_middle|>{m['content']}<|im_end|>"
    return text + ("<|im_assistant|>assistant<|im_middle|>" if add_generation_prompt else "")


def encode_chat(tokenizer: Tokenizer, folder: Path, messages: list, add_generation_prompt: bool = True, **variables) -> list:
    """Messages -> token ids. Markup of the template becomes special tokens; the same characters in a message of anyone but
    the assistant stay text: while the template runs they are hidden behind characters that occur nowhere."""
    markup = [t for t in tokenizer.get_added_tokens_decoder().values() if t.special or t.content.strip()]
    markup = sorted(markup, key=lambda t: -len(t.content))
    everything = json.dumps(messages, ensure_ascii=False)
    check_surrogates(everything, "the chat")
    free = (i for i in range(0xE000, 0xF900) if chr(i) not in everything)
    hidden = {ord(c): next(free) for c in sorted({t.content[0] for t in markup})}  # what markup begins with
    shown = {v: k for k, v in hidden.items()}
    anywhere = re.compile("|".join(re.escape(t.content) for t in markup) or r"(?!)")

    def guard(value):
        if isinstance(value, str):
            return anywhere.sub(lambda m: m[0].translate(hidden), value)
        if isinstance(value, list):
            return [guard(v) for v in value]
        return {k: guard(v) for k, v in value.items()} if isinstance(value, dict) else value

    messages = [m if m["role"] == "assistant" else {**m, "content": guard(m["content"])} for m in messages]
    text = render_chat(folder, messages, add_generation_prompt, **variables)
    def plain(part):
        return tokenizer.plain.encode(part.translate(shown), add_special_tokens=False).ids
    def space(eaten):  # some tokens swallow the blanks beside them
        return r"\s*" if eaten else ""
    own = re.compile("|".join(f"{space(t.lstrip)}({re.escape(t.content)}){space(t.rstrip)}" for t in markup) or r"(?!)")
    ids, at = [], 0
    for m in own.finditer(text):
        ids += plain(text[at:m.start()]) + [tokenizer.token_to_id(m[m.lastindex])]
        at = m.end()
    return ids + plain(text[at:])
