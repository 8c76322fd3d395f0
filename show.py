"""What the command line shows: text as it becomes complete, a line of figures, the tree of a round drawn as text."""
import sys
from typing import Callable, Optional

import torch
from torch import Tensor

from hub import UserError
from model import Tree

DRAFTED, OWN, DIM, RESET = "\033[32m", "\033[1;33m", "\033[2m", "\033[0m"


class TextStream:
    """Turns tokens into text as they come: never half a character, nothing lost at the end, cut before the first stop string."""

    def __init__(self, tokenizer, stop: tuple = ()):
        self.tokenizer, self.stop, self.stopped = tokenizer, tuple(s for s in stop if s), False
        self.tokens, self.text, self.shown = [], "", 0  # tokens whose text is not complete yet; all complete text; its part given out

    def push(self, token: int) -> str:
        """The text that this token makes safe to show; `stopped` turns true when a stop string is complete."""
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=False)
        if not text.endswith("\ufffd"):  # else the bytes of a character are still incomplete
            self.text, self.tokens = self.text + text, []
        return self._release()

    def read(self, tokens: list) -> tuple:
        """Pushes a round's tokens up to the stop string: the text of each, and how many to keep; None where it did not stop."""
        pieces = []
        for token in tokens:
            pieces.append(self.push(token))
            if self.stopped:
                return pieces, len(pieces)
        return pieces, None

    def flush(self) -> str:
        """What is left when no token will follow."""
        self.text += self.tokenizer.decode(self.tokens, skip_special_tokens=False)
        self.tokens = []
        return self._release(final=True)

    def _release(self, final: bool = False) -> str:
        found = [i for i in (self.text.find(s) for s in self.stop) if i >= 0]
        if found:
            self.stopped, self.text = True, self.text[:min(found)]
        end = len(self.text)
        if not (final or self.stopped):  # hold back a tail that may grow into a stop string
            end -= max((k for s in self.stop for k in range(1, len(s)) if self.text.endswith(s[:k])), default=0)
        text, self.shown = self.text[self.shown:end], max(self.shown, end)
        return text


class Screen:
    """Text of all rows as it becomes complete; a single row is printed live."""

    def __init__(self, tokenizer, rows: int, stop: tuple, live: bool, color: bool):
        self.streams = [TextStream(tokenizer, stop) for _ in range(rows)]
        self.painted = [""] * rows
        self.pieces, self.live, self.color = [], live, color

    def until(self, row: int, tokens: list) -> Optional[int]:
        """Reads new tokens up to a stop string; the pieces of text wait for `show`, which knows which ones were drafted."""
        self.pieces, keep = self.streams[row].read(tokens)
        return keep

    def show(self, e) -> None:
        """Prints an Event of generate.rounds whose tokens `until` has read."""
        pieces = self.pieces[:len(e.tokens)] if e.tokens else []
        self.put(e.number, [(text, i < e.drafts) for i, text in enumerate(pieces)])
        if e.finish:
            self.put(e.number, [(self.streams[e.number].flush(), False)])

    def put(self, row: int, pieces: list) -> None:
        text = "".join(f"{DRAFTED if drafted else OWN}{t}{RESET}" if self.color and t else t for t, drafted in pieces)
        self.painted[row] += text
        if self.live:
            print(text, end="", flush=True)

    def close(self) -> None:
        for row, s in enumerate(self.streams):
            self.put(row, [(s.flush(), False)])


def summary(mode: str, results: list, seconds: float) -> str:
    """The one line that closes a run. tok/s counts what came after the first token, over the time it took."""
    tokens, steps = sum(len(r.tokens) for r in results), sum(len(r.accepted) for r in results)
    emitted = tokens - sum(bool(r.tokens) for r in results)
    first = max((r.first_token for r in results), default=0.0)
    rate = emitted / (seconds - first) if seconds > first and emitted else 0.0
    return (f"{mode}: {tokens} tokens, {steps} rounds, {emitted / steps if steps else 0:.2f} tokens per round, {rate:.1f} tok/s, "
            f"first token after {first * 1e3:.0f} ms")


def node_probabilities(tree: Tree, marginals: Tensor, conditional: Optional[Callable] = None) -> Tensor:
    """tree and what it was built from (`Drafter.proposal`) -> (B, N) probability of each node after its parent; the root's is 1."""
    before, p = tree.tokens.gather(1, tree.parents.clamp(min=0)), torch.ones_like(tree.tokens, dtype=torch.float32)
    for d in range(marginals.shape[1]):
        logits = marginals[:, d].unsqueeze(1) + (conditional(d, before) if conditional is not None else 0)  # (B, N or 1, V)
        here = logits.float().softmax(-1).expand(-1, before.shape[1], -1).gather(-1, tree.tokens.unsqueeze(-1)).squeeze(-1)
        p = torch.where(tree.depth == d + 1, here, p)
    return p


def draw_tree(tree: Tree, probabilities: Tensor, path: list, emitted: list, decode, color: bool = False) -> str:
    """Row 0 of a tree as text: each node's token, the drafter's probability (B, N) for it after its parent and for the whole
    path to it; a tick where the target accepted it. path: the accepted node ids, root first; emitted: the round's tokens;
    decode: id -> text."""
    conditional = probabilities[0]
    joint = torch.where(tree.ancestors[0], conditional, 1.0).prod(-1).tolist()
    conditional, tokens, parents = conditional.tolist(), tree.tokens[0].tolist(), tree.parents[0].tolist()
    children = [[j for j, p in enumerate(parents) if p == i] for i in range(len(tokens))]
    lines, on_path = [f"{decode(tokens[0])!r}  root"], set(path)

    def walk(node: int, indent: str) -> None:
        for j in children[node]:
            end = j == children[node][-1]
            text = f"{decode(tokens[j])!r}  {conditional[j]:.2f}  path {joint[j]:.3f}" + ("  ✓" if j in on_path else "")
            if color and j in on_path:
                text = f"{DRAFTED}{text}{RESET}"
            lines.append(f"{indent}{'└─ ' if end else '├─ '}{text}")
            walk(j, indent + ("   " if end else "│  "))
    walk(0, "")
    own = f"{decode(emitted[-1])!r}"
    lines.append(f"{len(tokens) - 1} nodes drafted, {len(path) - 1} accepted, then the target's own {OWN + own + RESET if color else own}: "
                 f"{len(emitted)} tokens in this round")
    return "\n".join(lines)


NO_MEMORY = ("not enough memory", "can't allocate memory")  # how torch words it on the CPU, in an ordinary RuntimeError


def told(line: str, code: int, error: Optional[BaseException] = None) -> int:
    """How a program of one process ends: with a line on stderr and this code, or with a traceback of what nobody thought of."""
    if error is not None:
        raise error
    if line:
        print(line, file=sys.stderr)
    return code


def exit_code(run: Callable[[], int], lower: str, interrupted: str = "interrupted", end: Callable = told) -> int:
    """run(), a command line's program. Where it fails by what the user can mend: one line on stderr, and 2; 130 on Ctrl-C.
    lower: what takes less memory. end: how it ends, where other processes must hear of it (launch.py)."""
    try:
        return run()
    except UserError as e:
        line = str(e)
    except KeyboardInterrupt:
        return end(interrupted, 130)
    except BrokenPipeError:  # the reader of our output left, as in `… | head`
        sys.stderr.close()
        return end("", 0)
    except OSError as e:
        line = f"{e.strerror or e} while reading or writing"
    except RecursionError:
        line = "the messages are nested too deeply; a content is text, or a list of parts"
    except Exception as e:
        what = " ".join(str(e).split())[:150]
        if isinstance(e, (MemoryError, torch.OutOfMemoryError)) or isinstance(e, RuntimeError) and any(words in str(e) for words in NO_MEMORY):
            line = f"out of memory ({what or 'Python could not allocate'}); lower {lower}"
        elif type(e).__module__.startswith(("torch._inductor", "torch._dynamo")):
            line = f"compilation failed ({what}); it needs a C++ compiler; or leave --compile out"
        else:
            return end("", 1, e)
    return end(f"error: {line}", 2)
