"""The ranks of the learner as one: what the loop takes for its trainer. Its calls wait, so they belong in a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.config import LearnerSection
from headrace.learner.intake import Intake
from headrace.learner.sharding import split
from headrace.loop.checkpoint import Checkpoint
from headrace.place.workers import Cluster, LearnerLostError, Worker, WorkerLostError
from headrace.types import FloatArray, Group, IntArray, Item, Mismatch, StepStats, Trajectory

NOTICED_S = 60.0  # after which a dead node is known to be dead


class RemoteTrainer:
    """Cuts every micro-batch into a part for each rank. If one of them is lost, so is the learner."""

    def __init__(self, cluster: Cluster, ranks: Sequence[Worker], section: LearnerSection) -> None:
        self._cluster, self.ranks, self._section = cluster, list(ranks), section
        self.lost = False  # a rank is gone, and no other can do anything any more
        intake = Intake(section, len(ranks))
        self.add, self.rest = intake.add, intake.rest

    @property
    def uses_reference(self) -> bool:
        """Whether groups must be scored by the reference first."""
        return bool(self._section.kl_coef)

    def meet(self) -> None:
        """The ranks find each other."""
        (address,) = self.all("address", ranks=self.ranks[:1])
        self.all("meet", *address)

    def accumulate(self, items: Sequence[Item]) -> None:
        """Forward and backward over one micro-batch, a part on each rank."""
        self._each("accumulate", split(items, len(self.ranks), len))

    def finish(self) -> StepStats:
        """The optimizer step."""
        stats: StepStats = self.all("finish")[0]
        return stats

    def reference_logprobs(self, group: Group) -> list[FloatArray]:
        """Log-probs of the group's sampled tokens under the start weights."""
        parts = [replace(group, trajectories=tuple(part)) for part in self._parts(group.trajectories)]
        found = {
            trajectory.id: values
            for part, logprobs in zip(parts, self._each("reference_logprobs", parts), strict=True)
            for trajectory, values in zip(part.trajectories, logprobs, strict=True)
        }
        return [found[trajectory.id] for trajectory in group.trajectories]

    def mismatch(self, trajectories: Sequence[Trajectory]) -> Mismatch:
        """How far the log-probs computed there are from those sampled with."""
        found: Mismatch = self._each("mismatch", self._parts(trajectories))[0]
        return found

    def next_logprob(self, prompt: IntArray, token: int) -> float:
        """Of a token after a prompt, as training computes it."""
        found: float = self.all("next_logprob", prompt, token)[0]
        return found

    def snapshot(self) -> Callable[[Path], None]:
        """Every rank copies what it holds; what is returned has them write it."""
        self.all("snapshot")
        return self._write

    def snapshot_reference(self) -> Callable[[Path], None]:
        """The same of the reference."""
        self.all("snapshot_reference")
        return self._write

    def _write(self, directory: Path) -> None:
        self.all("write", directory.absolute())

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""
        self.all("load", replace(checkpoint, path=checkpoint.path.absolute()))

    def load_reference(self, checkpoint: Checkpoint) -> None:
        """The weights of the reference are these."""
        self.all("load_reference", replace(checkpoint, path=checkpoint.path.absolute()))

    def save(self, directory: Path) -> None:
        """Write the whole policy."""
        self.all("save", directory.absolute())

    def all(self, method: str, *args: Any, ranks: Sequence[Worker] | None = None) -> list[Any]:
        """Ask every rank the same."""
        asked = [rank.ask(method, *args) for rank in (self.ranks if ranks is None else ranks)]
        return self._answers(asked)

    def _each(self, method: str, parts: Sequence[Any]) -> list[Any]:
        return self._answers([rank.ask(method, part) for rank, part in zip(self.ranks, parts, strict=True)])

    def _answers(self, asked: Sequence[Any]) -> list[Any]:
        try:
            return self._cluster.first_failure(asked)
        except WorkerLostError as lost:
            reason = str(lost)
        except RuntimeError:
            # a rank that lives notices first that another is gone, and says so in the words of the network
            if not (reason := self._death()):
                raise
        raise self.gone(reason)

    def gone(self, reason: str) -> LearnerLostError:
        """A rank does not answer any more: the error to raise."""
        self.lost = True
        return LearnerLostError(f"{reason}; the learner cannot go on without it")

    def _death(self) -> str:
        """Of one of several ranks, if there was one; a node's takes a while to be noticed."""
        for answer in [rank.ask("alive") for rank in self.ranks] if len(self.ranks) > 1 else []:
            try:
                answer.result(NOTICED_S)
            except WorkerLostError as lost:
                return str(lost)
        return ""

    def _parts(self, trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
        return split(trajectories, len(self.ranks), lambda t: len(t.token_ids))
