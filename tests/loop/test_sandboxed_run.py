"""A run whose reward function attacks it: with reward.sandbox nothing of it reaches the run."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from chat_runs import ChatWorkshop
from hand_made import accounts
from needs import needs_sandbox
from tiny_runs import Workshop, play, select
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config_file import load_config
from headrace.errors import ConfigError, RewardError
from headrace.ledger.ledger import Ledger
from headrace.place import place
from headrace.reward.function import Setup
from headrace.reward.pool import isolated
from headrace.reward.scorer import Scorer
from headrace.runs.audit import audit, books
from headrace.runs.show import TrajectoryDetails
from headrace.user_code import load_function

pytestmark = needs_sandbox

# Each attack that does not fail is a reward of -100.
ATTACKER = """
import contextlib, json, os, pathlib, socket, sqlite3, sys
import headrace.sandbox
LEDGER = pathlib.Path({ledger!r})
KINDS = 8  # of texts, and two of them end or break the process

def score(completion):
    attacks = [
        lambda: os.truncate(LEDGER, 0),
        lambda: LEDGER.write_bytes(b"x"),
        lambda: LEDGER.read_bytes(),
        lambda: sqlite3.connect(f"file:{{LEDGER}}?mode=ro", uri=True).execute("SELECT 1 FROM accounts").fetchall(),
        lambda: (LEDGER.parent / "checkpoints").rmdir(),
        lambda: os.kill({pid}, 9),
        lambda: socket.socket(socket.AF_INET),
        lambda: pathlib.Path(__file__).write_text(""),
        lambda: os.environ["TOKEN"],
        lambda: pathlib.Path(__file__).with_name("prompts.jsonl").read_text(),
        lambda: headrace.sandbox.run("1"),
    ]
    for number, attack in enumerate(attacks):
        try:
            attack()
        except (OSError, KeyError, sqlite3.OperationalError, headrace.errors.SandboxError):
            continue
        return -100.0
    for pid in (os.getppid(), 1, -1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    os.ftruncate(1, 0) if os.path.isfile("/proc/self/fd/1") else None
    kind = sum(map(ord, completion.text)) % KINDS
    if kind == 1:
        json.dumps = lambda *_, **__: "nonsense"
    if kind == 2:
        os._exit(9)
    print("judged", len(completion.text))
    return sum(map(ord, completion.text)) % 97 / 97
"""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("shop"), "reward.sandbox=true", "reward.retries=0", "reward.cache=false")


async def test_a_run_goes_on_while_its_reward_attacks_it(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = workshop.directory / "attacked"
    code = ATTACKER.format(ledger=str(run_dir / "ledger.sqlite"), pid=os.getpid())
    (workshop.directory / "attacker.py").write_text(code)
    monkeypatch.setenv("TOKEN", "secret")
    config = workshop.config("attacked", *workshop.settings, "loop.steps=2")
    function = f"{workshop.directory}/attacker.py:score"
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"function": function})})
    await play(config)
    assert (workshop.directory / "attacker.py").read_text() == code
    with Ledger.open(run_dir) as ledger:
        books = ledger.totals()
        assert len(ledger.rows()) == 2
        assert sum(tokens for tokens, _ in accounts(ledger).values()) == 0
    assert books.trained.trajectories > 0
    rewards = [reward for (reward,) in select(run_dir, "SELECT reward FROM trajectories WHERE reward IS NOT NULL")]
    assert min(rewards) >= 0.0, "an attack came through"
    failed = select(run_dir, "SELECT id FROM trajectories WHERE drop_reason = 'reward_error'")
    assert failed, "broken replies and ended processes are failures"
    said = [whole.verdict_failure for (id,) in failed if (whole := TrajectoryDetails(run_dir, id).whole)]
    assert all("the worker process" in text for text in said), said
    assert any("exit code 9" in text for text in said)
    assert any("no verdict" in text for text in said)
    (id,) = select(run_dir, "SELECT id FROM trajectories WHERE state = 'trained'")[0]
    whole = TrajectoryDetails(run_dir, id).whole
    assert whole is not None
    assert whole.verdict_output == f"judged {len(whole.text)}\n"
    assert whole.verdict_s > 0.0
    shown = " ".join(CliRunner().invoke(app, ["show", str(run_dir), "--trajectory", id]).output.split())
    assert f"printed by the reward function judged {len(whole.text)}" in shown
    assert "verdict after " in shown
    failure = CliRunner().invoke(app, ["show", str(run_dir), "--trajectory", failed[0][0]]).output
    assert "why there is no reward" in failure


WORLD = """
from types import SimpleNamespace
import attacker
from headrace import Done

attacker.KINDS = 16  # a process that ends takes other environments with it

class World:
    def start(self, prompt):
        return "attack"

    def reply(self, text):
        raise Done("over", reward=attacker.score(SimpleNamespace(text=text)))
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
async def test_a_run_goes_on_while_its_environment_attacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Also if the episodes are in a process of their own, as they are with a GPU."""
    monkeypatch.setattr(place, "resolve_device", lambda name: torch.device(device))
    workshop, run_dir = ChatWorkshop(tmp_path), tmp_path / "attacked"
    (tmp_path / "attacker.py").write_text(ATTACKER.format(ledger=str(run_dir / "ledger.sqlite"), pid=os.getpid()))
    (tmp_path / "world.py").write_text(WORLD)
    monkeypatch.setenv("TOKEN", "secret")
    config = workshop.config("attacked", "reward.sandbox=true", "rollout.max_running=16", "loop.steps=3")
    section = config.episode.model_copy(update={"environment": f"{tmp_path}/world.py:World"})
    await play(config.model_copy(update={"episode": section}))
    assert audit(run_dir) == []
    rewards = [reward for (reward,) in select(run_dir, "SELECT reward FROM trajectories WHERE reward IS NOT NULL")]
    assert rewards
    assert min(rewards) >= 0.0, "an attack came through"
    assert books(run_dir).dropped["env_error"].tokens > 0, "broken replies and ended processes are failures"


async def test_what_a_sandboxed_worker_cannot_be(workshop: Workshop) -> None:
    with pytest.raises(ConfigError, match="the training process itself"):
        load_config(None, ["reward.sandbox=true", "reward.workers=0"])
    section = workshop.config("none", *workshop.settings).reward
    with pytest.raises(RewardError, match="cannot be put there"):
        Scorer(section, max_new_tokens=9, function=lambda completion: 1.0)
    section = section.model_copy(update={"function": f"{workshop.directory}/missing.py:score"})
    scorer = Scorer(section, max_new_tokens=9)
    with pytest.raises(RewardError, match=r"there is no file .*missing.py"):
        await scorer.start()


def test_a_folder_that_a_users_file_was_loaded_from_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Prompts may come from a function in a file; what lies beside it is nobody's business in the sandbox."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "prompts.py").write_text("def tasks(count, seed):\n    return []\n", encoding="utf-8")
    (tmp_path / "secret.txt").write_text("x", encoding="utf-8")
    load_function(f"{tmp_path / 'prompts.py'}:tasks", "prompts.source", ConfigError)
    assert str(tmp_path) in sys.path
    with isolated(["true"], Setup(function="exact", timeout_s=1.0, sandbox=True)) as (command, _):
        shown = {path for option, path in pairwise(command) if option.startswith("--ro-bind")}
        assert str(tmp_path / "prompts.py") in shown
        assert shown.isdisjoint({str(tmp_path), str(tmp_path / "secret.txt")})
