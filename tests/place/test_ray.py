"""The same loop with its engines and its learner in other processes, on a Ray cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from chat_runs import ChatWorkshop
from ray_runs import IN_TURNS, ON_RAY, assert_same_result, begun_here, kill, train, trained_tokens
from tiny_runs import Workshop, rows_of, weights

from headrace import api
from headrace.config_file import load_config
from headrace.errors import ConfigError, MissingExtraError, RewardError, RunError
from headrace.ledger.files import run_config, scale
from headrace.ledger.journal import read_trajectories
from headrace.ledger.ledger import Ledger
from headrace.measured import Row
from headrace.place.place import Place, _gpus_of_a_worker, open_place
from headrace.runs.audit import audit, books
from headrace.user_code import gpus_said

AGENT = """
import json, urllib.request

def run(task, base_url, api_key):
    messages, headers = [{"role": "user", "content": task["prompt"]}], {"Authorization": f"Bearer {api_key}"}
    for _ in range(2):
        body = json.dumps({"model": "m", "messages": messages}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as reply:
            messages += [json.load(reply)["choices"][0]["message"], {"role": "user", "content": "And?"}]
    return sum(map(ord, json.dumps(messages))) % 97 / 97
"""

pytestmark = pytest.mark.usefixtures("local_ray")


def test_strictly_on_policy_the_same_answers_are_trained_on_with_the_same_result(workshop: Workshop, local_run: Path):
    run = train(workshop, "ray", *ON_RAY, "loop.max_lag=0")
    assert audit(run.run_dir) == []
    assert_same_result(run.run_dir, local_run)
    start, here = weights_of_model(workshop), weights(local_run)
    assert max(float((here[name] - start[name]).abs().max()) for name in here) > 1e-4  # it was trained at all
    with Ledger.open(run.run_dir) as ledger:
        workers = {worker for (worker,) in ledger.read("SELECT worker FROM spans WHERE stage = 'rollout'")}
        spans = ledger.read("SELECT detail FROM spans WHERE stage = 'publish'")
        details = {detail.split(",")[0] for (detail,) in spans}
    assert workers == {"rollout-0", "rollout-1"}
    assert {"gather", "encode", "transfer", "apply"} <= details


def weights_of_model(workshop: Workshop) -> dict[str, torch.Tensor]:
    (workshop.directory / "start").mkdir(exist_ok=True)
    link = workshop.directory / "start" / "model"
    if not link.exists():
        link.symlink_to(workshop.model)
    return weights(workshop.directory / "start")


def test_only_a_cluster_with_devices_of_their_own_gets_more_workers(local_run: Path):
    with pytest.raises(RunError, match=r"place.cluster = 'local'.* changes only on a cluster"):
        scale(local_run, 3)


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_in_turns_on_the_same_devices(workshop: Workshop, local_run: Path):
    """Begun in one process, it ends on a cluster, with two ranks that have its one checkpoint."""
    run_dir = begun_here(workshop, "moved", stop_at=1)
    assert api.resume(run_dir, overrides=[*ON_RAY, *IN_TURNS])["finished"]
    assert audit(run_dir) == []
    assert run_config(run_dir).learner.mesh == (1, 2)
    assert_same_result(run_dir, local_run, attempt=2)


@pytest.mark.slow
def test_without_a_rollout_worker_and_then_without_the_learner_the_run_goes_on(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    left = [1, 3]

    def on_row(place: Place, row: Row) -> None:
        if row.step not in left:
            return
        left.remove(row.step)
        if row.step == 1:
            kill(place.pool.workers[0])
        else:
            place.ranks.next_logprob(np.array([5]), 6)  # when they are done with what they were at
            kill(place.ranks.first)

    run = train(
        workshop, "kill", "place.cluster=ray", "loop.max_lag=1", "loop.steps=4",
        "recovery.every_steps=4", "publish.encoding=delta", on_row=on_row, monkeypatch=monkeypatch,
    )  # fmt: skip
    assert [row.step for row in run.rows] == [1, 2, 3, 4]
    assert audit(run.run_dir) == []
    assert any("rollout-0 is lost" in note for note in run.notes)
    assert any("takes part" in note for note in run.notes)
    assert any("learner-0 is lost" in note and "goes on from its last checkpoint" in note for note in run.notes)
    assert max(row.lag_max for row in run.rows) <= 1
    assert len(trained_tokens(run.run_dir)) == 4 * 4 * 4
    assert books(run.run_dir).trained.trajectories == 4 * 4 * 4


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> ChatWorkshop:
    return ChatWorkshop(tmp_path_factory.mktemp("chats"))


@pytest.mark.slow
def test_an_environment_that_began_here_goes_on_with_engines_elsewhere(chats: ChatWorkshop):
    """It stays beside the loop; each of its turns is sampled by a rollout worker."""

    class Stop(api.Watcher):
        def row(self, row: Row) -> None:
            raise RuntimeError("the machine is wanted for something else")

    run_dir = chats.directory / "environment"
    with pytest.raises(RuntimeError, match="something else"):
        api.train(chats.config(run_dir.name, "loop.steps=2"), Stop())
    summary = api.resume(run_dir, overrides=["place.cluster=ray"])
    assert summary["finished"]
    assert_trained_on_turns(run_dir, 3)


@pytest.mark.slow
def test_an_agent_is_trained_in_turns_on_the_same_devices(chats: ChatWorkshop):
    (chats.directory / "agent.py").write_text(AGENT, encoding="utf-8")
    words = [word for word in chats.overrides("agent", "loop.steps=2") if not word.startswith("episode.")]
    agent = f"episode.agent={chats.directory / 'agent.py'}:run"
    api.train(load_config(None, [*words, agent, "place.cluster=ray", "place.layout=colocated"]))
    assert_trained_on_turns(chats.directory / "agent", 2)


def assert_trained_on_turns(run_dir: Path, num_turns: int) -> None:
    assert audit(run_dir) == []
    assert books(run_dir).trained.trajectories == 2 * 4 * 4
    with Ledger.open(run_dir) as ledger:
        workers = {worker for (worker,) in ledger.read("SELECT worker FROM spans WHERE stage = 'rollout'")}
        trained = read_trajectories(ledger.connection, "t.state = 'trained' AND t.trained_step = 2", ())
    assert workers & {"rollout-0", "worker-0"}
    assert {len(t.turns) for t in trained} == {num_turns}


def test_hosts_of_reward_functions_need_no_torch():
    """Each would take seconds more to start, and half a gigabyte."""
    code = "import sys, headrace.place.cluster_ray, headrace.place.reward_hosts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_more_workers_than_gpus_are_refused_with_the_numbers(workshop: Workshop):
    config = workshop.config("gpus", *ON_RAY, "model.device=cuda")
    with pytest.raises(ConfigError, match=r"rollout.workers = 2 and learner.ranks = 2 need 4 GPUs, .* has 3"):
        _gpus_of_a_worker(config, SimpleNamespace(num_gpus=3))  # type: ignore[arg-type]
    assert _gpus_of_a_worker(config, SimpleNamespace(num_gpus=4)) == 1.0  # type: ignore[arg-type]


RATER = """
import os

GPUS = 0.5

def score(completion):
    return 1.0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "0" else 0.0
"""


@pytest.mark.slow
def test_processes_of_a_reward_function_get_the_gpus_that_it_asks_for(workshop: Workshop, tmp_path: Path):
    (tmp_path / "rater.py").write_text(RATER)
    rated = ("place.cluster=ray", f"reward.function={tmp_path}/rater.py:score")
    with pytest.raises(ConfigError, match=r"^reward.workers = 3 need 1.5 GPUs, and the cluster has 1: use fewer"):
        api.train(workshop.config("too-many-raters", *rated, "reward.workers=3"))
    settings = ("reward.workers=2", "buffer.drop=nothing", "loop.steps=2")
    summary = api.train(workshop.config("raters", *rated, *settings))
    assert [row.reward_mean for row in rows_of(workshop.directory / "raters")] == [1.0, 1.0]
    assert summary["finished"]


@pytest.mark.parametrize("value", ["1.5", "-1", "os.cpu_count()", "'one'"])
def test_gpus_are_a_share_or_a_number(tmp_path: Path, value: str):
    (tmp_path / "rater.py").write_text(f"GPUS = 2\nGPUS = {value}\n")
    with pytest.raises(RewardError, match=r"rater.py: GPUS = .* is neither a share of a GPU, such as 0.5, nor"):
        gpus_said(f"{tmp_path}/rater.py:score")
    (tmp_path / "other.py").write_text("GPUS = 2.0\n")
    (tmp_path / "typed.py").write_text("GPUS: float\nGPUS: float = 0.5\n")
    (tmp_path / "broken.py").write_text("GPUS = 1\ndef score(:\n")
    specs = (*(f"{tmp_path}/{name}.py:score" for name in ("other", "typed", "broken", "none")), "exact", "m:score", "")
    assert [gpus_said(spec) for spec in specs] == [2, 0.5, 0, 0, 0, 0, 0]


def test_settings_that_need_a_cluster_say_so(workshop: Workshop):
    with pytest.raises(ConfigError, match=r"rollout.workers = 2 and place.cluster = 'local'"):
        workshop.config("none", "rollout.workers=2")
    with pytest.raises(ConfigError, match=r"'colocated' with rollout.workers = 2 and learner.ranks = 1"):
        workshop.config("none", "place.cluster=ray", "rollout.workers=2", "place.layout=colocated")


def test_without_ray_the_extra_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.setattr("headrace.user_code.importlib.import_module", missing)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[ray\]'"):
        open_place(workshop.config("none", "place.cluster=ray"), tmp_path)
