"""How answers come about: one episode per answer, all answers to a prompt as one group.

An episode leads from a prompt to a finished trajectory with a reward. Without an environment it is
a single turn: the policy answers once, and the answer is scored. In a trajectory, sampled tokens
may lie anywhere and in several pieces; nothing after this file relies on where.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from headrace.config import Config
from headrace.loop.books import RowMaker
from headrace.loop.ending import Ending, State
from headrace.loop.stages import Stages
from headrace.loop.watchdog import background
from headrace.reward.scorer import Scorer
from headrace.roles import Answers
from headrace.types import (
    Attempt,
    Completion,
    DropReason,
    FinishReason,
    Group,
    Order,
    Outcome,
    Prompt,
    Sampling,
    Score,
    Trajectory,
    Turn,
)

Answer = asyncio.Future[Any]  # a trajectory of the engines alone, or an episode's outcome
Steps = Sequence[tuple[int, float]]  # where each step of an answer ends in its text, and its reward
SoFar = Mapping[int, Trajectory]  # by index, what the answers of a group have sampled
# A group that a resumed run starts again: serial, attempt, and what it goes on from. Without that,
# it starts from its prompt, and the ledger does not know the attempt yet.
Again = tuple[int, int, SoFar | None]


async def episode(
    prompt: Prompt,
    sampled: Awaitable[Trajectory | Outcome],
    score: Callable[[Completion], Awaitable[Score]],
    now: Callable[[], float],
    split: Callable[[Trajectory, Steps], Trajectory] = lambda trajectory, steps: trajectory,
) -> Outcome:
    """The outcome of one answer to `prompt`; `sampled` is its generation, queued by the caller.

    An aborted answer is not scored. A reward that cannot be computed is a failure, never a zero.
    """
    played = await sampled
    outcome = played if isinstance(played, Outcome) else Outcome(trajectory=played)
    trajectory = outcome.trajectory
    if outcome.failure is not None or trajectory.reward is not None:
        return outcome
    if trajectory.finish is FinishReason.ABORT:
        return Outcome(trajectory=trajectory, failure=DropReason.STALE)
    found = await score(Completion.of(prompt, trajectory))
    if found.steps and not trajectory.turns:
        trajectory = split(trajectory, found.steps)
    trajectory = replace(trajectory, verdict_s=found.seconds, verdict_output=found.output, verdict_failure=found.detail)
    if found.failure is not None:
        return Outcome(trajectory=trajectory, failure=found.failure, detail=found.detail)
    timing = replace(trajectory.timing, scored_s=now())
    parts, reward = {**trajectory.reward_parts, **found.parts}, found.reward
    if reward is not None:
        reward += sum(trajectory.reward_parts.values())
    return Outcome(trajectory=replace(trajectory, reward=reward, reward_parts=parts, timing=timing))


class Groups:
    """The groups in flight: generated, scored, and then put into the buffer."""

    def __init__(self, config: Config, stages: Stages, rows: RowMaker, ending: Ending) -> None:
        self._stages, self._rows, self._ending = stages, rows, ending
        self._filtered, self._first = bool(config.buffer.filters), config.buffer.first or None
        self._samplings = samplings_of(config, config.rollout.temperature, config.rollout.samples)
        self._running: dict[int, Sequence[Answer]] = {}  # serial -> its answers
        self._judging: set[asyncio.Task[Any]] = set()  # verdicts, and what filters are asked

    def start(
        self, serial: int, prompt: Prompt, attempt: int = 1, so_far: SoFar | None = None
    ) -> Coroutine[None, None, None]:
        """Queue a group's answers; the coroutine that is returned brings the group to the buffer.

        Answers are queued here: an engine gets groups that start together before its first step.
        """
        stages = self._stages
        version = stages.buffer.start(serial, attempt)
        started = Attempt(serial, attempt, prompt.id, stages.buffer.wave, version)
        if so_far is None:
            stages.ledger.started(len(self._samplings), started)
        known = {"attempt": attempt, "so_far": so_far, "first": self._first}
        answers = stages.answers.start(Order.group(serial, prompt, self._samplings, **known))
        if begun := [t.oldest_version for t in (so_far or {}).values() if t.spans]:
            stages.buffer.begin(serial, min(begun))
        self._running[serial] = answers
        return self._carry(started, prompt, answers)

    async def _carry(self, started: Attempt, prompt: Prompt, answers: Sequence[Answer]) -> None:
        """Score each answer as soon as it is complete; then buffer the group, or drop it."""
        serial, number = of = (started.serial, started.number)
        outcomes = await asyncio.gather(*(self._finish(prompt, answer) for answer in answers))
        if self._first and sum(o.failure is not DropReason.STALE for o in outcomes) >= self._first:
            outcomes = [replace(o, failure=DropReason.LATE) if o.failure is DropReason.STALE else o for o in outcomes]
        failed = [(o.trajectory, str(o.failure)) for o in outcomes if o.failure is not None]
        scored = tuple(o.trajectory for o in outcomes if o.failure is None)
        # a group that the end of the run cut short is dropped whole: a resumed run repeats it
        cut_short = any(o.failure is DropReason.RUN_ENDED for o in outcomes)
        group = Group(serial=serial, prompt=prompt, version=started.version, trajectories=scored, attempt=number)
        too_few = len(scored) < min(2, len(answers))
        refusal = None
        if self._filtered and not (cut_short or too_few):
            group, refusal = await self._ask_filters(group)
        self._rows.turns.extend(max(1, len(t.turns)) for t in group.trajectories)
        lengths, late = [t.num_sampled_tokens for t in scored], sum(why == DropReason.LATE for _, why in failed)
        if lengths and late:  # those would be at least as long as the longest that is left
            self._rows.biases.append(float(np.mean(lengths) / np.mean(lengths + [max(lengths)] * late)) - 1)
        del self._running[serial]
        if cut_short or too_few or refusal is DropReason.RUN_ENDED:
            reason = DropReason.RUN_ENDED if self._ending.orderly else DropReason.INCOMPLETE
            failed += [(trajectory, str(reason)) for trajectory in scored]
            scored = ()
        self._stages.books.dropped(failed, group, was_buffered=False)
        buffered = bool(scored) and await self._stages.buffer.put(group, refusal)
        if not scored:
            await self._stages.buffer.lose(serial, min(failed, key=lambda drop: drop[1] == DropReason.LATE)[1])
        resumable = self._ending.orderly and self._ending.state is not State.COMPLETE
        if not buffered and not resumable:  # a resumed run makes another attempt
            self._stages.ledger.closed(*of)

    async def _finish(self, prompt: Prompt, answer: Answer) -> Outcome:
        """The outcome of one episode. Its failure is RUN_ENDED if the end of the run cut it off."""
        try:
            outcome = await episode(prompt, answer, self._score, self._stages.clock.now, self._split)
        except asyncio.CancelledError:
            if not self._ending.orderly or not answer.done() or answer.cancelled():
                raise
            return Outcome(trajectory=_trajectory(answer), failure=DropReason.RUN_ENDED)
        if outcome.failure is DropReason.STALE and self._ending.orderly:
            return replace(outcome, failure=DropReason.RUN_ENDED)
        if outcome.detail:
            self._rows.reward_failed(outcome.detail)
        return outcome

    def _split(self, t: Trajectory, steps: Steps) -> Trajectory:
        """The answer with a turn for each step; a token belongs to the first that goes as far as it."""
        ids, stream = t.token_ids[t.sampled].tolist(), DecodeStream(skip_special_tokens=True)
        pieces, borders = [""], [0, *(end for end, _ in steps[:-1]), len(t.text)]
        with suppress(Exception):  # it raises no other: bytes that are no character
            pieces = [stream.step(self._stages.tokenizer.backend_tokenizer, id) or "" for id in ids]
        ends = np.cumsum([0, *map(len, pieces)])
        if "".join(pieces) != t.text:
            ends = np.linspace(0, len(t.text), len(ids) + 1)  # about
        cuts = [0, *np.minimum(np.searchsorted(ends, borders[1:-1]), len(ids)).tolist(), len(ids)]
        at, turns = len(t.token_ids) - len(ids), list[Turn]()  # where the answer begins
        whole = Turn(start=0, end=0, finish=t.finish, temperature=self._samplings[t.index].temperature)
        for (a, b), (c, d), (_, own) in zip(pairwise(cuts), pairwise(borders), steps, strict=True):
            turns.append(replace(whole, start=at + a, end=at + b, reward=own, text=t.text[c:d]))
        return replace(t, turns=tuple(turns))

    async def _score(self, completion: Completion) -> Score:
        with self._stages.clock.span("reward", version=self._stages.books.version):
            return await background(self._stages.scorer.score(completion), self._judging)

    async def _ask_filters(self, group: Group) -> tuple[Group, str | None]:
        """The group as they leave it, and why they do not keep it.

        That is RUN_ENDED if the end of the run cut them off.
        """
        asking = background(self._stages.buffer.sieve.filtered(group), self._judging)
        try:
            await asyncio.wait([asking])
            return (group, DropReason.RUN_ENDED) if asking.cancelled() else asking.result()
        finally:
            asking.cancel()

    async def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, what the answers of unfinished groups have sampled so far."""
        found = await self._stages.answers.under_way()
        for serial, answers in self._running.items():
            done = {i: a for i, a in enumerate(answers) if a.done() and not a.cancelled()}
            complete = {i: _trajectory(a) for i, a in done.items() if not a.exception()}
            found[serial] = found.get(serial, {}) | complete
        return {serial: found[serial] for serial in self._running}

    async def abort(self, *tasks: asyncio.Task[None]) -> None:
        """End what is in flight. Returns once all of it is booked, or one of `tasks` is done."""
        self._stages.answers.abort(list(self._running))
        while self._running and not any(task.done() for task in tasks):
            for judging in self._judging:
                judging.cancel()
            await asyncio.sleep(0.01)


def _trajectory(answer: Answer) -> Trajectory:
    found = answer.result()
    return found.trajectory if isinstance(found, Outcome) else found


def in_flight_rule(config: Config) -> str:
    """What a restart does about answers under way. A turn of an episode is never sampled again."""
    rule = config.recovery.in_flight
    if config.episode.environment or config.episode.agent:
        return "resume" if rule == "requeue" else rule
    return "requeue" if rule == "resume" and redoes_waves(config) else rule


def redoes_waves(config: Config) -> bool:
    """Whether a wave (groups that started together) is generated again as a whole, or not at all.

    Else an answer's bits depend on the rest of its batch, and which are first on when each began.
    """
    return config.loop.max_lag == 0 and bool(config.buffer.first or not config.model.exact)


def samplings_of(config: Config, temperatures: Sequence[float], count: int) -> list[Sampling]:
    """Of `count` answers, which take the `temperatures` in turns."""
    known = config.rollout.model_dump(include={f.name for f in fields(Sampling)} - {"temperature"})
    each = [Sampling(**known, temperature=heat) for heat in temperatures]
    return [each[i % len(each)] for i in range(count)]


async def evaluate(answers: Answers, scorer: Scorer, prompts: list[Prompt], config: Config) -> float | None:
    """The held-out score: mean reward on `prompts`, with the same random numbers each time.

    Answers that could not be scored are left out, not counted as zero; None if all were.
    """
    loop, known = config.loop, config.rollout.model_dump(include={"max_new_tokens", "stop"})
    samplings = [Sampling(**known, temperature=loop.eval_temperature)] * loop.eval_samples
    orders = [Order.group(i, prompt, samplings, counted=False) for i, prompt in enumerate(prompts)]
    started = [(order.prompt, answer) for order in orders for answer in answers.start(order)]
    episodes = [episode(prompt, answer, scorer.score, time.monotonic) for prompt, answer in started]
    found = [outcome.trajectory.reward for outcome in await asyncio.gather(*episodes)]
    rewards = [reward for reward in found if reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
