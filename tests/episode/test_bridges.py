"""Environments of other libraries, each through a file in recipes/."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from headrace.errors import UnavailableError
from headrace.reward.environment import environment_function
from headrace.types import Command, Prompt

RECIPES = Path(__file__).parents[2] / "src" / "headrace" / "recipes"

SERVER = """
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")
stock = {"apples": 3}

@server.tool()
def take(what: str, count: int = 1) -> str:
    '''Take some of a thing.'''
    if what not in stock:
        raise ToolError(f"there are no {what}")
    stock[what] -= count
    return f"{stock[what]} {what} left"

server.run()
"""
CLERK = f"""
import sys
sys.path.insert(0, {str(RECIPES)!r})
from headrace import Done
from mcp_tools import StdioServerParameters, tools_of

class Clerk(tools_of(StdioServerParameters(command=sys.executable, args=[SERVER]))):
    def start(self, prompt): return "Take two apples."
    def reply(self, text): raise Done("bye", reward=1.0)
"""

RIDDLES = """
import sys
import uvicorn
from fastapi import FastAPI
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field

class Guess(Action):
    word: str = Field(min_length=2)

class Numbers(Action):
    a: int
    b: int = 0

class Seen(Observation):
    text: str

class Riddle(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()
    def reset(self, seed=None, animal="cat"):
        self.animal = animal
        return Seen(text=f"An animal of {len(animal)} letters.")
    def step(self, action):
        if action.word == self.animal:
            return Seen(text="right", done=True, reward=True)
        if action.word == "unicorn":
            raise KeyError("it is not in the book")
        return Seen(text=f"no {action.word}", reward=-0.25 if action.word == "dog" else None)

class Total(Observation):
    total: int
    rest: int

class Sum(Environment):
    state = State()
    def reset(self):
        self.total = 0
        return Total(total=0, rest=9)
    def step(self, action):
        self.total += action.a + action.b
        return Total(total=self.total, rest=9 - self.total, done=self.total >= 9)

app = FastAPI()
app.mount("/riddle", create_app(Riddle, Guess, Seen, max_concurrent_envs=2))
app.mount("/sum", create_app(Sum, Numbers, Total))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


def prompt(**fields: Any) -> Prompt:
    return Prompt(id="p", text="?", token_ids=None, fields=fields)  # type: ignore[arg-type]


class Host:
    """One environment, asked as a worker process asks it."""

    def __init__(self, spec: str) -> None:
        self.function = environment_function(spec)

    async def do(self, do: str, given: Any = None) -> Any:
        found = self.function.call(Command(episode="e", do=do, given=given))
        return await found if hasattr(found, "__await__") else found

    async def say(self, text: str) -> Any:
        return await self.do("turn", {"text": text})


def needs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


async def test_a_game_of_textarena():
    needs("textarena")
    host = Host(f"{RECIPES / 'textarena_game.py'}:Game")
    began = (await host.do("start", prompt(seed=1)))["said"]
    assert "number between 1 and 20" in began
    low, high, said = 1, 20, {}
    while not said.get("done"):
        middle = (low + high) // 2
        said = await host.say(f"[{middle}]")
        assert "[GAME] You are" not in said["replies"][0], "only what is new"
        low, high = (low, middle - 1) if "lower" in said["replies"][0] else (middle + 1, high)
    assert said["reward"] == 1.0


async def test_a_world_of_gymnasium():
    needs("gymnasium")
    host = Host(f"{RECIPES / 'gymnasium_world.py'}:World")
    began = (await host.do("start", prompt(seed=1)))["said"]
    assert began.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert (await host.say("fly"))["replies"] == ["error: say one of left, down, right, up"]
    for way in ("down", "down", "right", "Right", "down"):
        said = await host.say(way)
        assert not said["done"]
    assert said["state"] == "SFFF\nFHFH\nFFFH\nHF[F]G"
    said = await host.say("right")
    assert (said["done"], said["reward"]) == (True, 1.0)
    await host.do("start", prompt(seed=1))
    await host.say("right")
    said = await host.say("down")
    assert (said["done"], said["reward"]) == (True, 0.0)
    await host.do("end")


def test_tools_of_an_mcp_server(tmp_path: Path):
    needs("mcp")
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")
    (tmp_path / "clerk.py").write_text(CLERK.replace("SERVER", repr(str(tmp_path / "server.py"))), encoding="utf-8")
    import_path = list(sys.path)
    try:
        host = Host(f"{tmp_path / 'clerk.py'}:Clerk")
    finally:
        sys.path[:] = import_path
    asyncio.run(check_the_shop(host))


async def check_the_shop(host: Host) -> None:
    (tool,) = (await host.do("describe"))["tools"]
    assert tool["function"]["name"] == "take"
    assert tool["function"]["description"] == "Take some of a thing."
    parameters = tool["function"]["parameters"]
    assert parameters["required"] == ["what"]
    assert parameters["properties"]["count"]["type"] == "integer"
    await host.do("start", prompt())
    calls = [["take", {"what": "apples", "count": 2}], ["take", {"what": "pears"}], ["take", {"some": 1}]]
    first, second, third = (await host.do("turn", {"calls": calls}))["replies"]
    assert first == "1 apples left"
    assert second.startswith("error: ")
    assert "there are no pears" in second
    assert "'take' cannot take these arguments" in third
    said = await host.say("done")
    assert said["reward"] == 1.0
    await host.do("end")


@pytest.fixture(scope="module")
def openenv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of OpenEnv, which wants a Python of its own: its mcp is an older one than ours."""
    python = os.environ.get("OPENENV_PYTHON")
    if python is None:
        pytest.skip("OPENENV_PYTHON names no Python with openenv (python -m venv DIR; DIR/bin/pip install openenv)")
    file = tmp_path_factory.mktemp("openenv") / "server.py"
    file.write_text(RIDDLES, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, patience = f"http://127.0.0.1:{port}", time.monotonic() + 60
    with subprocess.Popen([python, str(file), str(port)]) as server:
        try:
            while not answers(f"{url}/sum/schema"):
                assert server.poll() is None, "the server has ended"
                assert time.monotonic() < patience
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5):
            return True
    except URLError:
        return False


def world(tmp_path: Path, name: str, body: str) -> Host:
    """A subclass of the recipe's class, in a file of its own."""
    code = f"from headrace.recipes.openenv_world import OpenEnvWorld\nclass {name}(OpenEnvWorld):\n    {body}\n"
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    return Host(f"{tmp_path / name}.py:{name}")


async def test_a_text_environment_of_openenv(openenv: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENENV_URL", f"{openenv}/riddle")
    host = Host(f"{RECIPES / 'openenv_world.py'}:OpenEnvWorld")
    assert (await host.do("describe"))["tools"] == []
    began = await host.do("start", prompt(seed=1, animal="ant", answer="not for reset"))
    assert began["said"] == "?\nAn animal of 3 letters."
    said = await host.say("x")
    assert (said["replies"], said["done"]) == (["error: word: String should have at least 2 characters"], False)
    said = await host.say("cow")
    assert (said["replies"], said["reward"], said["done"]) == (["no cow"], None, False)
    assert (await host.say("dog"))["reward"] == -0.25
    said = await host.say("ant")
    assert (said["replies"], said["reward"], said["done"]) == (["right"], 1.0, True)
    await host.do("start", prompt(animal="bee"))  # another episode
    with pytest.raises(RuntimeError, match=r"EXECUTION_ERROR.*it is not in the book"):
        await host.say("unicorn")
    await host.do("end")


async def test_actions_of_openenv_that_are_no_text_are_said_as_json(openenv: str, tmp_path: Path):
    host = world(tmp_path, "Sum", f"url, shown = '{openenv}/sum', 'rest'")
    began = (await host.do("start", prompt()))["said"]
    assert began.startswith("?\n9\nSay each action as JSON of this schema: {")
    assert '"metadata"' not in began
    assert (await host.say("four"))["replies"][0].startswith("error: ")
    assert (await host.say("[4]"))["replies"] == ["error: data: Input should be a valid dictionary"]
    assert (await host.say('{"b": 4}'))["replies"] == ["error: a: Field required"]
    assert (await host.say('{"a": 2, "b": 2}'))["replies"] == ["5"]
    said = await host.say('{"a": 5}')
    assert (said["replies"], said["reward"], said["done"]) == (["0"], None, True), "no reward is not a reward of zero"
    await host.do("end")


async def test_a_server_of_openenv_that_is_full(openenv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.recipes.openenv_world.WAITS_S", (0.1, 0.3))
    first, second, third = (world(tmp_path, f"World{i}", f"url = '{openenv}/riddle'") for i in range(3))
    await first.do("start", prompt())
    await second.do("start", prompt())
    with pytest.raises(UnavailableError, match="is full"):
        await third.do("start", prompt())
    waiting = asyncio.create_task(third.do("start", prompt()))
    await first.do("end")
    assert (await waiting)["said"] == "?\nAn animal of 3 letters."
    await second.do("end")
    await third.do("end")


async def test_a_server_of_openenv_that_is_away(tmp_path: Path):
    needs("websockets")
    host = world(tmp_path, "Away", "url = 'http://127.0.0.1:9'")
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await host.do("start", prompt())
