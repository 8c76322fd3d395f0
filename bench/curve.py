"""Draws tokens per round over training steps, from the curves that train.py writes: an SVG, made by hand.

    python bench/curve.py bench/curve.jsonl bench/curve.svg

A line of a curve is {"step": …, "held_out": {temperature: {"chain": …, "tree": …}}}; lines without held_out are left out, and so are
temperatures other than 0 and 0.7 where these are there.
"""
import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 48, 170, 36, 44
COLOURS = {"0": "#b45309", "0.7": "#1d4ed8"}
SAID = {"0": "greedy", "0.7": "temperature 0.7"}


def read_curve(path: Path) -> dict:
    """(temperature, "chain" or "tree") -> [(step, tokens per round)]."""
    lines, texts = {}, path.read_text(encoding="utf-8").splitlines()
    for i, text in enumerate(texts):
        try:
            d = json.loads(text)
        except ValueError:
            if i + 1 == len(texts):  # still being written, or cut short
                break
            raise ValueError(f"line {i + 1} is no JSON object") from None
        for temperature, figures in d.get("held_out", {}).items():
            for mode, value in figures.items():
                lines.setdefault((temperature, mode), []).append((d["step"], value))
    wanted = {k: v for k, v in lines.items() if k[0] in COLOURS}
    return wanted or lines


def svg(lines: dict, title: str) -> str:
    steps, values = ([p[i] for points in lines.values() for p in points] for i in (0, 1))
    low, high, most = min(steps), max(steps), max(math.ceil(max(values) * 2) / 2, 1.5)
    def x(step):
        return LEFT + (step - low) / max(high - low, 1) * (WIDTH - LEFT - RIGHT)
    def y(value):
        return HEIGHT - BOTTOM - (value - 1) / (most - 1) * (HEIGHT - TOP - BOTTOM)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', f'<text x="{LEFT}" y="20" font-size="14" fill="#111111">{title}</text>']
    for value in range(1, int(most) + 1):
        out += [f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dddddd"/>',
                f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end" fill="#555555">{value}</text>']
    pace = 10 ** math.floor(math.log10(max(high - low, 1)))
    pace = next(p for p in (pace / 5, pace / 2, pace, 2 * pace) if (high - low) / p <= 8)
    tick = math.ceil(low / pace) * pace
    while tick <= high:
        out.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#555555">{tick:g}</text>')
        tick += pace
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle" fill="#555555">training steps</text>')
    for (temperature, mode), points in sorted(lines.items()):
        colour, dash = COLOURS.get(temperature, "#374151"), ' stroke-dasharray="5 4"' if mode == "chain" else ""
        path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        out += [f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="2.5" fill="{colour}"/>' for s, v in points]
        out.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y(points[-1][1]) + 4:.1f}" fill="{colour}">{SAID.get(temperature, "temperature " + temperature)}, '
                   f'{mode} {points[-1][1]:.2f}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python bench/curve.py CURVE.jsonl OUT.svg")
    try:
        curve = read_curve(Path(sys.argv[1]))
        if not curve:
            raise ValueError("it has no held_out figures yet; train.py adds some every --eval-every steps")
        Path(sys.argv[2]).write_text(svg(curve, "Tokens per round on held-out prompts"), encoding="utf-8")
    except OSError as e:
        print(f"error: {e.filename}: {e.strerror}", file=sys.stderr)
        sys.exit(2)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        print(f"error: {sys.argv[1]} cannot be drawn: {e}", file=sys.stderr)
        sys.exit(2)
