"""One rank of the learner behind the trainer port: its part of every batch, its part of the weights.

The first rank also sends new weights to the rollout workers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.config import Config, ModelSection
from headrace.learner.learner import Learner, Sharding
from headrace.learner.supervised import Example, WarmStart
from headrace.learner.tensor_files import copies, read_tensors, write_tensors
from headrace.network import own_address
from headrace.place.build import load, make_learner
from headrace.place.device import DeviceThread
from headrace.place.memory import LEARNER, MODEL, memory_for, training_bytes
from headrace.policy.attention import PackedPlan
from headrace.publish.encoding import Encoder
from headrace.publish.publisher import Publisher
from headrace.roles import SendingEnd
from headrace.types import (
    FloatArray,
    Group,
    IntArray,
    Item,
    Mismatch,
    PolicyFacts,
    PublishTimes,
    StepStats,
    Ticket,
    Trajectory,
)

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
    sending: Callable[[], SendingEnd] | None  # None: the engine computes with this rank's own weights


class LearnerRank:
    """A `Trainer`."""

    def __init__(self, device: DeviceThread, spec: RankSpec) -> None:
        self._spec = spec
        with memory_for("the model", MODEL):
            self.policy = load(device, spec.config, spec.model)
        self._sharding: Sharding | None = None
        self._learner: Learner | None = None
        self._publisher: Publisher | None = None
        self._warming: WarmStart | None = None
        self._copies: dict[str, Tensor] = {}  # of the checkpoint that is to be written
        self._wanted_bytes = training_bytes(self.policy, spec.config.learner) // spec.config.learner.ranks
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

    async def alive(self) -> bool:
        """Answers even while the device waits for other ranks."""
        return True

    # ---- before the first step

    def facts(self) -> PolicyFacts:
        """About the whole policy."""
        return PolicyFacts(
            name=type(self.policy.model).__name__,
            num_weights=sum(p.numel() for p in self.policy.model.parameters()),
            device=self.policy.device.type,
            dtype=str(self.policy.dtype).removeprefix("torch."),
            max_context=self.policy.max_context,
            unchecked=self.policy.unchecked,
        )

    def address(self) -> tuple[str, int]:
        """Where the ranks can meet, on this machine."""
        with socket.socket() as free:
            free.bind(("", 0))
            return own_address(), int(free.getsockname()[1])

    def warm_up(self, examples: Sequence[Sequence[Example]]) -> list[float]:
        """Supervised steps, by one rank before it meets the others: they take its weights."""
        if self._warming is None:
            self._warming = WarmStart(self.policy, self._spec.config.warmstart)
        return [self._warming.step(batch) for batch in examples]

    def meet(self, host: str, port: int) -> None:
        """Shard the weights among the ranks and make the optimizer."""
        spec, self._warming = self._spec, None
        num_ranks = spec.config.learner.ranks
        if num_ranks > 1:
            self._sharding = Sharding(
                rank=spec.rank, num_ranks=num_ranks, host=host, port=port, device=self.policy.device
            )
        before = _allocated_bytes(self.policy.device)
        with memory_for("the optimizer and the reference policy", LEARNER, wanted_bytes=self._wanted_bytes):
            self._learner = make_learner(spec.config, self.policy, self._sharding)
        self._held_bytes = max(0, _allocated_bytes(self.policy.device) - before)
        if spec.rank == 0 and spec.sending is not None:
            section = spec.config.publish
            encoder = Encoder(section.encoding, bucket_bytes=section.bucket_mb * MB)
            self._publisher = Publisher(encoder, spec.sending(), self.policy.dtype)

    # ---- steps

    def accumulate(self, items: Sequence[Item]) -> None:
        """Forward and backward over this rank's part of a micro-batch."""
        self.learner.accumulate(items)

    def finish(self) -> StepStats:
        """The optimizer step."""
        return self.learner.finish()

    def reference_logprobs(self, group: Group) -> list[FloatArray]:
        """Of this rank's part of a group."""
        return self.learner.reference_logprobs(group)

    def mismatch(self, trajectories: Sequence[Trajectory]) -> Mismatch:
        """Over the parts of all ranks."""
        return self.learner.mismatch(trajectories)

    @torch.no_grad()
    def next_logprob(self, prompt: IntArray, token: int) -> float:
        """Log-prob of `token` after `prompt`, as training computes it."""
        device = self.policy.device
        tokens = torch.from_numpy(np.append(prompt, token).astype(np.int64)).to(device)
        last = torch.tensor([len(prompt)], device=device)
        return float(self.policy.logprobs(tokens, PackedPlan([len(tokens)], device), last, 1.0)[0])

    # ---- checkpoints

    def snapshot(self, *, reference: bool = False) -> None:
        """Copy what a checkpoint holds of this rank, for `write`."""
        self._copies = copies(self.learner.reference_tensors() if reference else self.learner.tensors())

    async def write(self, directory: Path) -> None:
        """Write the copies, beside the training."""
        tensors, self._copies = self._copies, {}
        group = None if self._sharding is None else self._sharding.writers
        writing = DeviceThread()
        try:
            await writing.run(write_tensors, directory, tensors, group)
        finally:
            writing.close(wait=False)

    def load(self, directory: Path, version: int, *, reference: bool = False) -> None:
        """Continue from a checkpoint's tensors, or take them as the reference's."""
        if reference:
            read_tensors(directory, self.learner.reference_tensors())
            return
        read_tensors(directory, self.learner.tensors())
        self.learner.loaded(version)

    def save(self, directory: Path) -> None:
        """Write the whole policy; the first rank does, with the parts of all."""
        if self._sharding is None:
            self.policy.save(directory)
            return
        weights = {name: tensor.cpu() for name, tensor in self.learner.weights(self.policy.dtype)}
        if self._spec.rank == 0:
            self.policy.save(directory, weights)

    # ---- new weights

    def offer(self, version: int, nodes: Sequence[str]) -> Ticket | None:
        """Make a version ready for receivers on these nodes; the first rank has the ticket."""
        if self._spec.sending is None:
            return None
        only = self._spec.config.publish.encoding == "adapter"
        weights = self.learner.weights(self.policy.dtype, trained_only=only)
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
        """All receivers hold the version."""
        if self._publisher is None:
            return PublishTimes()
        self._publisher.commit(version)
        return self._publisher.times

    def withdraw(self, version: int) -> None:
        """Withdraw an offered version; receivers keep the old one."""
        assert self._publisher is not None
        self._publisher.abandon(version)

    def catch_up(self, nodes: Sequence[str]) -> list[Ticket]:
        """Tickets that bring receivers without weights to the published version."""
        assert self._publisher is not None
        self._publisher.expect(nodes)
        return self._publisher.catch_up()


def _allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
