"""The same loop with its engines and its learner in other processes, on a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray_runs import ON_RAY, train, trained_tokens
from tiny_runs import Workshop, weights

from headrace import api
from headrace.errors import ConfigError, MissingExtraError, RunError
from headrace.ledger.files import run_config, scale
from headrace.ledger.ledger import Ledger
from headrace.place import places
from headrace.place.place import Place, _gpus_of_a_worker
from headrace.row import Row
from headrace.runs.audit import audit, books

pytestmark = pytest.mark.usefixtures("local_ray")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def once(at_step: int, harm: Callable[[Place], None]) -> Callable[[Place, Row], None]:
    done: list[int] = []

    def on_row(place: Place, row: Row) -> None:
        if row.step == at_step and not done:
            done.append(row.step)
            harm(place)

    return on_row


def test_strictly_on_policy_the_same_answers_are_trained_on_with_the_same_result(workshop: Workshop, local_run: Path):
    run = train(workshop, "ray", *ON_RAY, "loop.max_lag=0")
    assert audit(run.run_dir) == []
    assert trained_tokens(run.run_dir) == trained_tokens(local_run)
    here, there = weights(local_run), weights(run.run_dir)
    assert max(float((here[name] - there[name]).abs().max()) for name in here) < 1e-5
    start = weights_of_model(workshop)
    assert max(float((here[name] - start[name]).abs().max()) for name in here) > 1e-4  # it was trained at all
    with Ledger.open(run.run_dir) as ledger:
        workers = {worker for (worker,) in ledger.read("SELECT worker FROM spans WHERE stage = 'rollout'")}
        spans = ledger.read("SELECT detail FROM spans WHERE stage = 'publish'")
        details = {detail.split(",")[0] for (detail,) in spans}
    assert workers == {"rollout-0", "rollout-1"}
    assert {"gather", "cast", "encode", "transfer", "apply"} <= details


def weights_of_model(workshop: Workshop) -> dict[str, torch.Tensor]:
    (workshop.directory / "start").mkdir(exist_ok=True)
    link = workshop.directory / "start" / "model"
    if not link.exists():
        link.symlink_to(workshop.model)
    return weights(workshop.directory / "start")


def test_in_turns_on_the_same_devices(workshop: Workshop, local_run: Path):
    settings = ("place.layout=colocated", "loop.max_lag=0", "publish.encoding=delta", "publish.transport=collective")
    run = train(workshop, "colocated", *ON_RAY, *settings)
    assert audit(run.run_dir) == []
    assert not run.notes
    assert trained_tokens(run.run_dir) == trained_tokens(local_run)
    here, there = weights(local_run), weights(run.run_dir)
    assert max(float((here[name] - there[name]).abs().max()) for name in here) < 1e-5


def test_what_a_killed_rollout_worker_was_at_goes_to_others(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    def harm(place: Place, row: Row) -> None:
        if row.step == 2:
            kill(place.pool.workers[0].pid)
        if row.step == 4:  # now there is nobody left
            for worker in place.pool.workers:
                kill(worker.pid)

    run = train(
        workshop, "kill-rollout", *ON_RAY[:2], "loop.max_lag=1", "loop.steps=6", "publish.encoding=delta",
        "publish.transport=disk", on_row=harm, monkeypatch=monkeypatch,
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
        workshop, "scale", "place.cluster=ray", "loop.max_lag=1", "loop.steps=12", "reward.timeout_s=200",
        f"reward.function={rewards}:score", on_row=once(2, more), on_note=fewer, monkeypatch=monkeypatch,
    )  # fmt: skip
    assert len(run.rows) == 12
    assert audit(run_dir) == []
    asked, joins, asked_again, leaves = run.notes
    assert (asked, asked_again) == ("1 -> 2 rollout workers are asked for", "2 -> 1 rollout workers are asked for")
    assert (joins, leaves) == ("rollout-1 takes part", "rollout-1 has finished its answers and is gone")
    with pytest.raises(RunError, match="has finished"):
        scale(run_dir, 3)


def test_only_a_cluster_with_devices_of_their_own_gets_more_workers(local_run: Path):
    with pytest.raises(RunError, match=r"place.cluster = 'local'.* changes only on a cluster"):
        scale(local_run, 3)


def test_without_a_rank_the_run_goes_on_from_its_checkpoint(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    def harm(place: Place) -> None:
        place.ranks.facts()
        kill(pid_of(place.ranks.ranks[1]))

    run = train(
        workshop, "kill-rank", "place.cluster=ray", "learner.ranks=2", "loop.steps=4", "recovery.every_steps=4",
        on_row=once(2, harm), monkeypatch=monkeypatch,
    )  # fmt: skip
    assert [row.step for row in run.rows] == [1, 2, 3, 4]
    assert audit(run.run_dir) == []
    assert any("learner-1 is lost" in note and "goes on from its last checkpoint" in note for note in run.notes)
    assert len(trained_tokens(run.run_dir)) == 4 * 4 * 4
    assert books(run.run_dir).trained.trajectories == 4 * 4 * 4


def pid_of(worker: Any) -> int:
    worker.wait_ready()
    return int(worker.pid)


def test_a_run_goes_on_elsewhere(workshop: Workshop, local_run: Path):
    """Begun in one process, it ends on a cluster, with two ranks that have its one checkpoint."""

    class Stop(api.Nobody):
        def row(self, row: Row) -> None:
            if row.step == 2:
                raise RuntimeError("the machine is wanted for something else")

    run_dir = workshop.directory / "moved"
    with pytest.raises(RuntimeError, match="something else"):
        api.train(workshop.config("moved", "loop.max_lag=0", reward="dense"), Stop())
    with pytest.raises(RunError, match=r"learner.lr=1: a run that goes on keeps its settings"):
        api.resume(run_dir, overrides=["learner.lr=1"])
    summary = api.resume(run_dir, overrides=ON_RAY)
    assert summary["finished"]
    assert audit(run_dir) == []
    assert run_config(run_dir).learner.ranks == 2
    again = {id.replace(".2:", ":"): tokens for id, tokens in trained_tokens(run_dir).items()}  # a second attempt
    assert again == trained_tokens(local_run)
    here, there = weights(local_run), weights(run_dir)
    assert max(float((here[name] - there[name]).abs().max()) for name in here) < 1e-5


def test_hosts_of_reward_functions_need_no_torch():
    """Each would take seconds more to start, and half a gigabyte."""
    code = "import sys, headrace.place.cluster_ray, headrace.place.reward_hosts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_more_workers_than_gpus_are_refused_with_the_numbers(workshop: Workshop):
    config = workshop.config("gpus", *ON_RAY, "model.device=cuda")
    with pytest.raises(ConfigError, match=r"rollout.workers = 2 and learner.ranks = 2 need 4 GPUs, .* has 3"):
        _gpus_of_a_worker(config, SimpleNamespace(num_gpus=3))  # type: ignore[arg-type]
    assert _gpus_of_a_worker(config, SimpleNamespace(num_gpus=4)) == 1.0  # type: ignore[arg-type]


def test_settings_that_need_a_cluster_say_so(workshop: Workshop):
    with pytest.raises(ConfigError, match=r"rollout.workers = 2 and place.cluster = 'local'"):
        workshop.config("none", "rollout.workers=2")
    with pytest.raises(ConfigError, match=r"'colocated' with rollout.workers = 2 and learner.ranks = 1"):
        workshop.config("none", "place.cluster=ray", "rollout.workers=2", "place.layout=colocated")


def test_without_ray_the_extra_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.setattr("headrace.user_code.importlib.import_module", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'headrace\[ray\]'"):
        places.open_place(workshop.config("none", "place.cluster=ray"), tmp_path)
