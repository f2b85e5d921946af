"""Episodes in a process of their own, as runs with a GPU or a cluster have them."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx
import psutil
import pytest
import torch
from chat_runs import ChatWorkshop

from headrace import api
from headrace.config_file import load_config
from headrace.errors import ConfigError, RunError
from headrace.ledger.journal import read_trajectories
from headrace.ledger.ledger import Amount, Ledger
from headrace.measured import Row
from headrace.place import place
from headrace.runs.audit import audit, books

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


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> ChatWorkshop:
    return ChatWorkshop(tmp_path_factory.mktemp("apart"))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run asks where its model is to decide where its episodes are."""
    monkeypatch.setattr(place, "resolve_device", lambda name: torch.device("cuda"))


def episode_processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if any("episode_process" in word for word in child.cmdline())]


class OnFirstRow(api.Watcher):
    def __init__(self, act: Any) -> None:
        self.act, self.notes = act, list[str]()

    def row(self, row: Row) -> None:
        if row.step == 1:
            self.act()

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_run_with_episodes_apart_ends_with_the_same_bits(
    workshop: ChatWorkshop, monkeypatch: pytest.MonkeyPatch, apart: None
):
    found, settings = list[int](), ("loop.max_lag=0", "model.exact=true", "loop.steps=2")
    looks = OnFirstRow(lambda: found.append(len(episode_processes())))
    api.train(workshop.config("apart", *settings), looks)
    monkeypatch.undo()
    api.train(workshop.config("here", *settings), looks)
    assert found == [1, 0]
    assert not episode_processes()
    one, other = (workshop.directory / name / "model" / "model.safetensors" for name in ("apart", "here"))
    assert one.read_bytes() == other.read_bytes()
    assert audit(workshop.directory / "apart") == []
    with Ledger.open(workshop.directory / "apart") as ledger:
        assert any(row.environment_s > 0 for row in ledger.rows())


@pytest.mark.slow
def test_an_agent_is_trained_in_turns(workshop: ChatWorkshop, apart: None):
    (workshop.directory / "agent.py").write_text(AGENT, encoding="utf-8")
    words = [word for word in workshop.overrides("agent", "loop.steps=2") if not word.startswith("episode.")]
    api.train(load_config(None, [*words, f"episode.agent={workshop.directory / 'agent.py'}:run"]))
    run = workshop.directory / "agent"
    assert audit(run) == []
    with Ledger.open(run) as ledger:
        trained = read_trajectories(ledger.connection, "t.state = 'trained'", ())
    assert {len(t.turns) for t in trained} == {2}


@pytest.mark.slow
def test_a_run_whose_process_of_episodes_was_killed_can_be_resumed(workshop: ChatWorkshop, apart: None):
    def kill() -> None:
        (process,) = episode_processes()
        os.kill(process.pid, signal.SIGKILL)

    run = workshop.directory / "killed"
    with pytest.raises(RunError, match=r"the process of the episodes has ended.*headrace resume"):
        api.train(workshop.config("killed", "loop.steps=3"), OnFirstRow(kill))
    assert audit(run, finished=False) == []
    assert api.resume(run)["finished"]
    assert audit(run) == []
    assert books(run).in_flight == Amount()


@pytest.mark.slow
def test_what_is_wrong_with_user_code_is_said_as_anywhere_else(workshop: ChatWorkshop, apart: None):
    config = workshop.config("wrong", reward="NoSuchThing")
    with pytest.raises(ConfigError, match=r"has no .*NoSuchThing"):
        api.train(config)
    assert not episode_processes()
    words = [word for word in workshop.overrides("nobody") if not word.startswith("episode.")]
    with pytest.raises(ConfigError, match="there is no command 'no-such-agent'"):
        api.train(load_config(None, [*words, "episode.agent=no-such-agent --now"]))
    with pytest.raises(ConfigError, match=r"expected host:port"):
        api.train(load_config(None, [*words, "episode.agent=true", "episode.listen=nowhere"]))


@pytest.mark.slow
def test_a_served_model_is_asked_in_another_process(workshop: ChatWorkshop, monkeypatch: pytest.MonkeyPatch):
    api.train(workshop.config("served", "loop.steps=1"))
    monkeypatch.setattr(place, "resolve_device", lambda name: torch.device("cuda"))
    found = list[Any]()

    class SeenError(Exception):
        """Enough was seen."""

    def on_ready(base_url: str) -> None:
        """Holds up the event loop of this process: only another one can answer."""
        found.append(httpx.get(f"{base_url}/models", headers={"Authorization": "Bearer k"}).json()["data"])
        raise SeenError

    with pytest.raises(SeenError):
        api.serve_run(workshop.directory / "served", on_ready, host="127.0.0.1", port=0, key="k")
    assert [model["id"] for (model,) in found] == ["served"]
    assert not episode_processes()
