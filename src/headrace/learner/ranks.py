"""The ranks of the learner as one, for the loop: groups become micro-batches, shared by all."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.config import LearnerSection
from headrace.errors import LearnerLostError, ModelError, WorkerLostError
from headrace.learner.batch import Packer, balanced, split
from headrace.learner.credit import credits, token_rewards
from headrace.learner.objective import kl, users_function
from headrace.learner.tree import paths_of
from headrace.measured import Mismatch, PolicyFacts, StepStats
from headrace.roles import Cluster, R, Reply, Trainer, Worker
from headrace.types import Example, FloatArray, Group, IntArray, Item, Trajectory
from headrace.user_code import short_traceback

NOTICED_S = 60.0  # after which a dead node is known to be dead


class Intake:
    """The groups of the current step, until their micro-batches (of all `num_ranks`) are full."""

    def __init__(self, section: LearnerSection, num_ranks: int = 1) -> None:
        for name, path in ("teacher", section.teacher), ("critic", section.critic):
            if path and isinstance(path, str) and ":" not in path and not Path(path).exists():
                raise ModelError(f"learner.{name} = '{path}': no such directory or file")
        for name in ("advantage", "loss", "teacher"):
            if ":" in (spec := getattr(section, name)):
                users_function(f"learner.{name}", spec)  # raises what is wrong, before anything is sampled
        self._section = section
        # an advantage of reinforce++ or of a user's depends on the other groups of its step
        self._whole = section.in_whole_steps or section.advantage == "reinforce++" or ":" in section.advantage
        self._packer = Packer(section.micro_batch_tokens * num_ranks)
        self._pending: list[tuple[Group, Sequence[FloatArray | None]]] = []

    def add(self, group: Group, references: Sequence[FloatArray] | None = None) -> list[list[Item]]:
        """Take a group into the step; returns micro-batches that are now full."""
        self._pending.append((group, references or [None] * len(group.trajectories)))
        return [] if self._whole else self._packer.add(self._items())

    def rest(self) -> list[list[Item]]:
        """The step has all its groups: the remaining micro-batches."""
        return balanced(self._items(), self._packer.budget) if self._whole else self._packer.rest()

    def _items(self) -> list[Item]:
        pending, self._pending = self._pending, []
        each = [list(zip(group.trajectories, self._costs(group, known), strict=True)) for group, known in pending]
        if self._section.loss == "tba":
            found: list[Any] = [[t.reward for t, _ in pairs] for pairs in each]  # made into advantages by `balance`
        elif self._section.advantage == "gae":
            found = [[(token_rewards(t) - cost).astype(np.float32) for t, cost in pairs] for pairs in each]
        else:
            rewards = [np.array([t.reward - cost.sum() for t, cost in pairs]) for pairs in each]
            found = credits(self._section, [group for group, _ in pending], rewards)
        items = [
            Item(trajectory=trajectory, advantage=advantage, reference=reference)
            for (group, known), values in zip(pending, found, strict=True)
            for trajectory, advantage, reference in zip(group.trajectories, values, known, strict=True)
        ]
        parts = self._section.minibatches
        return items if parts == 1 else [replace(x, minibatch=k * parts // len(items)) for k, x in enumerate(items)]

    def _costs(self, group: Group, references: Sequence[FloatArray | None]) -> list[np.ndarray]:
        """Of each sampled token the KL to the reference, where that is taken off the reward."""
        if not self._section.kl_coef or self._section.kl_in == "loss" or self._section.loss == "tba":
            return [np.zeros(1)] * len(references)
        costs = []
        for trajectory, reference in zip(group.trajectories, references, strict=True):
            assert reference is not None
            behaviour = torch.from_numpy(trajectory.logprobs[trajectory.sampled])
            divergence = kl(self._section.kl_estimator, behaviour, torch.from_numpy(reference))
            costs.append(self._section.kl_coef * divergence.double().numpy())
        return costs


class Ranks:
    """Cuts every micro-batch into a part for each rank. If one of them is lost, so is the learner.

    Methods with the names of `Trainer` do the same on all ranks. They block: call them in the
    device thread.
    """

    def __init__(self, cluster: Cluster, ranks: Sequence[Worker[Trainer]], section: LearnerSection) -> None:
        self.ranks = list(ranks)
        self.first = self.ranks[0]  # saves and sends
        self.uses_reference = bool(section.kl_coef)
        self.teacher = section.teacher if ":" in section.teacher else ""  # a function that is asked
        self.keeps_reference = self.uses_reference and not section.teacher  # its weights are nowhere else
        self.lost = False  # a rank is gone, and no other can do anything any more
        self._cluster = cluster
        self.intake = Intake(section, len(ranks))

    def warm_up(self, examples: Sequence[Sequence[Example]]) -> list[float]:
        """Supervised steps, one for each batch of worked examples; the losses."""
        return self.gather([rank.ask(Trainer.warm_up, examples) for rank in self.ranks])[0]

    def meet(self) -> PolicyFacts:
        (address,) = self.gather([self.first.ask(Trainer.address)])
        return self.gather([rank.ask(Trainer.meet, *address) for rank in self.ranks])[0]

    def accumulate(self, items: Sequence[Item]) -> None:
        asked = zip(self.ranks, split(items, len(self.ranks)), strict=True)
        self.gather([rank.ask(Trainer.accumulate, part) for rank, part in asked])

    def finish(self) -> StepStats:
        return self.gather([rank.ask(Trainer.finish) for rank in self.ranks])[0]

    def reference_logprobs(self, group: Group) -> list[FloatArray]:
        if self.teacher:
            return teacher_logprobs(self.teacher, group)
        parts = [replace(group, trajectories=tuple(own)) for own in self._parts(group.trajectories)]
        asked = zip(self.ranks, parts, strict=True)
        answers = self.gather([rank.ask(Trainer.reference_logprobs, part) for rank, part in asked])
        ids = [trajectory.id for part in parts for trajectory in part.trajectories]
        found = dict(zip(ids, chain.from_iterable(answers), strict=True))
        return [found[trajectory.id] for trajectory in group.trajectories]

    def mismatch(self, trajectories: Sequence[Trajectory]) -> Mismatch:
        asked = zip(self.ranks, self._parts(trajectories), strict=True)
        return self.gather([rank.ask(Trainer.mismatch, part) for rank, part in asked])[0]

    def next_logprob(self, prompt: IntArray, token: int) -> float:
        return self.gather([rank.ask(Trainer.next_logprob, prompt, token) for rank in self.ranks])[0]

    def snapshot(self, *, reference: bool = False) -> Callable[[Path], None]:
        """Every rank copies what it holds. The result makes them write it, in any thread."""
        self.gather([rank.ask(Trainer.snapshot, reference=reference) for rank in self.ranks])
        return self._write

    def _write(self, directory: Path) -> None:
        self.gather([rank.ask(Trainer.write, directory.absolute()) for rank in self.ranks])

    def load(self, directory: Path, version: int, *, reference: bool = False) -> None:
        self.gather([rank.ask(Trainer.load, directory, version, reference=reference) for rank in self.ranks])

    def save(self, directory: Path) -> None:
        self.gather([rank.ask(Trainer.save, directory.absolute()) for rank in self.ranks])

    def gather(self, answers: Sequence[Reply[R]]) -> list[R]:
        """All results. A rank that is lost makes it a `LearnerLostError`."""
        try:
            return self._cluster.gather(answers)
        except WorkerLostError as lost:
            reason = str(lost)
        except RuntimeError:
            # the living ranks notice first that another is gone, and raise a network error
            if not (reason := self._death()):
                raise
        raise self.gone(reason)

    def gone(self, reason: str) -> LearnerLostError:
        """A rank does not answer any more: the error to raise."""
        self.lost = True
        return LearnerLostError(f"{reason}; the learner cannot go on without it")

    def _death(self) -> str:
        """Why one of several ranks is gone, if one is; a node's death is noticed late."""
        for answer in [rank.ask(Trainer.alive) for rank in self.ranks] if len(self.ranks) > 1 else []:
            try:
                answer.result(NOTICED_S)
            except WorkerLostError as lost:
                return str(lost)
        return ""

    def _parts(self, trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
        items = [Item(trajectory=t, advantage=0.0) for t in trajectories]
        return [[item.trajectory for item in part] for part in split(items, len(self.ranks))]


def teacher_logprobs(spec: str, group: Group) -> list[FloatArray]:
    """Log-probs of each answer's sampled tokens, by a teacher elsewhere and at a temperature of 1.

    The user's function `spec` asks it. It gets sequences of tokens, all answers and all branches of
    an episode, and returns log-probs of their tokens. That of a first token does not matter.
    """
    answers = group.trajectories
    ranges = [(i, path) for i, t in enumerate(answers) for path in paths_of(t)]
    paths = [(i, np.concatenate([np.arange(a, b) for a, b in path])) for i, path in ranges]
    found = [np.full(len(t.token_ids), np.nan, np.float32) for t in answers]
    try:
        ask = users_function("learner.teacher", spec)
        told = ask([answers[i].token_ids[path].tolist() for i, path in paths])
        for (i, path), values in zip(paths, told, strict=True):
            found[i][path] = np.asarray(values, np.float32).reshape(len(path))
        sampled = [known[t.sampled] for known, t in zip(found, answers, strict=True)]
        if not np.isfinite(np.concatenate(sampled)).all():
            raise ValueError("they are not all finite numbers")
    except Exception as why:  # of the user's code, or of what it returned
        needed = "must return a log-prob for each token of each sequence"
        raise ModelError(f"learner.teacher = '{spec}' {needed}:\n{short_traceback(why)}") from why
    return sampled
