"""Sampled tokens may lie anywhere in a trajectory, in several pieces: trained, booked, killed, resumed and shown."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import Piece, ScriptedJudge, ScriptedSampler, scripted_place
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny_runs import Workshop, rank_of, rows_of

from headrace.config import Config
from headrace.ledger.files import prepare_run_dir
from headrace.ledger.ledger import Ledger
from headrace.ledger.recovery import Recovery
from headrace.loop.resume import resume
from headrace.measured import Row
from headrace.runs.audit import audit
from headrace.runs.show import TrajectoryDetails
from headrace.types import Prompt

STEPS = 3

tokens = st.lists(st.integers(3, 90), min_size=1, max_size=5)
pieces = st.lists(st.tuples(tokens, st.booleans()), min_size=1, max_size=5).filter(
    lambda drawn: any(by_policy for _, by_policy in drawn)
)


def script(drawn: list[list[Piece]]) -> Any:
    """Another answer for every prompt and index, of the shapes that were drawn."""

    def answer(prompt: Prompt, index: int) -> list[Piece]:
        shift = sum(map(ord, prompt.id)) + index
        shape = drawn[shift % len(drawn)]
        return [([3 + (token + shift) % 88 for token in ids], by_policy) for ids, by_policy in shape]

    return answer


async def run(config: Config, run_dir: Path, drawn: list[list[Piece]], *, resumed: bool, die_at: int = 0) -> bytes:
    """Train; with `die_at`, the process is cancelled in that step. The weights it leaves."""
    sampler = ScriptedSampler(script(drawn), decode=lambda ids: "".join(map(chr, ids + 29)))
    judge = ScriptedJudge(lambda completion: sum(map(ord, completion.text)) % 97 / 97)
    place = scripted_place(config, run_dir, sampler, judge, resumed=resumed)

    def on_row(row: Row) -> None:
        if row.step == die_at:
            running.cancel()

    try:
        await place.start_user_code()
        loop = await place.loop(on_row)
        if resumed:
            await resume(loop, pytest.fail)
        running = asyncio.create_task(loop.run())
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()
        weights = rank_of(place).policy.model.state_dict()
        return b"".join(weight.numpy().tobytes() for weight in weights.values())
    finally:
        await place.close()


@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # to shrink an example would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(drawn=st.lists(pieces, min_size=2, max_size=4), die_at=st.integers(1, STEPS - 1))
def test_trained_booked_killed_resumed_and_shown(workshop: Workshop, drawn: list[list[Piece]], die_at: int):
    def config(name: str) -> Config:
        return workshop.config(
            name, f"loop.steps={STEPS}", "recovery.every_steps=2", "run.overwrite=true", "buffer.drop=nothing"
        )

    unbroken = prepare_run_dir(config("pieces-unbroken"))
    expected = asyncio.run(run(config("pieces-unbroken"), unbroken, drawn, resumed=False))
    broken = prepare_run_dir(config("pieces-broken"))
    assert asyncio.run(run(config("pieces-broken"), broken, drawn, resumed=False, die_at=die_at)) != expected
    assert asyncio.run(run(config("pieces-broken"), broken, drawn, resumed=True)) == expected
    for run_dir in (unbroken, broken):
        assert audit(run_dir) == []
        assert len(rows_of(run_dir)) == STEPS
    with Ledger.open(broken) as ledger:
        named = [pair for _, groups in Recovery(ledger).steps_after(0) for pair in groups]
        trained = [t for pair in named for t in Recovery(ledger).trajectories(*pair)]
    assert len(trained) == STEPS * 4 * 4
    answer = script(drawn)
    for t in trained[:8]:
        prompt = Prompt(id=t.prompt_id, text="", token_ids=np.zeros(0, np.int32))
        ids, sampled = zip(*[(i, by) for part, by in answer(prompt, t.index) for i in part], strict=True)
        assert t.token_ids[-len(ids) :].tolist() == list(ids)
        assert t.sampled[-len(ids) :].tolist() == list(sampled)
        shown = TrajectoryDetails(broken, t.id)
        assert shown.whole is not None
        assert shown.whole.num_sampled_tokens == sum(sampled)
