"""The embedded engine behind the sampler port: one engine, driven by an actor, in a worker.

It samples on while nobody asks. New weights are fetched and verified meanwhile, and taken between two decode steps. In
one worker with a whole learner (`shared_policy`), both compute with one copy of the weights: a commit moves no bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from headrace.config import Config, ModelSection
from headrace.ledger.clock import StageClock
from headrace.place.build import load, make_engine
from headrace.place.device import DeviceThread
from headrace.place.learner_rank import LearnerRank
from headrace.place.memory import MODEL, memory_for
from headrace.publish.publisher import Subscriber
from headrace.roles import ReceivingEnd
from headrace.rollout.actor import RolloutActor
from headrace.types import IntArray, News, Order, PublishTimes, Ticket, Trajectory

HEARTBEAT_S = 1.0  # a worker without news says so this often


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """What a rollout worker is made from. Without a `clock`, it keeps its own, from `epoch_s` on.

    Example:
        RolloutSpec(config=Config(...), model=ModelSection(path="models/mine"), name="rollout-0", epoch_s=1.8e9,
            longest_prompt=212, receiving=ObjectStoreReceiver)
    """

    config: Config
    model: ModelSection
    name: str
    epoch_s: float  # the time of day at which the run's clock stood at zero
    longest_prompt: int
    receiving: Callable[[], ReceivingEnd] | None  # None: the engine computes with the learner's own weights
    clock: StageClock | None = None  # of the run, where worker and run are one process


class RolloutWorker:
    """A `Sampler`."""

    def __init__(self, device: DeviceThread, spec: RolloutSpec, rank: LearnerRank | None = None) -> None:
        config = spec.config
        self._name, self._device = spec.name, device
        self._clock = spec.clock or StageClock(start_s=time.time() - spec.epoch_s)
        self._keeps_spans = spec.clock is None
        self._subscriber: Subscriber | None = None
        if spec.receiving is None:
            assert rank is not None
            self.policy = rank.policy
        else:
            with memory_for("the model", MODEL):
                self.policy = load(device, config, spec.model)
            weights = {name: parameter.data for name, parameter in self.policy.model.named_parameters()}
            self._subscriber = Subscriber(spec.receiving(), weights)
        self.engine = make_engine(
            config,
            self.policy,
            longest_prompt=spec.longest_prompt,
            reserved_bytes=rank.still_wanted_bytes if rank else 0,
            clock=self._clock.now,
        )
        self._sampled_tokens = 0
        self._begun: list[tuple[int, int]] = []
        self._finished: list[Trajectory] = []
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._asked_under_way = False
        self.actor = RolloutActor(
            self.engine,
            device,
            seed=config.run.seed,
            clock=self._clock.now,
            span=lambda stage: self._clock.span(stage, version=self.engine.version, worker=self._name),
            on_sampled=self._on_sampled,
            on_begun=self._on_begun,
        )
        self._fetching: DeviceThread | None = None  # one version at a time
        self._running: asyncio.Task[None] | None = None

    # ---- generation

    async def take(self, orders: Sequence[Order]) -> None:
        """Sample these, too."""
        if self._running is None:
            self._running = asyncio.create_task(self.actor.run())
        try:
            for order in orders:
                for future in self.actor.start(order):
                    future.add_done_callback(self._on_finished)
        except Exception as error:
            self._failure = self._failure or error
            self._news.set()

    async def news(self) -> News:
        """What happened, as soon as something has."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._news.wait()
        except TimeoutError:
            pass
        if self._failure is not None:
            raise self._failure
        if self._running is not None and self._running.done():
            self._running.result()  # raises what ended it
        self._news.clear()
        under_way = await self._under_way() if self._asked_under_way else None
        begun, self._begun = tuple(self._begun), []
        finished, self._finished = tuple(self._finished), []
        return News(
            sampled_tokens=self._sampled_tokens,
            begun=begun,
            finished=finished,
            spans=tuple(self._clock.drain()) if self._keeps_spans else (),
            counts=self.engine.counts,
            under_way=under_way,
        )

    async def abort(self, serials: Sequence[int]) -> None:
        """End what is left of these groups."""
        self.actor.abort(serials)

    async def tell_under_way(self) -> None:
        """The next `news` tells what unfinished answers have sampled, too."""
        self._asked_under_way = True
        self._news.set()

    async def _under_way(self) -> dict[int, dict[int, Trajectory]]:
        self._asked_under_way = False
        found = await self._device.run(self.actor.under_way)
        await asyncio.sleep(0)  # what the device finished before that is now in `_finished`
        return found

    def greedy(self, prompt: IntArray) -> tuple[int, float] | None:
        """The most likely next token and its log-prob."""
        return self.engine.greedy(prompt)

    def release_cache(self) -> None:
        """Free the KV cache for whoever shares the device."""
        self.engine.release_cache()

    def close(self) -> None:
        """Sample no more. Called on the event loop."""
        if self._running is not None:
            self._running.cancel()
        if self._fetching is not None:
            self._fetching.close(wait=False)

    def _on_sampled(self, num_tokens: int) -> None:
        self._sampled_tokens += num_tokens
        self._news.set()

    def _on_begun(self, serial: int, version: int) -> None:
        self._begun.append((serial, version))
        self._news.set()

    def _on_finished(self, future: asyncio.Future[Trajectory]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._finished.append(future.result())
        self._news.set()

    # ---- weights

    async def stage(self, ticket: Ticket, timeout_s: float) -> None:
        """Fetch a version and verify it; sampling goes on with the old one."""
        assert self._subscriber is not None
        if self._fetching is None:
            self._fetching = DeviceThread()
        await self._fetching.run(partial(self._subscriber.stage, ticket, timeout_s))

    @torch.no_grad()
    def commit(self, version: int) -> PublishTimes:
        """From the next decode step on, tokens are sampled by `version`."""
        if self._subscriber is None:
            self.engine.weights_changed(version)
            return PublishTimes()
        with self._clock.span("publish", version=version, worker=self._name, detail="apply"):
            self._subscriber.commit(version)
            self.engine.weights_changed(version)
        return self._subscriber.times

    async def abandon(self, version: int) -> None:
        """Stay with the old version."""
        assert self._subscriber is not None
        self._subscriber.abandon(version)
