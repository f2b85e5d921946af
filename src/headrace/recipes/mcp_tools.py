"""The tools of an MCP server as those of an environment. Needs pip install mcp (2.3 was tried).

    class Clerk(tools_of(StdioServerParameters(command="python", args=["server.py"]))):    # or "http://host/mcp"
        def start(self, prompt): return prompt.fields["question"]
        def reward(self): ...

Each episode has a session of its own.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Annotated, Any

from mcp import Client, StdioServerParameters  # noqa: F401  # the second is for those who import this
from pydantic import WithJsonSchema

from headrace import UnavailableError


def tools_of(server: Any) -> type:
    """A class with a method for each tool of the server, which is asked for them now."""

    async def listed() -> list[Any]:
        async with Client(server) as client:
            return list((await client.list_tools()).tools)

    tools = {tool.name: _method(tool) for tool in asyncio.run(listed())}
    return type("Tools", (McpSession,), {"server": server, **tools})


class McpSession:
    """A connection to `server`, made with the first call. It lives in a task of its own, as MCP demands."""

    server: Any
    _holding: asyncio.Task[None] | None = None

    async def _call(self, name: str, given: dict[str, Any]) -> str:
        if self._holding is None:
            self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
            self._over = asyncio.Event()
            self._holding = asyncio.create_task(self._hold())
        result = await (await self._client).call_tool(name, given)
        text = "\n".join(getattr(part, "text", "") for part in result.content)
        if result.is_error:
            raise ValueError(text)  # told to the policy
        return text

    async def _hold(self) -> None:
        try:
            async with Client(self.server) as client:
                self._client.set_result(client)
                await self._over.wait()
        except Exception as error:
            if not self._client.done():
                self._client.set_exception(UnavailableError(f"the MCP server cannot be reached: {error}"))

    async def close(self) -> None:
        if self._holding is not None:
            self._over.set()
            await self._holding


def _method(tool: Any) -> Any:
    schema, needed = tool.input_schema.get("properties", {}), tool.input_schema.get("required", ())

    async def method(self: McpSession, **given: Any) -> str:
        return await self._call(tool.name, given)

    method.__name__, method.__doc__ = tool.name, tool.description or tool.name
    method.__annotations__ = {name: Annotated[Any, WithJsonSchema(about)] for name, about in schema.items()}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name in sorted(schema, key=lambda name: name not in needed):
        default = inspect.Parameter.empty if name in needed else schema[name].get("default")
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method
