"""Any interleaving of events, with deaths of the process in between: the books stay true and no prompt is lost."""

from __future__ import annotations

import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made import balances
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from played_runs import GOOD, KINDS, MOST_AT_ONCE, SAMPLES, TRAINED, Died, Process, World, delivered

from headrace.ledger import recovery
from headrace.ledger.ledger import Amount, Ledger
from headrace.runs.audit import audit

AT = st.integers(0, 7)
TURNS = st.integers(1, 8)
STATEMENTS = st.integers(0, 60)


class Recovery(RuleBasedStateMachine):
    """A run whose every event is chosen, and what must hold after each."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.process: Process | None = None
        self.finished = False

    @initialize(
        max_lag=st.sampled_from([0, 0, 1, 3]),
        groups_per_step=st.integers(1, 3),
        exact=st.booleans(),
        kinds=st.lists(st.sampled_from(KINDS), max_size=5),
        rule=st.sampled_from(["requeue", "requeue", "resume", "drop"]),
        skipped=st.sets(st.integers(1, 4), max_size=1),
        every_steps=st.integers(1, 3),
    )
    def begin(self, kinds: list[str], **chosen: Any) -> None:
        self.world = World(run_dir=Path(self.directory.name), kinds=(*kinds, GOOD), **chosen)
        self.process = Process(self.world, resumed=False)

    @property
    def alive(self) -> bool:
        return self.process is not None

    def check_whether_gone(self) -> None:
        """A process that is gone is buried at once."""
        assert self.process is not None
        assert not self.process.notes
        if self.process.gone:
            process, self.process = self.process, None
            self.finished = process.bury() and process.loop.over and not process.loop.ending.asked

    # ---- what happens while a process lives

    @precondition(lambda self: self.alive)
    @rule(at=AT, turns=TURNS)
    def a_token_is_sampled(self, at: int, turns: int) -> None:
        self.process.do(lambda: self.process.actor.sample(at), turns)
        self.check_whether_gone()

    @precondition(lambda self: self.alive)
    @rule(at=AT, turns=TURNS)
    def an_answer_is_judged(self, at: int, turns: int) -> None:
        self.process.do(lambda: self.process.scorer.judge(at), turns)
        self.check_whether_gone()

    @precondition(lambda self: self.alive)
    @rule(turns=TURNS)
    def the_device_works(self, turns: int) -> None:
        self.process.do(self.process.cores.turn, turns)
        self.check_whether_gone()

    @precondition(lambda self: self.alive)
    @rule(turns=TURNS)
    def the_disk_writes(self, turns: int) -> None:
        self.process.do(self.process.disk.turn, turns)
        self.check_whether_gone()

    @precondition(lambda self: self.alive)
    @rule(rounds=st.integers(1, 40), at=AT)
    def time_passes(self, rounds: int, at: int) -> None:
        self.process.pass_time(rounds, at)
        self.check_whether_gone()

    @precondition(lambda self: self.alive and not self.process.loop.ending.asked)
    @rule()
    def it_is_interrupted(self) -> None:
        self.process.do(self.process.loop.interrupt)
        self.check_whether_gone()

    # ---- what happens to a process

    @precondition(lambda self: self.alive)
    @rule()
    def it_is_killed(self) -> None:
        self.process.kill()
        self.check_whether_gone()

    @precondition(lambda self: self.alive)
    @rule(num_statements=STATEMENTS)
    def it_is_killed_soon(self, num_statements: int) -> None:
        self.process.doom(num_statements)

    @precondition(lambda self: not self.alive and not self.finished)
    @rule(num_statements=st.none() | STATEMENTS, rounds=st.integers(0, 10))
    def it_is_resumed(self, num_statements: int | None, rounds: int) -> None:
        self.process = Process(self.world, resumed=True, num_statements=num_statements)
        self.process.pass_time(rounds)
        self.check_whether_gone()

    @precondition(lambda self: self.alive)
    @rule(at=AT)
    def an_attempt_delivers_that_is_over(self, at: int) -> None:
        with Ledger.open(self.world.run_dir) as books:
            known = recovery.Recovery(books)
            under_way = known.attempts(state="open")
            over = [attempt for attempt in known.attempts() if attempt not in under_way]
        if not over:
            return
        attempt = over[-1 - at % len(over)]
        late = delivered(self.world, attempt.serial, attempt.number, attempt.version)
        drops = [(t, "stale") for t in late.trajectories]
        process = self.process
        before = self.on_disk(), dict(process.buffer.in_flight), list(process.buffer.buffered)
        assert not process.put(late)
        self.is_refused(lambda: process.ledger.buffered(late))
        self.is_refused(lambda: process.ledger.dropped(late, drops, was_buffered=False))
        assert (self.on_disk(), process.buffer.in_flight, process.buffer.buffered) == before
        self.check_whether_gone()

    def is_refused(self, call: Callable[[], None]) -> None:
        """At once: in a turn of the event loop, a process that is ending would go on with that."""
        try:
            with pytest.raises(sqlite3.IntegrityError, match="is over"):
                call()
        except Died:
            assert self.process.gone

    @precondition(lambda self: self.finished)
    @rule()
    def nothing_happens_after_the_end(self) -> None:
        assert self.process is None

    # ---- what must hold after each event

    def on_disk(self) -> dict[str, list[Any]]:
        with Ledger.open(self.world.run_dir) as books:
            return {
                "accounts": books.read("SELECT name, tokens, trajectories FROM accounts ORDER BY name"),
                "attempts": books.read("SELECT serial, number, state FROM attempts ORDER BY serial, number"),
                "groups": books.read(
                    "SELECT serial, attempt, state, COUNT(*), MAX(lag) FROM trajectories GROUP BY 1, 2, 3"
                ),
                "steps": recovery.Recovery(books).steps_after(0),
                "rows": [(row.step, row.reward_mean) for row in books.rows()],
            }

    @invariant()
    def everything_holds(self) -> None:
        self.the_books_are_true()
        found = self.on_disk()
        self.every_prompt_is_somewhere(found)
        if not self.world.max_lag and self.world.rule != "drop":
            self.trains_as_an_unbroken_run_does(found)

    def the_books_are_true(self) -> None:
        assert audit(self.world.run_dir, finished=self.finished) == []
        with Ledger.open(self.world.run_dir) as books:
            assert balances(books.totals())

    def every_prompt_is_somewhere(self, found: dict[str, list[Any]]) -> None:
        newest = {serial: (number, state) for serial, number, state in found["attempts"]}
        assert list(newest) == list(range(len(newest))), "no prompt is skipped"
        numbers = Counter(serial for serial, _, _ in found["attempts"])
        assert all(number == numbers[serial] for serial, (number, _) in newest.items()), "attempts have no gaps"
        open_now = Counter(serial for serial, _, state in found["attempts"] if state == "open")
        assert all(count == 1 for count in open_now.values())
        decided: Counter[int] = Counter()
        trained: dict[int, set[int]] = {}
        for serial, attempt, state, count, lag in found["groups"]:
            if state == "trained":
                trained.setdefault(serial, set()).add(attempt)
                assert lag <= self.world.max_lag
            if attempt == newest[serial][0]:
                decided[serial] += count
        assert all(attempts == {newest[serial][0]} for serial, attempts in trained.items()), "trained on once"
        for serial, (_, state) in newest.items():
            assert state != "closed" or decided[serial] == SAMPLES, "each answer has its place in the books"
        if self.process is not None and self.process.under_way:
            self.agrees_with_the_process(found, newest)

    def agrees_with_the_process(self, found: dict[str, list[Any]], newest: dict[int, tuple[int, str]]) -> None:
        process = self.process
        by_state: dict[str, set[int]] = {"open": set(process.buffer.in_flight), "redone": set()}
        for serial, _, so_far in process.loop.again:  # the attempt of what is gone on with is in the books already
            by_state["redone" if so_far is None else "open"].add(serial)
        for state, serials in by_state.items():
            assert serials == {serial for serial, (_, found_state) in newest.items() if found_state == state}
        waiting = sorted(group.serial for group in (*process.buffer.buffered, *process.taken))
        assert waiting == sorted({serial for serial, _, state, *_ in found["groups"] if state == "buffered"})
        held = len(found["rows"]) * self.world.groups_per_step + len(waiting) + len(process.buffer.in_flight)
        most = (process.buffer.version + self.world.max_lag + 1) * self.world.groups_per_step
        if not self.world.max_lag:  # what one wave kept beyond its need is trained on in the same step
            most += MOST_AT_ONCE
        assert held <= most, "nobody runs ahead further than max_lag allows"

    def trains_as_an_unbroken_run_does(self, found: dict[str, list[Any]]) -> None:
        serial, unbroken, rewards = 0, [], []
        size = self.world.groups_per_step
        begun_before = kept_before = 0  # in the last step
        for _ in found["steps"]:
            first = serial
            groups: list[int] = []
            scores: list[float] = []
            while len(groups) < size:  # a wave, as large as its need
                missing, begun, kept = size - len(groups), begun_before + serial - first, kept_before + len(groups)
                wave = range(serial, serial + max(missing, min(ceil(missing * (begun + 1) / (kept + 1)), MOST_AT_ONCE)))
                serial = wave.stop
                groups += [s for s in wave if self.world.kind(s) in TRAINED]
                verdicts = [self.world.score(s, i).reward for s in wave for i in range(SAMPLES)]
                scores += [reward for reward in verdicts if reward is not None]
            unbroken.append(groups)
            rewards.append(float(np.mean(sorted(scores))))
            begun_before, kept_before = serial - first, len(groups)
        assert [[s for s, _ in groups] for _, groups in found["steps"]] == unbroken
        assert [mean for _, mean in found["rows"]] == rewards[: len(found["rows"])]

    def teardown(self) -> None:
        """Whatever happened, the run can be brought to its end."""
        try:
            if not hasattr(self, "world"):
                return
            for _ in range(2000):
                if self.finished:
                    break
                if self.process is None:
                    self.process = Process(self.world, resumed=True)
                self.process.pass_time(20)
                self.check_whether_gone()
            assert self.finished, "the run hangs"
            self.everything_holds()
            found = self.on_disk()
            assert [step for step, _ in found["rows"]] == list(range(1, self.world.steps + 1))
            assert {state for *_, state in found["attempts"]} <= {"closed", "redone", "crashed"}
            with Ledger.open(self.world.run_dir) as books:
                assert books.totals().in_flight == books.totals().buffered == Amount()
        finally:
            if self.process is not None:
                self.process.kill()
                self.process.bury()
            self.directory.cleanup()


# Explaining a failure traces every line, which takes minutes here.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
Recovery.TestCase.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, derandomize=True, phases=PHASES
)
TestRecovery = pytest.mark.slow(Recovery.TestCase)


def steps_of(world: World) -> list[list[int]]:
    with Ledger.open(world.run_dir) as books:
        return [[serial for serial, _ in groups] for _, groups in recovery.Recovery(books).steps_after(0)]


def play_to_the_end(process: Process) -> None:
    for _ in range(100):
        process.pass_time(10)
        if process.gone:
            break
    assert process.bury()


def play(process: Process, *events: str) -> None:
    """`s1` samples a token of the second answer under way, `j0` judges the first that waits; then all comes to rest."""
    for event in events:
        move = {"s": process.actor.sample, "j": process.scorer.judge}[event[0]]
        process.do(lambda move=move, at=int(event[1]): move(at), 10)


def one_step(run_dir: Path, **chosen: Any) -> tuple[World, Process]:
    """A strictly on-policy run of a single step, just begun."""
    world = World(run_dir=run_dir, max_lag=0, kinds=(GOOD,), rule="requeue", skipped=set(), steps=1, **chosen)
    process = Process(world, resumed=False)
    process.do(process.cores.turn, 10)
    return world, process


def test_the_learner_waits_for_a_group_that_a_restart_starts_again(tmp_path: Path):
    world, process = one_step(tmp_path, groups_per_step=2, exact=True)
    play(process, "s3", "s3", "j0", "s3", "s3", "s3", "j0", "s3", "j0")  # all of group 1, nothing of group 0
    assert [group.serial for group in process.buffer.buffered] == [1]
    process.kill()
    process.bury()
    play_to_the_end(Process(world, resumed=True))
    assert steps_of(world) == [[0, 1]]


def test_a_group_that_an_interrupt_cuts_short_is_trained_on_whole(tmp_path: Path):
    world, process = one_step(tmp_path, groups_per_step=1, exact=False)
    play(process, "s0", "j0", "s0", "s0", "j0")  # two answers of three are scored
    process.do(process.loop.interrupt, 10)
    while not process.gone:
        process.pass_time(1)
    assert process.bury()
    play_to_the_end(Process(world, resumed=True))
    with Ledger.open(tmp_path) as books:
        assert books.totals().trained.trajectories == SAMPLES


def test_an_interrupt_before_the_first_step_leaves_nothing_begun(tmp_path: Path):
    chosen: dict[str, Any] = {"max_lag": 0, "groups_per_step": 1, "kinds": ("dull", GOOD), "rule": "requeue"}
    worlds = [World(run_dir=tmp_path / name, skipped=set(), steps=4, exact=True, **chosen) for name in ("a", "b")]
    broken, unbroken = (Process(world, resumed=False) for world in worlds)
    play_to_the_end(unbroken)
    broken.do(broken.loop.interrupt)  # while the weights are checked
    play_to_the_end(broken)
    play_to_the_end(Process(worlds[0], resumed=True))
    assert steps_of(worlds[0]) == steps_of(worlds[1]) == [[1], [3], [5], [7]]
