"""generate.py on a rank to which something happens in its third round: python tests/ranks_faulty.py FAULT:FOLDER ARGUMENTS…"""
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

import generate  # noqa: E402
from launch import Watch  # noqa: E402
from verify import Decoder  # noqa: E402

torch.set_num_threads(1)
fault, _, folder = sys.argv[1].partition(":")


def step(decoder, *args):
    decoder.steps = getattr(decoder, "steps", 0) + 1
    if decoder.steps == 3:
        Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
        if fault == "waits":
            time.sleep(0.05)
            decoder.steps -= 1
        elif os.environ["RANK"] == "1":
            if fault == "raises":
                raise ZeroDivisionError("planted")
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hangs":
                time.sleep(1000)
    return ordinary(decoder, *args)


def begin(watch):
    """`--timeout` holds for joining, too, which takes long on a busy machine; from here on, little is enough."""
    watch.timeout = 4.0
    began(watch)


ordinary, began = Decoder.step, Watch.begin
Decoder.step, Watch.begin = step, begin
sys.exit(generate.main(sys.argv[2:]))
