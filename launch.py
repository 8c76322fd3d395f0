"""A launch of several ranks by torchrun: they join, rank 0 alone speaks, and one that fails ends all of them.

torchrun ends the other ranks when a process ends, and reports that on a page of its own; a rank that hangs it does not see. So each
rank has a thread that tells the launch's store twice a second that it lives, and where in the program it is. From that the first who
finds that something is wrong says in one line which rank it was, and why.
"""
import datetime
import os
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist

from hub import UserError
from ranks import agree
from show import told

BEAT = 0.5      # seconds between two signs of life
PATIENCE = 3.0  # seconds for others to say why they failed, before their failure is called a death


def own_device(device: str, local_rank: int, local_size: int, what: str) -> str:
    """The CUDA device of one of local_size ranks of a host, made the current one. what: they are called. UserError where there are too few."""
    there, index = torch.cuda.device_count() if torch.cuda.is_available() else 0, device.partition(":")[2]
    if index or there < local_size:
        raise UserError(f"each of the {local_size} {what} on a host takes a CUDA device of its own, and "
                        + (f"--device is {device}; use cuda" if index else f"there are {there}; start fewer {what}, or use --device cpu"))
    torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"


def alike(what: str, mine: dict) -> None:
    """For what every rank was given by itself and all must have alike, name -> value: flags, configs. All must call it. UserError where
    this rank's are not rank 0's."""
    theirs = agree(mine)
    differ = [f"{k} is {mine.get(k)!r}, there {theirs.get(k)!r}" for k in {**theirs, **mine} if mine.get(k) != theirs.get(k)]
    if differ:
        raise UserError(f"{what} are not those of rank 0: {'; '.join(differ[:3])}. Start every host with the same flags and files")


class Launch:
    """This process's place in a launch; a process that torchrun did not start is alone, and nothing here changes it."""

    def __init__(self):
        env = os.environ
        self.rank, self.size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
        self.local_rank, self.local_size = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", self.size))
        self.watch = None
        if self.rank:
            sys.stdout = sys.stderr = open(os.devnull, "w")

    @property
    def joined(self) -> bool:
        return self.watch is not None

    def join(self, tp: int, device: str, timeout: float) -> str:
        """Makes this process one of `tp` ranks. Returns its device. timeout: seconds a rank may keep the others waiting. UserError
        where the launch is not as asked for."""
        if tp == self.size == 1:
            return device
        if tp > 1 and "RANK" not in os.environ:
            raise UserError(f"--tp {tp} needs {tp} processes: start it as torchrun --standalone --nproc-per-node {tp} {Path(sys.argv[0]).name} --tp {tp} …")
        if tp != self.size:
            raise UserError(f"torchrun started {self.size} ranks, and --tp is {tp}; make them equal")
        if not 1 <= timeout <= 10 ** 6:
            raise UserError(f"--timeout must be between 1 and 1000000 seconds, got {timeout:g}")
        kind = device.partition(":")[0]
        if kind == "cuda":
            device = own_device(device, self.local_rank, self.local_size, "ranks")
        elif kind != "cpu":
            raise UserError(f"several ranks run on cpu or cuda, not on {device!r}")
        try:
            # objects travel over gloo. NCCL gets some seconds more than the watch, which can say who is late
            dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=datetime.timedelta(seconds=timeout + 15 * (kind == "cuda")))
            self.watch = Watch(self.rank, self.size, timeout)
        except Exception as e:
            raise UserError(f"could not join the launch: {' '.join(str(e).split())[:200]}") from None
        self.watch.start()
        return device

    def ready(self) -> None:
        """Waits until every rank has its models, for as long as those that have not live: weights may come from slow disks. From here on a
        rank may not keep the others waiting."""
        self.wait()
        if self.joined:
            self.watch.begin()

    def wait(self) -> None:
        """Waits until every rank is here, for as long as those that are not live: files may have to be fetched."""
        if self.joined:
            self.watch.meet()

    def leave(self, code: int = 0) -> int:
        """The end of the program, in good order."""
        if not self.joined:
            return code
        if code == 130:
            self.watch.fail("interrupted", code)
        sys.stdout.flush(), sys.stderr.flush()
        dist.barrier()
        self.watch.over = True
        dist.destroy_process_group()
        os._exit(code)  # threads of the backend would crash one exit in four

    def fail(self, message: str, code: int, error: Optional[BaseException] = None) -> int:
        """The end of the program where something went wrong: says it once in the launch. error: where it is not the user's."""
        if self.joined:
            self.watch.fail(self.named(message, error), code, error)
        if self.rank == 0:
            return told(message, code, error)
        # where rank 0 comes to the same end it says so, and torchrun ends this process; who is still here then has an end of its own
        time.sleep(PATIENCE * (1 + bool(self.local_rank)))
        if code != 130 and (message or error is not None):
            os.write(2, f"{self.named(message, error)}\n".encode())
        return code

    def named(self, message: str, error: Optional[BaseException]) -> str:
        """The line that says that this rank failed. error: where it is not the user's."""
        if error is None:
            return message.replace("error: ", f"error: rank {self.rank}: ", 1) if self.rank else message
        last = traceback.extract_tb(error.__traceback__)[-1:]
        return f"error: rank {self.rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}" + "".join(
            f" ({Path(f.filename).name}:{f.lineno})" for f in last)


class Watch(threading.Thread):
    """Tells the store that this rank lives, and looks for those that do not."""

    def __init__(self, rank: int, size: int, timeout: float):
        super().__init__(daemon=True)
        self.rank, self.size, self.timeout, self.over = rank, size, timeout, False
        self.met, self.begun = 0, False
        # the folders whose lines are places: this one, not what lies inside it, and the program's
        self.homes = {os.path.dirname(os.path.abspath(f)) for f in (__file__, sys.argv[0])}
        # a connection of its own: calls on one wait for each other
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=datetime.timedelta(seconds=timeout))
        self.store = dist.PrefixStore(f"watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)  # one launch's failure is not the next one's
        self.main, self.beats, self.seen = threading.main_thread().ident, 0, {}
        self.counting, self.speaking = threading.Lock(), threading.Lock()
        # the main thread may be stuck in a collective when a signal comes: this thread hears of it through a pipe
        self.signals, out = os.pipe()
        os.set_blocking(out, False)
        signal.set_wakeup_fd(out, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)

    def where(self) -> str:
        """The line of this project that the main thread is at."""
        frame = sys._current_frames().get(self.main)
        while frame is not None and os.path.dirname(frame.f_code.co_filename) not in self.homes:
            frame = frame.f_back
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else "?"

    def beat(self) -> None:
        """Writes this rank's sign of life, reads everybody's: rank -> [beat, when it changed, place, when that changed]."""
        with self.counting:
            self.beats += 1
            self.store.set(f"beat/{self.rank}", f"{self.beats}|{self.where()}")
            now = time.monotonic()
            for r in range(self.size):
                if r in self.seen or self.store.check([f"beat/{r}"]):
                    beat, _, place = self.store.get(f"beat/{r}").decode().partition("|")
                    was = self.seen.get(r, [None, now, None, now])
                    self.seen[r] = [beat, was[1] if beat == was[0] else now, place, was[3] if place == was[2] else now]

    def run(self) -> None:
        failed = None
        try:
            while not self.over:
                self.beat()
                if self.store.check(["failed"]):
                    failed = failed or time.monotonic()
                    if time.monotonic() - failed > 2 * PATIENCE:  # the main thread is stuck in a collective that will never end
                        os._exit(1)
                elif who := self.late(self.timeout):
                    self.fail(f"error: rank {who[0]}: {who[1]}", 1)
                if select.select([self.signals], [], [], BEAT)[0]:
                    self.ended(os.read(self.signals, 1)[0])
        except Exception:  # the store is gone, and with it the launch
            if not self.over:
                time.sleep(PATIENCE)
                os._exit(1)

    def late(self, patience: float) -> tuple:
        """(rank, why) of one that gives no sign of life, or, once all have begun, stays elsewhere while this one waits; () where there is none."""
        now = time.monotonic()
        for r, (_, alive, place, _) in sorted(self.seen.items()):
            if now - alive > patience:
                return r, f"no sign of life for {now - alive:.0f} s (killed, out of memory, or stopped), last at {place}"
        if self.begun and now - self.seen[self.rank][3] > self.timeout:
            still = [r for r, (_, _, _, moved) in self.seen.items() if now - moved > self.timeout]
            if len({self.seen[r][2] for r in still}) > 1:
                r = self.elsewhere(still)
                return r, f"stays at {self.seen[r][2]} for {now - self.seen[r][3]:.0f} s, while others wait for it"
        return ()

    def elsewhere(self, ranks: list) -> int:
        """Who of some ranks keeps the others waiting: a rank in a collective (ranks.py), or in a compiled round (verify.py), waits itself."""
        def waits(r):
            return 2 * self.seen[r][2].startswith("ranks.py:") + self.seen[r][2].startswith("verify.py:"), r == self.rank, r
        return min(ranks, key=waits)

    def why(self) -> str:
        """Why a collective failed here: which rank died or is late."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and not self.store.check(["failed"]):
            self.beat()
            if who := self.late(4 * BEAT):
                return f"rank {who[0]}: {who[1]}"
            time.sleep(BEAT / 2)
        self.beat()
        other = self.elsewhere([r for r in self.seen if r != self.rank])
        return f"rank {other}: is at {self.seen[other][2]}, while others wait for it"

    def fail(self, message: str, code: int, error: Optional[BaseException] = None) -> None:
        """Ends the process; the first of all ranks to come here prints the line."""
        try:
            if error is not None and (isinstance(error, dist.DistError) or "gloo" in str(error).lower()):  # another rank's doing, most likely
                message = f"error: {self.why()}"
            elif error is None and self.rank and code == 2:
                time.sleep(1)  # most that a user can mend fails on every rank: rank 0 says it
            with self.speaking:
                if self.store.compare_set("failed", "", message or " ").decode() == message:
                    os.write(2, f"{message}\n".encode())
                for channel in (sys.stdout, sys.stderr):
                    channel.flush()
                os._exit(code)
        finally:
            os._exit(code)

    def ended(self, number: int) -> None:
        """On a signal: torchrun ends this rank, because another one ended, or because a user ends the launch."""
        if number == signal.SIGINT:  # the main thread gets it too, and may clean up
            time.sleep(PATIENCE)
            os._exit(130)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and not self.store.check(["failed"]):
            self.beat()
            if who := self.late(4 * BEAT):
                self.fail(f"error: rank {who[0]}: {who[1]}", 1)
            time.sleep(BEAT / 2)
        with self.speaking:
            os._exit(143)

    def meet(self) -> None:
        self.met, self.begun = self.met + 1, False
        self.store.set(f"met/{self.met}/{self.rank}", "")
        while not self.store.check([f"met/{self.met}/{r}" for r in range(self.size)]):
            time.sleep(BEAT / 10)

    def begin(self) -> None:
        """From now on places count: time that was spent elsewhere before does not."""
        with self.counting:
            now = time.monotonic()
            for seen in self.seen.values():
                seen[3] = now
            self.begun = True
