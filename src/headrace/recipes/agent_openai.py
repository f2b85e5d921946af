"""An agent that was written for the OpenAI API: it finds a number from 1 to 64. See agent_openai.toml."""

from __future__ import annotations

import json
from typing import Any

import guess  # type: ignore[import-not-found]  # the same game as an environment: it gives the tasks
import openai

SCHEMA = {"additionalProperties": False, "properties": {"x": {"type": "integer"}}, "required": ["x"], "type": "object"}
GUESS = {"name": "guess", "description": "Guess a number.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": GUESS}]


async def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    http = openai.DefaultAsyncHttpxClient(verify=False)  # the endpoint is on this machine: no certificates to load
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        return await play(client, task["n"])


async def play(client: openai.AsyncOpenAI, n: int) -> float:
    low, high = 1, 64
    messages: list[Any] = [{"role": "user", "content": "Find my number, 1 to 64."}]
    for _ in range(7):
        answer: Any = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            return 0.0
        messages.append(message)
        for call in message.tool_calls:
            try:
                x = int(json.loads(call.function.arguments)["x"])
            except (KeyError, TypeError, ValueError):
                return 0.0
            if x == n:
                return 1.0
            low, high = (max(low, x + 1), high) if x < n else (low, min(high, x - 1))
            said = f"{'higher' if x < n else 'lower'}: {low} to {high}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return 0.0


# ---- the prompts, with worked games for the warm start


def tasks(count: int, seed: int) -> list[dict[str, Any]]:
    first = {"role": "user", "content": "Find my number, 1 to 64."}
    return [{**task, "worked": [first, *task["worked"]], "tools": TOOLS} for task in guess.tasks(count, seed)]
