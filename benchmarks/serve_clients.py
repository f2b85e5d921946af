"""The clients of serve.py, in a process of their own: `python serve_clients.py PORT KEY ...`, one chat for each key."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

TURNS = 3
REPLY = "And then?"


async def chat(port: int, key: str) -> int:
    """A chat of a few turns on one connection; returns the tokens that were sampled for it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[Any] = [{"role": "user", "content": f"I am {key}. What now?"}]
    num_tokens = 0
    for _ in range(TURNS):
        body = json.dumps({"model": "m", "messages": messages}).encode()
        head = f"POST /sessions/{key}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length"))
        found = json.loads(await reader.readexactly(length))
        num_tokens += found["usage"]["completion_tokens"]
        messages += [found["choices"][0]["message"], {"role": "user", "content": REPLY}]
    writer.close()
    return num_tokens


async def main(port: int, keys: list[str]) -> None:
    began_s = time.perf_counter()
    num_tokens = sum(await asyncio.gather(*(chat(port, key) for key in keys)))
    print(num_tokens, time.perf_counter() - began_s)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
