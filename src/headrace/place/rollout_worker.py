"""The embedded engine behind the sampler port: one engine, driven by an actor, in a worker.

It samples between calls too. New weights are fetched and verified while it samples, and applied
between two decode steps. If it shares the learner's policy, a commit moves no bytes.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.ledger.files import SERVED
from headrace.measured import StageClock
from headrace.place.device import CACHE, GIB, DeviceThread, memory_for, room
from headrace.place.learner_rank import LearnerRank, policy_of
from headrace.policy.policy import Policy, resolve_device
from headrace.publish.publisher import Subscriber
from headrace.roles import ReceivingEnd
from headrace.rollout.actor import AnyEngine, RolloutActor
from headrace.rollout.engine import Engine, kv_budget, kv_bytes_per_token
from headrace.rollout.engine_server import ServerEngine
from headrace.rollout.engine_sglang import SglangEngine
from headrace.rollout.engine_vllm import VllmEngine
from headrace.types import IntArray, News, Order, Ticket, Trajectory

SERVERS = {"vllm": VllmEngine, "sglang": SglangEngine}
HEARTBEAT_S = 1.0  # a worker without news says so this often
Begun = tuple[int, int]  # the serial of a group, and the version that samples it


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """What a rollout worker is made from."""

    config: Config
    name: str
    epoch_s: float  # `time.time()` at which the run's clock stood at zero
    longest_prompt: int
    receiving: Callable[[], ReceivingEnd] | None  # None: the engine has the learner's own policy
    clock: StageClock | None = None  # the run's, in one process with it; None: one of its own


class RolloutWorker:
    """A `Sampler`. `rank` is the learner's rank in the same process, if there is one."""

    def __init__(self, device: DeviceThread, spec: RolloutSpec, rank: LearnerRank | None = None) -> None:
        self._name, self._device = spec.name, device
        self._clock = spec.clock or StageClock(start_s=time.time() - spec.epoch_s)
        self._shares_policy = spec.receiving is None
        if spec.receiving is None:
            assert rank is not None
            self.policy = rank.policy
        else:
            config = spec.config  # of which a server has the GPUs for itself
            if config.rollout.engine != "embedded" and resolve_device(config.model.device).type == "cuda":
                config = config.but(model={"device": "cpu", "dtype": config.model.dtype.replace("auto", "bfloat16")})
            self.policy = policy_of(device, config)
            weights = {name: p.data for name, p in self.policy.model.named_parameters()}
            self._subscriber = Subscriber(spec.receiving(), weights)
        reserved_bytes = rank.still_wanted_bytes if rank else 0
        self.engine = _engine(spec, self.policy, reserved_bytes, self._clock.now)
        self._sampled_tokens = 0
        self._begun: list[Begun] = []
        self._finished: list[Trajectory] = []
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._asked_under_way = False
        self.actor = RolloutActor(
            self.engine,
            device,
            seed=spec.config.run.seed,
            clock=self._clock.now,
            span=lambda stage: self._clock.span(stage, version=self.engine.version, worker=self._name),
            on_sampled=self._tell,
            on_begun=lambda serial, version: self._tell(begun=((serial, version),)),
            on_finished=lambda trajectory: self._tell(finished=(trajectory,)),
        )
        self._fetching = DeviceThread()  # for weights: one version at a time
        self._running: asyncio.Task[None] | None = None

    async def take(self, orders: Sequence[Order]) -> None:
        if self._running is None:
            self._running = asyncio.create_task(self.actor.run())
            self._running.add_done_callback(lambda _: self._news.set())  # an engine's error is told at once
        try:
            for order in orders:
                self.actor.start(order)
        except Exception as error:
            self._failure = self._failure or error
            self._news.set()

    async def news(self) -> News:
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await self._news.wait()
        if self._failure is not None:
            raise self._failure
        if self._running is not None and self._running.done():
            self._running.result()  # raises what ended it
        self._news.clear()
        under_way = None
        if self._asked_under_way:
            self._asked_under_way = False
            under_way = await self._device.run(self.actor.under_way)  # what finished is told
        begun, self._begun = tuple(self._begun), []
        finished, self._finished = tuple(self._finished), []
        notes = tuple(self.engine.notes)
        self.engine.notes.clear()
        return News(
            sampled_tokens=self._sampled_tokens,
            begun=begun,
            finished=finished,
            spans=() if self._shares_policy else tuple(self._clock.drain()),
            counts=replace(self.engine.counts),
            under_way=under_way,
            notes=notes,
        )

    async def abort(self, serials: Sequence[int]) -> None:
        self.actor.abort(serials)

    async def forget(self, sessions: Sequence[str]) -> None:
        self.actor.forget(sessions)

    async def tell_under_way(self) -> None:
        self._asked_under_way = True
        self._news.set()

    def greedy(self, prompt: IntArray) -> list[tuple[int, float]]:
        return self.engine.greedy(prompt)

    def release_cache(self) -> None:
        self.engine.release_cache()

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
        self._fetching.close(wait=False)
        if isinstance(self.engine, ServerEngine):
            self.engine.close()

    def _tell(self, num_tokens: int = 0, begun: Sequence[Begun] = (), finished: Sequence[Trajectory] = ()) -> None:
        self._sampled_tokens += num_tokens
        self._begun += begun
        self._finished += finished
        self._news.set()

    async def stage(self, ticket: Ticket, timeout_s: float) -> None:
        await self._fetching.run(self._subscriber.stage, ticket, timeout_s)

    def commit(self, version: int) -> float:
        if self._shares_policy:
            self.engine.weights_changed(version)
            return 0.0
        with self._clock.span("publish", version=version, worker=self._name, detail="apply"):
            self._subscriber.commit(version)
            self.engine.weights_changed(version)
        return self._subscriber.fetch_s

    async def abandon(self, version: int) -> None:
        self._subscriber.abandon(version)


def _engine(spec: RolloutSpec, policy: Policy, reserved_bytes: int, clock: Callable[[], float]) -> AnyEngine:
    """An engine with a KV cache in all free memory but `reserved_bytes`, or what it can use."""
    r, e = spec.config.rollout, spec.config.episode
    kv_tokens = kv_budget(policy, r.kv_tokens, reserved_bytes)
    most_tokens, needed = spec.config.prompts.max_tokens + r.max_new_tokens + 64, spec.longest_prompt + r.max_new_tokens
    if grows := bool(e.environment or e.agent):  # with every turn
        most_tokens = needed = min(e.max_tokens or policy.max_context, policy.max_context)
    if r.engine != "embedded":
        on_gpu = resolve_device(spec.config.model.device).type == "cuda"
        where = on_gpu, f"{spec.config.run.dir}/{SERVED}"
        return SERVERS[r.engine](policy, r, min(most_tokens, policy.max_context), clock, *where)
    if not r.kv_tokens:
        kv_tokens = min(kv_tokens, r.max_running * most_tokens)
    if kv_tokens < needed:
        free = room() if policy.device.type == "cuda" else ""
        raise ConfigError(
            f"{free}With {reserved_bytes / GIB:.1f} GiB kept for training, memory holds a key/value "
            f"cache of {kv_tokens} tokens, and one sequence may need {needed}: lower "
            f"{'episode.max_tokens' if grows else 'rollout.max_new_tokens'}, take a smaller model, or free "
            "memory (rollout.kv_tokens sets the size)"
        )
    wanted_bytes = kv_tokens * kv_bytes_per_token(policy)
    settings = {"max_running", "prefill_tokens", "on_update", "max_wall_s", "on_wall", "speculate"}
    with memory_for("the key/value cache", CACHE, wanted_bytes=wanted_bytes):
        return Engine(policy, kv_tokens=kv_tokens, clock=clock, **r.model_dump(include=settings))
