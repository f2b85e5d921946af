"""One rank of the learner behind the trainer port: its part of every batch and of the weights.

The first rank also sends new weights to the rollout workers.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from headrace.config import Config
from headrace.errors import RunError
from headrace.learner.learner import Learner, WarmStart
from headrace.learner.optimizer import Sharding
from headrace.loop.watchdog import beside
from headrace.measured import Mismatch, PolicyFacts, PublishTimes, StepStats
from headrace.network import own_address
from headrace.place.device import LEARNER, MODEL, DeviceThread, memory_for
from headrace.place.threads import ThreadChoice
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy, load_policy, resolve_device
from headrace.policy.tensor_files import copies, read_tensors, write_tensors
from headrace.publish.encoding import Encoder
from headrace.publish.publisher import Publisher
from headrace.roles import SendingEnd
from headrace.types import Example, FloatArray, Group, IntArray, Item, Ticket, Trajectory


class LearnerRank:
    """A `Trainer`. `sending` makes its end of the transport; None: the engine has its policy."""

    def __init__(
        self, device: DeviceThread, config: Config, rank: int, sending: Callable[[], SendingEnd] | None
    ) -> None:
        self._device, self._config, self._rank, self._sending = device, config, rank, sending
        self.policy: Policy  # loaded when the ranks meet
        self._store: TCPStore | None = None  # where they do; rank 0 serves it
        self._sharding: Sharding | None = None
        self._publisher: Publisher  # of the first rank, if weights travel; made when the ranks meet
        self._warming: WarmStart | None = None
        self._copies: dict[str, Tensor] = {}  # for the checkpoint that is written next
        self._held_bytes = 0

    @property
    def still_wanted_bytes(self) -> int:
        """Bytes of the training state that are not allocated yet: mostly gradients and moments.

        All of it is masters, moments, gradients and the reference policy, without activations.
        """
        section = self._config.learner
        has_reference = section.kl_coef and ":" not in section.teacher
        total, reference = 0, self.policy.dtype.itemsize if has_reference else 0
        own_critic = section.advantage == "gae" and isinstance(section.critic, str)  # thought to be as large
        for parameter in self.policy.model.parameters():
            size = parameter.dtype.itemsize
            trained = (12 if size == 2 else 2 * size) + size if parameter.requires_grad else 0
            total += parameter.numel() * (trained * (2 if own_critic else 1) + reference)
        return max(0, total // section.mesh[1] - self._held_bytes)

    @cached_property
    def learner(self) -> Learner:
        """Made after the warm start: its reference policy has the weights of this moment."""
        self._warming = None
        config, device = self._config, self.policy.device
        before = _allocated_bytes(device)
        with memory_for("the optimizer and the reference policy", LEARNER, wanted_bytes=self.still_wanted_bytes):
            learner = Learner(
                self.policy,
                config.learner,
                temperatures=config.rollout.temperature,
                max_new_tokens=config.rollout.max_new_tokens,
                total_steps=config.loop.steps,
                sharding=self._sharding,
            )
        self._held_bytes = max(0, _allocated_bytes(device) - before)
        return learner

    async def alive(self) -> bool:
        return True

    def address(self) -> tuple[str, int]:
        if self._config.learner.mesh == (1, 1):
            return "", 0  # nobody to meet: no port is opened
        self._store = TCPStore(own_address(), 0, is_master=True, wait_for_workers=False)
        return self._store.host, self._store.port

    def meet(self, host: str, port: int) -> PolicyFacts:
        config, mesh = self._config, self._config.learner.mesh
        if mesh != (1, 1):
            store = self._store or TCPStore(host, port, is_master=False)
            device = resolve_device(config.model.device)
            self._sharding = Sharding(rank=self._rank, shape=mesh, store=store, device=device)
        self.policy = policy_of(self._device, config, self._sharding.mesh if self._sharding else None)
        if self._rank == 0 and self._sending is not None:
            self._publisher = Publisher(Encoder(config.publish.encoding), self._sending())
        return PolicyFacts(
            name=type(self.policy.model).__name__,
            num_weights=sum(p.numel() for p in self.policy.model.parameters()),
            device=self.policy.device.type,
            dtype=str(self.policy.dtype).removeprefix("torch."),
            max_context=self.policy.max_context,
            eos_ids=tuple(sorted(self.policy.eos_ids)),
            exact=self.policy.exact,
            unchecked=self.policy.unchecked,
        )

    def warm_up(self, examples: Sequence[Sequence[Example]]) -> list[float]:
        if self._warming is None:
            self._warming = WarmStart(self.policy, self._config.warmstart, self._sharding)
        return [self._warming.step(batch) for batch in examples]

    def accumulate(self, items: Sequence[Item]) -> None:
        self.learner.accumulate(items)

    def finish(self) -> StepStats:
        return self.learner.finish()

    def reference_logprobs(self, group: Group) -> list[FloatArray]:
        return self.learner.reference_logprobs(group)

    def mismatch(self, trajectories: Sequence[Trajectory]) -> Mismatch:
        return self.learner.mismatch(trajectories)

    @torch.no_grad()
    def next_logprob(self, prompt: IntArray, token: int) -> float:
        device = self.policy.device
        tokens = torch.from_numpy(np.append(prompt, token).astype(np.int64)).to(device)
        last = torch.tensor([len(prompt)], device=device)
        return float(self.policy.logprobs(tokens, PackedPlan([len(tokens)], device), last, 1.0)[0])

    def snapshot(self, *, reference: bool = False) -> None:
        self._copies = copies(self._tensors(reference))

    async def write(self, directory: Path) -> None:
        tensors, self._copies = self._copies, {}
        group = None if self._sharding is None else self._sharding.writers
        await beside(write_tensors, directory, tensors, group)

    def load(self, directory: Path, version: int, *, reference: bool = False) -> None:
        try:
            read_tensors(directory, self._tensors(reference))
        except Exception as error:  # of many types, by what does not fit
            raise RunError(
                f"the checkpoint {directory.parent} does not fit this model and optimizer: {error}. "
                "Has the model at model.path changed since the run began?"
            ) from error
        if not reference:
            self.learner.loaded(version)

    def _tensors(self, reference: bool) -> dict[str, Tensor]:
        return self.learner.reference_tensors() if reference else self.learner.tensors()

    def save(self, directory: Path) -> None:
        weights = None
        if self._sharding is not None:  # gathered by all ranks, kept by the first
            whole = self.learner.weights(self.policy.dtype)
            weights = {name: tensor.cpu() for name, tensor in whole if self._rank == 0}
        if self._rank == 0:
            self.policy.save(directory, weights)

    def offer(self, version: int, nodes: Sequence[str]) -> Ticket | None:
        if self._sending is None:
            return None
        only = self._config.publish.encoding == "adapter"
        weights = self.learner.weights(self.policy.dtype, trained_only=only)
        try:
            if self._rank > 0:
                return None
            self._publisher.expect(nodes)
            return self._publisher.stage(version, weights)
        finally:
            for _ in weights:  # gathering is a collective: also on ranks that do not send, or fail
                pass

    async def send(self, ticket: Ticket, timeout_s: float) -> None:
        await beside(self._publisher.send, ticket, timeout_s)

    async def offered(self, version: int, wanted: Sequence[int]) -> PublishTimes:
        self._publisher.commit(version, wanted)
        return self._publisher.times

    async def withdraw(self, version: int) -> None:
        self._publisher.abandon(version)

    def catch_up(self, nodes: Sequence[str]) -> list[Ticket]:
        self._publisher.expect(nodes)
        return self._publisher.catch_up()


def policy_of(device: DeviceThread, config: Config, mesh: DeviceMesh | None = None) -> Policy:
    """The policy, with adapters if those are trained, over `mesh`. Sets the threads of `device`."""
    model = config.model
    if model.exact == "auto" and (config.rollout.engine != "embedded" or config.learner.mesh != (1, 1)):
        model = model.model_copy(update={"exact": False})  # the other side has other bits
    if model.threads:
        torch.set_num_threads(model.threads)
    with memory_for("the model", MODEL):
        policy = device.call(load_policy, model, config.learner, config.run.seed, mesh)
    if not model.threads and policy.device.type == "cpu":
        choice = device.call(ThreadChoice, policy.model.get_input_embeddings().weight.shape[1])
        device.call(choice.choose)
        if not policy.exact:  # bits depend on the number of threads
            device.do_between(choice.choose)
    return policy


def _allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
