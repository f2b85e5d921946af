"""The same loop with its workers in other processes, which die, join and leave. What is Ray's own is in test_ray."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from forked_cluster import ForkedCluster
from ray_runs import (
    IN_TURNS,
    ON_RAY,
    GatedReceiver,
    SlowReceiver,
    assert_same_result,
    begun_here,
    kill,
    train,
    trained_tokens,
)
from tiny_runs import Workshop, select

from headrace import api
from headrace.errors import RunError
from headrace.ledger.files import run_config, scale
from headrace.measured import Row
from headrace.place.place import Place
from headrace.publish.disk import DiskSender
from headrace.runs.audit import audit, books

DISK = "publish.transport=disk"


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`place.cluster=ray` means a cluster of forked processes."""
    monkeypatch.setattr("headrace.place.cluster_ray.RayCluster", ForkedCluster)


def once(at_step: int, harm: Callable[[Place], None]) -> Callable[[Place, Row], None]:
    done: list[int] = []

    def on_row(place: Place, row: Row) -> None:
        if row.step == at_step and not done:
            done.append(row.step)
            harm(place)

    return on_row


def test_what_a_killed_rollout_worker_was_at_goes_to_others(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    def harm(place: Place, row: Row) -> None:
        if row.step == 2:
            kill(place.pool.workers[0])
        if row.step == 4:  # now there is nobody left
            for worker in place.pool.workers:
                kill(worker)

    run = train(
        workshop, "kill-rollout", *ON_RAY[:2], DISK, "loop.max_lag=1", "loop.steps=6", "publish.encoding=delta",
        on_row=harm, monkeypatch=monkeypatch,
    )  # fmt: skip
    assert len(run.rows) == 6
    assert audit(run.run_dir) == []
    assert any("rollout-0 is lost" in note for note in run.notes)
    assert any("rollout-1 is lost" in note for note in run.notes)
    assert any("takes part" in note for note in run.notes)
    assert max(row.lag_max for row in run.rows) <= 1
    assert len(trained_tokens(run.run_dir)) == 6 * 4 * 4


def test_workers_join_and_leave_a_run_that_goes_on(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    """From the second step on nothing is scored until the new worker takes part; from then on one is to leave."""
    monkeypatch.setattr("headrace.place.elastic.LOOK_S", 0.05)
    run_dir, gate = workshop.directory / "scale", workshop.directory / "gate"
    rewards = workshop.directory / "gated.py"
    rewards.write_text(
        "import os, time\n"
        "def score(completion):\n"
        f"    while os.path.exists({str(gate)!r}):\n"
        "        time.sleep(0.01)\n"
        "    return sum(map(ord, completion.text)) % 97 / 97\n"
    )

    def more(place: Place) -> None:
        gate.touch()
        assert "1 -> 2 rollout workers" in scale(run_dir, 2)

    def fewer(text: str) -> None:
        if "rollout-1 takes part" in text:
            gate.unlink()
            scale(run_dir, 1)

    run = train(
        workshop, "scale", DISK, "place.cluster=ray", "loop.max_lag=1", "loop.steps=12", "reward.timeout_s=200",
        f"reward.function={rewards}:score", on_row=once(2, more), on_note=fewer, monkeypatch=monkeypatch,
    )  # fmt: skip
    assert len(run.rows) == 12
    assert audit(run_dir) == []
    asked, joins, asked_again, leaves = run.notes
    assert (asked, asked_again) == ("1 -> 2 rollout workers are asked for", "2 -> 1 rollout workers are asked for")
    assert (joins, leaves) == ("rollout-1 takes part", "rollout-1 is gone; its answers go on elsewhere")
    with pytest.raises(RunError, match="has finished"):
        scale(run_dir, 3)


def test_without_a_rank_the_run_goes_on_from_its_checkpoint(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    def harm(place: Place) -> None:
        place.ranks.next_logprob(np.array([5]), 6)  # when they are done with what they were at
        kill(place.ranks.ranks[1])

    run = train(
        workshop, "kill-rank", DISK, "place.cluster=ray", "learner.ranks=2", "loop.steps=4", "recovery.every_steps=4",
        on_row=once(2, harm), monkeypatch=monkeypatch,
    )  # fmt: skip
    assert [row.step for row in run.rows] == [1, 2, 3, 4]
    assert audit(run.run_dir) == []
    assert any("learner-1 is lost" in note and "goes on from its last checkpoint" in note for note in run.notes)
    assert len(trained_tokens(run.run_dir)) == 4 * 4 * 4
    assert books(run.run_dir).trained.trajectories == 4 * 4 * 4


def test_in_turns_on_the_same_devices(workshop: Workshop, local_run: Path):
    run = train(workshop, "colocated", *ON_RAY, *IN_TURNS, "loop.max_lag=0")
    assert audit(run.run_dir) == []
    assert not run.notes
    assert_same_result(run.run_dir, local_run)


def test_a_run_goes_on_elsewhere(workshop: Workshop, local_run: Path):
    """Begun in one process, it ends on a cluster, with two ranks that have its one checkpoint."""
    run_dir = begun_here(workshop, "moved-there", stop_at=2)
    with pytest.raises(RunError, match=r"run.seed=1: that cannot change in the middle of a run"):
        api.resume(run_dir, overrides=["run.seed=1"])
    assert api.resume(run_dir, overrides=[*ON_RAY, DISK])["finished"]
    assert audit(run_dir) == []
    assert run_config(run_dir).learner.mesh == (1, 2)
    assert_same_result(run_dir, local_run, attempt=2)


def test_the_learner_goes_on_while_its_weights_travel(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    sending = partial(DiskSender, workshop.directory / "travel" / "published")
    monkeypatch.setattr("headrace.place.place._ends", lambda *of_run: (sending, SlowReceiver))
    run = train(
        workshop, "travel", DISK, "place.cluster=ray", "loop.max_lag=2", "loop.steps=5", monkeypatch=monkeypatch
    )
    assert [row.step for row in run.rows] == [1, 2, 3, 4, 5]
    assert max(row.lag_max for row in run.rows) <= 2
    assert audit(run.run_dir) == []
    spans = select(run.run_dir, "SELECT stage, detail, start_s, end_s FROM spans")
    passes = [(start, end) for stage, detail, start, end in spans if stage == "train" and detail]
    travels = [(start, end) for stage, _, start, end in spans if stage == "publish" and end - start > 0.9]
    assert len(travels) >= 5
    beside = [one for one in passes if any(start < one[0] and one[1] < end for start, end in travels)]
    assert len(beside) > len(passes) / 2  # most groups were there already


def test_nobody_waits_for_a_worker_that_takes_new_weights_late(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    """One of two workers gets no new version before the fourth step is done."""
    gate = workshop.directory / "late-gate"
    gate.touch()
    ends = partial(DiskSender, workshop.directory / "late" / "published"), partial(GatedReceiver, gate)
    monkeypatch.setattr("headrace.place.place._ends", lambda *of_run: ends)
    run = train(
        workshop, "late", DISK, *ON_RAY[:2], "loop.max_lag=2", "loop.steps=12", "publish.timeout_s=600",
        on_row=once(4, lambda place: gate.unlink()), monkeypatch=monkeypatch,
    )  # fmt: skip
    assert [row.step for row in run.rows] == [*range(1, 13)]
    assert max(row.lag_max for row in run.rows) <= 2
    assert audit(run.run_dir) == []
    assert sum("takes new weights later" in note for note in run.notes) == 1
    applied: dict[str, list[int]] = {}
    for worker, version in select(
        run.run_dir, "SELECT worker, version FROM spans WHERE stage = 'publish' AND detail = 'apply' ORDER BY start_s"
    ):
        applied.setdefault(worker, []).append(version)
    late, other = sorted(applied.values(), key=lambda versions: 2 in versions)
    assert other[:5] == [0, 1, 2, 3, 4]  # one of them is alone until the gate opens
    assert late[0] == 0
    assert 2 not in late  # it goes on to what is the newest then
    assert late == sorted(set(late))
