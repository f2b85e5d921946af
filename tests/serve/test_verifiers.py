"""Environments of verifiers, in a Python of their own, in front of the endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import TEXT, House, add, assert_trained_once, house

RECIPES = Path(__file__).parents[2] / "src" / "headrace" / "recipes"
TASKS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Task(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

class Questions(vf.Taskset[Task]):
    def load(self):
        for n in range(9):
            yield Task(Data(prompt=f"Say {n}.", answer=str(n)), self.config.task)
"""
SINGLE = f"""{TASKS}
__all__ = ["Questions"]
"""
SEVERAL = f"""{TASKS}
class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Talk(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            for word in ("again", "once more"):
                await interaction.turn(word)

__all__ = ["Questions", "Talk"]
"""
WITH_A_TOOL = f"""{TASKS}
class Sums(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        'Add two numbers.'
        return str(a + b)

class Calculation(Task):
    @classmethod
    def toolsets(cls, config):
        return [Sums(vf.ToolsetConfig())]

    @vf.reward
    async def sums(self, trace: vf.Trace) -> float:
        return float(sum(int(m.content) for m in trace.messages if m.role == "tool"))

class Sheet(vf.Taskset[Calculation]):
    def load(self):
        for n in range(9):
            yield Calculation(Data(prompt=f"Add to {{n}}.", answer=str(n)), self.config.task)

__all__ = ["Sheet"]
if __name__ == "__main__":
    Sums.run()
"""
SETTINGS = """
[env.taskset]
id = "{id}"

[env.{role}]
harness = {{id = "null"}}
runtime = {{type = "subprocess"}}
"""
PLAIN = """
import asyncio, json, sys
from verifiers_agent import run
print(json.dumps(asyncio.run(run({"number": 4}, *sys.argv[1:]))))
"""
WITH_TOKENS = """
import asyncio, json, os, sys
import verifiers.v1 as vf
from verifiers_agent import _environment, _task

async def main(base_url, key, tokenizer):
    os.environ["KEY"] = key
    client = vf.TrainClientConfig(base_url=base_url, api_key_var="KEY", renderer_model_name=tokenizer)
    context = vf.ModelContext(model="tiny", client=client, sampling=vf.Sampling(temperature=1.0, max_tokens=30))
    episode = await _environment()[1].run_episode(_task(3), context)
    (trace,) = episode.traces
    (node,) = (node for node in trace.nodes if node.sampled)
    found = [id for id, is_sampled in zip(node.token_ids, node.mask) if is_sampled]
    return {"ok": episode.ok, "token_ids": found, "logprobs": [x for x in node.logprobs if x]}

print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
"""


async def said(home: House, tmp_path: Path, tasks: str, role: str, program: str, *given: str) -> dict[str, Any]:
    """What a program prints that has the recipe and the taskset beside it."""
    python = os.environ.get("VERIFIERS_PYTHON")
    if python is None:
        pytest.skip(
            "VERIFIERS_PYTHON names no Python with verifiers (python -m venv DIR; DIR/bin/pip install verifiers)"
        )
    (tmp_path / "questions.py").write_text(tasks, encoding="utf-8")
    (tmp_path / "env.toml").write_text(SETTINGS.format(id="questions", role=role), encoding="utf-8")
    path = os.pathsep.join((str(tmp_path), str(RECIPES)))
    env = {**os.environ, "PYTHONPATH": path, "VERIFIERS_ENV": str(tmp_path / "env.toml")}
    async with home.front.listening("127.0.0.1", 0):
        command = (python, "-c", program, home.front.base_url, *given)
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
        printed, _ = await process.communicate()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


async def test_turns_of_a_verifiers_environment_are_one_trajectory(tmp_path: Path):
    async with house(script=lambda turn: TEXT) as home:
        session = home.open("key")
        parts = await said(home, tmp_path, SEVERAL, "player", PLAIN, "key")
        assert_trained_once(home, num_turns=3)
        last = session.trajectory.turns[-1]
        text = home.policy.tokenizer.decode(
            session.trajectory.token_ids[last.start : last.end], skip_special_tokens=True
        )
        assert parts == {"length": 2.0 * len(text.strip()), "turns": 3.0}


async def test_the_training_client_of_verifiers_gets_tokens_and_logprobs(tmp_path: Path):
    async with house(script=lambda turn: TEXT) as home:
        session = home.open("key")
        home.policy.tokenizer.save_pretrained(tmp_path / "tokenizer")
        found = await said(home, tmp_path, SINGLE, "agent", WITH_TOKENS, "key", str(tmp_path / "tokenizer"))
        assert found["ok"]
        trajectory = session.trajectory
        assert found["token_ids"] == trajectory.token_ids[trajectory.sampled].tolist()
        kept = trajectory.logprobs[trajectory.sampled]
        np.testing.assert_allclose(found["logprobs"], kept[kept != 0], rtol=1e-6)


async def test_the_policy_calls_tools_of_a_verifiers_taskset(tmp_path: Path):
    async with house(num_calls=2) as home:
        session = home.open("key")
        parts = await said(home, tmp_path, WITH_A_TOOL, "agent", PLAIN, "key")
        assert_trained_once(home, num_turns=3)
        text = home.policy.tokenizer.decode(session.trajectory.token_ids)
        called = re.findall(r'"arguments": ?(\{.*?\})', text)
        assert parts["turns"] == 3.0
        assert parts["sums"] == sum(int(add(arguments)) for arguments in called[-2:])
