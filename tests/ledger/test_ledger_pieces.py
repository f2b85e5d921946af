"""Sampled tokens may lie anywhere in a trajectory, in several pieces: what the ledger keeps and gives back of them."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields, is_dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from hand_made import balances
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ledger.ledger import Ledger
from headrace.ledger.recovery import Recovery
from headrace.runs.audit import audit
from headrace.types import (
    Attempt,
    BoolArray,
    FinishReason,
    Group,
    Prompt,
    Replay,
    Span,
    Timing,
    Trajectory,
    Turn,
)

MAX_TOKENS = 12
SEED = st.integers(0, 2**32 - 1)


@st.composite
def masks(draw: st.DrawFn) -> BoolArray:
    """Runs of tokens that were sampled or not, in any order; at least one token, perhaps none of them sampled."""
    runs = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=5))
    return np.array([sampled for sampled, length in runs for _ in range(length)], np.bool_)


def pieces(sampled: BoolArray) -> list[tuple[int, int]]:
    """Start and end of every run of sampled tokens."""
    found, start = [], 0
    for is_sampled, run in groupby(sampled.tolist()):
        end = start + len(list(run))
        if is_sampled:
            found.append((start, end))
        start = end
    return found


def spans_of(sampled: BoolArray, rng: np.random.Generator) -> tuple[Span, ...]:
    """Each piece by one version, or cut in two by an update of the weights in flight."""
    spans, version = [], int(rng.integers(0, 3))
    for start, end in pieces(sampled):
        cut = int(rng.integers(start, end))
        if cut > start:
            spans.append(Span(version=version, start=start, end=cut))
            version += 1
        spans.append(Span(version=version, start=cut, end=end))
    return tuple(spans)


def trajectory(serial: int, index: int, sampled: BoolArray, seed: int, attempt: int = 1) -> Trajectory:
    rng, num_tokens, num_sampled = np.random.default_rng(seed), len(sampled), int(sampled.sum())
    sizes = rng.integers(1, 4, num_sampled)
    replay = Replay(
        support_ids=rng.integers(0, 50, sizes.sum()).astype(np.int32),
        support_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        routes=rng.integers(0, 8, (num_tokens, 2, 2)).astype(np.uint8) if seed % 2 else None,
    )
    return Trajectory(
        id=f"{serial}{'' if attempt == 1 else f'.{attempt}'}:p{serial}/{index}",
        prompt_id=f"p{serial}",
        index=index,
        token_ids=rng.integers(0, 50, num_tokens).astype(np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -rng.random(num_tokens), 0.0).astype(np.float32),
        spans=spans_of(sampled, rng),
        finish=FinishReason.EOS,
        text="two pieces \ud800",
        timing=Timing(submitted_s=0.5, started_s=1.0, finished_s=2.0, scored_s=2.5),
        reward=float(rng.integers(0, 2)),
        reward_parts={"correct": 1.0},
        replay=replay if seed % 3 else None,
        turns=tuple(
            Turn(start=a, end=b, finish=FinishReason.STOP, temperature=0.5, reward=[None, 0.25][a % 2], text="é")
            for a, b in pieces(sampled)
        ),
    )


def group_of(serial: int, members: list[tuple[BoolArray, int]], attempt: int = 1) -> Group:
    prompt = Prompt(id=f"p{serial}", text="12+9=", token_ids=np.array([5, 6], np.int32))
    trajectories = tuple(trajectory(serial, i, mask, seed, attempt) for i, (mask, seed) in enumerate(members))
    return Group(serial=serial, prompt=prompt, version=0, trajectories=trajectories, attempt=attempt)


def assert_same(found: Any, expected: Any) -> None:
    """Equal in every field, arrays to the last bit and with their types."""
    if is_dataclass(expected):
        assert type(found) is type(expected)
        for field in fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


def columns(run_dir: Path) -> dict[str, dict[str, Any]]:
    """By id, all columns of every trajectory."""
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as connection:
        connection.row_factory = sqlite3.Row
        return {found["id"]: dict(found) for found in connection.execute("SELECT * FROM trajectories")}


@contextmanager
def new_ledger() -> Iterator[tuple[Ledger, Path]]:
    with tempfile.TemporaryDirectory() as directory, Ledger.create(Path(directory)) as ledger:
        yield ledger, Path(directory)


def start(ledger: Ledger, group: Group) -> None:
    attempt = Attempt(serial=group.serial, number=group.attempt, prompt_id=group.prompt.id, wave=1, version=0)
    ledger.started(len(group.trajectories), attempt)
    ledger.sampled(group.num_sampled_tokens)


MEMBERS = st.lists(st.tuples(masks(), SEED), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(members=MEMBERS, trained=st.booleans())
def test_what_is_booked_is_read_back_whole(members: list[tuple[BoolArray, int]], trained: bool) -> None:
    group = group_of(3, members)
    with new_ledger() as (ledger, run_dir):
        start(ledger, group)
        ledger.buffered(group)
        if trained:
            ledger.trained(group, version=0)
        else:
            ledger.dropped(group, [(t, "stale") for t in group.trajectories], was_buffered=True)
        found = Recovery(ledger).trajectories(3, 1)
        totals = ledger.totals()
        assert audit(run_dir) == []
        rows = columns(run_dir)
    assert len(found) == len(group.trajectories)
    for got, expected in zip(found, group.trajectories, strict=True):
        assert_same(got, expected)
    account = totals.trained if trained else totals.dropped["stale"]
    assert (account.tokens, account.trajectories) == (group.num_sampled_tokens, len(group.trajectories))
    for t in group.trajectories:
        row = rows[t.id]
        assert row["num_tokens"] == int(t.sampled.sum())
        assert row["num_tokens"] + row["num_prompt_tokens"] == len(t.token_ids)
        mask = np.zeros(len(t.token_ids), np.bool_)
        for _, begin, end in json.loads(row["spans"]):
            mask[begin:end] = True
        assert mask.tolist() == t.sampled.tolist(), "the columns alone say which tokens were sampled"


@settings(max_examples=40, deadline=None)
@given(members=MEMBERS, seed=SEED)
def test_a_killed_run_goes_on_from_the_pieces_that_were_kept(members: list[tuple[BoolArray, int]], seed: int) -> None:
    """In flight at a checkpoint, kept, the process dies, the restart carries on, and the books balance to the end."""
    group = group_of(0, members)
    kept = {t.index: replace(t, reward=None, reward_parts={}) for t in group.trajectories if seed >> t.index & 1}
    kept = {index: replace(t, timing=replace(t.timing, scored_s=None)) for index, t in kept.items()}
    num_kept = sum(t.num_sampled_tokens for t in kept.values())
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        with Ledger.create(run_dir) as ledger:
            start(ledger, group)
            ledger.keep_partials({0: kept})
        with Ledger.reopen(run_dir) as ledger:
            recovery = Recovery(ledger)
            found = recovery.partials(0)
            assert list(found) == list(kept)
            for index, t in kept.items():
                assert_same(found[index], t)
            lost = recovery.carry_on(recovery.attempts(state="open"), num_kept)
            assert lost.tokens == group.num_sampled_tokens - num_kept
            again = group_of(0, members, attempt=2)
            ledger.sampled(again.num_sampled_tokens - num_kept)
            ledger.buffered(again)
            ledger.trained(again, version=0)
            assert recovery.partials(0) == {}, "they were booked since"
            totals = ledger.totals()
        assert audit(run_dir) == []
    assert totals.trained.tokens == group.num_sampled_tokens
    assert totals.generated.tokens == group.num_sampled_tokens + lost.tokens
    assert balances(totals)


def test_the_old_meaning_of_the_columns_holds_for_a_prompt_and_its_answer() -> None:
    """What ledgers of earlier versions call num_prompt_tokens: the tokens before the first sampled one."""
    mask = np.array([False] * 5 + [True] * 3)
    group = group_of(1, [(mask, 4)])
    with new_ledger() as (ledger, run_dir):
        start(ledger, group)
        ledger.buffered(group)
        row = columns(run_dir)["1:p1/0"]
    assert (row["num_prompt_tokens"], row["num_tokens"]) == (5, 3)
