"""Everything that only a GPU can answer, in about a quarter of an hour on one card: run it, keep its folder.

    python bench/gpu.py --out results          on a CUDA device
    python bench/gpu.py --out results --dry-run    the same steps in small on the CPU: it shows that they run, and measures nothing

Each step is a command a reader can repeat. It runs under a time limit of its own, and what one step does never stops the next.
`results/summary.txt` holds the steps with their exit codes and seconds, one file per step holds what it printed.
"""
import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
KIMI = "bench.py --random --config kimi_k26 --layers {layers} --device {device} --dtype bfloat16"
POINTS = "--nodes 1 8 16 32 64 --concurrency 1 8 32 --contexts 1024 16384"
FEW = "--nodes 1 8 32 --concurrency 1 --contexts 1024"  # a graph per point is compiled

STEPS = (  # name, seconds, command
    ("tests", 150, "-m pytest -m gpu -q"),
    ("pair", 180, "bench.py --quick --device {device} --dtype bfloat16 --compile --prompts 8 --budgets 8 32 --temperature 0"),
    ("questions", 150, "bench.py --quick --questions --device {device} --dtype bfloat16 --prompts 4 --budgets 32 --temperature 0"),
    ("kimi_bf16_captured", 90, f"{KIMI} --capture {POINTS}"),
    ("kimi_bf16_eager", 60, f"{KIMI} {FEW}"),
    ("kimi_bf16_compiled", 120, f"{KIMI} --compile {FEW}"),
    ("kimi_int4_captured", 90, f"{KIMI} --int4 --capture {POINTS}"),
    ("kimi_int4_compiled", 120, f"{KIMI} --int4 --compile {FEW}"))

SMALL = {"kimi_k26": "tests/golden/targets/kimi_k2/config.json", "--capture ": "", "--compile": "", POINTS: "--nodes 1 4 --concurrency 1 2 --contexts 16 32",
         FEW: "--nodes 1 4 --concurrency 1 --contexts 16", "--prompts 8": "--prompts 1 --tokens 8", "--prompts 4": "--prompts 1 --tokens 8",
         "--layers 2": "--layers 1", "-m gpu": "-m gpu --co tests/test_w4a16.py", "--questions ": "",
         "--int4 ": ""}  # compiling takes minutes; a small expert has no whole group of 32 to pack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for what the steps print")
    parser.add_argument("--dry-run", action="store_true", help="small and on the CPU")
    parser.add_argument("--seconds", type=float, default=840, help="of all steps together (default 840): later steps are left out")
    parser.add_argument("--layers", type=int, default=2, help="layers of Kimi-K2.6 to build, 34 GB each in bf16 (default 2)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began, lines = time.monotonic(), []
    for name, seconds, command in STEPS:
        command = command.format(device="cpu" if args.dry_run else "cuda", layers=args.layers)
        if args.dry_run:
            for large, small in SMALL.items():
                command = command.replace(large, small)
        if time.monotonic() - began + seconds > args.seconds:
            lines.append(f"{name}: left out, {seconds} s would pass the {args.seconds:.0f} s of all steps")
            continue
        start = time.monotonic()
        with open(args.out / f"{name}.txt", "w", encoding="utf-8") as log:
            print(f"python {command}", file=log, flush=True)
            try:
                code = subprocess.run([sys.executable, *command.split()], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=seconds,
                                      env={**os.environ, "PYTHONUNBUFFERED": "1"}).returncode
            except subprocess.TimeoutExpired:
                code = f"ended after {seconds} s"
        lines.append(f"{name}: exit code {code}, {time.monotonic() - start:.0f} s: python {command}")
        print(lines[-1], flush=True)
        (args.out / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all("exit code 0" in line for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
