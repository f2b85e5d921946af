"""The rollout actor: prompts in, trajectories out, one by one as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from headrace.errors import DataError
from headrace.roles import Device
from headrace.rollout.engine import Engine
from headrace.rollout.request import Generation, Request
from headrace.rollout.sampling import request_seed
from headrace.types import EngineCounts, FinishReason, Prompt, Sampling, Timing, Trajectory


@dataclass(slots=True)
class _Pending:
    """A request whose generation is under way."""

    serial: int
    prompt: Prompt
    index: int
    submitted_s: float
    counted: bool
    future: asyncio.Future[Trajectory]


class RolloutActor:
    """Drives the engine and turns its generations into trajectories.

    `span(stage)` is entered around every stretch of engine work; `on_sampled(n)` hears of new tokens before the
    trajectories that hold them are handed out, so that the books never show a trajectory without its tokens;
    `on_begun(serial, version)` hears when a group's first token is sampled.
    """

    def __init__(
        self,
        engine: Engine,
        device: Device,
        *,
        seed: int,
        clock: Callable[[], float],
        span: Callable[[str], AbstractContextManager[None]],
        on_sampled: Callable[[int], None],
    ) -> None:
        self.engine = engine
        self.on_begun: Callable[[int, int], None] = lambda serial, version: None
        self._device, self._seed, self._clock, self._span, self._on_sampled = device, seed, clock, span, on_sampled
        self._pending: dict[str, _Pending] = {}
        self._work = asyncio.Event()
        self._booked = 0

    @property
    def exact(self) -> bool:
        """Whether an answer has the same bits in any company."""
        return self.engine.policy.exact

    @property
    def counts(self) -> EngineCounts:
        """What the engine did so far."""
        return self.engine.counts

    def start(
        self,
        serial: int,
        prompt: Prompt,
        samplings: Sequence[Sampling],
        *,
        counted: bool = True,
        attempt: int = 1,
        so_far: Mapping[int, Trajectory] | None = None,
        indices: Sequence[int] | None = None,
    ) -> list[asyncio.Future[Trajectory]]:
        """Queue one generation per entry of `samplings`; each future gives its trajectory.

        What is not `counted` (evaluation) draws other noise and stays out of the books. A further attempt at a group
        draws the noise of the first; `so_far` has, by index, what an earlier one came to, and that is gone on with.
        `indices` are those of the entries in their group, if they are not all of it.
        """
        self._check_length(prompt, samplings)
        loop = asyncio.get_running_loop()
        now_s = self._clock()
        requests, futures = [], []
        for index, sampling in zip(indices or range(len(samplings)), samplings, strict=True):
            id = request_id(serial, prompt, index, attempt, counted=counted)
            future: asyncio.Future[Trajectory] = loop.create_future()
            futures.append(future)
            known = so_far.get(index) if so_far else None
            if known is not None and known.finish is not FinishReason.ABORT:
                future.set_result(replace(known, id=id))
                continue
            self._pending[id] = _Pending(serial, prompt, index, now_s, counted, future)
            seed = request_seed(self._seed, int(counted), serial, index)
            request = Request(id=id, sampling=sampling, seed=seed, counted=counted)
            if known is not None and known.num_sampled_tokens:
                self.engine.go_on(prompt.token_ids, request, _generation(known))
            else:
                requests.append(request)
        if requests:
            self.engine.submit(prompt.token_ids, requests)
        self._work.set()
        return futures

    def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, what unfinished requests have sampled so far. Call it in the device thread."""
        found: dict[int, dict[int, Trajectory]] = {}
        for id, generation in self.engine.under_way().items():
            if id in self._pending and (pending := self._pending[id]).counted:
                found.setdefault(pending.serial, {})[pending.index] = self._trajectory(pending, generation)
        return found

    def _check_length(self, prompt: Prompt, samplings: Sequence[Sampling]) -> None:
        needed = len(prompt.token_ids) + max(s.max_new_tokens for s in samplings)
        if needed > self.engine.policy.max_context:
            raise DataError(
                f"prompt '{prompt.id}' has {len(prompt.token_ids)} tokens and may get "
                f"{needed - len(prompt.token_ids)} new ones (rollout.max_new_tokens): more than the model's context of "
                f"{self.engine.policy.max_context}; lower rollout.max_new_tokens or prompts.max_tokens"
            )

    def abort(self, serial: int) -> None:
        """End what is left of a group; its futures give what was sampled so far."""
        self.engine.abort({id for id, pending in self._pending.items() if pending.counted and pending.serial == serial})
        self._work.set()

    async def drain(self) -> None:
        """Wait until every request that is under way has finished; an engine error is raised here too."""
        while self._pending:
            done, _ = await asyncio.wait([p.future for p in self._pending.values()])
            for future in done:
                if not future.cancelled():
                    future.result()

    async def run(self) -> None:
        """Step the engine whenever there is work. Runs until cancelled; an engine error goes to everyone who waits."""
        try:
            while True:
                await self._work.wait()
                while self.engine.has_work:
                    counted = any(p.counted for p in self._pending.values())
                    finished = await self._device.run(self._advance, "rollout" if counted else "evaluate")
                    self._book()
                    for id, version in self.engine.begun():
                        if id in self._pending and self._pending[id].counted:
                            self.on_begun(self._pending[id].serial, version)
                    for generation in finished:
                        self._deliver(generation)
                self._work.clear()
        except Exception as error:
            for pending in self._pending.values():
                if not pending.future.done():
                    pending.future.set_exception(error)
            self._pending.clear()
            raise

    def _advance(self, stage: str) -> list[Generation]:
        with self._span(stage):
            return self.engine.advance()

    def _book(self) -> None:
        total = self.engine.sampled_tokens
        if total > self._booked:
            self._on_sampled(total - self._booked)
            self._booked = total

    def _deliver(self, generation: Generation) -> None:
        pending = self._pending.pop(generation.id)
        if not pending.future.done():
            pending.future.set_result(self._trajectory(pending, generation))

    def _trajectory(self, pending: _Pending, generation: Generation) -> Trajectory:
        prompt_ids = pending.prompt.token_ids
        padding = np.zeros(len(prompt_ids), np.float32)
        return Trajectory(
            id=generation.id,
            prompt_id=pending.prompt.id,
            index=pending.index,
            token_ids=np.concatenate([prompt_ids, generation.token_ids]),
            sampled=np.arange(len(prompt_ids) + len(generation.token_ids)) >= len(prompt_ids),
            logprobs=np.concatenate([padding, generation.logprobs]),
            spans=generation.spans,
            finish=generation.finish,
            text=self._text(generation),
            timing=Timing(
                submitted_s=pending.submitted_s, started_s=generation.started_s, finished_s=generation.finished_s
            ),
            replay=generation.replay,
        )

    def _text(self, generation: Generation) -> str:
        """The answer as text. It is for rewards and readers; nothing is ever tokenised from it."""
        text = self.engine.policy.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def _generation(trajectory: Trajectory) -> Generation:
    """The part that was sampled."""
    return Generation(
        id=trajectory.id,
        token_ids=trajectory.token_ids[trajectory.sampled],
        logprobs=trajectory.logprobs[trajectory.sampled],
        spans=trajectory.spans,
        finish=trajectory.finish,
        started_s=trajectory.timing.started_s,
        finished_s=trajectory.timing.finished_s,
        replay=trajectory.replay,
    )


def request_id(serial: int, prompt: Prompt, index: int, attempt: int, *, counted: bool) -> str:
    """Of a trajectory, or of an answer that stays out of the books."""
    id = trajectory_id(serial, prompt, index, attempt)
    return id if counted else f"eval:{id}"


def trajectory_id(serial: int, prompt: Prompt, index: int, attempt: int = 1) -> str:
    """Unique in a run: the serial tells apart the epochs in which a prompt comes again, the attempt its tries."""
    return f"{serial}{f'.{attempt}' if attempt > 1 else ''}:{prompt.id}/{index}"
