"""From trajectories to the packed tensors of a micro-batch (sequences end to end, no padding).

T tokens of a micro-batch, N of them sampled, L mixture-of-experts layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Support
from headrace.policy.routes import Routers
from headrace.types import Item, RouteArray, Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The tensors of one micro-batch."""

    token_ids: Tensor  # [T]
    plan: PackedPlan
    at: Tensor  # [N] positions of the sampled tokens
    behaviour: Tensor  # [N] log-probs at sampling time
    advantage: Tensor  # [N]
    sequence_ids: Tensor  # [N] which sequence a sampled token belongs to
    num_sequences: int
    reference: Tensor | None  # [N]
    support: Support | None
    routes: Tensor | None  # [T, L, K]


def pack(sequences: Sequence[Item], device: torch.device, routers: Routers | None = None) -> Batch:
    """Lay the sequences end to end. With `routers`, the recorded expert choices are replayed."""
    trajectories = [s.trajectory for s in sequences]
    sampled = np.concatenate([t.sampled for t in trajectories])
    counts = [t.num_sampled_tokens for t in trajectories]
    references = [s.reference for s in sequences if s.reference is not None]
    advantages = [np.full(n, s.advantage, np.float32) for n, s in zip(counts, sequences, strict=True)]
    if rootless := [t.id for t in trajectories if t.sampled[0]]:
        raise ValueError(f"trajectory {rootless[0]} begins with a sampled token: there is no prompt before it")

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Batch(
        token_ids=tensor(np.concatenate([t.token_ids for t in trajectories]).astype(np.int64)),
        plan=PackedPlan([len(t.token_ids) for t in trajectories], device),
        at=tensor(np.flatnonzero(sampled)),
        behaviour=tensor(np.concatenate([t.logprobs for t in trajectories])[sampled]),
        advantage=tensor(np.concatenate(advantages)),
        sequence_ids=tensor(np.repeat(np.arange(len(sequences)), counts)),
        num_sequences=len(sequences),
        reference=tensor(np.concatenate(references)) if references else None,
        support=_support(trajectories, device),
        routes=_routes(trajectories, device, routers) if routers is not None and routers.num_layers else None,
    )


def _support(trajectories: Sequence[Trajectory], device: torch.device) -> Support | None:
    """The sampling support of all sampled tokens; None if sampling was not truncated."""
    replays = [t.replay for t in trajectories]
    supports = [(r.support_ids, r.support_offsets) for r in replays if r is not None and r.support_ids is not None]
    if not supports:
        return None
    for trajectory, replay in zip(trajectories, replays, strict=True):
        offsets = None if replay is None else replay.support_offsets
        if offsets is None or len(offsets) != trajectory.num_sampled_tokens + 1:
            raise ValueError(f"trajectory {trajectory.id} lacks the sampling support of its tokens")
    sizes = np.concatenate([np.diff(offsets) for _, offsets in supports if offsets is not None])
    ids = np.concatenate([ids for ids, _ in supports])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Support(torch.from_numpy(ids).to(device), torch.from_numpy(offsets).to(device))


def _routes(trajectories: Sequence[Trajectory], device: torch.device, routers: Routers) -> Tensor:
    found: list[RouteArray] = []
    for trajectory in trajectories:
        routes = None if trajectory.replay is None else trajectory.replay.routes
        needed = (len(trajectory.token_ids), *routers.shape)
        if routes is None:
            raise ValueError(f"trajectory {trajectory.id} lacks the expert routing of its tokens")
        if routes.shape != needed:
            raise ValueError(
                f"trajectory {trajectory.id} has experts of shape {list(routes.shape)}; tokens, layers and experts per "
                f"token are {list(needed)}"
            )
        if (largest := int(routes.max())) >= routers.num_experts:
            raise ValueError(f"trajectory {trajectory.id} names expert {largest}; the model has {routers.num_experts}")
        found.append(routes)
    return routers.to_device(np.concatenate(found), device)


class Packer:
    """Collects micro-batches of at most `budget` tokens. A longer sequence gets one of its own."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._pending: list[Item] = []

    def add(self, sequences: Sequence[Item]) -> list[list[Item]]:
        """Returns the micro-batches that are now full. They are filled in the order of arrival."""
        full = []
        for sequence in sequences:
            if self._pending and sum(map(len, self._pending)) + len(sequence) > self.budget:
                full.append(self._pending)
                self._pending = []
            self._pending.append(sequence)
        return full

    def rest(self) -> list[list[Item]]:
        rest, self._pending = self._pending, []
        return [rest] if rest else []


def balanced(sequences: Sequence[Item], budget: int) -> list[list[Item]]:
    """Micro-batches of nearly equal size, of at most `budget` tokens or one longer sequence each."""
    alone = [[s] for s in sequences if len(s) > budget]
    shared = sorted((s for s in sequences if len(s) <= budget), key=len, reverse=True)
    num_batches = max(1, -(-sum(map(len, shared)) // budget))
    while True:
        batches = split(shared, num_batches, len)
        if max(sum(map(len, batch)) for batch in batches) <= budget:
            return alone + [b for b in batches if b]
        num_batches += 1


def split(items: Sequence[T], num_parts: int, size: Callable[[T], int]) -> list[list[T]]:
    """Parts of nearly equal total `size`, some perhaps empty. A single part keeps the order."""
    if num_parts == 1:
        return [list(items)]
    parts: list[list[T]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for item in sorted(items, key=size, reverse=True):
        lightest = loads.index(min(loads))
        parts[lightest].append(item)
        loads[lightest] += size(item)
    return parts
