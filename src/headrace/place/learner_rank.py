"""A rank of the learner in a process of its own: its part of every batch, its part of the weights.

All ranks are asked the same things in the same order, because they compute together. The first one also sends new
weights to the rollout workers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.config import Config, ModelSection
from headrace.learner.batch import Item
from headrace.learner.corrections import MismatchSums
from headrace.learner.learner import Learner, StepStats
from headrace.learner.sharding import Sharding
from headrace.learner.supervised import Example, WarmStart
from headrace.loop.canary import next_logprob
from headrace.loop.checkpoint import Checkpoint, snapshot, write_tensors
from headrace.network import own_address
from headrace.place.build import PolicyFacts, load, make_learner
from headrace.place.device import DeviceThread
from headrace.place.memory import LEARNER, MODEL, memory_for, training_bytes
from headrace.policy.policy import Policy
from headrace.publish.encoding import Encoder, Encoding
from headrace.publish.publisher import Publisher, PublishTimes
from headrace.publish.transport import SendingEnd, Ticket
from headrace.types import FloatArray, Group, IntArray, Trajectory

MB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What a rank is made from.

    Example:
        RankSpec(config=Config(...), model=ModelSection(path="models/mine"), rank=0, sending=ObjectStoreSender)
    """

    config: Config
    model: ModelSection
    rank: int
    sending: Callable[[], SendingEnd]


class LearnerRank:
    """Serves one rank."""

    def __init__(self, spec: RankSpec, device: DeviceThread | None = None) -> None:
        self._spec = spec
        if spec.config.model.threads:
            torch.set_num_threads(spec.config.model.threads)
        self._device = device or DeviceThread()
        with memory_for("the model", MODEL):
            self._policy: Policy = self._device.call(load, spec.config, spec.model)
        self._sharding: Sharding | None = None
        self._learner: Learner | None = None
        self._publisher: Publisher | None = None
        self._warming: WarmStart | None = None
        self._copies: dict[str, Tensor] = {}  # of the checkpoint that is to be written
        self._wanted_bytes = training_bytes(self._policy, spec.config.learner) // spec.config.learner.ranks
        self._held_bytes = 0

    @property
    def still_wanted_bytes(self) -> int:
        """What this rank's part of the training state will yet take, gradients and moments mostly."""
        return max(0, self._wanted_bytes - self._held_bytes)

    @property
    def learner(self) -> Learner:
        """There is one once the ranks have met."""
        assert self._learner is not None
        return self._learner

    def alive(self) -> bool:
        """Answers even while it waits for other ranks."""
        return True

    # ---- before the first step

    def facts(self) -> PolicyFacts:
        """Of the whole policy."""
        return PolicyFacts.of(self._policy)

    def address(self) -> tuple[str, int]:
        """Where the ranks can meet, on this machine."""
        with socket.socket() as free:
            free.bind(("", 0))
            return own_address(), int(free.getsockname()[1])

    async def warm_up(self, examples: Sequence[Sequence[Example]]) -> list[float]:
        """Supervised steps on worked examples, by one rank before it meets the others: they take its weights."""
        if self._warming is None:
            self._warming = WarmStart(self._policy, self._spec.config.warmstart)
        warming = self._warming
        return await self._device.run(lambda: [warming.step(batch) for batch in examples])

    async def meet(self, host: str, port: int) -> None:
        """Cut the weights among the ranks; from here on, they go together."""
        await self._device.run(self._meet, host, port)

    def _meet(self, host: str, port: int) -> None:
        spec, self._warming = self._spec, None
        num_ranks = spec.config.learner.ranks
        if num_ranks > 1:
            self._sharding = Sharding(
                rank=spec.rank, num_ranks=num_ranks, host=host, port=port, device=self._policy.device
            )
        before = _allocated_bytes(self._policy.device)
        with memory_for("the optimizer and the reference policy", LEARNER, wanted_bytes=self._wanted_bytes):
            self._learner = make_learner(spec.config, self._policy, self._sharding)
        self._held_bytes = max(0, _allocated_bytes(self._policy.device) - before)
        if spec.rank == 0:
            section = spec.config.publish
            encoder = Encoder(Encoding(section.encoding), bucket_bytes=section.bucket_mb * MB)
            self._publisher = Publisher(encoder, spec.sending(), self._policy.dtype)

    # ---- steps

    async def accumulate(self, items: Sequence[Item]) -> None:
        """Forward and backward over this rank's part of a micro-batch."""
        await self._device.run(self.learner.accumulate, items)

    async def finish(self) -> StepStats:
        """The optimizer step."""
        return await self._device.run(self.learner.finish)

    async def reference_logprobs(self, group: Group) -> list[FloatArray]:
        """Of this rank's part of a group."""
        return await self._device.run(self.learner.reference_logprobs, group)

    async def mismatch(self, trajectories: Sequence[Trajectory]) -> MismatchSums:
        """Of this rank's part."""
        return await self._device.run(self.learner.mismatch, trajectories)

    async def next_logprob(self, prompt: IntArray, token: int) -> float:
        """Of a token after a prompt."""
        return await self._device.run(next_logprob, self._policy, prompt, token)

    # ---- checkpoints

    async def snapshot(self) -> None:
        """Copy what a checkpoint holds of this rank, to be written later."""
        self._copies = await self._device.run(lambda: snapshot(self.learner.tensors()))

    async def write(self, directory: Path) -> None:
        """Write the copies, beside the training."""
        copies, self._copies = self._copies, {}
        group = None if self._sharding is None else self._sharding.writers
        writing = DeviceThread()
        try:
            await writing.run(write_tensors, directory, copies, group)
        finally:
            writing.close()

    async def snapshot_reference(self) -> None:
        """The same of the reference."""
        self._copies = await self._device.run(lambda: snapshot(self.learner.reference_tensors()))

    async def load(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""
        await self._device.run(self._load, checkpoint)

    async def load_reference(self, checkpoint: Checkpoint) -> None:
        """The weights of the reference are these."""
        await self._device.run(lambda: checkpoint.load(self.learner.reference_tensors()))

    def _load(self, checkpoint: Checkpoint) -> None:
        checkpoint.load(self.learner.tensors())
        self.learner.loaded(checkpoint.version)

    async def save(self, directory: Path) -> None:
        """Write the whole policy; the first rank does, with the parts of all."""
        await self._device.run(self._save, directory)

    def _save(self, directory: Path) -> None:
        weights = {name: tensor.cpu() for name, tensor in self.learner.weights(self._policy.dtype)}
        if self._spec.rank == 0:
            self._policy.save(directory, weights)

    # ---- new weights

    async def offer(self, version: int, nodes: Sequence[str]) -> Ticket | None:
        """Make a version ready for the receivers on these nodes; the first rank has the ticket for them."""
        return await self._device.run(self._offer, version, nodes)

    def _offer(self, version: int, nodes: Sequence[str]) -> Ticket | None:
        only = self._spec.config.publish.encoding == "adapter"
        weights = self.learner.weights(self._policy.dtype, trained_only=only)
        try:
            if self._publisher is None:
                return None
            self._publisher.expect(nodes)
            return self._publisher.stage(version, weights)
        finally:
            for _ in weights:  # to gather takes all ranks, also where one has no use for it, or fails
                pass

    async def send(self, ticket: Ticket, timeout_s: float) -> None:
        """The sender's part, while receivers fetch."""
        assert self._publisher is not None
        sending = DeviceThread()
        try:
            await sending.run(self._publisher.send, ticket, timeout_s)
        finally:
            sending.close(wait=False)

    def offered(self, version: int) -> PublishTimes:
        """All receivers hold it."""
        assert self._publisher is not None
        self._publisher.commit(version)
        return self._publisher.times

    def withdraw(self, version: int) -> None:
        """It never was."""
        assert self._publisher is not None
        self._publisher.abandon(version)

    async def catch_up(self, nodes: Sequence[str]) -> list[Ticket]:
        """For a receiver that holds nothing."""
        assert self._publisher is not None
        self._publisher.expect(nodes)
        return await self._device.run(self._publisher.catch_up)


def _allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
