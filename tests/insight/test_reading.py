from __future__ import annotations

import pkgutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from big_ledger import STEP_S, make_big_ledger
from insight_runs import hand_made_run
from tiny_runs import rows_of

import headrace.insight
from headrace.errors import HeadraceError
from headrace.insight import reading
from headrace.insight.reading import Reading, Spread, metrics_text, write_trace
from headrace.ledger.ledger import Ledger
from headrace.measured import StageTimes
from headrace.runs.audit import audit
from headrace.runs.columns import covered_s, union


def test_stage_times_overlap_and_idle_shares_are_those_of_the_spans(known_run: Path):
    found = Reading(known_run, after_step=0)
    assert (found.num_steps, found.wall_s, found.measured_steps) == (3, 30.0, range(1, 4))
    assert found.stage_s == StageTimes(rollout=6.0, reward=5.5, train=3.0, publish=0.5)
    side_by_side = found.occupancy
    assert side_by_side is not None
    assert side_by_side.wall_s == pytest.approx(30.0), "an evaluation between two steps is in neither"
    assert side_by_side.stage_s == StageTimes(rollout=18.0, reward=16.5, train=9.0, publish=1.5)
    assert side_by_side.busy_s == pytest.approx(28.5)
    assert side_by_side.overlap_share == pytest.approx(16.5 / 45.0)
    assert side_by_side.idle_shares == pytest.approx({"device": 0.05, "reward": 0.45})
    assert side_by_side.stall_s == 0.25


def test_more_workers_mean_more_idle_time(known_run: Path):
    settings = known_run / "config.toml"
    before, section, after = settings.read_text().partition("[reward]")
    settings.write_text(before + section + after.replace("workers = 1", "workers = 2", 1))
    side_by_side = Reading(known_run, after_step=0).occupancy
    assert side_by_side is not None
    assert side_by_side.idle_shares["reward"] == pytest.approx(1.0 - 6.5 / 20.0)


def test_tokens_rates_lags_and_ratios_are_those_of_the_books(known_run: Path):
    found = Reading(known_run, after_step=0)
    assert (found.trained_tokens, found.dropped_tokens) == (180, {"no_signal": 10})
    assert found.useful_share == pytest.approx(180 / 190)  # 1 - 10 / 190
    assert found.goodput_tokens_per_s == pytest.approx(6.0)
    assert (found.lag_mean, found.lag_max) == (pytest.approx(1 / 3), 1)
    assert found.ratio_outside == pytest.approx(0.02)
    assert found.effective_samples == pytest.approx(0.8)
    assert found.preemptions == 6


def test_lengths_rewards_and_the_tail_are_those_of_the_answers(known_run: Path):
    found = Reading(known_run, after_step=0)
    assert found.answer_tokens is not None
    assert found.answer_tokens.mean == pytest.approx(190 / 11)
    assert found.answer_tokens.max == 30.0
    assert found.tail_s is not None
    assert found.tail_s.mean == pytest.approx(1.5), "from 4.5, when all but the last are done, to 6"
    assert found.tail_share == pytest.approx(0.15)
    assert found.no_signal_share == pytest.approx(1 / 4)
    assert found.verdict_s is not None
    assert found.verdict_s.mean == pytest.approx(3 * 6.5 / 11)
    assert found.verdict_s.max == 2.5


def test_the_first_steps_are_left_out_where_there_are_others(known_run: Path, tmp_path: Path):
    found = Reading(known_run)
    assert (found.num_steps, found.measured_steps, found.wall_s) == (3, range(3, 4), 10.0)
    assert found.occupancy is not None
    assert found.occupancy.num_steps == 1
    assert found.occupancy.stage_s == StageTimes(rollout=6.0, reward=5.5, train=3.0, publish=0.5)
    assert found.answer_tokens is not None
    assert found.answer_tokens.count == 3
    assert Reading(hand_made_run(tmp_path / "two", num_steps=2)).measured_steps == range(1, 3)
    assert Reading(known_run, last_steps=2, after_step=0).measured_steps == range(2, 4)


def test_a_run_without_steps_says_what_is_known(tmp_path: Path):
    found = Reading(hand_made_run(tmp_path / "run", num_steps=0))
    assert (found.num_steps, found.wall_s, len(found.measured_steps)) == (0, 0.0, 0)
    unknown = (found.step_s, found.stage_s, found.occupancy, found.answer_tokens, found.tail_s, found.verdict_s)
    assert unknown == (None,) * 6
    assert found.no_signal_share is found.lag_mean is found.lag_max is found.ratio_outside is None
    assert found.goodput_tokens_per_s is found.useful_share is found.tail_share is None
    assert found.config.loop.max_lag == 1


def test_a_run_that_is_being_written_is_read(tmp_path: Path):
    found = Reading(hand_made_run(tmp_path / "run", num_steps=2, close=False), after_step=0)
    assert found.trained_tokens == 120
    assert found.occupancy is not None


def _damage(run: Path, how: str) -> None:
    ledger = run / "ledger.sqlite"
    if how == "empty":
        for file in run.iterdir():
            file.unlink()
    elif how == "damaged":
        ledger.write_bytes(b"not a database" * 100)
    elif how == "cut":
        ledger.write_bytes(ledger.read_bytes()[: ledger.stat().st_size // 2])
    elif how == "starting":
        ledger.write_bytes(b"")
    elif how == "no ledger":
        ledger.unlink()
        (run / "lock").touch()
    else:
        change = {
            "foreign": "UPDATE meta SET value = '1' WHERE key = 'schema'",
            "rows": "UPDATE rows SET data = '{'",
            "other rows": "UPDATE rows SET data = '[3]'",
            "no stages": "UPDATE rows SET data = '{}'",
        }[how]
        with closing(sqlite3.connect(ledger)) as connection, connection:
            connection.execute(change)


@pytest.mark.parametrize(
    "how", ["empty", "damaged", "cut", "starting", "no ledger", "foreign", "rows", "other rows", "no stages"]
)
def test_what_cannot_be_read_gets_a_message(known_run: Path, how: str):
    _damage(known_run, how)
    for look in (Reading, write_trace, metrics_text):
        with pytest.raises(HeadraceError):
            look(known_run)
    assert not list(known_run.glob("trace*")), "no file is begun"


def test_a_real_run_reads_as_its_rows_say(real_run: Path):
    rows, found = rows_of(real_run), Reading(real_run, after_step=0)
    assert found.num_steps == len(rows) == 6
    assert found.stage_s is not None
    assert found.stage_s.train == pytest.approx(sum(row.stage_s.train for row in rows) / 6)
    assert found.occupancy is not None
    for stage in ("rollout", "train", "reward"):
        booked = sum(getattr(row.stage_s, stage) for row in rows)
        assert getattr(found.occupancy.stage_s, stage) == pytest.approx(booked, rel=0.1, abs=0.05)
    assert found.occupancy.busy_s <= found.occupancy.wall_s * 1.0001
    assert found.occupancy.stall_s > 0.0
    assert found.lag_max == max(row.lag_max for row in rows)
    trained = np.array([(row.lag_mean, row.trained_tokens) for row in rows])
    assert found.lag_mean == pytest.approx((trained[:, 0] * trained[:, 1]).sum() / trained[:, 1].sum())
    assert 0.0 <= min(found.occupancy.idle_shares.values()) <= 1.0


def test_steps_that_a_restart_took_again_are_counted_once(resumed_run: Path):
    rows, found = rows_of(resumed_run), Reading(resumed_run, after_step=0)
    assert (found.num_restarts, found.redone_steps) == (1, 2)
    assert found.num_steps == len(rows) == 4
    assert found.occupancy is not None
    assert found.occupancy.wall_s == pytest.approx(sum(row.wall_s for row in rows), rel=0.02)
    booked = sum(row.stage_s.train for row in rows)
    assert found.occupancy.stage_s.train == pytest.approx(booked, rel=0.1, abs=0.02)


def test_of_a_long_run_the_last_steps_can_be_asked_for(tmp_path: Path):
    run = make_big_ledger(tmp_path / "run", num_steps=300)
    Ledger.reopen(run).close()  # notes all that is there
    assert audit(run) == []
    begun_s = time.process_time()
    whole, last = Reading(run), Reading(run, last_steps=50)
    assert time.process_time() - begun_s < 1.0
    assert (len(whole.measured_steps), len(last.measured_steps)) == (298, 50)
    assert last.occupancy is not None
    assert last.occupancy.num_steps == 50
    assert last.occupancy.wall_s == pytest.approx(50 * STEP_S)
    with Ledger.open(run) as ledger:
        booked = ledger.read(
            "SELECT COUNT(*) FROM trajectories WHERE trained_step > 250 OR (state = 'dropped' AND finished_s > ?)",
            (250 * STEP_S,),
        )[0][0]
    assert last.answer_tokens is not None
    assert last.answer_tokens.count == booked


def test_of_too_many_spans_and_answers_the_newest_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_big_ledger(tmp_path / "run", num_steps=60)
    whole = Reading(run)
    monkeypatch.setattr(reading, "MOST_SPANS", 400)
    monkeypatch.setattr(reading, "MOST_ANSWERS", 100)
    found = Reading(run)
    assert found.occupancy is not None
    assert whole.occupancy is not None
    assert 5 <= found.occupancy.num_steps < 20
    assert found.occupancy.overlap_share == pytest.approx(whole.occupancy.overlap_share, rel=0.2)
    assert found.answer_tokens is not None
    assert found.answer_tokens.count == 100
    assert len(found.measured_steps) == 58, "rows are few: all of them count"


def test_a_spread_of_hand_worked_numbers():
    found = Spread.of(np.array([1.0, 2.0, 3.0, 4.0, np.nan]))
    assert found is not None
    assert (found.count, found.mean, found.p50, found.max) == (4, 2.5, 2.5, 4.0)
    assert found.p95 == pytest.approx(3.85)
    assert found.cv == pytest.approx(np.sqrt(1.25) / 2.5)
    assert Spread.of(np.array([np.nan])) is None


def test_unions_and_bounded_sums_of_intervals():
    intervals = np.array([5.0, 0.0, 1.0, 2.0]), np.array([6.0, 3.0, 2.0, 4.0])
    starts, ends = union(intervals)
    assert (starts.tolist(), ends.tolist()) == ([0.0, 5.0], [4.0, 6.0])
    assert [covered_s(intervals, at_once=limit) for limit in (1, 2, 3)] == [5.0, 7.0, 7.0]
    assert covered_s((np.zeros(0), np.zeros(0))) == 0.0


def test_insight_needs_no_torch():
    names = [f"headrace.insight.{found.name}" for found in pkgutil.iter_modules(headrace.insight.__path__)]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
