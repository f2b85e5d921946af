"""A rollout worker: one engine in a process of its own. It is asked from afar, and says what happened since last time.

It samples on while nobody asks. New weights are fetched and checked beside that, and taken between two decode steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headrace.config import Config, ModelSection
from headrace.ledger.clock import StageClock
from headrace.place.build import load, make_engine
from headrace.place.device import DeviceThread
from headrace.place.memory import MODEL, memory_for
from headrace.policy.policy import Policy
from headrace.publish.publisher import Subscriber
from headrace.publish.transport import ReceivingEnd
from headrace.rollout.actor import RolloutActor
from headrace.types import (
    IntArray,
    News,
    Order,
    PublishTimes,
    Ticket,
    Trajectory,
)

HEARTBEAT_S = 1.0  # a worker that has nothing to say says so this often


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """What a rollout worker is made from.

    Example:
        RolloutSpec(config=Config(...), model=ModelSection(path="models/mine"), name="rollout-0", epoch_s=1.8e9,
            longest_prompt=212, receiving=ObjectStoreReceiver)
    """

    config: Config
    model: ModelSection
    name: str
    epoch_s: float  # the time of day at which the run's clock stood at zero
    longest_prompt: int
    receiving: Callable[[], ReceivingEnd]


class RolloutWorker:
    """Serves one engine."""

    def __init__(self, spec: RolloutSpec, device: DeviceThread | None = None, reserved_bytes: int = 0) -> None:
        config = spec.config
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        self._name = spec.name
        self._clock = StageClock(start_s=time.time() - spec.epoch_s)
        self._device = device or DeviceThread()
        with memory_for("the model", MODEL):
            self._policy: Policy = self._device.call(load, config, spec.model)
        self._engine = make_engine(
            config,
            self._policy,
            longest_prompt=spec.longest_prompt,
            reserved_bytes=reserved_bytes,
            clock=self._clock.now,
        )
        self._sampled_tokens = 0
        self._begun: list[tuple[int, int]] = []
        self._finished: list[Trajectory] = []
        self._news = asyncio.Event()
        self._actor = RolloutActor(
            self._engine,
            self._device,
            seed=config.run.seed,
            clock=self._clock.now,
            span=lambda stage: self._clock.span(stage, version=self._engine.version, worker=self._name),
            on_sampled=self._on_sampled,
        )
        self._actor.on_begun = self._on_begun
        weights = {name: parameter.data for name, parameter in self._policy.model.named_parameters()}
        self._subscriber = Subscriber(spec.receiving(), weights)
        self._fetching = DeviceThread()  # one version at a time
        self._running: asyncio.Task[None] | None = None

    # ---- generation

    async def take(self, orders: Sequence[Order]) -> None:
        """Sample these, too."""
        if self._running is None:
            self._running = asyncio.create_task(self._actor.run())
        for order in orders:
            futures = self._actor.start(
                order.serial,
                order.prompt,
                order.samplings,
                counted=order.counted,
                attempt=order.attempt,
                so_far=order.so_far,
                indices=order.indices,
            )
            for future in futures:
                future.add_done_callback(self._on_finished)

    async def news(self) -> News:
        """What happened, as soon as something has."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._news.wait()
        except TimeoutError:
            pass
        if self._running is not None and self._running.done():
            self._running.result()  # raises what ended it
        self._news.clear()
        begun, self._begun = tuple(self._begun), []
        finished, self._finished = tuple(self._finished), []
        return News(
            sampled_tokens=self._sampled_tokens,
            begun=begun,
            finished=finished,
            spans=tuple(self._clock.drain()),
            counts=self._engine.counts,
        )

    async def abort(self, serial: int) -> None:
        """End what is left of a group."""
        self._actor.abort(serial)

    async def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, what unfinished requests have sampled so far."""
        return await self._device.run(self._actor.under_way)

    async def likeliest(self, prompt: IntArray) -> tuple[int, float] | None:
        """The likeliest token after a prompt and its log-prob."""
        return await self._device.run(self._engine.likeliest, prompt)

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

    def release_cache(self) -> None:
        """Give the cache's memory to whoever shares the device. Call it in the device thread."""
        self._engine.release_cache()

    # ---- weights

    async def stage(self, ticket: Ticket, timeout_s: float) -> None:
        """Fetch a version and check it; sampling goes on with the old one."""
        await self._fetching.run(self._subscriber.stage, ticket, timeout_s)

    async def commit(self, version: int) -> PublishTimes:
        """From the next decode step on, tokens are sampled by `version`."""
        return await self._device.run(self._commit, version)

    async def abandon(self, version: int) -> None:
        """Stay with the old version."""
        self._subscriber.abandon(version)

    def _commit(self, version: int) -> PublishTimes:
        with self._clock.span("publish", version=version, worker=self._name, detail="apply"), torch.no_grad():
            self._subscriber.commit(version)
            self._engine.weights_changed(version)
        return self._subscriber.times
