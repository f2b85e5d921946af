"""Which trajectories are trained on. Every other one is dropped with a reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

from headrace.config import BufferSection
from headrace.errors import ConfigError, HeadraceError
from headrace.types import DropReason, Group, Trajectory
from headrace.user_code import load_function

Dropped = list[tuple[Trajectory, str]]


class Sieve:
    """All filters of a run, in order: overlong answers, the user's own, groups without signal."""

    def __init__(self, section: BufferSection) -> None:
        self._section = section
        self._own = [(spec.rsplit(":", 1)[-1], _load_filter(spec)) for spec in section.filters]

    def sift(self, group: Group) -> tuple[Group | None, Dropped]:
        """What of the group to train on, if anything, and the dropped trajectories with reasons."""
        dropped: Dropped = []
        if self._section.drop_overlong:
            dropped = [(t, DropReason.OVERLONG) for t in group.trajectories if t.finish.cut]
            kept = tuple(t for t in group.trajectories if not t.finish.cut)
            group = replace(group, trajectories=kept)
        reason = self._verdict(group)
        if reason is None:
            return group, dropped
        return None, dropped + [(t, reason) for t in group.trajectories]

    def _verdict(self, group: Group) -> str | None:
        """The reason to drop the whole group, if there is one."""
        if not group.trajectories:
            return DropReason.INCOMPLETE
        for name, keep in self._own:
            try:
                kept = keep(group)
            except (Exception, SystemExit) as error:
                raise HeadraceError(f"the filter '{name}' failed on prompt '{group.prompt.id}': {error!r}") from error
            if not kept:
                return f"filter:{name}"
        rewards = {t.reward for t in group.trajectories}
        if self._section.drop_no_signal and len(rewards) == 1:
            return DropReason.NO_SIGNAL
        return None


def _load_filter(spec: str) -> Callable[[Group], bool]:
    function = load_function(spec, "buffer.filters", ConfigError)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"buffer.filters: '{spec}' is an async function; a filter must be an ordinary one")
    return function
