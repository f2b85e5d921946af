"""Judging in this process, without child processes."""

from __future__ import annotations

from dataclasses import replace

from headrace.reward.function import RewardFunction, failure_of, resolve
from headrace.reward.worker import Setup
from headrace.types import Completion, Score


class InlineJudges:
    """Calls the reward function in this process: `Scorer(section, judges=InlineJudges)`.

    For tests, and for functions that are trusted: one that hangs or crashes takes the trainer with
    it, and one that blocks delays everything else in this event loop. `timeout_s` limits coroutines
    only. Nothing is retried.
    """

    num_retried = 0
    num_workers_replaced = 0

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._function: RewardFunction | None = None

    async def start(self) -> None:
        setup = self._setup
        self._function = resolve(setup.function, answer_field=setup.answer_field, pattern=setup.pattern)

    async def run(self, completion: Completion) -> Score:
        assert self._function is not None, "start() comes first"
        given = replace(completion, fields=dict(completion.fields))  # a copy, as for a child process
        try:
            return await self._function.judge(given, self._setup.timeout_s)
        except (Exception, SystemExit) as error:
            return failure_of(error)

    async def close(self) -> None:
        """Nothing to end."""
