"""A random chat model with a real engine behind the endpoint, and agents of real libraries in front of it.

A random model calls no tools. So what it samples is bound to a grammar, turn by turn: calls first, then a text. The
numbers in the calls are its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import httpx2
import numpy as np
import torch
import transformers
from exact_runs import TEMPERATURE
from tiny_policies import EXPERTS, SHAPE

from headrace.episode.chat import Chat
from headrace.episode.session import Desk, Session
from headrace.learner.batch import pack
from headrace.place.device import DeviceThread
from headrace.policy.demo import chat_tokenizer
from headrace.policy.policy import Policy
from headrace.rollout.actor import RolloutActor
from headrace.rollout.engine import Engine
from headrace.serve.conversation import Conversation
from headrace.serve.front_desk import FrontDesk
from headrace.serve.starlette_app import application
from headrace.types import FloatArray, Item, Order, Prompt, Sampling, Trajectory

BASE_URL = "http://house/v1"
INT = {"type": "integer", "minimum": 0, "maximum": 64}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": INT, "b": INT},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TEXT = "start: /[a-z ]{3,12}/\n"


def chat_policy(architecture: str = "Qwen3", *, exact: bool = True) -> Policy:
    """A few thousand random weights, and a tokenizer for chats with tools."""
    tokenizer, shape = chat_tokenizer(), SHAPE | (EXPERTS if "Moe" in architecture else {})
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=0,
        **(shape | {"max_position_embeddings": 4096}),
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return Policy(model, tokenizer, exact=exact)


@dataclass(eq=False)
class House:
    """The endpoint over a real engine. `script` gives the grammar of a session's n-th turn."""

    policy: Policy
    script: Callable[[int], str]
    engine: Engine
    device: DeviceThread
    desk: Desk = field(init=False)
    front: FrontDesk = field(init=False)
    orders: list[Order] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)

    def open(self, key: str, **limits: int) -> Session:
        """A session that `key` opens."""
        prompt = Prompt(id=key, text="", token_ids=np.empty(0, np.int32))
        sampling = Sampling(max_new_tokens=60, temperature=TEMPERATURE)
        order = Order(serial=len(self.sessions), prompt=prompt, samplings=(sampling,), indices=(0,))
        session = Session(self.desk, order, 0)
        self.sessions.append(session)
        self.front.admit(key, Conversation(session, **limits))
        return session

    def transport(self, module: Any = httpx) -> Any:
        return module.ASGITransport(app=application(self.front))

    def client(self, module: Any = httpx2) -> Any:
        """An HTTP client without a socket."""
        return module.AsyncClient(transport=self.transport(module), base_url=BASE_URL)


def calls_then_text(policy: Policy, num_calls: int, tool: Any = ADD) -> Callable[[int], str]:
    """`num_calls` turns that call a tool, then texts."""
    chat = Chat(policy.tokenizer, stops=sorted(policy.eos_ids))
    call = chat.call_grammar([{"type": "function", "function": tool}])
    return lambda turn: call if turn <= num_calls else TEXT


@asynccontextmanager
async def house(
    policy: Policy | None = None,
    *,
    num_calls: int = 3,
    tool: Any = ADD,
    script: Callable[[int], str] | None = None,
    on_update: Any = "keep",
) -> AsyncIterator[House]:
    policy = policy or chat_policy()
    engine = Engine(policy, max_running=16, prefill_tokens=64, kv_tokens=10**6, on_update=on_update)
    device = DeviceThread()
    clock = asyncio.get_running_loop().time
    finished: dict[str, asyncio.Future[Trajectory]] = {}
    actor = RolloutActor(
        engine,
        device,
        seed=0,
        clock=clock,
        span=lambda stage: nullcontext(),
        on_sampled=lambda n: None,
        on_begun=lambda serial, version: None,
        on_finished=lambda trajectory: finished.pop(trajectory.id).set_result(trajectory),
    )
    running = asyncio.create_task(actor.run())
    home = House(policy, script or calls_then_text(policy, num_calls, tool), engine, device)

    def sample(order: Order) -> asyncio.Future[Trajectory]:
        home.orders.append(order)
        (sampling,) = order.samplings
        grammar = home.script(order.turn) or sampling.grammar
        answer = finished[order.request_id(0)] = asyncio.get_running_loop().create_future()
        actor.start(replace(order, samplings=(replace(sampling, grammar=grammar),)))
        return answer

    home.desk = Desk(
        chat=Chat(policy.tokenizer, stops=sorted(policy.eos_ids)),
        max_context=policy.max_context,
        sample=sample,
        forget=lambda session: actor.forget([session]),
        now=clock,
        span=lambda stage: nullcontext(),
        on_turn=lambda serial, trajectory: None,
        refusal=lambda sampling: "",
    )
    home.desk.chat.prove()
    home.front = FrontDesk("tiny", policy.max_context)
    try:
        yield home
    finally:
        running.cancel()
        device.close()


@torch.no_grad()
def gaps(policy: Policy, found: Sequence[Trajectory]) -> FloatArray:
    """|learner's - engine's| log-prob of every sampled token."""
    batch = pack([Item(trajectory=t, advantage=0.0) for t in found], policy.device, policy.routers, (TEMPERATURE,))
    given = batch.token_ids, batch.plan, batch.at, batch.temperature, batch.support, batch.routes
    ours, _ = policy.logprobs(*given)
    return (ours.float() - batch.behaviour).abs().numpy()  # type: ignore[no-any-return]


def assert_trained_once(home: House, *, num_turns: int, num_branches: int = 0) -> None:
    """Every sampled token is in a trajectory once, under its own turn, with the log-prob that the learner finds."""
    trajectories = [session.trajectory for session in home.sessions if session.trajectory.turns]
    assert sum(len(t.turns) for t in trajectories) == len(home.orders) == num_turns
    assert sum(len(t.segments) for t in trajectories) == num_branches
    for t in trajectories:
        covered = np.zeros(len(t.token_ids), int)
        for turn in t.turns:
            covered[turn.start : turn.end] += 1
        np.testing.assert_array_equal(covered, t.sampled.astype(int))
        assert (t.logprobs[t.sampled] < 0).any()
    assert gaps(home.policy, trajectories).max() == 0.0


def add(arguments: str) -> str:
    """The tool itself."""
    given = json.loads(arguments)
    return str(given["a"] + given["b"])
