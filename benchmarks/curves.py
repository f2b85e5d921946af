"""Curves as SVG, for docs/results. See benchmarks/README.md.

    python benchmarks/curves.py runs --out docs/results/gsm8k.svg "max_lag 0=runs/a" "max_lag 4=runs/b"
    python benchmarks/curves.py staleness --out docs/results/staleness.svg

`runs` draws the mean reward of five steps, and held-out scores as dots, over generated tokens; it reads `rows.jsonl`,
which `ledger.sinks=["jsonl"]` makes a run write. `staleness` draws docs/results/staleness.json over `loop.max_lag`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 56, 150, 16, 44
COLOURS = ("#1668b8", "#c2410c", "#0f7b4f", "#7c3aed")
SMOOTHED = 5  # steps


@dataclass
class Series:
    """A line, and dots of its colour."""

    name: str
    line: list[tuple[float, float]]
    dots: list[tuple[float, float]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["runs", "staleness"])
    parser.add_argument("runs", nargs="*", help="NAME=RUN")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_intermixed_args()
    if arguments.what == "runs":
        series = [of_run(name, Path(run)) for name, run in (given.rsplit("=", 1) for given in arguments.runs)]
        picture = draw(series, "million generated tokens", "reward (line), held-out score (dots)")
    else:
        runs = json.loads(Path("docs/results/staleness.json").read_text(encoding="utf-8"))["runs"]
        lags = sorted({float(run["lag"]) for run in runs})
        picture = draw(of_lags(runs, lags), "loop.max_lag", "held-out score", [f"{lag:g}" for lag in lags])
    arguments.out.write_text(picture, encoding="utf-8")


def of_run(name: str, run: Path) -> Series:
    found, tokens, rewards = Series(name, []), 0, list[float]()
    for line in (run / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        tokens += row["generated_tokens"]
        rewards.append(row["reward_mean"])
        found.line.append((tokens / 1e6, statistics.fmean(rewards[-SMOOTHED:])))
        if row["score"] is not None:
            found.dots.append((tokens / 1e6, row["score"]))
    if (summary := run / "summary.json").exists():
        known = json.loads(summary.read_text(encoding="utf-8"))
        ends = ((0.0, known["score_before"]), (tokens / 1e6, known["score_after"]))
        found.dots += [(x, y) for x, y in ends if y is not None]
    return found


def of_lags(runs: list[dict[str, Any]], lags: list[float]) -> list[Series]:
    """A line through the means of the seeds, and a dot for each."""
    series = []
    for loss in dict.fromkeys(run["loss"] for run in runs):
        dots = [(float(lags.index(run["lag"])), run["score"]) for run in runs if run["loss"] == loss]
        means = [statistics.fmean(y for x, y in dots if x == place) for place in range(len(lags))]
        series.append(Series(loss, list(enumerate(means)), dots))  # type: ignore[arg-type]
    return series


def draw(series: list[Series], x_title: str, y_title: str, x_names: Sequence[str] = ()) -> str:
    """`x_names` stand at 0, 1, 2 and so on; without them, five numbers."""
    points = [point for one in series for point in (*one.line, *one.dots)]
    most_x, most_y = max(x for x, _ in points), max(y for _, y in points) * 1.05

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / most_x * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(HEIGHT - BOTTOM - y / most_y * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"',
        f' font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{(WIDTH + LEFT - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_title}</text>',
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">{y_title}</text>',
    ]
    quarters = [most_x * number / 4 for number in range(5)]
    for x, name in list(enumerate(x_names)) or [(x, f"{x:.3g}") for x in quarters]:
        parts.append(f'<text x="{place(x, 0)[0]}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{name}</text>')
    for number in range(5):
        left, y = place(0, most_y * number / 4)
        parts.append(f'<path d="M{left} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{most_y * number / 4:.2f}</text>')
    for number, (one, colour) in enumerate(zip(series, COLOURS, strict=False)):
        line = "L".join(f"{x} {y}" for x, y in (place(*point) for point in one.line))
        parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}" stroke="white"/>'
            for x, y in (place(*p) for p in one.dots)
        ]
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 16 + 18 * number}" fill="{colour}">{one.name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
