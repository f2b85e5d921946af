"""The site: which runs it shows, how it stays inside its directory, and how quickly it reads a long run."""

from __future__ import annotations

import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from page_runs import BROKEN
from test_cli import headrace, problem
from tiny_runs import rows_of, select

from headrace.dashboard import site as site_module
from headrace.dashboard.books import LAGS, PARTS, Page, Rewards, Series, Timeline, Wanted, read_accounts
from headrace.dashboard.charts import CARDS, Look, lag_bars, sankey, timeline
from headrace.dashboard.site import FIELDS, NOT_YET, LiveRun, Overview, Site, address, is_local, question
from headrace.errors import ConfigError, RunError
from headrace.insight.planner import plan
from headrace.insight.triage import Triage
from headrace.runs.report import duration


@pytest.mark.parametrize("name", ["..", ".", "", "../secret", "real/../../secret", "/etc", "a/b", "real\0", "nothing"])
def test_a_name_cannot_lead_out_of_the_directory(real_run: Path, name: str):
    (real_run.parent.parent / "secret").mkdir(exist_ok=True)
    with pytest.raises(RunError, match="There is no run"):
        Site(real_run.parent).run(name)


def test_a_single_run_is_a_site_of_its_own(real_run: Path):
    site = Site(real_run)
    assert site.run("real").path == real_run
    with pytest.raises(RunError, match="There is no run"):
        site.run("other")


def test_overview_is_what_the_rows_say(real_run: Path):
    seen, rows = Overview(Site(real_run).run("real")), rows_of(real_run)
    trained, wall_s = sum(row.trained_tokens for row in rows), sum(row.wall_s for row in rows)
    assert seen.series.goodput() == pytest.approx(trained / wall_s)
    assert seen.series.now("reward_mean") == pytest.approx(sum(row.reward_mean for row in rows) / len(rows))
    assert seen.lag_max == max(row.lag_max for row in rows)
    assert seen.dollars == pytest.approx(seen.elapsed_s)
    assert seen.elapsed_s >= wall_s


def test_overview_names_the_wall_and_what_the_run_cost(real_run: Path):
    seen = Overview(Site(real_run).run("real"))
    verdict = Triage(real_run)
    told = {name: (value, says) for name, value, says in seen.numbers(verdict)}
    assert told["Bottleneck"][0] == verdict.bottleneck
    assert ("Bottleneck", "…", NOT_YET) in seen.numbers(NOT_YET)
    assert told["Cost so far"][0] == f"${seen.elapsed_s:,.2f}"
    assert told["Steps"] == ("6", "of 6; finished, after " + duration(seen.elapsed_s))
    assert "2 allowed" in told["Lag"][1]


def verdict_of(live: LiveRun) -> Triage | str:
    """What the page says once it has been worked out."""
    deadline = time.monotonic() + 30.0
    while (found := live.triage()) == NOT_YET:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_the_wall_of_a_run_is_found_in_a_thread_once_for_each_number_of_steps(
    real_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(site_module, "TRIAGE_AFTER_S", 0.0)
    monkeypatch.setattr(site_module, "TRIAGE_SHARE", 1.0)
    asked: list[Path] = []
    monkeypatch.setattr(site_module, "Triage", lambda path: asked.append(path) or Triage(path))
    shutil.copytree(real_run, tmp_path / "run")
    live = Site(tmp_path).run("run")
    assert live.triage() == NOT_YET  # nobody waits for it
    found = verdict_of(live)
    assert isinstance(found, Triage)
    assert found.bottleneck == Triage(real_run).bottleneck
    assert live.triage() is found
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as connection, connection:
        connection.execute("UPDATE rows SET step = 7 WHERE step = 6")
    deadline = time.monotonic() + 30.0
    while live.triage() is found:  # until there is a newer one
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(asked) == 2


def test_every_curve_of_a_run_without_rows_is_a_sentence(real_run: Path):
    found = CARDS["reward"].drawn(Series(), Look(), Site(real_run).run("real").facts())
    assert found == ({}, "There is no row yet: the first step is under way.")


def test_stage_chart_leaves_out_what_was_never_busy(real_run: Path):
    live = Site(real_run).run("real")
    options, _ = CARDS["stage_times"].drawn(live.series(), Look(), live.facts())
    assert {one["name"] for one in options["series"]} == {"rollout", "reward", "train", "publish"}  # no reference


@pytest.mark.parametrize("name", BROKEN)
def test_a_run_out_of_order_gives_a_message_or_a_part_of_it(site_dir: Path, name: str):
    live = Site(site_dir).run(name)
    reads = [
        lambda: Overview(live),
        lambda: live.triage(),
        lambda: live.series(),
        lambda: lag_bars(live.tally(LAGS), 1, 0.0),
        lambda: live.tally(PARTS),
        lambda: live.history(),
        lambda: sankey(read_accounts(live.path)),
        lambda: timeline(Timeline(live.path, 3)),
        lambda: Rewards(live.path),
        lambda: Page(live.path, Wanted()),
    ]
    found, told = [], []
    for read in reads:
        try:
            found.append(read())
        except RunError as error:  # anything else is a traceback
            told.append(str(error))
    if BROKEN[name]:
        assert not found
        assert all(BROKEN[name] in text or "there is no ledger.sqlite" in text for text in told)
    else:
        assert found or name == "half"


def test_a_damaged_row_is_named_in_the_overview(site_dir: Path):
    assert Overview(Site(site_dir).run("bad-row")).series.num_damaged == 1


def test_a_long_run_is_read_quickly_and_hardly_at_all_the_second_time(large_run: Path):
    live = Site(large_run).run("large")

    def look() -> float:
        begin = time.perf_counter()
        assert Overview(live).facts.steps == 10_000
        live.tally(LAGS)
        Timeline(live.path, 10)
        Rewards(live.path)
        Page(live.path, Wanted(state="dropped", reason="no_signal"))
        return time.perf_counter() - begin

    begin = time.perf_counter()
    assert len(rows_of(large_run)) == 10_000
    plainly_s = time.perf_counter() - begin
    first_s, second_s = look(), min(look() for _ in range(3))
    assert 200 < len(live.series().curve("reward_mean")) <= 400
    assert (
        sum(live.tally(LAGS).sums.values())
        == select(live.path, "SELECT tokens FROM accounts WHERE name = 'trained'")[0][0]
    )
    assert second_s < first_s / 5
    assert first_s < 5 * plainly_s  # of reading every row


def test_addresses_keep_what_is_odd_in_a_name():
    assert (
        address("run", "a b/../c", "trajectory", id="4:p/3&x", step=None)
        == "/run/a%20b%2F..%2Fc/trajectory?id=4%3Ap%2F3%26x"
    )


TYPED = {name: field.value for name, field in FIELDS.items()}


def test_a_form_as_it_stands_can_be_planned():
    asked = question(TYPED, device="H100", reference=False, adapter=False)
    assert plan(asked)[0].goodput > 0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("model", "seven", "not a size, such as 7B"),
        ("model", "/etc", "not a size"),  # the page looks at no files
        ("model", "9" * 400 + "B", "more weights than any model has"),
        ("model", "1T-A2T", "active"),
        ("num_devices", "0", "out of range: from 1"),
        ("num_prompts", "1.5", "not a whole number"),
        ("num_samples", "many", "not a number like 4096"),
        ("mean_tokens", "", "not a number like 4096, 8k"),
        ("cv", "-1", "not a number"),
        ("reward_s", "4 parsecs", "not a time like 4s"),
        ("max_lag", "1e9", "not a number"),
    ],
)
def test_what_cannot_be_planned_is_said_beside_its_field(name: str, text: str, says: str):
    assert says in (FIELDS[name].problem(text) or "")
    with pytest.raises(ConfigError, match=f"marked above: {FIELDS[name].label}"):
        question(TYPED | {name: text}, device="H100", reference=False, adapter=False)


def test_more_answers_than_can_be_worked_out_soon_are_refused():
    with pytest.raises(ConfigError, match="4,096,000 answers in a step are too many to plan: at most 16,384"):
        question(TYPED | {"num_prompts": "4k", "num_samples": "1024"}, device="H100", reference=False, adapter=False)


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("10.0.0.1", False)],
)
def test_who_can_connect_is_known(host: str, local: bool):
    assert is_local(host) is local


def test_a_directory_that_is_not_there_is_named(tmp_path: Path):
    assert f"there is no directory {tmp_path / 'nowhere'}" in problem(headrace("dash", tmp_path / "nowhere"))


def test_a_missing_library_is_named_with_the_extra_that_has_it(tmp_path: Path):
    code = "import sys; sys.modules['nicegui'] = None; from headrace.cli import app; app()"
    done = subprocess.run([sys.executable, "-c", code, "dash", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install -e '.[dash]'" in done.stderr


def test_a_port_in_use_is_named(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port}" in problem(headrace("dash", tmp_path, "--port", port))


def test_reading_for_the_page_needs_neither_torch_nor_nicegui():
    code = (
        "import sys; sys.modules |= {'torch': None, 'transformers': None, 'nicegui': None}; "
        "import headrace.dashboard.site, headrace.dashboard.charts, headrace.dashboard.books"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
