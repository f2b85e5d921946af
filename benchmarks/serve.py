"""The endpoint under load.

    python benchmarks/serve.py                  # 1,000 sessions at once, then a real engine: two CPU cores, minutes
    python benchmarks/serve.py --device cuda    # the same with a larger model, in bfloat16
    python benchmarks/serve.py --tiny           # to see that it runs

*sessions*: so many sessions at once, three turns each, answers from a script. Nothing may be lost: every turn is in its
session's tokens once, in one line. *engine*: tokens per second of a real engine, asked through the endpoint by clients
in another process, over those asked directly, taking turns; median and range. All sessions begin together; their
answers have equal lengths, so that all turns end together, or lengths that differ.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gpu_record import facts, table
from serve_clients import REPLY, TURNS, length_of
from serve_front import Clients, refusal
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.config import Config
from headrace.episode.chat import Chat
from headrace.episode.session import Desk, Episodes, Session
from headrace.place.device import DeviceThread
from headrace.place.episode_process import EpisodeProcess
from headrace.policy.demo import chat_tokenizer
from headrace.policy.policy import Policy
from headrace.rollout.actor import RolloutActor
from headrace.rollout.engine import Engine
from headrace.types import FinishReason, Order, Prompt, Sampling, Span, Trajectory

Sample = Callable[[Order], Awaitable[Trajectory]]
LENGTHS = {"tiny": [(8, 8), (4, 12)], "cpu": [(64, 64), (16, 112)], "cuda": [(64, 64), (16, 112), (64, 448)]}


async def through_the_endpoint(port: int, names: Sequence[str], lengths: tuple[int, int]) -> tuple[int, float]:
    """Tokens and seconds of chats that a process of clients has."""
    asking = [sys.executable, str(Path(__file__).with_name("serve_clients.py")), *map(str, (port, *lengths))]
    process = await asyncio.create_subprocess_exec(*asking, *names, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    num_tokens, seconds = printed.split()
    return int(num_tokens), float(seconds)


# ---- the endpoint


def orders_of(prefix: str, count: int, max_new_tokens: int) -> list[Order]:
    sampling, empty = Sampling(max_new_tokens=max_new_tokens), np.empty(0, np.int32)
    prompts = [Prompt(id=f"{prefix}{i}", text="", token_ids=empty) for i in range(count)]
    return [Order(serial=i, prompt=prompt, samplings=(sampling,), indices=(0,)) for i, prompt in enumerate(prompts)]


def desk_of(tokenizer: Any, sample: Sample, max_context: int) -> Desk:
    chat = Chat(tokenizer, stops=[tokenizer.eos_token_id])
    chat.prove()
    return Desk(
        chat=chat,
        max_context=max_context,
        sample=sample,
        forget=lambda session: None,
        now=time.monotonic,
        span=lambda stage: nullcontext(),
        on_turn=lambda serial, episode: None,
        refusal=refusal,
    )


async def scripted(order: Order) -> Trajectory:
    """An answer of three tokens and an end, a moment later."""
    await asyncio.sleep(0.05)
    before, said = order.nothing_sampled(0, 0.0), np.array([40, 41, 42, 2], np.int32)
    ids = np.concatenate([before.token_ids, said])
    sampled = np.arange(len(ids)) >= len(before.token_ids)
    span = Span(version=0, start=len(before.token_ids), end=len(ids))
    logprobs = np.where(sampled, -1.0, 0.0).astype(np.float32)
    known = {"token_ids": ids, "sampled": sampled, "logprobs": logprobs, "spans": (span,)}
    return replace(before, **known, finish=FinishReason.EOS)


async def many_sessions(count: int) -> dict[str, Any]:
    tokenizer, orders = chat_tokenizer(), orders_of("s-", count, 8)
    async with episodes_of(desk_of(tokenizer, scripted, 4096), tokenizer, "cpu") as (episodes, port):
        playing = [future for order in orders for future in episodes.start(order)]
        num_tokens, seconds = await through_the_endpoint(port, [order.prompt.id for order in orders], (8, 8))
        played = [outcome.trajectory for outcome in await asyncio.gather(*playing)]
    whole = [trajectory for trajectory in played if len(trajectory.turns) == TURNS and not trajectory.segments]
    return {"sessions": count, "whole": len(whole), "lost": count * TURNS * 4 - num_tokens, "seconds": seconds}


# ---- a real engine


def policy_of(size: str, device: str) -> Policy:
    tokenizer = chat_tokenizer()
    hidden, layers = {"tiny": (64, 2), "cpu": (512, 8), "cuda": (2048, 28)}[size]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64 or 1,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.no_grad():  # no answer ends before its limit
        model.model.embed_tokens.weight[tokenizer.eos_token_id] = 0
    return Policy(model.eval(), tokenizer)


async def directly(sessions: Sequence[Session], lengths: tuple[int, int]) -> tuple[int, float]:
    """The same chats without the endpoint."""

    async def play(session: Session) -> int:
        chat = [{"role": "user", "content": f"I am {session.order.prompt.id}. What now?"}]
        place = session.tell(session.first(chat, None))
        for turn in range(TURNS):
            limit = length_of(session.order.prompt.id, turn, *lengths)
            await session.sample(place, replace(session.sampling, max_new_tokens=limit))
            said = session.trajectory.turns[-1]
            answer = session.desk.chat.parse(session.sampled_ids(said).tolist(), [], None).message()
            new = [{"role": "user", "content": REPLY}]
            if turn < TURNS - 1:
                place = session.tell(session.next(said, chat, answer, new, None))
            chat += [answer, *new]
        return session.trajectory.num_sampled_tokens

    began_s = time.perf_counter()
    return sum(await asyncio.gather(*map(play, sessions))), time.perf_counter() - began_s


async def real_engine(size: str, device: str, count: int, rows: int, job: tuple[int, int], repeats: int) -> list[float]:
    """Tokens per second through the endpoint over those of direct requests, of `count` sessions."""
    policy, thread = policy_of(size, device), DeviceThread()
    room = {"prefill_tokens": 2048, "kv_tokens": min(count * max(512, 4 * job[1]), rows * 2048)}
    engine = Engine(policy, max_running=rows, on_update="keep", **room)
    spans: dict[str, Any] = {"span": lambda stage: nullcontext(), "clock": time.monotonic}
    finished: dict[str, asyncio.Future[Trajectory]] = {}
    actor = RolloutActor(
        engine,
        thread,
        seed=0,
        on_sampled=lambda n: None,
        on_begun=lambda serial, version: None,
        on_finished=lambda trajectory: finished.pop(trajectory.id).set_result(trajectory),
        **spans,
    )

    def sample(order: Order) -> asyncio.Future[Trajectory]:
        answer = finished[order.request_id(0)] = asyncio.get_running_loop().create_future()
        actor.start(order)
        return answer

    running = asyncio.create_task(actor.run())
    desk = desk_of(policy.tokenizer, sample, 4096)
    async with episodes_of(desk, policy.tokenizer, device) as (episodes, port):
        found = []
        for repeat in range(repeats + 1):  # the first warms up
            orders = {way: orders_of(f"{way}-{repeat}-", count, job[1]) for way in ("direct", "endpoint")}
            sessions = [Session(desk, order, 0) for order in orders["direct"]]
            num_tokens, seconds = await directly(sessions, job)
            assert num_tokens == sum(session.trajectory.num_sampled_tokens for session in sessions)
            direct = num_tokens / seconds
            actor.forget([session.id for session in sessions])
            playing = [future for order in orders["endpoint"] for future in episodes.start(order)]
            await episodes.under_way()  # all have begun
            names = [order.prompt.id for order in orders["endpoint"]]
            num_tokens, seconds = await through_the_endpoint(port, names, job)
            played = [outcome.trajectory for outcome in await asyncio.gather(*playing)]
            assert num_tokens == sum(trajectory.num_sampled_tokens for trajectory in played)
            actor.forget([trajectory.id for trajectory in played])
            found.append(num_tokens / seconds / direct)
            print(f"direct {direct:,.0f} tokens/s, endpoint {num_tokens / seconds:,.0f}", flush=True)
    running.cancel()
    thread.close()
    return found[1:]


@asynccontextmanager
async def episodes_of(desk: Desk, tokenizer: Any, device: str) -> AsyncIterator[tuple[Any, int]]:
    """Where a run has them: on a CPU in this process, with a GPU in another. Also the port of their endpoint."""
    told: list[str] = []
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        no_abort: Callable[[Sequence[int]], None] = lambda serials: None  # noqa: E731
        episodes: Any = Episodes(Clients(desk, told.append), no_abort)
        if device != "cpu":
            episodes = EpisodeProcess(
                Clients, Config.model_validate({"model": {"path": folder}}), desk, no_abort, told.append
            )
        await episodes.prepare()
    try:
        yield episodes, int(told[0])
    finally:
        await episodes.close()


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument(
        "--asking", type=int, help="sessions that ask the real engine, too, where more than it answers at once"
    )
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU")
    arguments = parser.parse_args(given)
    torch.set_num_threads(arguments.threads)
    gc.freeze()  # as the commands do
    gc.set_threshold(50_000, 20, 20)
    noted = facts("serve", torch.device(arguments.device))
    print(f"{noted['device']}, commit {noted['commit'][:12]}, {noted['command']}, {noted['versions']}\n")
    many = asyncio.run(many_sessions(50 if arguments.tiny else arguments.sessions))
    size = "tiny" if arguments.tiny else arguments.device
    at_once = 4 if arguments.tiny else 64 if arguments.device == "cpu" else 256
    repeats = 1 if arguments.tiny else arguments.repeats
    rows, found = [], {}
    for count in sorted({at_once, max(at_once, arguments.asking or at_once)}):
        for least, most in LENGTHS[size][: None if count == at_once else 2]:
            name = f"{least} to {most}" if least < most else f"{most} each"
            print(f"{count} sessions, {at_once} answered at once, answers of {name} tokens", flush=True)
            job = (least, most)
            ratios = asyncio.run(real_engine(size, arguments.device, count, at_once, job, repeats))
            gc.collect()  # the engine's cache, before the next one is made
            found[f"{count}: {name}"] = ratios
            shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            rows.append([str(count), str(at_once), name, shown])
    numbers = [f"{many['sessions']:,}", f"{many['whole']:,}", str(many["lost"]), f"{many['seconds']:.1f}"]
    print("\n" + table(["sessions", "whole", "lost tokens", "seconds"], [numbers]) + "\n")
    print(table(["sessions", "answered at once", "tokens of an answer", "endpoint / direct tokens per second"], rows))
    return {**many, "ratios": found}


if __name__ == "__main__":
    main()
