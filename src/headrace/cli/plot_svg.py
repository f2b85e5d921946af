"""The reward curve of a run as an SVG file, for a report or a chat; the page has all the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from headrace.ledger.files import PLOT
from headrace.ledger.ledger import Ledger
from headrace.row import Row

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 56, 16, 40, 44
BLUE, GREEN, GREY = "#0072B2", "#009E73", "#767676"


def write_plot(summary: Mapping[str, Any]) -> None:
    """Into the run's directory. Without room for it, a run that went well is none the worse."""
    run_dir = Path(summary["run_dir"])
    with Ledger.open(run_dir) as ledger:
        rows = ledger.rows()
    drawn = reward_svg(f"{run_dir.name}, {len(rows)} steps", rows, summary["score_before"], summary["score_after"])
    with suppress(OSError):
        (run_dir / PLOT).write_text(drawn)


def reward_svg(title: str, rows: Sequence[Row], before: float | None, after: float | None) -> str:
    """Mean rewards as a line; held-out scores as dots, `before` the first step and `after` the last too."""
    last = max((row.step for row in rows), default=1)
    curve = [(row.step, row.reward_mean) for row in rows]
    held_out = [(row.step, row.score) for row in rows if row.score is not None]
    held_out += [(step, score) for step, score in ((0, before), (last, after)) if score is not None]
    values = [value for _, value in (*curve, *held_out)] or [0.0]
    low, high = min(0.0, *values), max(1e-9, *values)
    high = 1.0 if 0.5 < high <= 1 else high

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    def text(x: float, y: float, words: str, anchor: str = "middle", fill: str = GREY) -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'

    parts = [text(LEFT, 22, title, "start", "#111"), text(WIDTH / 2, HEIGHT - 8, "step")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = at(0, low + share * (high - low))
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(text(LEFT - 6, y + 4, f"{low + share * (high - low):.2f}", "end"))
        x, _ = at(share * last, low)
        parts.append(text(x, HEIGHT - BOTTOM + 18, f"{share * last:.0f}"))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="1.5"/>')
    dots = [at(*point) for point in held_out]
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{GREEN}"/>' for x, y in dots]
    for x, words, colour in ((110, "mean reward", BLUE), (0, "held-out score", GREEN)):
        parts.append(text(WIDTH - RIGHT - x, 22, words, "end", colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="12">', '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])
