"""Whole runs of agents: functions, commands and remote ones, those that fail, and what the books say of them."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import forked
import httpx
import openai
import pytest
from killed_episodes import finished, kept_turns, kill_in_mid_episode
from kills import train
from tiny_runs import select

import headrace
from headrace import api
from headrace.cli import app
from headrace.config_file import load_config
from headrace.errors import ConfigError
from headrace.insight.scenario import calibrate
from headrace.ledger.journal import read_trajectories
from headrace.ledger.ledger import Amount, Ledger
from headrace.policy.demo import build_demo
from headrace.runs.audit import audit, books
from headrace.serve.agent import run_command

# An agent of two turns, without any library. What it does besides is in the task.
AGENT = """
import json, os, sys, time, urllib.request

def ask(base_url, api_key, messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]

def run(task, base_url, api_key):
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(2):
        messages += [ask(base_url, api_key, messages), {"role": "user", "content": "And?"}]
        if task["kind"] == "crash":
            raise KeyError("a bug")
        if task["kind"] in ("hang", "slow"):
            time.sleep({"hang": 600, "slow": 0.2}[task["kind"]])
    while task["kind"] == "endless":
        messages += [ask(base_url, api_key, messages), {"role": "user", "content": "And?"}]
    return None if task["kind"] == "silent" else len(messages[1]["content"] or "") + len(messages[3]["content"] or "")

if __name__ == "__main__":
    task = json.loads(os.environ["HEADRACE_TASK"])
    assert task == json.load(sys.stdin)
    print("working")
    print(json.dumps({"reward": run(task, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])}))
"""
NUM_PROMPTS, SAMPLES = 12, 4


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("agents")
    build_demo(directory / "model", 0, chat=True)
    (directory / "agent.py").write_text(AGENT, encoding="utf-8")
    return directory


def settings(workshop: Path, name: str, agent: str, kinds: tuple[str, ...] = ("fine",), *more: str) -> list[str]:
    records = [{"id": f"p{i}", "prompt": f"Say {i}.", "kind": kinds[i % len(kinds)]} for i in range(NUM_PROMPTS)]
    source = workshop / f"{name}.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return [
        f"run.dir={workshop / name}",
        f"model.path={workshop / 'model'}",
        "model.device=cpu",
        "model.threads=1",
        f"prompts.source={source}",
        "prompts.eval_count=2",
        "prompts.select=in-order",
        f"episode.agent={agent}",
        f"rollout.samples={SAMPLES}",
        "rollout.max_new_tokens=6",
        "loop.steps=1",
        "loop.groups_per_step=4",
        *more,
    ]


def accounts(run_dir: Path) -> dict[str, int]:
    """Trajectories by what became of them."""
    return dict(select(run_dir, "select account, count(*) from trajectories group by account"))


@pytest.mark.parametrize("kind", ["function", "command"])
def test_an_agent_is_trained(workshop: Path, kind: str):
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(workshop / 'agent.py'))}"
    agent = f"{workshop / 'agent.py'}:run" if kind == "function" else command
    summary = headrace.train(load_config(None, settings(workshop, kind, agent)))
    assert summary["finished"]
    assert summary["score_before"] is not None
    assert summary["trained_tokens"] > 0
    assert audit(workshop / kind) == []
    known = calibrate(workshop / kind).workload
    assert known.reward_s.mean == 0  # from its last answer to its reward an agent's time is the environment's
    assert known.environment_s > 0


def command_line(*words: str) -> None:
    app(list(words))


def test_a_trained_agent_is_tried_at_the_endpoint_over_its_weights(workshop: Path):
    agent, run, log = f"{workshop / 'agent.py'}:run", str(workshop / "tried"), workshop / "served.log"
    headrace.train(load_config(None, settings(workshop, "tried", agent, ("fine",), "loop.steps=1")))
    process = forked.start(log, command_line, "serve", run, "--port", "0")
    try:
        while "OPENAI_API_KEY=" not in (log.read_text() if log.exists() else ""):
            assert process.is_alive(), log.read_text()
            process.join(0.05)
        said = dict(line.split("=", 1) for line in log.read_text().splitlines() if line.startswith("OPENAI_"))
        base_url, key = said["OPENAI_BASE_URL"], said["OPENAI_API_KEY"]
        client, chat = openai.OpenAI(base_url=base_url, api_key=key), [{"role": "user", "content": "Say 1."}]
        first: Any = client.chat.completions.create(model="m", messages=chat, max_tokens=4)  # type: ignore[arg-type]
        chat += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "And?"},
        ]
        again: Any = client.chat.completions.create(model="m", messages=chat, max_tokens=4)  # type: ignore[arg-type]
        assert first.usage.completion_tokens > 0
        assert again.usage.prompt_tokens > first.usage.total_tokens
        (model,) = httpx.get(f"{base_url}/models", headers={"Authorization": f"Bearer {key}"}).json()["data"]
        assert model["id"] == "tried"
        assert httpx.get(f"{base_url}/models", headers={"Authorization": "Bearer guessed"}).status_code == 401
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(20)
        assert process.exitcode == 0, log.read_text()
    finally:
        process.kill()
    assert audit(workshop / "tried") == []


def dropped(run_dir: Path) -> dict[str, int]:
    """Trajectories that were dropped, by reason."""
    query = "select credit, sum(trajectories) from transfers where credit like 'dropped:%' group by credit"
    return {credit.removeprefix("dropped:"): count for credit, count in select(run_dir, query)}


def test_what_fails_is_dropped_by_name_and_what_reaches_a_limit_is_scored(workshop: Path):
    kinds = ("fine", "crash", "silent", "endless", "hang", "fine", "fine", "fine", "fine", "fine", "fine", "fine")
    more = ("episode.timeout_s=1.5", "episode.max_turns=3", "loop.groups_per_step=3")
    config = load_config(None, settings(workshop, "failures", f"{workshop / 'agent.py'}:run", kinds, *more))
    summary = headrace.train(config)
    found = dropped(workshop / "failures")
    assert found["agent_error"] == 3 * SAMPLES  # crash, silent, hang
    assert found["no_signal"] >= SAMPLES  # endless: each has the reward of zero that a limit earns
    assert summary["trained_tokens"] > 0
    assert audit(workshop / "failures") == []


def test_an_episode_that_takes_too_long_is_scored_by_the_reward_function(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace.serve.agent.GRACE_S", 0.1)
    (workshop / "even.py").write_text("def score(completion):\n    return len(completion.text) % 7\n", encoding="utf-8")
    more = ("episode.max_s=0.8", f"reward.function={workshop / 'even.py'}:score")
    config = load_config(None, settings(workshop, "slow", f"{workshop / 'agent.py'}:run", ("hang",), *more))
    summary = headrace.train(config)
    assert summary["trained_tokens"] > 0
    assert "agent_error" not in dropped(workshop / "slow")
    assert audit(workshop / "slow") == []


@pytest.mark.slow
def test_an_interrupted_run_ends_while_turns_are_sampled_and_goes_on_later(workshop: Path):
    more = ("rollout.max_new_tokens=200", "loop.steps=2")
    given = settings(workshop, "interrupted", f"{workshop / 'agent.py'}:run", ("fine",), *more)
    run, log = workshop / "interrupted", workshop / "interrupted.log"
    process = forked.start(log, train, given)
    while process.is_alive() and not kept_turns(run):
        process.join(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 0, log.read_text()
    with Ledger.open(run) as ledger:
        assert len(ledger.rows()) < 2
    before = kept_turns(run)
    assert api.resume(run)["finished"]
    after = finished(run)
    for key, episode in before.items():
        turns = [after[key].token_ids[turn.start : turn.end].tolist() for turn in after[key].turns]
        for turn in episode.turns:
            assert episode.token_ids[turn.start : turn.end].tolist() in turns
    assert audit(run) == []


async def test_a_command_ends_with_all_its_processes(tmp_path: Path):
    """It has started a process of its own, and neither ends by itself."""
    mark = tmp_path / "mark"
    script = f"sleep 600 & echo $! > {mark}; wait"
    running = asyncio.create_task(run_command(f"sh -c {shlex.quote(script)}", {}, "", ""))
    while not (mark.exists() and mark.read_text().strip()):
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    async with asyncio.timeout(20):  # it was killed, which takes a moment
        while not has_ended(mark.read_text().strip()):
            await asyncio.sleep(0.01)


def has_ended(pid: str) -> bool:
    """It is gone, or nobody has looked at how it ended."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or ") Z " in status.read_text()


def test_a_command_ends_with_a_run_that_is_killed(workshop: Path):
    """Nothing else tells it: it asks for no turn."""
    mark = workshop / "mark"
    script = f"sleep 600 & echo $! > {mark}; wait"
    words = settings(workshop, "killed-asleep", f"sh -c {shlex.quote(script)}")
    process = forked.start(workshop / "killed-asleep.log", train, words)
    while process.is_alive() and not (mark.exists() and mark.read_text().strip()):
        time.sleep(0.02)
    process.kill()
    process.join()
    until = time.monotonic() + 20
    while not has_ended(mark.read_text().strip()):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("leave", ["sleep 600 &", "setsid sleep 20 &"])
async def test_what_a_command_leaves_behind_delays_nothing(leave: str, monkeypatch: pytest.MonkeyPatch):
    """Processes of its group are ended. One that left the group may keep the output open."""
    monkeypatch.setattr("headrace.serve.agent.GRACE_S", 0.5)
    script = f"{leave} echo '{{\"reward\": 0.25}}'"
    found = await asyncio.wait_for(run_command(f"sh -c {shlex.quote(script)}", {}, "", ""), 15)
    assert found == {"agent": 0.25}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "command"])
def test_no_turn_of_a_killed_run_is_sampled_again(workshop: Path, kind: str):
    """The agent is run again, and gets the answers that were kept."""
    script = workshop / "agent.py"
    agent = f"{script}:run" if kind == "function" else f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}"
    run, log = workshop / f"killed-{kind}", workshop / f"killed-{kind}.log"
    more = ("loop.steps=3", "recovery.every_steps=1")
    process = forked.start(log, train, settings(workshop, run.name, agent, ("slow",), *more))
    kill_in_mid_episode(process, run, 0.0, turns=1)
    before = kept_turns(run)
    assert before
    api.resume(run)
    later, num_checked = finished(run), 0
    for key, kept in before.items():
        if key in later:
            end = kept.turns[-1].end
            assert later[key].token_ids[:end].tolist() == kept.token_ids.tolist()
            assert later[key].logprobs[:end].tobytes() == kept.logprobs.tobytes()
            assert later[key].turns[0].text == kept.turns[0].text
            num_checked += 1
    assert num_checked
    assert audit(run) == []
    assert books(run).in_flight == Amount()
    assert "agent_error" not in books(run).dropped


async def test_remote_agents_pull_episodes_and_report_rewards(workshop: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_KEY", "secret")
    notes: list[str] = []

    class Ears(api.Watcher):
        def note(self, text: str) -> None:
            notes.append(text)

    config = load_config(None, settings(workshop, "remote", "remote"))
    training = asyncio.create_task(asyncio.to_thread(headrace.train, config, Ears()))

    async def agent(client: httpx.AsyncClient, root: str) -> None:
        while True:
            try:
                pulled = await client.post(f"{root}/episodes", headers={"Authorization": "Bearer secret"})
            except httpx.TransportError:  # the run is over, and its endpoint gone
                return
            if pulled.status_code == 410:
                return
            assert pulled.status_code == 200, pulled.text
            episode: dict[str, Any] = pulled.json()
            headers = {"Authorization": f"Bearer {episode['api_key']}"}
            asked = {"model": "m", "messages": [{"role": "user", "content": episode["task"]["prompt"]}]}
            answer = await client.post(f"{episode['base_url']}/chat/completions", json=asked, headers=headers)
            reward = {"reward": {"length": len(answer.json()["choices"][0]["message"]["content"]), "rest": 0.5}}
            assert (await client.post(f"{root}/episodes", headers=headers)).status_code == 401
            done = await client.post(f"{root}/episodes/{episode['id']}/reward", json=reward, headers=headers)
            assert done.status_code == 200

    while not notes and not training.done():
        await asyncio.sleep(0.05)
    root = notes[0].split(" at ")[1].split("/episodes")[0]
    async with httpx.AsyncClient(timeout=60) as client:
        agents = [asyncio.create_task(agent(client, root)) for _ in range(3)]
        await asyncio.wait([training, *agents], return_when=asyncio.FIRST_EXCEPTION)
        await asyncio.gather(*agents)
    summary = await training
    assert summary["trained_tokens"] > 0
    assert audit(workshop / "remote") == []


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("nowhere.py:run", "there is no file"),
        ("agent.py:ask_nobody", "has no function"),
        ("'never closed", "cannot be started: No closing quotation"),
        ("no-such-command --now", "cannot be started: there is no command 'no-such-command'"),
    ],
)
def test_an_agent_that_cannot_run_is_told_at_once(workshop: Path, agent: str, message: str):
    agent = agent.replace("agent.py", str(workshop / "agent.py"))
    with pytest.raises(ConfigError, match=message):
        headrace.train(load_config(None, settings(workshop, "wrong", agent, ("fine",), "run.overwrite=true")))


def test_a_cache_that_cannot_hold_a_whole_episode_is_told_at_once(workshop: Path):
    small = settings(
        workshop, "small", f"{workshop / 'agent.py'}:run", ("fine",), "rollout.kv_tokens=64", "prompts.max_tokens=50"
    )
    with pytest.raises(ConfigError, match=r"one sequence may need .*lower episode.max_tokens"):
        headrace.train(load_config(None, small))


def test_an_episode_has_an_environment_or_an_agent():
    with pytest.raises(ConfigError, match="leave one empty"):
        load_config(None, ["episode.agent=a.py:run", "episode.environment=a.py:Guess"])


def test_self_play_credits_each_player_with_what_it_won(tmp_path: Path):
    """The recipe in small: both players are the policy, and their rewards always add up to one."""
    recipe = Path(__file__).parents[2] / "src" / "headrace" / "recipes" / "self_play.toml"
    small = [
        "prompts.count=60",
        "prompts.eval_count=4",
        "warmstart.steps=20",
        "warmstart.lr=1e-2",
        "warmstart.examples=8",
    ]
    small += ["loop.steps=1", "loop.groups_per_step=2", "model.threads=1", f"run.dir={tmp_path / 'run'}"]
    summary = headrace.train(load_config(recipe, small))
    assert summary["trained_tokens"] > 0
    with Ledger.open(tmp_path / "run") as ledger:
        games = read_trajectories(ledger.connection, "t.state = 'trained'", ())
    assert {game.reward for game in games} == {1.0}
    assert {turn.agent for game in games for turn in game.turns} == {"first", "second"}
    assert len({game.reward_parts["first"] for game in games}) == 2
