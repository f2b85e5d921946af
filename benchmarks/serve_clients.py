"""The clients of serve.py, in a process of their own: `python serve_clients.py PORT LEAST MOST KEY ...`, one chat for
each key; its answers have from LEAST to MOST tokens."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

TURNS = 3
REPLY = "And then?"


def length_of(key: str, turn: int, least: int, most: int) -> int:
    """Of an answer: the same for keys that end alike."""
    return random.Random(f"{key.rpartition('-')[2]} {turn}").randint(least, most)


async def chat(port: int, key: str, least: int, most: int) -> int:
    """A chat of a few turns on one connection; returns the tokens that were sampled for it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[Any] = [{"role": "user", "content": f"I am {key}. What now?"}]
    num_tokens = 0
    for turn in range(TURNS):
        asked = {"model": "m", "messages": messages, "max_tokens": length_of(key, turn, least, most)}
        body = json.dumps(asked).encode()
        head = f"POST /sessions/{key}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length"))
        found = json.loads(await reader.readexactly(length))
        num_tokens += found["usage"]["completion_tokens"]
        messages += [found["choices"][0]["message"], {"role": "user", "content": REPLY}]
    writer.close()
    return num_tokens


async def main(port: int, least: int, most: int, keys: list[str]) -> None:
    began_s = time.perf_counter()
    num_tokens = sum(await asyncio.gather(*(chat(port, key, least, most) for key in keys)))
    print(num_tokens, time.perf_counter() - began_s)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:4]), sys.argv[4:]))
