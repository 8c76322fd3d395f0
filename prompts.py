"""A file of prompts, served through a batch: one JSON object a line in, one a line out, each written whole when it is done.

The results' file is the memory of a run: what it holds is not done again, so the same command goes on after a crash or Ctrl-C. A
line is one write at the end of the file, so a process that dies can leave no more than a last line cut short, which the next run drops.
"""
import fcntl
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Optional, Union

from auto import Pilot
from chat import check_messages
from hub import UserError
from model import Config
from serve import Request, Result, Usage, check_prompt, check_settings, need, record, serve
from show import TextStream
from verify import Decoder, Plan

KEYS = ("id", "prompt", "messages", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop")
BEGINS = b'{"id": '   # how each result begins
SYNC_SECONDS = 1.0    # a result that comes this long after the last fsync brings the next one: a dying process loses none, a dying machine those since
SHOW_SECONDS = 0.1    # figures are shown this often at most


class Task(NamedTuple):
    """A line of the file."""
    id: Union[str, int]
    request: Request
    stop: tuple           # texts that end it


def read_task(line: bytes, encode: Callable, default: Request, stop: tuple, config: Config) -> Task:
    """encode(prompt, or messages) -> ids; default and stop: what a line does not say itself. UserError on a line that cannot be served."""
    try:
        d = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise UserError(f"it is not JSON in UTF-8: {e}") from None
    need(isinstance(d, dict), f"it must be a JSON object, not a {type(d).__name__}")
    unknown = [k for k in d if k not in KEYS]
    need(not unknown, f"the key {unknown[0] if unknown else ''!r} is unknown; known: {', '.join(KEYS)}")
    need(type(d.get("id")) in (str, int), "it needs an \"id\", a text or a whole number")
    need(("prompt" in d) != ("messages" in d), "it needs a \"prompt\" or \"messages\", and not both")
    if "prompt" in d:
        need(isinstance(d["prompt"], str), "its prompt must be text")
    else:
        check_messages(d["messages"], "its \"messages\"")
    for key in ("max_new_tokens", "top_k", "seed"):
        need(type(d.get(key, 0)) is int, f"{key} must be a whole number, got {d.get(key)!r}")
    for key in ("temperature", "top_p"):
        need(type(d.get(key, 0)) in (int, float) and abs(d.get(key, 0)) < 1e9, f"{key} must be a number, got {d.get(key)!r}")
    own = d.get("stop", stop)
    own = (own,) if isinstance(own, str) else own
    need(isinstance(own, (list, tuple)) and all(isinstance(s, str) and s for s in own), "stop must be a text, or a list of texts, none of them empty")
    settings = {k: d[k] for k in ("max_new_tokens", "temperature", "top_p", "top_k", "seed") if k in d}
    r = replace(default, tokens=encode(d["prompt"] if "prompt" in d else d["messages"]), **settings)
    check_settings("ar", 1, r.max_new_tokens, r.temperature, r.top_p, r.top_k, r.seed, 1)
    check_prompt(r.tokens, "the prompt", config.max_positions, config.vocab_size)
    return Task(d["id"], r, tuple(own))


def read_tasks(path: Path, *settings) -> tuple:
    """A file -> its Tasks, and (number, what is wrong) of each line that cannot be served. The settings are those of read_task.
    UserError where the file cannot be read, or holds nothing."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    tasks, wrong, first = [], [], {}
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = read_task(line, *settings)
            need(task.id not in first, f"the id {task.id!r} is taken by line {first.get(task.id)}")
            first[task.id] = n
            tasks.append(task)
        except UserError as e:
            wrong.append((n, str(e)))
        except RecursionError:  # of whatever looks into it: the JSON, the chat template
            wrong.append((n, "it is nested too deeply"))
    need(tasks or wrong, f"{path} holds no prompt")
    return tasks, wrong


def result_id(line: bytes) -> Optional[Union[str, int]]:
    """The id of a line of results; None where it is something else."""
    try:
        d = json.loads(line)
        return d["id"] if isinstance(d["text"], str) and d["finish"] and type(d["id"]) in (str, int) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def cut_short(tail: bytes) -> bool:
    """Whether it is the beginning of a result and no more. What is whole JSON was not cut."""
    try:
        json.loads(tail)
    except ValueError:
        return tail.startswith(BEGINS[:len(tail)])
    except RecursionError:
        pass  # (results are flat)
    return False


def open_results(path: Path, source: Path) -> tuple:
    """The file of results, open to append to, and the ids that it holds; a last line that was cut short is dropped. UserError where
    it cannot be written, or holds something else: that is not ours to change."""
    need(not path.exists() or path.is_file(), f"{path} is not a file; results need one of their own")
    need(not path.exists() or not path.samefile(source), f"{path} holds the prompts; give --out a file of its own")
    try:
        out = open(path, "a+b", buffering=0)
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path} is being written by another run; wait for it, or give --out another file") from None
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}") from None
    out.seek(0)
    whole, newline, tail = out.read().rpartition(b"\n")
    done = {}
    for n, line in enumerate(whole.split(b"\n") if newline else [], 1):
        done[result_id(line)] = n
        need(None not in done, f"{path}, line {n} is no result of an earlier run; give --out another file")
    if result_id(tail) is not None:
        done[result_id(tail)] = 0
        out.write(b"\n")
    elif tail:
        need(cut_short(tail), f"{path} ends in something that is no result of an earlier run; give --out another file")
        out.truncate(len(whole) + len(newline))
        print(f"{path}: its last line was cut short and is done again", file=sys.stderr)
    return out, set(done)


def ranges(numbers: list) -> str:
    """Rising numbers, those in a row as first-last: 3, 7-9."""
    there = set(numbers)
    firsts, lasts = [n for n in numbers if n - 1 not in there], [n for n in numbers if n + 1 not in there]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts))


@dataclass
class PromptFile:
    """tasks: what is to be done. Results go to `out`, or to stdout where there is none."""
    tasks: list
    wrong: int
    before: int            # how many were done before
    out: object = None
    synced: float = field(default_factory=time.perf_counter)

    def write(self, result: dict) -> None:
        line = json.dumps(result) + "\n"
        if self.out is None:
            print(line, end="", flush=True)
            return
        data = line.encode()
        while data:  # one write, unless the disk takes less
            data = data[self.out.write(data):]
        if time.perf_counter() - self.synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        os.fsync(self.out.fileno())
        self.synced = time.perf_counter()

    def close(self) -> int:
        """The exit code: 2 where some line could not be served."""
        if self.out is not None:
            self.sync()
            self.out.close()
        return 2 if self.wrong else 0


def open_file(path: Path, out: Optional[Path], *settings) -> PromptFile:
    """The file's tasks without those that `out` holds. Lines that cannot be served are reported. The settings are those of read_task."""
    tasks, wrong = read_tasks(path, *settings)
    handle, done = open_results(out, path) if out is not None else (None, set())
    for n, what in wrong[:10]:
        print(f"error: {path}, line {n}: {what}", file=sys.stderr)
    if len(wrong) > 10:
        print(f"error: and {len(wrong) - 10} more lines of {path}: {ranges([n for n, _ in wrong[10:]])}", file=sys.stderr)
    left = [t for t in tasks if t.id not in done]
    if len(left) < len(tasks) or not left:
        print(f"{len(tasks) - len(left)} of {len(tasks)} prompts were done before", file=sys.stderr)
    return PromptFile(left, len(wrong), len(tasks) - len(left), handle)


def answers(tasks: list, decoder: Decoder, plan: Plan, tokenizer, stop_ids: tuple, usage: Usage, choose: Optional[Callable] = None,
            heard: Callable = lambda text: None) -> Iterator[dict]:
    """Serves the tasks; yields each result, as it goes to the file, when it is done. Its seconds count from when it got its slot.
    heard(text) is called whenever a row got something, and with a text about prompts read while nothing decodes."""
    results, streams, began = {}, {}, {}

    def requests() -> Iterator[Request]:
        for number, task in enumerate(tasks):
            results[number], began[number] = Result(), time.perf_counter()
            if task.stop:
                streams[number] = TextStream(tokenizer, task.stop)
            yield task.request

    def until(number: int, tokens: list) -> Optional[int]:
        return streams[number].read(tokens)[1] if number in streams else None

    for e in serve(decoder, requests(), plan, choose, stop_ids, until, heard, usage):
        record(results[e.number], e, time.perf_counter() - began[e.number])
        heard("")
        if not e.finish:
            continue
        r, stream = results.pop(e.number), streams.pop(e.number, None)
        if stream is not None:
            stream.flush()
        text = tokenizer.decode(r.tokens, skip_special_tokens=False) if stream is None else stream.text
        yield {"id": tasks[e.number].id, "text": text, "tokens": r.tokens, "accepted": r.accepted, "finish": r.finish, "mode": "auto" if choose else plan.mode,
               "rounds": dict(Counter(r.modes)), "first_token_s": round(r.first_token, 6), "seconds": round(r.seconds, 6)}


def serve_file(file: PromptFile, decoder: Decoder, plan: Plan, tokenizer, stop_ids: tuple, progress: Callable, choose: Optional[Pilot] = None) -> int:
    """Serves a file to its end; progress(text) hears how far it is. choose: of mode auto. Returns the exit code: 130 on Ctrl-C, which keeps all that is done."""
    usage, done, began, shown, interrupted = Usage(), 0, time.perf_counter(), 0.0, False
    def figures() -> str:
        seconds = time.perf_counter() - began
        return f"{done} of {len(file.tasks)} done, {usage.tokens / seconds:.1f} tok/s, {usage.per_round:.2f} tokens per round"
    def heard(text: str) -> None:
        nonlocal shown
        if time.perf_counter() - shown > SHOW_SECONDS:
            shown = time.perf_counter()
            progress(figures() + (f"; {text}" if text else ""))
    try:
        for result in answers(file.tasks, decoder, plan, tokenizer, stop_ids, usage, choose, heard):
            file.write(result)
            done += 1
    except KeyboardInterrupt:
        interrupted = True
    finally:
        code = file.close()
        progress("")
        if choose is not None:
            choose.keep()
    wrong = f", {file.wrong} lines could not be served" if file.wrong else ""
    print(f"{'interrupted; ' if interrupted else ''}{'auto' if choose else plan.mode}: {figures()}, {usage.rounds} rounds with {usage.busy:.0%} of "
          f"{usage.slots} slots busy, {time.perf_counter() - began:.1f} s{wrong}{f'; {choose.auto.summary()}' if choose else ''}", file=sys.stderr)
    return 130 if interrupted else code
