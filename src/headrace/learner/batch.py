"""From trajectories to the packed tensors of a micro-batch (no padding, common prefixes once).

T tokens of a micro-batch, N sampled ones of its trajectories, L mixture-of-experts layers, K
experts per token. A token that two trajectories share is one of T, and two of N if both sampled it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.learner.tree import LEAST_SHARED, Forest, key_of
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Support
from headrace.policy.routes import Routers
from headrace.types import Item, RouteArray, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The tensors of one micro-batch."""

    token_ids: Tensor  # [T]
    plan: PackedPlan
    at: Tensor  # [N] which of the T tokens are the sampled ones
    behaviour: Tensor  # [N] log-probs at sampling time
    advantage: Tensor  # [N]
    temperature: Tensor  # [N]
    sequence_ids: Tensor  # [N] which sequence a sampled token belongs to
    reference: Tensor | None  # [N]
    start: Tensor | None  # [3, N] at the start of the step: log-probs, values, returns
    support: Support | None
    routes: Tensor | None  # [T, L, K]


def pack(
    items: Sequence[Item], device: torch.device, routers: Routers | None = None, heats: float | Sequence[float] = (1.0,)
) -> Batch:
    """Lay the sequences end to end, or as a tree. With `routers`, recorded expert choices are replayed.

    A group's answers take the temperatures `heats` in turns, or a turn's own; a number is for all.
    """
    trajectories = [s.trajectory for s in items]
    sampled = np.concatenate([t.sampled for t in trajectories])
    counts = [t.num_sampled_tokens for t in trajectories]
    references = [s.reference for s in items if s.reference is not None]
    starts = [s.start for s in items if s.start is not None]
    advantages = [np.full(n, s.advantage, np.float32) for n, s in zip(counts, items, strict=True)]
    replayed = _routes(trajectories, routers) if routers and routers.num_layers else None
    lengths, after, tokens, rows = Forest(trajectories).laid_out()
    tensor = partial(torch.as_tensor, device=device)
    return Batch(
        token_ids=tensor(np.concatenate([t.token_ids for t in trajectories])[tokens].astype(np.int64)),
        plan=PackedPlan(lengths, device, after),
        at=tensor(rows[sampled]),
        behaviour=tensor(np.concatenate([t.logprobs for t in trajectories])[sampled]),
        advantage=tensor(np.concatenate(advantages)),
        temperature=tensor(_temperatures(trajectories, heats)),
        sequence_ids=tensor(np.repeat(np.arange(len(items)), counts)),
        reference=tensor(np.concatenate(references)) if references else None,
        start=tensor(np.concatenate(starts, axis=1)) if starts else None,
        support=_support(trajectories, device),
        routes=None if routers is None or replayed is None else routers.to_device(replayed[tokens], device),
    )


def _temperatures(trajectories: Sequence[Trajectory], heats: float | Sequence[float]) -> np.ndarray:
    """Of each sampled token, by its turn or its answer's index, unless one number is for all."""
    if isinstance(heats, float):
        return np.full(sum(t.num_sampled_tokens for t in trajectories), heats)
    found = []
    for t in trajectories:
        values = np.full(len(t.token_ids), heats[t.index % len(heats)])
        for turn in t.turns:
            if turn.temperature <= 0:
                raise ValueError(f"trajectory {t.id} has a greedy turn: its tokens cannot be trained on")
            values[turn.start : turn.end] = turn.temperature
        found.append(values[t.sampled])
    return np.concatenate(found)


def _support(trajectories: Sequence[Trajectory], device: torch.device) -> Support | None:
    """The sampling support of all sampled tokens; None if sampling was not truncated."""
    known = [(r.support_ids, r.support_offsets) if (r := t.replay) is not None else (None, None) for t in trajectories]
    if all(ids is None for ids, _ in known):
        return None
    found, sizes = [np.empty(0, np.int32)], []
    for trajectory, (ids, offsets) in zip(trajectories, known, strict=True):
        if ids is None and trajectory.turns:  # nobody truncated its turns: an empty support is the whole vocabulary
            sizes.append(np.zeros(trajectory.num_sampled_tokens, np.int64))
        elif ids is None or offsets is None or len(offsets) != trajectory.num_sampled_tokens + 1:
            raise ValueError(f"trajectory {trajectory.id} lacks the sampling support of its tokens")
        else:
            found.append(ids)
            sizes.append(np.diff(offsets))
    ends = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    return Support(torch.from_numpy(np.concatenate(found)).to(device), torch.from_numpy(ends).to(device))


def _routes(trajectories: Sequence[Trajectory], routers: Routers) -> RouteArray:
    found: list[RouteArray] = []
    for trajectory in trajectories:
        routes = None if trajectory.replay is None else trajectory.replay.routes
        needed = (len(trajectory.token_ids), *routers.shape)
        if routes is None:
            raise ValueError(f"trajectory {trajectory.id} lacks the expert routing of its tokens")
        if routes.shape != needed:
            told = f"{list(routes.shape)}; tokens, layers and experts per token are {list(needed)}"
            raise ValueError(f"trajectory {trajectory.id} has experts of shape {told}")
        if (largest := int(routes.max())) >= routers.num_experts:
            raise ValueError(f"trajectory {trajectory.id} names expert {largest}; the model has {routers.num_experts}")
        found.append(routes)
    return np.concatenate(found)


class Packer:
    """Collects micro-batches of at most `budget` computed tokens. A longer sequence gets one of its own."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._pending: list[Item] = []
        self._forest = Forest()

    def add(self, sequences: Sequence[Item]) -> list[list[Item]]:
        """Returns the micro-batches that are now full. They are filled in the order of arrival."""
        full = []
        for sequence in sequences:
            self._forest.add(sequence.trajectory)
            if self._pending and self._forest.num_tokens > self.budget:
                full += self.rest()
                self._forest.add(sequence.trajectory)
            self._pending.append(sequence)
        return full

    def rest(self) -> list[list[Item]]:
        rest, self._pending, self._forest = self._pending, [], Forest()
        return [rest] if rest else []


def balanced(sequences: Sequence[Item], budget: int) -> list[list[Item]]:
    """Micro-batches of nearly equal size, of at most `budget` computed tokens or one longer sequence each."""
    families = _families(sequences, budget)
    alone = [family for size, family in families if size > budget]
    shared = [family for family in families if family[0] <= budget]
    batches = _split(shared, max(1, -(-sum(size for size, _ in shared) // budget)))
    while max(size for size, _ in batches) > budget:
        batches = _split(shared, len(batches) + 1)
    return alone + [batch for _, batch in batches if batch]


def split(items: Sequence[Item], num_parts: int) -> list[list[Item]]:
    """Parts of nearly equal size, some perhaps empty. A single part keeps the order."""
    if num_parts == 1:
        return [list(items)]
    whole = Forest(item.trajectory for item in items).num_tokens
    most = 5 * whole // (4 * num_parts)  # what a prefix that is computed in two parts costs is worth some imbalance
    return [part for _, part in _split(_families(items, most), num_parts)]


Family = tuple[int, list[Item]]  # computed tokens; sequences with a common beginning


def _families(items: Sequence[Item], budget: int) -> list[Family]:
    """Sequences with a common beginning together, if they have at most `budget` computed tokens."""
    packer, alike = Packer(budget), dict[bytes, list[Item]]()
    for item in items:
        alike.setdefault(key_of(item.trajectory, LEAST_SHARED), []).append(item)
    parts = [part for family in alike.values() for part in packer.add(family) + packer.rest()]
    return [(Forest(item.trajectory for item in part).num_tokens, part) for part in parts]


def _split(families: Sequence[Family], num_parts: int) -> list[Family]:
    """The largest first, each to the part that is the lightest then."""
    parts: list[Family] = [(0, [])] * num_parts
    for size, items in sorted(families, key=lambda f: f[0], reverse=True):
        lightest = min(range(num_parts), key=lambda i: parts[i][0])
        load, known = parts[lightest]
        parts[lightest] = load + size, known + items
    return parts
