"""What the page tells of tokens, spans, lag, rewards and trajectories is what the ledger says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hand_made import group, row
from tiny_runs import select

from headrace.dashboard import books as module
from headrace.dashboard import charts
from headrace.dashboard.books import (
    LagShares,
    Wanted,
    read_accounts,
    read_answer,
    read_page,
    read_rewards,
    read_timeline,
    update_lag_shares,
)
from headrace.ledger.ledger import Ledger
from headrace.runs.audit import books
from headrace.runs.show import (
    TokenTexts,
    TrajectoryDetails,
    accounts,
    prompt_ids,
    tokens,
    trajectory_facts,
    why_no_tokens,
)
from headrace.types import StageSpan, Trajectory


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
    shown = read_timeline(tmp_path, 5)
    assert shown.lanes == ("reward · a", "reward · b", "train", "evaluate")
    assert (shown.start_s, shown.end_s) == (0.0, 10.0)
    assert shown.busy == pytest.approx({"reward · a": 0.2001, "reward · b": 0.1, "train": 0.2, "evaluate": 0.1})
    assert shown.bars[0] == pytest.approx(("reward · a", "reward", 0.0, 2.001))
    assert [stage for _, stage, _, _ in shown.bars] == ["reward", "reward", "train", "evaluate"]


def test_timeline_shows_the_last_steps_only(real_run: Path):
    all_steps, last = read_timeline(real_run, 1000), read_timeline(real_run, 1)
    (wall_s,) = select(real_run, "SELECT wall_s FROM rows ORDER BY step DESC LIMIT 1")[0]
    assert last.end_s - last.start_s == pytest.approx(wall_s)
    assert last.end_s == all_steps.end_s
    assert last.start_s > all_steps.start_s


def test_lag_shares_are_those_of_the_trained_trajectories(real_run: Path, monkeypatch: pytest.MonkeyPatch):
    shares = LagShares()
    update_lag_shares(real_run, shares)
    expected: Counter[tuple[int, int]] = Counter()
    for step, lag, num_tokens in select(
        real_run, "SELECT trained_step, lag, num_tokens FROM trajectories WHERE state = 'trained'"
    ):
        expected[step, lag] += num_tokens
    assert shares.tokens == expected
    update_lag_shares(real_run, shares)
    assert shares.tokens == expected
    monkeypatch.setattr(charts, "MOST_LAG_BARS", 3)
    drawn = charts.lag_bars(shares, 6)
    assert drawn["xAxis"]["data"] == ["1-2", "3-4", "5-6"]
    fresh = [sum(n for (step, lag), n in expected.items() if lag == 0 and step in two) for two in ((1, 2), (3, 4))]
    total = [sum(n for (step, _), n in expected.items() if step in two) for two in ((1, 2), (3, 4))]
    assert drawn["series"][0]["name"] == "lag 0"
    assert drawn["series"][0]["data"][:2] == [round(100 * a / b, 2) for a, b in zip(fresh, total, strict=True)]
    assert [sum(bars) for bars in zip(*(one["data"] for one in drawn["series"]), strict=True)] == pytest.approx(
        [100, 100, 100], abs=0.1
    )


def test_lag_shares_read_in_pieces_are_those_read_at_once(tmp_path: Path):
    in_pieces, groups = LagShares(), [group(serial) for serial in range(3)]
    with Ledger.create(tmp_path) as ledger:
        for step, taken in enumerate(groups, 1):
            ledger.started(len(taken.trajectories))
            ledger.sampled(sum(t.num_sampled_tokens for t in taken.trajectories))
            ledger.buffered(taken)
            ledger.trained(taken, step=step, lag_of=lambda _, lag=step: lag)
            ledger.row(row(step))
            update_lag_shares(tmp_path, in_pieces)
    at_once = LagShares()
    update_lag_shares(tmp_path, at_once)
    assert in_pieces == at_once
    assert set(at_once.tokens) == {(1, 1), (2, 2), (3, 3)}


def test_rewards_of_few_values_have_a_bar_each(real_run: Path):
    shape = read_rewards(real_run)
    rewards = [reward for (reward,) in select(real_run, "SELECT reward FROM trajectories ORDER BY rowid")]
    half = (len(rewards) + 1) // 2
    assert shape.labels == ("0", "1")
    for side, shares, number in (
        (rewards[:half], shape.first, shape.num_first),
        (rewards[-half:], shape.newest, shape.num_newest),
    ):
        scored = [reward for reward in side if reward is not None]
        assert shares == pytest.approx((scored.count(0.0) / len(scored), scored.count(1.0) / len(scored)))
        assert number == len(scored)


def test_rewards_of_many_values_are_put_into_bins_that_hold_them_all():
    first, newest = np.arange(100) / 100, np.array([0.5, 2.0])
    labels, shares = module._histogram(first, newest)
    assert len(labels) == module.MOST_BARS
    assert sum(shares[0]) == pytest.approx(1.0)
    assert shares[1][5] == shares[1][19] == 0.5
    assert module._histogram(np.empty(0), np.empty(0)) == ((), [(), ()])


def test_pages_hold_every_trajectory_once_in_both_directions(real_run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PAGE_SIZE", 7)
    places = [place for (place,) in select(real_run, "SELECT rowid FROM trajectories ORDER BY rowid DESC")]
    page, seen = read_page(real_run, Wanted()), []
    assert not page.has_newer
    while True:
        seen += page.places
        if not page.has_older:
            break
        page = read_page(real_run, Wanted(older_than=page.places[-1]))
    assert seen == places
    back = list(page.places)
    while page.has_newer:
        page = read_page(real_run, Wanted(newer_than=page.places[0]))
        back = [*page.places, *back]
    assert back == places


def test_pages_are_filtered(real_run: Path):
    def column(title: str, wanted: Wanted) -> set[str]:
        return {row[module.PAGE_COLUMNS.index(title)] for row in read_page(real_run, wanted).rows}

    assert column("fate", Wanted(state="trained")) == {"trained"}
    assert column("fate", Wanted(state="dropped", reason="no_signal")) == {"dropped: no_signal"}
    assert column("step", Wanted(step=3)) == {"3"}
    assert column("answer", Wanted(state="'; DROP TABLE rows")) == set()


def longest_answer(run: Path) -> tuple[TrajectoryDetails, TokenTexts, Trajectory]:
    id = select(run, "SELECT id FROM trajectories WHERE state = 'trained' ORDER BY num_tokens DESC")[0][0]
    found, texts = read_answer(run, id)
    assert texts is not None
    assert found.whole is not None
    return found, texts, found.whole


def test_an_answer_has_its_tokens_with_version_mask_and_log_prob(real_run: Path):
    found, texts, whole = longest_answer(real_run)
    shown, told = list(tokens(whole, texts)), trajectory_facts(found)
    assert [token.id for token in shown] == whole.token_ids.tolist()
    assert [token.logprob is not None for token in shown] == whole.sampled.tolist()
    assert [token.logprob or 0.0 for token in shown] == whole.logprobs.tolist()
    versions = [span.version for span in whole.spans for _ in range(span.end - span.start)]
    assert [token.version for token in shown if token.logprob is not None] == versions
    assert "".join(token.text for token in shown).startswith(texts.text(prompt_ids(whole)) or "-")
    assert "trained on in step" in told["fate"]
    reward = told["reward"].split()[0]
    assert told["reward"] == f"{reward}  (score {reward})"


def test_a_long_answer_is_shown_in_pieces(real_run: Path):
    _, texts, whole = longest_answer(real_run)
    pieces = [list(tokens(whole, texts, start, 4)) for start in range(0, len(whole.token_ids), 4)]
    assert [token for piece in pieces for token in piece] == list(tokens(whole, texts))
    assert {len(piece) for piece in pieces[:-1]} == {4}


def test_an_answer_that_was_dropped_says_why(real_run: Path):
    id = select(real_run, "SELECT id FROM trajectories WHERE drop_reason = 'no_signal'")[0][0]
    found, _ = read_answer(real_run, id)
    assert "all answers of its group got the same reward" in trajectory_facts(found)["fate"]
    assert found.whole is None
    assert "never reached the buffer" in why_no_tokens(found)
