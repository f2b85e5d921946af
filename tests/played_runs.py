"""A run without a model: the real loop, buffer, ledger and restart between stand-ins that move when they are told to.

What an answer says and earns follows from its serial and index, as with a seed; when it comes is the caller's choice. A
process dies at any statement to its database, and what is durable by then is all that the next one finds.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from headrace.buffer.buffer import Buffer, LagPolicy, Sieve
from headrace.config import BufferSection, Config, LoopSection, ModelSection, RecoverySection, RolloutSection
from headrace.ledger.ledger import Ledger
from headrace.loop.books import Bookkeeper
from headrace.loop.loop import Loop
from headrace.loop.resume import resume
from headrace.loop.stages import Stages
from headrace.measured import EngineCounts, Mismatch, StepStats
from headrace.place.device import DeviceThread
from headrace.types import (
    Completion,
    DropReason,
    FinishReason,
    Group,
    Item,
    Order,
    Outcomes,
    Prompt,
    Score,
    Span,
    Timing,
    Trajectory,
)

SAMPLES = 3
MOST_AT_ONCE = 4  # groups that start together


def answer_id(serial: int, prompt: Prompt, index: int, attempt: int) -> str:
    order = Order(serial=serial, prompt=prompt, samplings=(), indices=(index,), attempt=attempt)
    return order.request_id(0)


# What becomes of a group: trained on; trained on without its first answer, which has no verdict, or is too long;
# dropped for want of signal; dropped for want of verdicts.
GOOD, HALF, CUT, DULL, BROKEN = "good", "half", "cut", "dull", "broken"
KINDS = (GOOD, HALF, CUT, DULL, BROKEN)
TRAINED = (GOOD, HALF, CUT)


class Died(BaseException):
    """The process is gone: nothing that it still tries has an effect."""


@dataclass(kw_only=True)
class World:
    """What outlasts a process: settings, what the prompts will bring, and what is on disk.

    Example:
        World(run_dir=Path("runs/a"), max_lag=0, groups_per_step=2, exact=False, kinds=("good", "dull"), rule="drop",
            skipped={2})
    """

    run_dir: Path
    max_lag: int
    groups_per_step: int
    exact: bool
    kinds: tuple[str, ...]
    rule: str  # for what is in flight when a process dies
    skipped: set[int]  # steps whose gradient is not finite
    steps: int = 4
    every_steps: int = 2  # a checkpoint
    checkpoints: dict[int, tuple[int, Any]] = field(default_factory=dict)  # version -> weights, facts
    weights: dict[int, int] = field(default_factory=dict)  # of every version that ever was

    def kind(self, serial: int) -> str:
        """What becomes of a group."""
        return self.kinds[serial % len(self.kinds)]

    def num_tokens(self, serial: int, index: int) -> int:
        """How long an answer is."""
        return 1 + (serial + index) % 3

    def score(self, serial: int, index: int) -> Score:
        """An answer's verdict."""
        kind = self.kind(serial)
        if kind == BROKEN or (kind == HALF and index == 0):
            return Score(failure=DropReason.REWARD_ERROR, detail="made to fail")
        return Score(reward=1.0 if kind == DULL else float(index == 1))

    def config(self) -> Config:
        """The run's settings."""
        return Config(
            model=ModelSection(exact=self.exact),
            rollout=RolloutSection(samples=SAMPLES),
            buffer=BufferSection(drop="no_signal,overlong", patience=100),
            loop=LoopSection(steps=self.steps, max_lag=self.max_lag, groups_per_step=self.groups_per_step),
            recovery=RecoverySection(every_steps=self.every_steps, in_flight=self.rule),
        )


class Turns(ThreadPoolExecutor):
    """An executor whose work is done when the caller says so, in the caller's thread."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: work(*args, **named)))
        return future

    def turn(self) -> None:
        """Do the oldest piece of work."""
        if self.waiting:
            future, work = self.waiting.pop(0)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)


class Hours(asyncio.SelectorEventLoop):
    """An event loop whose clock follows from what was done, so that a run can be played again."""

    _ticks = 0

    def time(self) -> float:
        self._ticks += 1
        return self._ticks * 0.001


class MortalConnection:
    """A connection to the database that fails for ever from some statement on; nothing uncommitted stays."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.dead = False
        self.num_left: int | None = None  # statements until it dies

    def check(self) -> None:
        """Raise if the process is dead by now."""
        if self.num_left is not None:
            self.num_left -= 1
            self.dead = self.dead or self.num_left < 0
        if self.dead:
            raise Died

    def execute(self, *args: Any) -> sqlite3.Cursor:
        self.check()
        return self._connection.execute(*args)

    def executemany(self, *args: Any) -> sqlite3.Cursor:
        self.check()
        return self._connection.executemany(*args)

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def __enter__(self) -> None:
        """A transaction, which ends like a statement."""

    def __exit__(self, *failure: Any) -> None:
        self.check()
        self._connection.__exit__(*failure)

    def close(self) -> None:
        self._connection.close()


class Prompts:
    """Prompt 0, 1, 2 and so on; `next` and `at` as those of a PromptStream."""

    def __init__(self) -> None:
        self.held_out = [self.at(0)]
        self._serial = 0

    def next(self) -> tuple[int, Prompt]:
        self._serial += 1
        return self._serial - 1, self.at(self._serial - 1)

    def at(self, serial: int) -> Prompt:
        return Prompt(id=f"p{serial}", text="?", token_ids=np.array([5, 6], np.int32), fields={"serial": serial})

    def state(self) -> dict[str, Any]:
        return {"serial": self._serial}

    def restore(self, state: Mapping[str, Any], drawn: Mapping[int, str]) -> None:
        self._serial = state["serial"]
        assert drawn == {serial: f"p{serial}" for serial in range(self._serial)}

    def heed(self, outcomes: Callable[[Iterable[int]], Outcomes]) -> None:
        """The order is fixed."""


@dataclass
class Answer:
    """An answer under way."""

    id: str
    serial: int
    index: int
    prompt: Prompt
    future: asyncio.Future[Trajectory]
    versions: list[int] = field(default_factory=list)  # of each token

    def trajectory(self, finish: FinishReason) -> Trajectory:
        """What was sampled so far."""
        num_prompt, num = len(self.prompt.token_ids), len(self.prompt.token_ids) + len(self.versions)
        spans = [
            Span(
                version=v,
                start=num_prompt + self.versions.index(v),
                end=num_prompt + self.versions.index(v) + self.versions.count(v),
            )
            for v in sorted(set(self.versions))
        ]
        return Trajectory(
            id=self.id,
            prompt_id=self.prompt.id,
            index=self.index,
            token_ids=np.concatenate(
                [self.prompt.token_ids, np.arange(len(self.versions), dtype=np.int32) + self.serial]
            ),
            sampled=np.arange(num) >= num_prompt,
            logprobs=np.linspace(0.0, -1.0, num, dtype=np.float32) * (np.arange(num) >= num_prompt),
            spans=tuple(spans),
            finish=finish,
            text=str(self.index),
            timing=Timing(submitted_s=0.0, started_s=0.0, finished_s=1.0),
        )


class Actor:
    """Samples one token of one answer at a time, by `version`, which the publisher sets."""

    def __init__(self, world: World, ledger: Ledger, on_begun: Callable[[int, int], None]) -> None:
        self._world, self._ledger, self._on_begun = world, ledger, on_begun
        self.counts = EngineCounts()
        self.workers = [self]
        self.version = 0
        self.answers: list[Answer] = []

    def start(self, order: Order) -> list[asyncio.Future[Trajectory]]:
        serial, prompt, attempt, so_far = order.serial, order.prompt, order.attempt, order.so_far
        futures = []
        for index in order.indices:
            future: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
            futures.append(future)
            answer = Answer(answer_id(serial, prompt, index, attempt), serial, index, prompt, future)
            known = (so_far or {}).get(index)
            if known is not None and known.finish is not FinishReason.ABORT:
                future.set_result(replace(known, id=answer.id))
                continue
            if known is not None:
                answer.versions = [span.version for span in known.spans for _ in range(span.start, span.end)]
            self.answers.append(answer)
        return futures

    async def under_way(self) -> dict[int, dict[int, Trajectory]]:
        found: dict[int, dict[int, Trajectory]] = {}
        for answer in self.answers:
            found.setdefault(answer.serial, {})[answer.index] = answer.trajectory(FinishReason.ABORT)
        return found

    def sample(self, at: int) -> None:
        """One token of one answer; the last of an answer delivers it."""
        if not self.answers:
            return
        answer = self.answers[at % len(self.answers)]
        self._ledger.sampled(1)
        answer.versions.append(self.version)
        self._on_begun(answer.serial, self.version)
        if len(answer.versions) == self._world.num_tokens(answer.serial, answer.index):
            cut = self._world.kind(answer.serial) == CUT and answer.index == 0
            self._deliver(answer, FinishReason.LENGTH if cut else FinishReason.EOS)

    def abort(self, serials: Sequence[int]) -> None:
        for answer in [answer for answer in self.answers if answer.serial in serials]:
            self._deliver(answer, FinishReason.ABORT)

    def close(self) -> None:
        self.answers.clear()

    async def run(self) -> None:
        await asyncio.Event().wait()

    def _deliver(self, answer: Answer, finish: FinishReason) -> None:
        self.answers.remove(answer)
        if not answer.future.done():
            answer.future.set_result(answer.trajectory(finish))


class Scorer:
    """Gives its verdicts when told to."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[tuple[Completion, asyncio.Future[Score]]] = []

    async def score(self, completion: Completion) -> Score:
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append((completion, future))
        return await future

    def judge(self, at: int) -> None:
        """One verdict."""
        if self._waiting:
            completion, future = self._waiting.pop(at % len(self._waiting))
            if not future.done():
                future.set_result(self._world.score(completion.fields["serial"], int(completion.text)))


class Learner:
    """Its weights are a digest of everything they were trained on, in order."""

    uses_reference = keeps_reference = lost = False

    def __init__(self, world: World) -> None:
        self._world, self._groups, self._version = world, [], 0
        self.intake = self
        self._weights = torch.zeros(1, dtype=torch.int64)

    def snapshot(self) -> int:
        return int(self._weights)

    def load(self, weights: int, version: int) -> None:
        self._weights.fill_(weights)
        self._version = version

    def add(self, group: Group, references: None) -> list[Any]:
        self._groups.append(group)
        return [self._answers(group)] if len(self._groups) % 2 == 0 else []  # a micro-batch is full now and then

    def rest(self) -> list[Any]:
        return [self._answers(group) for group in self._groups[-1:]]

    def _answers(self, group: Group) -> list[Any]:
        return [Item(trajectory=trajectory, advantage=0.0) for trajectory in group.trajectories]

    def accumulate(self, items: list[Any]) -> None:
        """Nothing: `finish` does it all."""

    def finish(self) -> StepStats:
        self._version += 1
        groups, self._groups = self._groups, []
        skipped = self._version in self._world.skipped
        if not skipped:
            digest = hashlib.sha256(str(int(self._weights)).encode())
            for trajectory in (t for group in groups for t in group.trajectories):
                digest.update(repr((trajectory.index, trajectory.spans, trajectory.reward, trajectory.text)).encode())
                for array in (trajectory.token_ids, trajectory.sampled, trajectory.logprobs):
                    digest.update(array.tobytes())
            self._weights.fill_(int.from_bytes(digest.digest()[:4]))
        assert self._world.weights.setdefault(self._version, int(self._weights)) == int(self._weights), (
            f"version {self._version} came out differently the second time"
        )
        loss = float("nan") if skipped else float(self._weights)
        return StepStats(
            loss=loss,
            grad_norm=loss,
            lr=1e-3,
            skipped=skipped,
            entropy=0.0,
            kl_reference=0.0,
            clipped_share=0.0,
            mismatch=Mismatch(),
        )


class CheckpointsOnDisk:
    """Of a disk that is the world's; a dead process writes nothing."""

    def __init__(self, world: World, alive: Callable[[], None]) -> None:
        self._world, self._alive = world, alive

    def write(self, version: int, weights: int, facts: Any) -> None:
        self._alive()
        self._world.checkpoints[version] = (weights, facts)

    @property
    def versions(self) -> list[int]:
        return sorted(self._world.checkpoints, reverse=True)

    def newest(self, on_damage: Callable[[str], None]) -> Any:
        version = max(self._world.checkpoints)
        weights, facts = self._world.checkpoints[version]
        return SimpleNamespace(version=version, facts=facts, tensors=weights)


class Process:
    """One process of a run, from its start (or restart) until it ends or dies."""

    def __init__(self, world: World, *, resumed: bool, num_statements: int | None = None) -> None:
        self.world, self.resumed = world, resumed
        self.ledger = Ledger.reopen(world.run_dir) if resumed else Ledger.create(world.run_dir)
        self._mortal = MortalConnection(self.ledger.connection)
        self.ledger.connection = self._mortal  # type: ignore[assignment]
        self.scorer, self.prompts = Scorer(world), Prompts()
        self.device, self.cores, self.disk, self._events = DeviceThread(), Turns(), Turns(), Hours()
        self.device.close()
        self.device.submit = self.cores.submit  # type: ignore[method-assign]
        checkpoints = CheckpointsOnDisk(world, self._mortal.check)
        if not resumed:
            checkpoints.write(0, 0, {"prompts": self.prompts.state()})
        config = world.config()
        books = Bookkeeper(self.ledger)
        self.buffer = Buffer(
            LagPolicy(
                max_lag=world.max_lag,
                groups_per_step=world.groups_per_step,
                most_at_once=MOST_AT_ONCE,
            ),
            Sieve(config.buffer),
            patience=config.buffer.patience,
            on_buffered=self.ledger.buffered,
            on_drop=books.dropped,
        )
        self.actor = Actor(world, self.ledger, self.buffer.begin)
        take = partial(setattr, self.actor, "version")
        publisher = SimpleNamespace(commit=take, offer=take, pending=None, moved_bytes=0)
        stages: dict[str, Any] = {
            "prompts": self.prompts,
            "pool": self.actor,
            "answers": self.actor,
            "books": books,
            "scorer": self.scorer,
            "ranks": Learner(world),
            "publisher": publisher,
            "canary": SimpleNamespace(check=lambda version: None),
            "checkpoints": checkpoints,
            "tokenizer": None,  # no reward is given step by step
        }
        self.notes: list[str] = []
        self.loop = Loop(
            config,
            Stages(buffer=self.buffer, ledger=self.ledger, clock=self.ledger.clock, device=self.device, **stages),
            on_row=lambda row: None,
            on_note=lambda text: None,
        )
        self._mortal.num_left = num_statements
        self._run = self._events.create_task(self._live())

    async def _live(self) -> None:
        if self.resumed:
            await resume(self.loop, self.notes.append)
        await self.loop.run()

    @property
    def taken(self) -> list[Group]:
        """The groups of the step under way."""
        return self.loop._taken

    @property
    def under_way(self) -> bool:
        """Whether it trains: not while it starts or ends."""
        return self.loop._learning is not None and not self.loop.ending.orderly and not self.loop.over

    def doom(self, num_statements: int) -> None:
        """It will die at this many statements to its database from now."""
        self._mortal.num_left = num_statements

    def kill(self) -> None:
        """It dies now."""
        self._mortal.dead = True

    def do(self, event: Callable[[], None], turns: int = 1) -> None:
        """Something happens, and then so many turns of the event loop."""

        async def act() -> None:
            event()
            for _ in range(turns):
                await asyncio.sleep(0)

        def beside(work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
            return asyncio.wrap_future(self.disk.submit(work, *args))

        try:
            with patch("headrace.loop.loop.beside", beside):
                self._events.run_until_complete(act())
        except Died:
            assert self._mortal.dead

    def put(self, group: Group) -> bool | None:
        """What the buffer says to a group, at this instant; None when somebody else is at the buffer."""
        putting = self.buffer.put(group)
        try:
            putting.send(None)
        except StopIteration as done:
            return bool(done.value)
        putting.close()
        return None

    def pass_time(self, rounds: int, at: int = 0) -> None:
        """Everything moves a little, so many times; `at` is the place in each queue that is served."""
        for _ in range(rounds):
            for event in (
                lambda: self.actor.sample(at),
                lambda: self.scorer.judge(at),
                self.cores.turn,
                self.disk.turn,
            ):
                if not self.gone:
                    self.do(event, 3)

    @property
    def gone(self) -> bool:
        """Whether it has died or ended."""
        return self._mortal.dead or self._run.done()

    def bury(self) -> bool:
        """Leave nothing of it but what is on disk; whether it had come to its end by itself."""
        ended = self._run.done() and not self._mortal.dead
        if ended:
            try:
                self.ledger.close()
            except Died:  # at the last moment
                ended = False
        self._mortal.dead = True
        self._events.set_exception_handler(lambda *_: None)  # what was under way fails, and nobody is left to hear it
        while tasks := asyncio.all_tasks(self._events):  # some begin another wait while they end
            for task in tasks:
                task.cancel()
            self._events.run_until_complete(asyncio.sleep(0))
        self._mortal.close()
        failure = None if self._run.cancelled() else self._run.exception()
        self._events.close()
        self.cores.shutdown()
        if ended and failure is not None:
            raise failure
        return ended


def delivered(world: World, serial: int, attempt: int, version: int) -> Group:
    """What an attempt at a group would bring if it were not over: all its answers, scored."""
    prompt = Prompts().at(serial)
    answers = [
        Answer(answer_id(serial, prompt, i, attempt), serial, i, prompt, None, [version] * world.num_tokens(serial, i))  # type: ignore[arg-type]
        for i in range(SAMPLES)
    ]
    scored = tuple(replace(answer.trajectory(FinishReason.EOS), reward=float(answer.index)) for answer in answers)
    return Group(serial=serial, prompt=prompt, version=version, trajectories=scored, attempt=attempt)
