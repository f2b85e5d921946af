"""What a training run shows: progress while it trains, then the reward curve and the stage times.

Where output is not a terminal the same facts come as plain lines, without control characters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from headrace.cli.app import ASCII, Paper
from headrace.config import Config
from headrace.config_file import changed
from headrace.insight.equation import BOTTLENECK_OF_STAGE, STAGE_WORDS, advice_for
from headrace.measured import STAGES, StageTimes
from headrace.roles import Watcher
from headrace.row import Row, Sample
from headrace.runs.report import count, duration

RECENT_ROWS = 10  # rates are over these, so that they follow the run without jumping
PLAIN_LINES = 20  # for a whole run, about, where output is not a terminal
PLOT_ROWS = 9  # odd, so that one of them is the middle


class _ProgressLine(Progress):
    """The bar of a phase, with a line of facts below it."""

    def __init__(self, console: Console, texts: Callable[[], tuple[str, str]]) -> None:
        self._texts = texts  # beside the bar, and below it
        bar = BarColumn(max(10, min(40, console.width - 55)))
        columns = (TextColumn("{task.description}", markup=False), bar, TaskProgressColumn())
        clock = TextColumn("{task.fields[clock]}")
        super().__init__(*columns, clock, console=console, refresh_per_second=4)

    def get_renderables(self) -> Iterator[RenderableType]:
        clock, facts = self._texts()
        for task in self.tasks:
            task.fields["clock"] = clock
        yield from super().get_renderables()
        if facts:
            yield Text(facts, style="bold")


class LiveDisplay(Watcher, AbstractContextManager["LiveDisplay"]):
    """Shows one training run. A context manager, so that the cursor comes back whatever happens."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.paper = Paper(console)
        self._animated = console.is_terminal and not console.is_dumb_terminal and not console.quiet
        self._clock, self._started_s = clock, clock()
        self._steps = 0
        self._rows: list[Row] = []
        self._score: float | None = None
        self.run_dir: Path | None = None
        self._config = Config()
        self._bar: _ProgressLine | None = None
        self._quarter = 0

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the bar of the present phase; its last state stays on the screen."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._quarter = None, 0

    def header(self, config: Config, run_dir: Path, facts: Mapping[str, str]) -> None:
        self._started_s = self._clock()
        self._run_dir, self._steps, self._config = run_dir, config.loop.steps, config
        loop = config.loop
        lag = f"tokens up to {count(loop.max_lag, 'version')} old" if loop.max_lag else "strictly on-policy"
        a_step = f"{loop.groups_per_step} prompts x {config.rollout.samples} answers"
        lines = {
            "run": str(run_dir),
            "model": config.model.path,
            "prompts": config.prompts.source,
            "plan": f"{loop.steps} steps of {a_step}, {lag}",
            "set": "  ".join(changed(config)) or "every setting is at its default",
        }
        self.paper.line("headrace", style="bold")
        self.paper.facts((lines | dict(facts)).items())
        self.paper.print()

    def phase(self, text: str) -> None:
        """A new part of the run begins, such as "warm start"."""
        self.close()
        self.paper.print(Text(f"{self.paper.drawn('▸')} {text}", style="bold"))

    def progress(self, done: int, total: int, text: str) -> None:
        if self._animated:
            self._draw(f"  {done}/{total} {text}", done, total)
        elif (quarter := 4 * done // max(total, 1)) != self._quarter:  # a few lines in a log
            self._quarter = quarter
            self.paper.line(f"  {done}/{total} {text}")

    def row(self, row: Row) -> None:
        self._rows.append(row)
        self._score = self._score if row.score is None else row.score
        total = max(self._steps, row.step, 1)
        text = f"step {row.step:>{len(str(total))}}/{total}"
        chosen = row.step % max(1, total // PLAIN_LINES) == 0 or row.step == self._steps
        if self._animated:
            self._draw(text, row.step, total)
        elif chosen or len(self._rows) == 1 or row.score is not None:
            self.paper.line("  ".join((text, *self._texts())))

    def sample(self, sample: Sample) -> None:
        reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3f}"
        texts = {"prompt": sample.prompt, "answer": sample.answer}
        self.paper.sample(f"sample of step {sample.step}: {reward}, {sample.fate}", texts)

    def note(self, text: str) -> None:
        first, *rest = self._lines(f"note: {text}")
        self.paper.print(Text(first))
        for line in rest:  # of a traceback
            self.paper.line(line)

    def summary(self, summary: Mapping[str, Any], *, rows: Sequence[Row] | None = None) -> None:
        """How the run went: its summary.json, with the curve of the rows shown so far, or of `rows`."""
        self.close()
        self._show_curve(summary, self._rows if rows is None else rows)
        self._show_stages(summary)
        self._show_tokens(summary)
        self._show_run(summary)

    def _lines(self, text: str) -> list[str]:
        """The lines of what may come from user code, in characters that the terminal has."""
        encoding = self.paper.console.encoding
        return text.encode(encoding, errors="replace").decode(encoding).splitlines()

    # While it runs

    def _draw(self, text: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = _ProgressLine(self.paper.console, self._texts)
            self._bar.add_task(text, clock="")
            self._bar.start()
        (task,) = self._bar.task_ids
        self._bar.update(task, description=text, completed=done, total=total, refresh=True)

    def _texts(self) -> tuple[str, str]:
        """The clock, and a line that fits 80 columns: what is always there first, what is rare last."""
        if not self._rows:
            return "", ""
        recent = self._rows[-RECENT_ROWS:]
        row = recent[-1]
        wall_s = sum(r.wall_s for r in recent)
        left_s = max(0, self._steps - row.step) * wall_s / len(recent)
        left = f", {duration(left_s)} left" if left_s else ""
        generated = sum(r.generated_tokens for r in self._rows)
        dropped = sum(sum(r.dropped_tokens.values()) for r in self._rows)
        stages = [asdict(r.stage_s) for r in recent]
        busy = StageTimes(**{stage: sum(times[stage] for times in stages) for stage in STAGES})
        facts = [
            f"reward {row.reward_mean:.3f}",
            "" if self._score is None else f"held-out {self._score:.3f}",
            f"lag {row.lag_mean:.1f}/{row.lag_max}",
            f"{sum(r.trained_tokens for r in recent) / wall_s if wall_s else 0:,.0f} tok/s",
            f"dropped {dropped / generated if generated else 0:.0%}",
            f"wall: {BOTTLENECK_OF_STAGE[busy.wall]}",
            f"preempted {row.preemptions}" if row.preemptions else "",
            "step skipped" if row.skipped else "",
        ]
        clock = f"{duration(self._clock() - self._started_s)} elapsed{left}"
        return clock, "  ".join(filter(None, facts))

    # When it is over

    def _show_curve(self, summary: Mapping[str, Any], rows: Sequence[Row]) -> None:
        paper = self.paper
        paper.section("reward", "mean over each step's answers")
        points = [(row.step, row.reward_mean) for row in rows]
        for line in plot(points, min(paper.console.width, 100) - 2, fine=paper.fine):
            paper.print(Text(f"  {line}", no_wrap=True))
        before, after = summary.get("score_before"), summary.get("score_after")
        if before is not None and after is not None:
            scores = f"{before:.3f} {paper.drawn('→')} {after:.3f}  ({after - before:+.3f})"
        else:
            known = before if after is None else after
            scores = "not measured" if known is None else f"{known:.3f}"
        paper.line(f"  held-out score  {scores}", style="bold")

    def _show_stages(self, summary: Mapping[str, Any]) -> None:
        paper = self.paper
        paper.section("time", "how long each stage was busy during the steps; stages can overlap")
        slowest, loop_s = str(summary["wall"]), float(summary["loop_s"])
        for stage in STAGES:
            busy_s = float(summary["stage_s"].get(stage, 0.0))
            share = busy_s / loop_s if loop_s else 0.0
            mark = paper.drawn("▸") if stage == slowest else " "
            shown = f"{busy_s:>9,.1f} s {paper.bar(share, 20)} {share:>5.0%}"
            line = f"{mark} {stage:<9} {shown}  {STAGE_WORDS[stage]}"
            paper.print(Text(line, style="bold" if stage == slowest else ""))
        if slowest in BOTTLENECK_OF_STAGE:
            advice = advice_for(BOTTLENECK_OF_STAGE[slowest], self._config)
            helps = f" What helps: {'; '.join(advice.moves)}." if advice.moves else ""
            paper.paragraph(f"The wall is {BOTTLENECK_OF_STAGE[slowest]}: {advice.sign}.{helps}")

    def _show_tokens(self, summary: Mapping[str, Any]) -> None:
        self.paper.section("tokens", "every sampled token is accounted for")
        generated, trained = int(summary["generated_tokens"]), int(summary["trained_tokens"])
        dropped: Mapping[str, int] = summary["dropped_tokens"]
        open_tokens = generated - trained - sum(dropped.values())
        lines = {"generated": generated, "trained on": trained}
        by_size = sorted(dropped.items(), key=lambda item: -item[1])
        lines |= {f"dropped: {reason}": num for reason, num in by_size if num}
        if open_tokens:
            lines["not settled"] = open_tokens
        digits, whole = len(f"{generated:,}"), max(generated, 1)
        self.paper.facts((name, f"{num:>{digits},}  {num / whole:>6.1%}") for name, num in lines.items())

    def _show_run(self, summary: Mapping[str, Any]) -> None:
        lag, run_dir = int(summary["max_lag_seen"]), summary["run_dir"]
        on_average = f"{summary['mean_lag_seen']:.1f} on average, " if lag else ""
        facts = {
            "goodput": f"{summary['goodput_tokens_per_s']:,.0f} trained tokens per second",
            "steps": f"{summary['steps']}, up to policy version {summary['version']}",
            "lag": f"{on_average}at most {count(lag, 'version')} between sampling and training",
            "took": duration(float(summary["wall_s"])),
            "kept in": run_dir,
        }
        if summary.get("best_step"):
            facts["best"] = f"held-out score {summary['best_score']:.3f} at step {summary['best_step']}"
        self.paper.section("run")
        self.paper.facts(facts.items())
        if summary.get("reward_failure"):
            first, *rest = self._lines(f"The first answer without a verdict: {summary['reward_failure']}")
            self.paper.paragraph(first)
            for line in rest:  # of a traceback
                self.paper.line(f"  {line}")
        commands = {f"audit {run_dir}": "check the books", f"export {run_dir} OUT": "get the model"}
        if summary.get("finished") is False:
            commands = {f"resume {run_dir}": "go on with it"} | commands
        self.paper.commands(commands)


def plot(points: Sequence[tuple[int, float]], width: int, *, fine: bool = True) -> list[str]:
    """A curve over steps as text with labelled axes; of braille dots if `fine`, else of asterisks."""
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if not points:
        return ["(no steps)"]
    low, high = min(value for _, value in points), max(value for _, value in points)
    low = 0.0 if 0 <= low < 0.5 * high else low  # where that wastes little
    high = 1.0 if 0.8 < high <= 1 else high  # where the curve comes close
    if high <= low:
        low, high = min(low, 0.0), max(high, 1.0)
    middle = (low + high) / 2
    labels = {0: f"{high:.2f}", PLOT_ROWS // 2: f"{middle:.2f}", PLOT_ROWS - 1: f"{low:.2f}"}
    margin = max(map(len, labels.values()))
    columns = width - margin - 2
    across, down = (2, 4) if fine else (1, 1)
    values, num = [value for _, value in points], columns * across
    if len(values) <= num:  # straight lines between few, or means of many
        heights = np.interp(np.linspace(0, len(values) - 1, num), np.arange(len(values)), values)
    else:
        edges = np.arange(num + 1) * len(values) // num
        heights = np.add.reduceat(values, edges[:-1]) / np.diff(edges)
    share = (heights - low) / (high - low)
    lifted = [round(height) for height in (share * (PLOT_ROWS * down - 1)).tolist()]
    rows = reversed(range(PLOT_ROWS))
    asterisks = ["".join("*" if height == row else " " for height in lifted) for row in rows]
    canvas = _braille(lifted, columns) if fine else asterisks
    lines = [f"{labels.get(i, ''):>{margin}} ┤{line}".rstrip() for i, line in enumerate(canvas)]
    first, last = f"step {points[0][0]}", str(points[-1][0])
    lines.append(f"{'':{margin}} └{'─' * columns}")
    lines.append(f"{'':{margin}}  {first}{last:>{columns - len(first)}}")
    return lines if fine else [line.translate(ASCII) for line in lines]


def _braille(lifted: Sequence[int], columns: int) -> list[str]:
    """Two columns and four rows of dots to a character."""
    dots = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # left and right, from the bottom up
    cells = [[0] * columns for _ in range(PLOT_ROWS)]
    previous = lifted[0]
    for x, height in enumerate(lifted):
        # Upright strokes join neighbours, so that a jump stays one line.
        start = height if previous == height else previous + (1 if height > previous else -1)
        for y in range(min(start, height), max(start, height) + 1):
            cells[PLOT_ROWS - 1 - y // 4][x // 2] |= dots[x % 2][y % 4]
        previous = height
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells]
