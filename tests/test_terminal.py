from __future__ import annotations

import io
import re
from contextlib import closing
from typing import Any

import pytest
from rich.console import Console

from headrace.cli.live import LiveDisplay, plot
from headrace.config_file import load_config
from headrace.insight.triage import ADVICE, Bottleneck
from headrace.measured import STAGES, Row, StageTimes

SUMMARY: dict[str, Any] = {
    "run_dir": "runs/x",
    "score_before": 0.148,
    "score_after": 0.836,
    "wall_s": 84.3,
    "loop_s": 84.3,
    "steps": 60,
    "version": 60,
    "generated_tokens": 258_600,
    "trained_tokens": 229_000,
    "dropped_tokens": {"no_signal": 28_000, "stale": 1_600},
    "goodput_tokens_per_s": 2716.5,
    "dollars": None,
    "mean_lag_seen": 0.625,
    "max_lag_seen": 1,
    "stage_s": {"rollout": 54.0, "reward": 6.1, "reference": 0.0, "train": 24.0, "publish": 0.6},
    "wall": "rollout",
}


def make_row(step: int, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "step": step,
        "version": step,
        "wall_s": 2.0,
        "generated_tokens": 1000,
        "trained_tokens": 900,
        "dropped_tokens": {"no_signal": 100},
        "lag_mean": 0.5,
        "lag_max": 1,
        "reward_mean": step / 60,
        "skipped": False,
        "stage_s": StageTimes(rollout=1.2, train=0.7),
        "score": None,
    }
    rest = {name: 0 for name in Row.__dataclass_fields__ if name not in values}
    return Row(**(rest | values | changes))


def terminal(width: int = 80, *, force_terminal: bool = False, encoding: str = "utf-8") -> tuple[LiveDisplay, Any]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    console = Console(file=file, width=width, force_terminal=force_terminal, _environ={})
    return LiveDisplay(console, clock=lambda: 0.0), lambda: raw.getvalue().decode(encoding)


def show_a_run(shown: LiveDisplay) -> None:
    with closing(shown):
        shown.header(load_config(None, ['rollout.stop=["[b]"]', "loop.max_lag=1"]), "runs/x", {"device": "cpu"})
        shown.phase("warm start")
        for done in range(1, 41):
            shown.progress(done, 40, "examples")
        shown.phase("training")
        for step in range(1, 61):
            shown.row(make_row(step, score=0.5 if step == 31 else None))
        shown.note("two [brackets] stay")
        shown.summary(SUMMARY)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_plain_output_has_no_control_characters(width, encoding):
    shown, text = terminal(width, encoding=encoding)
    show_a_run(shown)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text())
    assert not [line for line in text().splitlines() if line != line.rstrip()]
    assert "two [brackets] stay" in text()
    assert 'rollout.stop=["[b]"]' in text()


@pytest.mark.parametrize("width", [80, 120])
def test_header_and_summary_fit_the_width(width):
    shown, text = terminal(width)
    shown.header(load_config(None, ["loop.max_lag=1", "prompts.system=" + "word " * 60]), "runs/x", {"device": "cpu"})
    header = text()
    for step in range(1, 61):
        shown.row(make_row(step))
    rows = text()
    shown.summary(SUMMARY)
    printed = header + text().removeprefix(rows)
    assert max(map(len, printed.splitlines())) <= width


def test_plain_rows_are_a_line_every_few_steps():
    shown, text = terminal()
    show_a_run(shown)
    lines = [line for line in text().splitlines() if line.startswith("step ")]
    assert 20 <= len(lines) <= 23
    assert lines[0].startswith("step  1/60")
    assert lines[-1].startswith("step 60/60")
    assert any(line.startswith("step 31/60") for line in lines), "a row with a held-out score is always shown"


def test_row_shows_the_facts():
    shown, text = terminal()
    shown.header(load_config(None, ["loop.steps=4"]), "runs/x", {})
    shown.row(make_row(1, score=0.25, reward_mean=0.125))
    line = text().splitlines()[-1]
    expected = "step 1/4  0 s elapsed, 6 s left  reward 0.125  held-out 0.250  lag 0.5/1  450 tok/s  dropped 10%  "
    assert line == expected + "wall: rollout"


def test_the_run_is_known_from_the_header_on():
    """Ctrl-C asks for it, to say whether there is anything to resume."""
    shown, _ = terminal()
    assert shown.run_dir is None
    shown.header(load_config(None), "runs/x", {})
    assert shown.run_dir == "runs/x"


def test_progress_in_a_log_is_a_few_lines():
    shown, text = terminal()
    for done in range(1, 101):
        shown.progress(done, 100, "examples")
    assert text().splitlines() == [f"  {done}/100 examples" for done in (25, 50, 75, 100)]


def test_live_display_in_a_terminal():
    shown, text = terminal(force_terminal=True)
    show_a_run(shown)
    assert "\x1b[?25l" in text(), "the cursor is hidden while the bar moves"
    assert text().rindex("\x1b[?25h") > text().rindex("\x1b[?25l"), "and comes back"
    assert "step 60/60" in text()
    assert "100%" in text()


def test_cursor_comes_back_after_an_error():
    shown, text = terminal(force_terminal=True)
    shown.row(make_row(1))
    with pytest.raises(ZeroDivisionError), closing(shown):
        _ = 1 / 0
    assert text().rindex("\x1b[?25h") > text().rindex("\x1b[?25l")


def test_summary_tells_the_whole_story():
    shown, text = terminal()
    show_a_run(shown)
    out = text()[text().index("\nreward  ") :]
    assert "held-out score  0.148 → 0.836  (+0.688)" in out
    assert all(re.search(rf"^[▸ ] {stage} .* s [█░]{{18}} +\d+%", out, re.MULTILINE) for stage in STAGES)
    assert re.search(r"^▸ rollout +54.0 s █{12}░{6} +64%", out, re.MULTILINE)
    assert f"The wall is rollout: {ADVICE[Bottleneck.GENERATION].sign}. What helps: " in " ".join(out.split())
    assert re.search(r"dropped: no_signal +28,000 +10.8%", out)
    assert "2,716 trained tokens per second" in out
    assert "0.6 on average, at most 1 version between" in out
    assert "1 min 24 s" in out
    assert "headrace audit runs/x" in out
    assert "headrace export runs/x OUT" in out


@pytest.mark.parametrize(("after", "is_told"), [(0.836, True), (None, True), (0.0, True), (0.9, False), (0.95, False)])
def test_the_best_score_is_told_if_the_last_is_not_it(after: float | None, is_told: bool):
    shown, text = terminal()
    show_a_run(shown)
    before = len(text())
    shown.summary(SUMMARY | {"best_score": 0.9, "best_step": 31, "score_after": after})
    assert ("held-out score 0.900 at step 31" in text()[before:]) is is_told


def test_summary_of_a_run_that_did_nothing():
    shown, text = terminal()
    nothing = SUMMARY | {
        "run_dir": "elsewhere",
        "score_after": None,
        "wall_s": 0.0,
        "generated_tokens": 0,
        "trained_tokens": 0,
        "dropped_tokens": {},
        "stage_s": {},
    }
    shown.summary(nothing)
    assert "(no steps)" in text()
    assert "held-out score  0.148" in text()
    assert "headrace audit elsewhere" in text()


@pytest.mark.parametrize(("after", "rise"), [(0.836, ", +0.688 in the held-out score"), (None, "")])
def test_a_price_makes_tokens_and_score_per_dollar(after: float | None, rise: str):
    shown, output = terminal(120)
    shown.summary(SUMMARY | {"dollars": 0.05, "score_after": after})
    assert re.search(rf"cost +\$0.05: 4.58 M trained tokens per dollar{re.escape(rise)}\n", output())
    unpriced, output = terminal()
    unpriced.summary(SUMMARY)
    assert "dollar" not in output()


def test_books_that_do_not_balance_show():
    shown, text = terminal()
    shown.summary(SUMMARY | {"trained_tokens": 228_000})
    assert re.search(r"not settled +1,000", text())


def test_plot_draws_a_rising_line_with_axes():
    lines = plot([(step, step / 100) for step in range(101)], 40, fine=False)
    assert lines[0].startswith("1.00 |")
    assert lines[4].startswith("0.50 |")
    assert lines[8].startswith("0.00 |")
    assert lines[-1].split() == ["step", "0", "100"]
    assert {len(line) <= 40 for line in lines} == {True}
    firsts = [line.index("*") for line in lines[:9]]
    assert firsts == sorted(firsts, reverse=True)


@pytest.mark.parametrize("values", [[0.0], [1.0, 1.0], [-2.0, 3.0], [float("nan"), 0.5], [5.0] * 1000])
@pytest.mark.parametrize("fine", [True, False])
def test_plot_takes_any_values(values, fine):
    lines = plot(list(enumerate(values)), 50, fine=fine)
    assert len(lines) == 11
    assert max(map(len, lines)) <= 50


TRACEBACK = """Traceback (most recent call last):
  File "/home/someone/a/rather/long/path/to/the/rewards/of/this/project/rewards.py", line 4, in score
    return float(completion.text) / len(completion.fields["the name of a field that is long"])
ValueError: could not convert string to float: 'überall'"""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_traceback_keeps_its_lines(encoding):
    shown, text = terminal(60, encoding=encoding)
    lines = TRACEBACK.encode(encoding, errors="replace").decode(encoding).splitlines()
    shown.note(f"1 verdict failed: {TRACEBACK}")
    assert text().splitlines()[-3:] == lines[1:]
    shown.summary(SUMMARY | {"reward_failure": TRACEBACK})
    printed = text().splitlines()
    start = printed.index(f"  {lines[1]}")
    assert printed[start : start + 3] == [f"  {line}" for line in lines[1:]]
