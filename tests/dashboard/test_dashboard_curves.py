"""Curves as they are drawn: one for every number of a row, along any axis, smoothed, with the held-out scores."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from hand_made import row

from headrace.dashboard.books import AXES, Series, Tally, read_series
from headrace.dashboard.charts import CARDS, NUM_COLOURS, Look, lines, metric_curves, parts_drawn, smoothed
from headrace.dashboard.site import Site
from headrace.ledger.ledger import Ledger
from headrace.measured import ROW_METRICS
from headrace.runs.facts import RunFacts, RunState

FACTS = RunFacts(path=Path("run"), state=RunState.RUNNING, written=datetime.now())


@pytest.fixture
def series(tmp_path: Path) -> Series:
    """Four steps, whose times, tokens and entropy differ."""
    with Ledger.create(tmp_path) as ledger:
        for step in range(1, 5):
            ledger.row(row(step, wall_s=900.0 * step, trained_tokens=10 * step, entropy=1.0 / step))
    return read_series(tmp_path, Series())


def test_every_number_of_a_row_has_one_curve():
    found = [curve for group in metric_curves().values() for curve in group]
    columns = [column for curve in found for column, _, _ in curve.lines.values()]
    assert sorted(columns) == sorted(ROW_METRICS)
    wanted = {"Entropy", "KL reference", "Grad norm", "Loss", "LR", "Clipped share", "Truncated share"}
    assert wanted <= {curve.title for curve in found}
    for group, within in metric_curves().items():
        names = {column for curve in within for column, _, _ in curve.lines.values()}
        assert names == {name for name, metric in ROW_METRICS.items() if metric.label.startswith(f"{group}/")}


def test_a_curve_is_drawn_or_says_why_it_is_not(series: Series):
    by_title = {curve.title: curve for group in metric_curves().values() for curve in group}
    options, _ = by_title["Entropy"].drawn(series, Look(), FACTS)
    assert options["series"][0]["data"] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)]
    assert by_title["KL reference"].drawn(series, Look(), FACTS) == ({}, "It was 0 in every step.")
    assert by_title["Score"].drawn(series, Look(), FACTS) == ({}, "It was not measured in this run.")


@pytest.mark.parametrize(
    ("by", "places"),
    [("step", [1, 2, 3, 4]), ("trained tokens", [10, 30, 60, 100]), ("hours", [0.25, 0.75, 1.5, 2.5])],
)
def test_curves_go_along_steps_tokens_or_hours(series: Series, by: str, places: list[float]):
    assert by in AXES
    for name in ("entropy", "goodput"):
        assert [place for place, _ in series.curve(name, by=by)] == pytest.approx(places)
    options, _ = CARDS["reward"].drawn(series, Look(by=by), FACTS)
    assert options["xAxis"]["name"] == by


def test_smoothing_keeps_the_measured_curve_pale_behind(series: Series):
    points = series.curve("entropy")
    assert smoothed(points, 0.0) == points
    assert smoothed([(1, 2.0), (2, None), (3, 4.0)], 0.5) == [(1, 2.0), (2, None), (3, pytest.approx(10 / 3))]
    pale, line = lines({"entropy": (points, "#000")}, y="nats", look=Look(smoothing=0.9))["series"]
    assert [y for _, y in pale["data"]] == [y for _, y in points]
    assert pale["lineStyle"]["opacity"] < 0.5
    assert [y for _, y in line["data"]] == [y for _, y in smoothed(points, 0.9)]
    assert line["name"] == "entropy"
    assert pale["name"] == ""  # not in the legend


def test_held_out_scores_are_marked_before_on_the_way_and_after(real_run: Path):
    live = Site(real_run).run("real")
    facts = live.facts()
    options, _ = CARDS["reward"].drawn(live.series(), Look(), facts)
    marks = {one["name"]: one["data"] for one in options["series"] if one["type"] == "scatter"}
    assert marks["held-out, before"] == [(0, facts.score_before)]
    assert marks["held-out, after"] == [(6, facts.score_after)]
    assert [step for step, _ in marks["held-out score"]] == [2, 4, 6][: len(marks["held-out score"])]
    assert set(marks) < set(options["legend"]["data"])


def test_reward_parts_have_a_line_each(series: Series):
    assert parts_drawn(Tally(), series, Look())[0] == {}
    held = {(1, "format"): 2.0, (1, "correct"): 1.0, (3, "format"): 4.0}
    parts = Tally()
    parts.sums.update(held)
    parts.counts.update(dict.fromkeys(held, 2))
    options, _ = parts_drawn(parts, series, Look())
    drawn = {one["name"]: one["data"] for one in options["series"]}
    assert drawn == {"correct": [(1, 0.5)], "format": [(1, 1.0), (3, 2.0)]}


def test_more_runs_than_colours_are_told_apart_by_dashes(series: Series):
    options, _ = CARDS["goodput"].compared({str(place): series for place in range(NUM_COLOURS + 1)}, Look())
    drawn = options["series"]
    assert drawn[-1]["lineStyle"] == drawn[0]["lineStyle"] | {"type": "dashed"}
