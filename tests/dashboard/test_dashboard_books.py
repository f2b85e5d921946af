"""What the page tells of tokens, spans, lag and rewards is what the ledger says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hand_made import group, row
from tiny_runs import select

from headrace.dashboard import charts
from headrace.dashboard.books import (
    LAGS,
    PARTS,
    Rewards,
    Series,
    Tally,
    Timeline,
    read_accounts,
    read_series,
)
from headrace.ledger.ledger import Ledger
from headrace.measured import StageSpan
from headrace.runs.audit import books
from headrace.runs.show import accounts


def test_accounts_add_up_to_what_was_generated(real_run: Path):
    found, totals = accounts(read_accounts(real_run)), books(real_run)
    assert sum(account.amount.tokens for account in found) == totals.generated.tokens
    assert sum(account.amount.trajectories for account in found) == totals.generated.trajectories
    assert found[0].name == "trained"
    assert {account.name for account in found if account.state == "dropped"} == {
        f"dropped: {reason}" for reason in totals.dropped
    }
    assert [account.explanation for account in found if not account.explanation] == []


def test_timeline_lays_workers_beside_each_other_and_joins_what_touches(tmp_path: Path):
    with Ledger.create(tmp_path) as ledger:
        ledger.spans([StageSpan(stage="train", start_s=6.0, end_s=8.0, version=2)])
        ledger.spans([StageSpan(stage="reward", worker="b", start_s=3.0, end_s=4.0)])
        ledger.spans(
            [StageSpan(stage="reward", worker="a", start_s=i / 1000, end_s=(i + 2) / 1000) for i in range(2000)]
        )
        ledger.spans([StageSpan(stage="evaluate", start_s=9.0, end_s=10.0, version=4)])
    shown = Timeline(tmp_path, 5)
    assert tuple(shown.busy) == ("reward · a", "reward · b", "train", "evaluate")
    assert (shown.start_s, shown.end_s) == (0.0, 10.0)
    assert shown.busy == pytest.approx({"reward · a": 0.2001, "reward · b": 0.1, "train": 0.2, "evaluate": 0.1})
    assert shown.bars[0] == pytest.approx(("reward · a", "reward", 0.0, 2.001))
    assert [stage for _, stage, _, _ in shown.bars] == ["reward", "reward", "train", "evaluate"]


def test_timeline_shows_the_last_steps_only(real_run: Path):
    all_steps, last = Timeline(real_run, 1000), Timeline(real_run, 1)
    (wall_s,) = select(real_run, "SELECT wall_s FROM rows ORDER BY step DESC LIMIT 1")[0]
    assert last.end_s - last.start_s == pytest.approx(wall_s)
    assert last.end_s == all_steps.end_s
    assert last.start_s > all_steps.start_s


def test_lag_shares_are_those_of_the_trained_trajectories(real_run: Path, monkeypatch: pytest.MonkeyPatch):
    shares = Tally()
    shares.update(real_run, LAGS)
    expected: Counter[tuple[int, int]] = Counter()
    for step, lag, num_tokens in select(
        real_run, "SELECT trained_step, lag, num_tokens FROM trajectories WHERE state = 'trained'"
    ):
        expected[step, lag] += num_tokens
    assert shares.sums == expected
    shares.update(real_run, LAGS)
    assert shares.sums == expected
    monkeypatch.setattr(charts, "MOST_LAG_BARS", 3)
    drawn, says = charts.lag_bars(shares, 6, 2.0)
    assert says == "loop.max_lag = 2.0: older tokens are dropped as stale."
    assert drawn["xAxis"]["data"] == ["1-2", "3-4", "5-6"]
    fresh = [sum(n for (step, lag), n in expected.items() if lag == 0 and step in two) for two in ((1, 2), (3, 4))]
    total = [sum(n for (step, _), n in expected.items() if step in two) for two in ((1, 2), (3, 4))]
    assert drawn["series"][0]["name"] == "lag 0"
    assert drawn["series"][0]["data"][:2] == [round(100 * a / b, 2) for a, b in zip(fresh, total, strict=True)]
    assert [sum(bars) for bars in zip(*(one["data"] for one in drawn["series"]), strict=True)] == pytest.approx(
        [100, 100, 100], abs=0.1
    )


def test_lag_shares_read_in_pieces_are_those_read_at_once(tmp_path: Path):
    in_pieces, groups = Tally(), [group(serial) for serial in range(3)]
    with Ledger.create(tmp_path) as ledger:
        for step, taken in enumerate(groups, 1):
            ledger.started(len(taken.trajectories))
            ledger.sampled(sum(t.num_sampled_tokens for t in taken.trajectories))
            ledger.buffered(taken)
            ledger.trained(taken, version=step)
            ledger.row(row(step))
            in_pieces.update(tmp_path, LAGS)
    at_once = Tally()
    at_once.update(tmp_path, LAGS)
    assert in_pieces == at_once
    assert set(at_once.sums) == {(1, 1), (2, 2), (3, 3)}


def test_rewards_of_few_values_have_a_bar_each(real_run: Path):
    found = Rewards(real_run)
    drawn, says = charts.reward_bars(found)
    assert says.startswith("Mean of each reward part, first → newest: score ")
    rewards = [reward for (reward,) in select(real_run, "SELECT reward FROM trajectories ORDER BY rowid")]
    half = (len(rewards) + 1) // 2
    assert drawn["xAxis"]["data"] == ["0", "1"]
    for name, side, bars in zip(("first", "newest"), (rewards[:half], rewards[-half:]), drawn["series"], strict=True):
        scored = [reward for reward in side if reward is not None]
        shares = [100 * scored.count(reward) / len(scored) for reward in (0.0, 1.0)]
        assert bars["data"] == pytest.approx(shares, abs=0.01)
        assert bars["name"] == f"{name} {len(scored)} answers"
        assert found.parts["score"][name == "newest"] == pytest.approx(np.mean(scored))


def test_rewards_of_many_values_are_put_into_bins_that_hold_them_all():
    found = SimpleNamespace(first=np.arange(100) / 100, newest=np.array([0.5, 2.0]), parts={})
    drawn, _ = charts.reward_bars(found)
    first, newest = (bars["data"] for bars in drawn["series"])
    assert len(drawn["xAxis"]["data"]) == charts.MOST_REWARD_BARS
    assert sum(first) == pytest.approx(100.0)
    assert newest[5] == newest[19] == 50.0


def test_reward_parts_are_averaged_by_step(real_run: Path):
    parts, series = Tally(), read_series(real_run, Series())
    parts.update(real_run, PARTS)
    (curve,) = parts.means(series).values()  # of the one part that this reward has
    assert list(parts.means(series)) == ["score"]
    scored = select(
        real_run,
        "SELECT x.step, AVG(t.reward) FROM transfers x JOIN trajectories t ON t.id = x.trajectory_id "
        "WHERE x.debit = 'in_flight' AND t.reward IS NOT NULL GROUP BY 1 ORDER BY 1",
    )
    assert curve == [pytest.approx(point) for point in scored if point[0] <= series.last_step]
    along = parts.means(series, "trained tokens")["score"]
    places = zip(series.curve("reward_mean"), series.curve("reward_mean", by="trained tokens"), strict=True)
    steps = {step for step, _ in curve}  # in which anything was scored
    assert [place for place, _ in along] == [tokens for (step, _), (tokens, _) in places if step in steps]
