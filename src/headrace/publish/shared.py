"""Publishing inside one process: engine and learner use one copy of the weights."""

from __future__ import annotations

from typing import Protocol


class VersionedEngine(Protocol):
    """What the publisher needs of an engine."""

    def weights_changed(self, version: int) -> None:
        """The weights are those of `version` now."""
        ...


class SharedPublisher:
    """The optimizer step is the publication.

    `commit` runs in the device thread, where engine steps run too, so no decode step ever sees half an update: before
    it every token is sampled by the old version, after it by the new one. No bytes move.
    """

    moved_bytes = 0

    def __init__(self, engine: VersionedEngine) -> None:
        self._engine = engine

    def commit(self, version: int) -> None:
        """Tell the engine, between two of its steps, that the weights it holds became `version`."""
        self._engine.weights_changed(version)
