"""What a run shows in a terminal: progress while it trains, the reward curve and the five stage times at the end.

Where output is not a terminal the same facts come as plain lines, without control characters.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from headrace.config import Config
from headrace.config_file import changed
from headrace.insight.equation import STAGE_WORDS
from headrace.types import STAGES, Row, StageTimes

RECENT_ROWS = 10  # rates are over these, so that they follow the run without jumping
PLAIN_LINES = 20  # about so many lines for a whole run where output is not a terminal
PLOT_ROWS = 9  # odd, so that one of them is the middle

WALL_WORDS = {
    "rollout": "generating answers sets the pace; shorter answers or more of rollout.max_running would help",
    "reward": "scoring sets the pace; more reward.workers or a quicker reward function would help",
    "reference": "the reference policy sets the pace; learner.kl_coef = 0 does without it",
    "train": "the learner sets the pace; larger learner.micro_batch_tokens may help",
    "publish": "moving weights sets the pace; more prompts per step (loop.groups_per_step) would help",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters drawn with, for terminals that know more than ASCII and for those that do not."""

    full: str
    empty: str
    mark: str
    arrow: str
    upright: str
    corner: str
    level: str


FINE = Glyphs(full="█", empty="░", mark="▸", arrow="→", upright="┤", corner="└", level="─")
ASCII = Glyphs(full="#", empty=".", mark=">", arrow="->", upright="|", corner="+", level="-")


class Terminal:
    """Shows one run. A context manager, so that the cursor comes back whatever happens."""

    def __init__(
        self, console: Console | None = None, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console(quiet=quiet, highlight=False)
        self._animated = self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.quiet
        self._fine = self.console.encoding.lower().startswith("utf")
        self._glyphs = FINE if self._fine else ASCII
        self._clock = clock
        self._started_s = clock()
        self._steps = 0
        self._rows: list[Row] = []
        self._score: float | None = None
        self._progress: tuple[int, int, str] | None = None
        self._quarter = 0
        self._training = False
        self._run_dir: Path | str = ""
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the live display and leave its last state standing."""
        if self._live is not None:
            self._progress = None
            self._live.stop()
            self._live = None
            if self._training:
                self._print(self._picture())
        self._training = False

    def header(self, config: Config, run_dir: Path | str, facts: Mapping[str, str]) -> None:
        """What is about to run."""
        self._started_s = self._clock()
        self._run_dir, self._steps = run_dir, config.loop.steps
        loop, samples = config.loop, config.rollout.samples
        lag = "strictly on-policy" if loop.max_lag == 0 else f"tokens up to {_versions(loop.max_lag)} old"
        lines = {
            "run": str(run_dir),
            "model": config.model.path,
            "prompts": config.prompts.source,
            "plan": f"{loop.steps} steps of {loop.groups_per_step} prompts x {samples} answers, {lag}",
            "set": "  ".join(changed(config)) or "every setting is at its default",
        } | dict(facts)
        self._print(Text("headrace", style="bold"))
        self._pairs(lines)
        self._print()

    def phase(self, text: str) -> None:
        """A new part of the run begins, e.g. "warm start"."""
        self._end_progress()
        self.close()
        self._print(Text(f"{self._glyphs.mark} {text}", style="bold"))

    def progress(self, done: int, total: int, text: str) -> None:
        """`done` of `total` of the current phase."""
        self._progress = (done, total, text)
        if self._animated:
            self._refresh()
        elif (quarter := 4 * done // max(total, 1)) != self._quarter:  # not every call is worth a line in a log
            self._quarter = quarter
            self._print(Text(f"  {done}/{total} {text}"))

    def row(self, row: Row) -> None:
        """One more step is done."""
        if not self._training:
            self._end_progress()
        self._progress, self._training = None, True
        self._rows.append(row)
        self._score = self._score if row.score is None else row.score
        if self._animated:
            self._refresh()
        elif self._worth_a_line(row):
            self._print(Text(f"{self._steps_text()}  {self._clock_text()}  {self._facts_text()}"), one_line=True)

    def note(self, text: str) -> None:
        """Something the user should know."""
        self._print(Text(f"note: {text}"))

    def summary(
        self, summary: Mapping[str, Any], *, run_dir: Path | str | None = None, rows: Sequence[Row] | None = None
    ) -> None:
        """How the run went: its summary.json, with the curve of the rows shown so far (or of those given)."""
        self._end_progress()
        self.close()
        self._show_curve(summary, self._rows if rows is None else rows)
        self._show_stages(summary)
        self._show_tokens(summary)
        self._show_run(summary, self._run_dir if run_dir is None else run_dir)

    # While it runs

    def _refresh(self) -> None:
        if self._live is None:
            self._live = Live(get_renderable=self._picture, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        self._live.refresh()

    def _picture(self) -> Group:
        lines = []
        if self._training:
            share = self._rows[-1].step / self._total_steps()
            room = self.console.width - len(self._steps_text()) - len(self._clock_text()) - 10
            bar = self._bar(share, max(10, min(40, room)))
            lines.append(Text(f"{self._steps_text()} {bar} {share:4.0%}  {self._clock_text()}", no_wrap=True))
            lines.append(Text(self._facts_text(), style="bold"))
        if self._progress is not None:
            done, total, text = self._progress
            lines.append(Text(f"  {self._bar(done / max(total, 1), 20)} {done}/{total} {text}", overflow="ellipsis"))
        return Group(*lines)

    def _end_progress(self) -> None:
        """Leave the last state of a phase's progress standing."""
        if self._progress is not None and self._animated and not self._training:
            done, total, text = self._progress
            self._progress = None
            self._print(Text(f"  {done}/{total} {text}"))
        self._progress, self._quarter = None, 0

    def _worth_a_line(self, row: Row) -> bool:
        every = max(1, self._total_steps() // PLAIN_LINES)
        return len(self._rows) == 1 or row.step % every == 0 or row.step == self._steps or row.score is not None

    def _total_steps(self) -> int:
        return max(self._steps, self._rows[-1].step, 1)

    def _steps_text(self) -> str:
        total = str(self._total_steps())
        return f"step {self._rows[-1].step:>{len(total)}}/{total}"

    def _clock_text(self) -> str:
        recent = self._rows[-RECENT_ROWS:]
        left_s = (self._total_steps() - recent[-1].step) * sum(row.wall_s for row in recent) / len(recent)
        left = f", {_duration(left_s)} left" if left_s else ""
        return f"{_duration(self._clock() - self._started_s)} elapsed{left}"

    def _facts_text(self) -> str:
        """One line that fits 80 columns: reward, held-out score, lag, goodput, drops, wall; what is rare comes last."""
        recent = self._rows[-RECENT_ROWS:]
        row = recent[-1]
        wall_s = sum(r.wall_s for r in recent)
        generated = sum(r.generated_tokens for r in self._rows)
        dropped = sum(sum(r.dropped_tokens.values()) for r in self._rows)
        busy = StageTimes(**{stage: sum(float(getattr(r.stage_s, stage)) for r in recent) for stage in STAGES})
        facts = [
            f"reward {row.reward_mean:.3f}",
            "" if self._score is None else f"held-out {self._score:.3f}",
            f"lag {row.lag_mean:.1f}/{row.lag_max}",
            f"{sum(r.trained_tokens for r in recent) / wall_s if wall_s else 0:,.0f} tok/s",
            f"dropped {dropped / generated if generated else 0:.0%}",
            f"wall: {busy.wall}",
            f"preempted {row.preemptions}" if row.preemptions else "",
            "step skipped" if row.skipped else "",
        ]
        return "  ".join(filter(None, facts))

    # When it is over

    def _show_curve(self, summary: Mapping[str, Any], rows: Sequence[Row]) -> None:
        self._section("reward", "mean over each step's answers")
        points = [(row.step, row.reward_mean) for row in rows]
        for line in plot(points, min(self.console.width, 100) - 2, fine=self._fine):
            self._print(Text(f"  {line}", no_wrap=True))
        before, after = summary.get("score_before"), summary.get("score_after")
        if before is not None and after is not None:
            scores = f"{before:.3f} {self._glyphs.arrow} {after:.3f}  ({after - before:+.3f})"
        else:
            scores = "not measured" if before is None and after is None else f"{before if after is None else after:.3f}"
        self._print(Text(f"  held-out score  {scores}", style="bold"))

    def _show_stages(self, summary: Mapping[str, Any]) -> None:
        self._section("time", "how long each stage was busy during the steps; stages can overlap")
        wall, loop_s = str(summary["wall"]), float(summary["loop_s"])
        for stage in STAGES:
            busy_s = float(summary["stage_s"].get(stage, 0.0))
            share = busy_s / loop_s if loop_s else 0.0
            mark = self._glyphs.mark if stage == wall else " "
            line = f"{mark} {stage:<9} {busy_s:>9,.1f} s {self._bar(share, 20)} {share:>5.0%}  {STAGE_WORDS[stage]}"
            self._print(Text(line, style="bold" if stage == wall else ""))
        self._paragraph(f"The wall is {wall}: {WALL_WORDS.get(wall, 'it sets the pace')}.")

    def _show_tokens(self, summary: Mapping[str, Any]) -> None:
        self._section("tokens", "every sampled token is accounted for")
        generated, trained = int(summary["generated_tokens"]), int(summary["trained_tokens"])
        dropped: Mapping[str, int] = summary["dropped_tokens"]
        open_tokens = generated - trained - sum(dropped.values())
        lines = {"generated": generated, "trained on": trained}
        lines |= {
            f"dropped: {reason}": num for reason, num in sorted(dropped.items(), key=lambda item: -item[1]) if num
        }
        if open_tokens:
            lines["not settled"] = open_tokens
        names, digits = max(map(len, lines)), len(f"{generated:,}")
        for name, num_tokens in lines.items():
            share = num_tokens / generated if generated else 0.0
            self._print(Text(f"  {name:<{names}}  {num_tokens:>{digits},}  {share:>6.1%}"))

    def _show_run(self, summary: Mapping[str, Any], run_dir: Path | str) -> None:
        lag = int(summary["max_lag_seen"])
        on_average = f"{summary['mean_lag_seen']:.1f} on average, " if lag else ""
        self._section("run")
        self._pairs(
            {
                "goodput": f"{summary['goodput_tokens_per_s']:,.0f} trained tokens per second",
                "steps": f"{summary['steps']}, up to policy version {summary['version']}",
                "lag": f"{on_average}at most {_versions(lag)} between sampling and training",
                "took": _duration(float(summary["wall_s"])),
                "kept in": str(run_dir),
            }
        )
        if summary.get("reward_failure"):
            self._paragraph(f"The first answer without a verdict: {summary['reward_failure']}")
        self._section("next")
        for command, effect in ((f"audit {run_dir}", "check the books"), (f"export {run_dir} OUT", "get the model")):
            self._print(Text(f"  {f'headrace {command}':<40}  # {effect}"), one_line=True)

    # Drawing

    def _print(self, content: RenderableType = "", *, one_line: bool = False) -> None:
        self.console.print(content, highlight=False, soft_wrap=one_line)

    def _section(self, title: str, explanation: str = "") -> None:
        self._print()
        self._print(Text.assemble((title, "bold"), (f"  {explanation}" if explanation else "", "dim")))

    def _pairs(self, pairs: Mapping[str, str]) -> None:
        column = max(map(len, pairs)) + 2
        for name, value in pairs.items():
            self._paragraph(f"{name:<{column}}{value}", hang=column)

    def _paragraph(self, text: str, hang: int = 0) -> None:
        # Paths and commands are never cut: they must survive being copied.
        lines = textwrap.wrap(
            text,
            self.console.width,
            initial_indent="  ",
            subsequent_indent=" " * (2 + hang),
            drop_whitespace=True,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines:
            self._print(Text(line), one_line=True)

    def _bar(self, share: float, width: int) -> str:
        filled = round(width * min(max(share, 0.0), 1.0))
        return self._glyphs.full * filled + self._glyphs.empty * (width - filled)


def plot(points: Sequence[tuple[int, float]], width: int, *, fine: bool = True) -> list[str]:
    """A curve over steps as text lines with labelled axes; braille dots if `fine`, else asterisks."""
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if not points:
        return ["(no steps)"]
    low, high = _limits([value for _, value in points])
    labels = [f"{high:.2f}", f"{(low + high) / 2:.2f}", f"{low:.2f}"]
    margin = max(map(len, labels))
    columns = width - margin - 2
    across, down = (2, 4) if fine else (1, 1)
    heights = _resample([value for _, value in points], columns * across)
    lifted = [round((value - low) / (high - low) * (PLOT_ROWS * down - 1)) for value in heights]
    canvas = _braille(lifted, columns) if fine else _asterisks(lifted, columns)
    glyphs = FINE if fine else ASCII
    marks = {0: labels[0], PLOT_ROWS // 2: labels[1], PLOT_ROWS - 1: labels[2]}
    lines = [f"{marks.get(i, ''):>{margin}} {glyphs.upright}{line}".rstrip() for i, line in enumerate(canvas)]
    first, last = f"step {points[0][0]}", str(points[-1][0])
    lines.append(f"{'':{margin}} {glyphs.corner}{glyphs.level * columns}")
    lines.append(f"{'':{margin}}  {first}{last:>{columns - len(first)}}")
    return lines


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """The axis: from 0 where that wastes little, up to 1 where the curve comes close."""
    low, high = min(values), max(values)
    low = 0.0 if 0 <= low < 0.5 * high else low
    high = 1.0 if 0.8 < high <= 1 else high
    return (low, high) if high > low else (min(low, 0.0), max(high, 1.0))


def _resample(values: Sequence[float], num_columns: int) -> list[float]:
    """One value per column: means of many, or straight lines between few."""
    if len(values) > num_columns:
        edges = [i * len(values) // num_columns for i in range(num_columns + 1)]
        return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    resampled = []
    for i in range(num_columns):
        position = i * (len(values) - 1) / max(num_columns - 1, 1)
        before = int(position)
        after = min(before + 1, len(values) - 1)
        resampled.append(values[before] + (position - before) * (values[after] - values[before]))
    return resampled


def _braille(lifted: Sequence[int], columns: int) -> list[str]:
    """Two columns and four rows of dots to a character."""
    dots = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # left and right column, from the bottom up
    cells = [[0] * columns for _ in range(PLOT_ROWS)]
    previous = lifted[0]
    for x, height in enumerate(lifted):
        # Upright strokes join neighbours, so that a jump stays one line.
        start = height if previous == height else previous + (1 if height > previous else -1)
        for y in range(min(start, height), max(start, height) + 1):
            cells[PLOT_ROWS - 1 - y // 4][x // 2] |= dots[x % 2][y % 4]
        previous = height
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells]


def _asterisks(lifted: Sequence[int], columns: int) -> list[str]:
    return ["".join("*" if lifted[x] == y else " " for x in range(columns)) for y in range(PLOT_ROWS - 1, -1, -1)]


def _versions(number: int) -> str:
    return f"{number} version" if number == 1 else f"{number} versions"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    return f"{hours} h {rest_min:02d} min" if hours else f"{minutes} min {rest_s:02d} s"
