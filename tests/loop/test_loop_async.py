"""Generation runs ahead of training, as far as max_lag allows and no further."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from tight_store import TightStore
from tiny_runs import Workshop, play, rank_of, rows_of, select, worker_of, write_prompts

from headrace import api
from headrace.ledger.ledger import Amount
from headrace.loop.loop import Loop
from headrace.place.place import Place
from headrace.policy.policy import Policy
from headrace.rollout.pages import PAGE
from headrace.runs.audit import audit, books

LONG_TAILED = (
    "rollout.max_new_tokens=100",
    'rollout.stop=["a", "e", "i", "o"]',
    "rollout.max_running=24",
    "learner.correction=truncated",
)


@dataclass(frozen=True)
class Trained:
    """A trajectory that was trained on, from the ledger."""

    step: int
    lag: int
    num_tokens: int
    spans: list[tuple[int, int, int]]


def trained_in(run: Path) -> list[Trained]:
    found = select(run, "SELECT trained_step, lag, num_tokens, spans FROM trajectories WHERE state = 'trained'")
    return [Trained(step, lag, num, [tuple(s) for s in json.loads(spans)]) for step, lag, num, spans in found]


@pytest.fixture(scope="module", params=[0.5, 1, 4])
def ahead(workshop: Workshop, request: pytest.FixtureRequest) -> tuple[Path, float]:
    """A run with long-tailed lengths, and how far ahead it might run."""
    max_lag = request.param
    name = f"ahead{max_lag}"
    api.train(workshop.config(name, f"loop.max_lag={max_lag}", "loop.steps=8", *LONG_TAILED, reward="dense"))
    return workshop.directory / name, max_lag


def test_nothing_trained_on_is_older_than_max_lag(ahead: tuple[Path, float]):
    run, max_lag = ahead
    trained = trained_in(run)
    assert {t.step for t in trained} == set(range(1, 9))
    for t in trained:
        oldest = min(version for version, _, _ in t.spans)
        assert t.lag == t.step - 1 - oldest
        assert 0 <= t.lag <= ceil(max_lag)


def test_half_a_step_ahead_is_half_a_step(ahead: tuple[Path, float]):
    run, max_lag = ahead
    if max_lag < 1:
        for step in range(1, 9):
            old = [t.lag > 0 for t in trained_in(run) if t.step == step]
            assert sum(old) <= max_lag * len(old)


def test_the_run_does_go_ahead(ahead: tuple[Path, float]):
    run, _ = ahead
    assert max(t.lag for t in trained_in(run)) > 0


def test_updates_reach_answers_in_flight(ahead: tuple[Path, float]):
    """Some answers were sampled by more than one version; every token knows by which."""
    run, _ = ahead
    trained = trained_in(run)
    assert any(len(t.spans) > 1 for t in trained)
    for t in trained:
        versions = [version for version, _, _ in t.spans]
        assert versions == sorted(set(versions))
        assert max(versions) <= t.step - 1
        assert all(a[2] == b[1] for a, b in zip(t.spans, t.spans[1:], strict=False))
        assert t.spans[-1][2] - t.spans[0][1] == t.num_tokens


def test_rows_tell_the_lag(ahead: tuple[Path, float]):
    run, _ = ahead
    by_step: dict[int, list[Trained]] = defaultdict(list)
    for t in trained_in(run):
        by_step[t.step].append(t)
    for row in rows_of(run):
        step = by_step[row.step]
        assert row.lag_max == max(t.lag for t in step)
        tokens = sum(t.num_tokens for t in step)
        assert row.lag_mean == pytest.approx(sum(t.lag * t.num_tokens for t in step) / tokens)
        assert row.trained_tokens == tokens


def test_old_samples_show_in_the_mismatch(ahead: tuple[Path, float]):
    """What older weights sampled has other log-probs now; what the present weights sampled has the same."""
    run, _ = ahead
    rows = rows_of(run)
    assert max(row.mismatch_mean for row in rows) > 1e-3
    assert rows[0].lag_max == 0
    assert rows[0].mismatch_mean < 1e-5


def test_the_books_balance(ahead: tuple[Path, float]):
    run, _ = ahead
    assert audit(run) == []
    assert books(run).in_flight == books(run).buffered == Amount()


async def test_late_groups_are_dropped_as_stale(workshop: Workshop):
    """One prompt's verdicts come three versions later, where one is allowed."""
    run = workshop.directory / "late"
    path = workshop.directory / "late.jsonl"
    write_prompts(path, rows=[0, 0, 3, 0], file=[str(run / "seen.txt")])
    extra = (f"prompts.source={path}", "prompts.select=in-order", "loop.max_lag=1", "loop.steps=10", "reward.workers=5")

    def meddle(place: Any, loop: Any) -> None:
        def on_row(row: Any) -> None:
            with (run / "seen.txt").open("a") as file:
                file.write(f"{row.step}\n")

        loop.on_row = on_row

    await play(workshop.config("late", *extra, "reward.timeout_s=1000", reward="tardy"), meddle)
    stale = select(run, "SELECT trajectory_id, prompt_id, num_tokens, lag, reward FROM drops WHERE reason = 'stale'")
    late = [drop for drop in stale if drop[1] == "p2"]
    assert len(late) == 4
    lengths = dict(select(run, "SELECT id, num_tokens FROM trajectories"))
    for id, _, num_tokens, lag, reward in late:
        assert lag >= 3
        assert num_tokens == lengths[id] > 0
        assert reward is not None
    assert max(t.lag for t in trained_in(run)) <= 1
    assert len(rows_of(run)) == 10  # its place was given back
    assert sum(row.dropped_tokens.get("stale", 0) for row in rows_of(run)) == sum(drop[2] for drop in stale)
    assert audit(run) == []


@pytest.mark.parametrize(("on_update", "several_versions"), [("drain", False), ("recompute", True)])
async def test_what_becomes_of_running_answers_when_weights_change(
    workshop: Workshop, on_update: str, several_versions: bool
):
    extra = ("loop.max_lag=2", "loop.steps=4", f"rollout.on_update={on_update}", *LONG_TAILED)
    await play(workshop.config(on_update, *extra, reward="dense"))
    run = workshop.directory / on_update
    trained = trained_in(run)
    assert any(len(t.spans) > 1 for t in trained) == several_versions
    assert max(t.lag for t in trained) <= 2
    assert audit(run) == []


async def test_a_full_cache_preempts_and_the_rows_say_so(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    """Eight answers of four pages each, and twelve pages: the run goes on, and the books balance."""
    monkeypatch.setattr(Policy, "eos_ids", property(lambda self: frozenset()))

    def tighten(place: Place, loop: Loop) -> None:
        engine = worker_of(place).engine
        engine._store = TightStore(rank_of(place).policy, 12 * PAGE, engine._rows)

    longer = ("rollout.max_new_tokens=200", "rollout.stop=[]")
    config = workshop.config("tight", "loop.steps=1", "loop.groups_per_step=2", *longer, reward="dense")
    loop = await play(config, tighten)
    run = workshop.directory / "tight"
    assert [row.preemptions for row in rows_of(run)] == [loop.stages.pool.counts.preemptions]
    assert loop.stages.pool.counts.preemptions > 0
    assert audit(run, finished=True) == []
    assert books(run).trained.trajectories == 8


def test_answers_cut_at_max_wall_s_are_truncated_and_evaluation_has_no_such_limit(workshop: Workshop):
    """No time at all: an answer ends with the first look at the clock."""
    hasty = ("rollout.max_new_tokens=100", "rollout.stop=[]", "loop.steps=1")
    summary = api.train(workshop.config("hasty", *hasty, "rollout.max_wall_s=1e-9", reward="dense"))
    run = workshop.directory / "hasty"
    finishes = dict(select(run, "SELECT finish, MAX(num_tokens) FROM trajectories GROUP BY finish"))
    assert "wall" in finishes
    assert "length" not in finishes
    assert finishes["wall"] < 10
    assert rows_of(run)[0].truncated_share > 0.5
    patient = api.train(workshop.config("patient", *hasty, reward="dense"))
    assert summary["score_before"] == patient["score_before"]


@pytest.mark.parametrize("max_lag", [0, 3])
def test_parked_answers_are_neither_lost_nor_left_over(workshop: Workshop, max_lag: int):
    """They are parked whenever anything waits, and some still are when the run ends."""
    name = f"parked{max_lag}"
    extra = ("rollout.max_running=6", "rollout.max_wall_s=1e-9", "rollout.on_wall=park", f"loop.max_lag={max_lag}")
    summary = api.train(workshop.config(name, *LONG_TAILED, *extra, "loop.steps=3", reward="dense"))
    run = workshop.directory / name
    assert sum(row.parks for row in rows_of(run)) > 0
    assert summary["finished"]
    assert audit(run) == []
    assert books(run).in_flight == Amount()
    assert books(run).trained.trajectories >= 3 * 4 * 2
    finishes = {finish for (finish,) in select(run, "SELECT DISTINCT finish FROM trajectories WHERE state = 'trained'")}
    assert finishes <= {"eos", "stop", "length"}


async def test_a_step_in_which_nothing_was_scored_has_the_rewards_that_it_trained_on(workshop: Workshop):
    """As after an evaluation, in whose time all answers of the next step may be scored."""

    def meddle(place: Place, loop: Loop) -> None:
        loop.stages.ledger.scored_since_row = lambda: []  # type: ignore[method-assign]

    await play(workshop.config("unscored", "loop.max_lag=1", reward="dense"), meddle)
    run = workshop.directory / "unscored"
    means = "SELECT AVG(reward), AVG(num_tokens) FROM trajectories WHERE state = 'trained' GROUP BY trained_step"
    for row, (reward, tokens) in zip(rows_of(run), select(run, means), strict=True):
        assert (row.reward_mean, row.length_mean) == pytest.approx((reward, tokens))
