"""What a training run shows: progress, then the reward curve, also as a file, and the stage times.

Where output is not a terminal the same facts come as plain lines, without control characters.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from headrace.cli.app import ASCII, Paper
from headrace.config import Config
from headrace.config_file import changed
from headrace.insight.triage import BOTTLENECK_OF_STAGE, STAGE_WORDS, advice_for
from headrace.ledger.files import PLOT
from headrace.ledger.ledger import Ledger
from headrace.measured import Row, Sample, stages_of
from headrace.roles import Watcher
from headrace.runs.report import count, dollars, duration, short

RECENT_ROWS = 10  # rates are over these, so that they follow the run without jumping
PLAIN_LINES = 20  # for a whole run, about, where output is not a terminal
PLOT_ROWS = 9  # odd, so that one of them is the middle
PICTURE = Template(Path(__file__).with_name("reward.svg").read_text(encoding="utf-8"))
LEFT, RIGHT, TOP, BOTTOM = 56, 704, 40, 316  # where its curve is


class _ProgressLine(Progress):
    """The bar of a phase, with a line of facts below it."""

    def __init__(self, console: Console, texts: Callable[[], tuple[str, str]]) -> None:
        self._texts = texts  # beside the bar, and below it
        bar = BarColumn(max(10, min(40, console.width - 55)))
        columns = (TextColumn("{task.description}", markup=False), bar, TaskProgressColumn())
        super().__init__(*columns, "{task.fields[clock]}", console=console, refresh_per_second=4)

    def get_renderables(self) -> Iterator[RenderableType]:
        clock, facts = self._texts()
        for task in self.tasks:
            task.fields["clock"] = clock
        yield from super().get_renderables()
        if facts:
            yield Text(facts, style="bold")


class LiveDisplay(Watcher):
    """Shows one training run. Close it, so that the cursor comes back whatever happens."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.paper = Paper(console)
        self._animated = console.is_terminal and not console.is_dumb_terminal and not console.quiet
        self._clock, self._started_s = clock, clock()
        self._rows: list[Row] = []
        self.run_dir: Path | None = None
        self._config = Config()
        self._bar: _ProgressLine | None = None
        self._quarter = 0

    def close(self) -> None:
        """End the bar of the present phase; its last state stays on the screen."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._quarter = None, 0

    def header(self, config: Config, run_dir: Path, facts: Mapping[str, str]) -> None:
        self._started_s = self._clock()
        self.run_dir, self._config, loop = run_dir, config, config.loop
        versions = count(math.ceil(loop.max_lag), "version")
        lag = f"tokens up to {versions} old" if loop.max_lag else "strictly on-policy"
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
        total = max(self._config.loop.steps, row.step, 1)
        text = f"step {row.step:>{len(str(total))}}/{total}"
        chosen = row.step % max(1, total // PLAIN_LINES) == 0 or row.step == self._config.loop.steps
        if self._animated:
            self._draw(text, row.step, total)
        elif chosen or len(self._rows) == 1 or row.score is not None:
            self.paper.line("  ".join((text, *self._texts())))

    def sample(self, sample: Sample) -> None:
        texts = {"prompt": sample.prompt, "answer": sample.answer}
        self.paper.sample(f"sample of step {sample.step}", sample.reward, sample.fate, texts)

    def note(self, text: str) -> None:
        self._tell(f"note: {text}")

    def summary(self, summary: Mapping[str, Any]) -> None:
        """How the run went: its summary.json, with the curve of the rows shown so far."""
        self.close()
        self._show_curve(summary)
        self._show_stages(summary)
        self._show_tokens(summary)
        self._show_run(summary)

    def _tell(self, text: str, indent: int = 0) -> None:
        """What user code has said, in the terminal's characters; a traceback keeps its lines."""
        encoding = self.paper.console.encoding
        first, *rest = text.encode(encoding, errors="replace").decode(encoding).splitlines()
        self.paper.paragraph(first, indent=indent)
        for line in rest:
            self.paper.line(" " * indent + line)

    def _draw(self, text: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = _ProgressLine(self.paper.console, self._texts)
            self._bar.add_task(text, clock="")
            self._bar.start()
        (task,) = self._bar.task_ids
        self._bar.update(task, description=text, completed=done, total=total, refresh=True)

    def _texts(self) -> tuple[str, str]:
        """The clock, and a line for 80 columns: what is always there first, rare things last."""
        if not self._rows:
            return "", ""
        recent = self._rows[-RECENT_ROWS:]
        row = recent[-1]
        wall_s = sum(r.wall_s for r in recent)
        left_s = max(0, self._config.loop.steps - row.step) * wall_s / len(recent)
        left = f", {duration(left_s)} left" if left_s else ""
        generated = sum(r.generated_tokens for r in self._rows)
        dropped = sum(sum(r.dropped_tokens.values()) for r in self._rows)
        scores = [r.score for r in self._rows if r.score is not None]
        facts = [
            f"reward {row.reward_mean:.3f}",
            f"held-out {scores[-1]:.3f}" if scores else "",
            f"lag {row.lag_mean:.1f}/{row.lag_max}",
            f"{sum(r.trained_tokens for r in recent) / wall_s if wall_s else 0:,.0f} tok/s",
            f"dropped {dropped / generated if generated else 0:.0%}",
            f"wall: {BOTTLENECK_OF_STAGE[stages_of(recent)[1]]}",
            f"preempted {row.preemptions}" if row.preemptions else "",
            "step skipped" if row.skipped else "",
        ]
        clock = f"{duration(self._clock() - self._started_s)} elapsed{left}"
        return clock, "  ".join(filter(None, facts))

    def _show_curve(self, summary: Mapping[str, Any]) -> None:
        paper = self.paper
        paper.section("reward", "mean over each step's answers")
        points = [(row.step, row.reward_mean) for row in self._rows]
        for line in plot(points, min(paper.console.width, 100) - 2, fine=paper.fine):
            paper.print(Text(f"  {line}", no_wrap=True))
        before, after = summary.get("score_before"), summary.get("score_after")
        scores = paper.drawn(" → ").join(f"{score:.3f}" for score in (before, after) if score is not None)
        gain = "" if before is None or after is None else f"  ({after - before:+.3f})"
        paper.line(f"  held-out score  {scores or 'not measured'}{gain}", style="bold")

    def _show_stages(self, summary: Mapping[str, Any]) -> None:
        paper = self.paper
        paper.section("time", "how long each stage was busy during the steps; stages can overlap")
        slowest, loop_s = str(summary["wall"]), float(summary["loop_s"])
        for stage, busy_s in summary["stage_s"].items():
            share = busy_s / loop_s if loop_s else 0.0
            mark = "▸" if stage == slowest else " "
            bar = f"{'█' * round(18 * min(share, 1.0)):░<18}"
            line = f"{mark} {stage:<11} {busy_s:>9,.1f} s {bar} {share:>5.0%}  {STAGE_WORDS[stage]}"
            paper.print(Text(paper.drawn(line), style="bold" if stage == slowest else ""))
        advice = advice_for(BOTTLENECK_OF_STAGE[slowest], self._config)
        helps = f" What helps: {'; '.join(advice.moves)}." if advice.moves else ""
        paper.paragraph(f"The wall is {BOTTLENECK_OF_STAGE[slowest]}: {advice.sign}.{helps}")

    def _show_tokens(self, summary: Mapping[str, Any]) -> None:
        self.paper.section("tokens", "every sampled token is accounted for")
        generated, trained = int(summary["generated_tokens"]), int(summary["trained_tokens"])
        dropped = Counter({reason: num for reason, num in summary["dropped_tokens"].items() if num})
        lines = {"generated": generated, "trained on": trained}
        lines |= {f"dropped: {reason}": num for reason, num in dropped.most_common()}
        if unsettled := generated - trained - dropped.total():
            lines["not settled"] = unsettled
        digits, whole = len(f"{generated:,}"), max(generated, 1)
        self.paper.facts([(name, f"{num:>{digits},}  {num / whole:>6.1%}") for name, num in lines.items()])

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
        best, before, after = (summary.get(name) for name in ("best_score", "score_before", "score_after"))
        if (cost := summary["dollars"]) is not None:
            rise = "" if before is None or after is None else f", {after - before:+.3f} in the held-out score"
            per_dollar = short(summary["trained_tokens"] / cost)
            facts["cost"] = f"{dollars(cost)}: {per_dollar} trained tokens per dollar{rise}"
        if best is not None and (after is None or best > after):
            facts["best"] = f"held-out score {best:.3f} at step {summary['best_step']}"
        self.paper.section("run")
        self.paper.facts(facts.items())
        if summary.get("reward_failure"):
            self._tell(f"The first answer without a verdict: {summary['reward_failure']}", indent=2)
        commands = {f"audit {run_dir}": "check the books", f"export {run_dir} OUT": "get the model"}
        if summary.get("finished") is False:
            commands = {f"resume {run_dir}": "go on with it"} | commands
        self.paper.commands(commands)


def plot(points: Sequence[tuple[int, float]], width: int, *, fine: bool = True) -> list[str]:
    """A curve over steps as text with labelled axes; of braille dots if `fine`, else asterisks."""
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if not points:
        return ["(no steps)"]
    values = [value for _, value in points]
    low, high = min(values), max(values)
    low = 0.0 if 0 <= low < 0.5 * high else low  # where that wastes little
    high = 1.0 if 0.8 < high <= 1 else high  # where the curve comes close
    if high <= low:
        low, high = min(low, 0.0), max(high, 1.0)
    middle = (low + high) / 2
    labels = {0: f"{high:.2f}", PLOT_ROWS // 2: f"{middle:.2f}", PLOT_ROWS - 1: f"{low:.2f}"}
    margin = max(map(len, labels.values()))
    columns = width - margin - 2
    across, down = (2, 4) if fine else (1, 1)
    num = columns * across
    if len(values) <= num:  # straight lines between few, or means of many
        heights = np.interp(np.linspace(0, len(values) - 1, num), np.arange(len(values)), values)
    else:
        edges = np.arange(num + 1) * len(values) // num
        heights = np.add.reduceat(values, edges[:-1]) / np.diff(edges)
    lifted = np.rint((heights - low) / (high - low) * (PLOT_ROWS * down - 1)).astype(int).tolist()
    rows = reversed(range(PLOT_ROWS))
    asterisks = ["".join("*" if height == row else " " for height in lifted) for row in rows]
    canvas = _braille(lifted) if fine else asterisks
    lines = [f"{labels.get(i, ''):>{margin}} ┤{line}".rstrip() for i, line in enumerate(canvas)]
    first, last = f"step {points[0][0]}", str(points[-1][0])
    lines.append(f"{'':{margin}} └{'─' * columns}")
    lines.append(f"{'':{margin}}  {first}{last:>{columns - len(first)}}")
    return lines if fine else [line.translate(ASCII) for line in lines]


def _braille(lifted: Sequence[int]) -> list[str]:
    """Two columns and four rows of dots to a character."""
    dots = np.zeros((PLOT_ROWS * 4, len(lifted)), np.int64)  # from the bottom up
    for x, (before, height) in enumerate(zip([lifted[0], *lifted[:-1]], lifted, strict=True)):
        # Upright strokes join neighbours, so that a jump stays one line.
        low, high = sorted((before + (height > before) - (height < before), height))
        dots[low : high + 1, x] = 1
    bits = np.array([[0x40, 0x80], [0x04, 0x20], [0x02, 0x10], [0x01, 0x08]])
    cells = np.einsum("rycx,yx->rc", dots.reshape(PLOT_ROWS, 4, -1, 2), bits)
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells[::-1].tolist()]


def write_plot(summary: Mapping[str, Any]) -> None:
    """The curve as an SVG file. Without room for it, a run that went well is none the worse.

    Mean rewards are a line; held-out scores are dots, before the first step and after the last too.
    """
    run_dir, scores = Path(summary["run_dir"]), [(0, summary["score_before"])]
    with Ledger.open(run_dir) as ledger:
        rows = ledger.rows()
    last = max((row.step for row in rows), default=1)
    curve = [(row.step, row.reward_mean) for row in rows]
    scores += [*((row.step, row.score) for row in rows), (last, summary["score_after"])]
    held_out = [(step, score) for step, score in scores if score is not None]
    values = [value for _, value in (*curve, *held_out)] or [0.0]
    low, high = min(0.0, *values), max(1e-9, *values)
    high = 1.0 if 0.5 < high <= 1 else high

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * step / last
        return x, BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)

    dots = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in (at(*dot) for dot in held_out))
    labels = {f"value{i}": f"{low + i / 4 * (high - low):.2f}" for i in range(5)}
    labels |= {f"step{i}": f"{i / 4 * last:.0f}" for i in range(5)}
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
    title = escape(f"{run_dir.name}, {len(rows)} steps")
    with suppress(OSError):
        (run_dir / PLOT).write_text(PICTURE.substitute(labels, title=title, points=points, dots="".join(dots)))
