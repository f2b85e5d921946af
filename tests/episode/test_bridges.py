"""Environments of other libraries, each through a file in recipes/."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

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
