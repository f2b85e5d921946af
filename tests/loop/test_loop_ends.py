"""How runs end, and what becomes of answers that cannot be trained on."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import Workshop, play, rank_of, rows_of, same_bits, select, weights, worker_of, write_prompts

from headrace import api
from headrace.errors import RewardError, StalledError
from headrace.ledger.ledger import Amount
from headrace.loop.ending import TARGET_STEPS
from headrace.loop.loop import Loop
from headrace.measured import Row, StepStats
from headrace.place.place import Place
from headrace.runs.audit import audit, books
from headrace.types import Completion, DropReason, Score

PATIENT_S = 60.0  # nothing here takes seconds; a test that waits for ever should still end


def drop_reasons(run: Path) -> Counter[str]:
    """Trajectories dropped, by reason."""
    return Counter({reason: amount.trajectories for reason, amount in books(run).dropped.items()})


def assert_all_accounted_for(run: Path, *, interrupted: bool = False) -> None:
    """Of an interrupted run, what is buffered waits for a restart."""
    assert audit(run) == []
    assert books(run).in_flight == Amount()
    assert interrupted or books(run).buffered == Amount()


# Nothing to train on


@pytest.mark.parametrize("max_lag", [0, 2])
def test_nothing_but_equal_rewards_stalls(workshop: Workshop, max_lag: int):
    name = f"stalled{max_lag}"
    extra = (f"loop.max_lag={max_lag}", "buffer.patience=2", "loop.groups_per_step=3")
    with pytest.raises(StalledError, match=r"the last (\d+) groups were all dropped \(\1 x no_signal\)"):
        api.train(workshop.config(name, *extra, reward="constant"))
    run = workshop.directory / name
    assert_all_accounted_for(run)
    # two steps' worth, and not much more than what was under way besides; at max_lag = 0, a wave four times the first
    most = 6 + 2 * 3 * (max_lag + 1) if max_lag else 3 + 4 * 3
    assert 4 * 6 <= drop_reasons(run)["no_signal"] <= 4 * most
    assert not select(run, "SELECT * FROM rows")


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_a_ranking_of_groups_gives_equal_rewards_a_signal(workshop: Workshop, max_lag: int):
    path = workshop.directory / "ranking.py"
    path.write_text("def rank(group):\n    return [0.1 * t.index for t in group.trajectories]\n")
    name = f"ranked{max_lag}"
    ranked = (f'buffer.filters=["{path}:rank"]', f"loop.max_lag={max_lag}")
    await play(workshop.config(name, *ranked, reward="constant"))
    run = workshop.directory / name
    assert_all_accounted_for(run)
    found = select(run, "SELECT idx, reward, reward_parts FROM trajectories WHERE state = 'trained'")
    assert len(found) == 3 * 4 * 4
    (constant,) = {json.loads(parts)["constant"] for _, _, parts in found}
    assert all(reward == pytest.approx(constant + 0.1 * index) for index, reward, _ in found)
    assert all(json.loads(parts)["rank"] == pytest.approx(0.1 * index) for index, _, parts in found)
    assert rows_of(run)[0].reward_mean == pytest.approx(constant + 0.15)


async def test_own_filter_that_keeps_nothing_stalls_under_its_name(workshop: Workshop):
    path = workshop.directory / "own_filters.py"
    path.write_text("def easy(group):\n    return False\n")
    config = workshop.config("filtered", f'buffer.filters=["{path}:easy"]', "buffer.patience=1", reward="dense")
    with pytest.raises(StalledError, match=r"4 x filter:easy"):
        await play(config)
    run = workshop.directory / "filtered"
    assert_all_accounted_for(run)
    assert drop_reasons(run)["filter:easy"] >= 16


async def test_a_reward_that_always_fails_stalls_and_says_why(workshop: Workshop):
    config = workshop.config("unjudged", "buffer.patience=2", reward="broken")
    with pytest.raises(StalledError, match=r"8 x reward_error.*(?s:.)*no judge today"):
        async with asyncio.timeout(PATIENT_S):
            await play(config)
    run = workshop.directory / "unjudged"
    assert_all_accounted_for(run)
    reasons = drop_reasons(run)  # what ran beside the last of them may have ended with the run
    assert reasons["reward_error"] >= 32
    assert reasons.keys() <= {"reward_error", "run_ended"}
    assert select(run, "SELECT COUNT(*) FROM trajectories WHERE reward IS NOT NULL") == [(0,)]


# A reward that is good enough


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_a_run_ends_when_the_reward_has_come_far_enough(workshop: Workshop, max_lag: int):
    settings = (f"loop.max_lag={max_lag}", "loop.steps=14")
    unhurried = workshop.directory / f"unhurried{max_lag}"
    assert not (await play(workshop.config(unhurried.name, *settings, reward="dense"))).ending.early
    rewards = [row.reward_mean for row in rows_of(unhurried)]
    assert len(rewards) == 14
    name = f"enough{max_lag}"
    loop = await play(workshop.config(name, *settings, "loop.target_reward=-1", reward="dense"))
    assert loop.ending.early
    assert loop.version == len(rows_of(workshop.directory / name)) == TARGET_STEPS
    assert_all_accounted_for(workshop.directory / name)
    if max_lag:
        return
    assert not drop_reasons(workshop.directory / name)["run_ended"]  # nothing was started in vain
    means = [sum(rewards[i - TARGET_STEPS : i]) / TARGET_STEPS for i in range(TARGET_STEPS, 15)]
    target = max(means)
    loop = await play(workshop.config("just", *settings, f"loop.target_reward={target!r}", reward="dense"))
    assert loop.version == TARGET_STEPS + means.index(target)  # the first time it is reached, and not before


# Failures of the reward are values


@pytest.fixture(scope="module")
def moody_run(workshop: Workshop) -> Path:
    """A reward that raises, hangs and returns NaN for some answers, by their characters."""
    path = write_prompts(workshop.directory / "moody.jsonl", slow=[True, True, False])
    extra = (
        f"prompts.source={path}",
        "prompts.select=in-order",
        "reward.timeout_s=0.3",
        "reward.retries=0",
        "reward.workers=2",
    )
    api.train(workshop.config("moody", *extra, "rollout.samples=6", "loop.steps=3", reward="moody"))
    return workshop.directory / "moody"


def test_failed_verdicts_are_drops_with_their_reason(moody_run: Path):
    reasons = drop_reasons(moody_run)
    assert reasons["reward_error"] > 0
    assert reasons["reward_timeout"] > 0
    assert_all_accounted_for(moody_run)


def test_a_failure_is_never_a_reward_of_zero(moody_run: Path):
    scored = "state = 'trained' OR drop_reason IN ('no_signal', 'incomplete', 'run_ended')"
    rewards = select(moody_run, f"SELECT reward FROM trajectories WHERE {scored}")
    assert all(reward >= 1.0 for (reward,) in rewards if reward is not None)
    assert select(moody_run, "SELECT COUNT(*) FROM trajectories WHERE state = 'trained' AND reward IS NULL") == [(0,)]
    failed = "drop_reason IN ('reward_error', 'reward_timeout')"
    assert select(moody_run, f"SELECT DISTINCT reward FROM trajectories WHERE {failed}") == [(None,)]
    assert all(row.reward_mean >= 1.0 for row in rows_of(moody_run))


def test_the_rest_of_the_group_is_trained_on(moody_run: Path):
    """A prompt with a failed answer has its other answers in the same step."""
    failed = "SELECT prompt_id FROM trajectories WHERE drop_reason = 'reward_error'"
    trained = dict(
        select(
            moody_run,
            f"SELECT prompt_id, COUNT(*) FROM trajectories WHERE state = 'trained' AND prompt_id IN ({failed}) "
            "GROUP BY prompt_id",
        )
    )
    assert trained
    assert all(2 <= count < 6 for count in trained.values())


def test_the_first_failure_is_told(moody_run: Path):
    told = json.loads((moody_run / "summary.json").read_text())["reward_failure"]
    assert "cannot read this answer" in told or "nan" in told or "no verdict in 0.3 s" in told


async def test_a_group_with_fewer_than_two_verdicts_is_incomplete(workshop: Workshop):
    """Of every group only the first answer that is ready gets a verdict."""
    judged: set[str] = set()

    def meddle(place: Place, loop: Loop) -> None:
        score = loop.stages.scorer.score

        async def once(completion: Completion) -> Score:
            if completion.prompt in judged:
                return Score(failure=DropReason.REWARD_ERROR, detail="one verdict per prompt is enough")
            judged.add(completion.prompt)
            return await score(completion)

        loop.stages.scorer.score = once  # type: ignore[method-assign]

    config = workshop.config("lonely", "buffer.patience=2", "rollout.samples=3", reward="dense")
    with pytest.raises(StalledError, match=r"the last (8|9|1\d) groups were all dropped \((8|9|1\d) x reward_error\)"):
        await play(config, meddle)
    run = workshop.directory / "lonely"
    assert_all_accounted_for(run)
    assert not books(run).trained.trajectories
    lonely = "SELECT COUNT(*), reward IS NULL FROM trajectories WHERE drop_reason = '{}' GROUP BY 2"
    ((num_incomplete, unscored),) = select(run, lonely.format("incomplete"))
    assert num_incomplete >= 8
    assert not unscored  # its verdict stays on record; there is only nothing to compare it with
    assert select(run, lonely.format("reward_error"))[0][0] >= 16


# Gradients that are not finite


async def test_an_infinite_gradient_skips_its_step_and_the_run_goes_on(workshop: Workshop):
    huge = [False] * 4 + [True] * 4 + [False]  # the prompts of the second step
    path = write_prompts(workshop.directory / "huge.jsonl", huge=huge)
    extra = (f"prompts.source={path}", "prompts.select=in-order", "learner.advantage=dr-grpo", "loop.steps=3")
    kept: list[dict[str, Any]] = []  # policy and moments after each step

    def meddle(place: Place, loop: Loop) -> None:
        optimizer = rank_of(place).learner._optimizer

        def on_row(row: Row) -> None:
            state = optimizer.adamw.state_dict()["state"]
            moments = {f"{i} {name}": value for i, per in state.items() for name, value in per.items()}
            kept.append(copy.deepcopy({**rank_of(place).policy.model.state_dict(), **moments}))

        loop.on_row = on_row

    loop = await play(workshop.config("huge", *extra, reward="huge"), meddle)
    rows = rows_of(workshop.directory / "huge")
    assert [row.skipped for row in rows] == [False, True, False]
    assert [row.version for row in rows] == [1, 2, 3]
    assert loop.version == 3
    assert not math.isfinite(rows[1].grad_norm)
    assert same_bits(kept[0], kept[1])
    assert not same_bits(kept[1], kept[2])
    assert all(bool(torch.isfinite(value).all()) for value in kept[2].values())
    assert rows[1].trained_tokens == 0
    assert rows[1].dropped_tokens == {"skipped_step": rows[1].generated_tokens}
    assert_all_accounted_for(workshop.directory / "huge")
    skipped = select(workshop.directory / "huge", "SELECT lag FROM drops WHERE reason = 'skipped_step'")
    assert skipped == [(0,)] * 16  # on-policy when its turn came


# Interrupts


async def test_an_interrupt_ends_the_run_with_everything_accounted_for(workshop: Workshop):
    def meddle(place: Place, loop: Loop) -> None:
        loop.on_row = lambda row: loop.interrupt() if row.step == 2 else None

    extra = ("loop.steps=1000", "loop.max_lag=2", "rollout.max_new_tokens=40")
    loop = await play(workshop.config("interrupted", *extra), meddle)
    run = workshop.directory / "interrupted"
    assert loop.ending.asked
    assert [row.step for row in rows_of(run)] == [1, 2]
    assert audit(run) == []
    assert books(run).in_flight == Amount()  # what is buffered waits for a restart
    assert drop_reasons(run)["run_ended"] > 0


async def test_an_interrupt_during_slow_verdicts(workshop: Workshop):
    """Answers that wait for a verdict are dropped without one."""
    path = write_prompts(workshop.directory / "endless.jsonl", late=[10**4])

    def meddle(place: Place, loop: Loop) -> None:
        asyncio.get_running_loop().call_later(0.5, loop.interrupt)

    async with asyncio.timeout(PATIENT_S):
        await play(
            workshop.config("endless", f"prompts.source={path}", "reward.timeout_s=10000", reward="late"), meddle
        )
    run = workshop.directory / "endless"
    assert_all_accounted_for(run)
    assert drop_reasons(run) == {"run_ended": 16}


async def test_an_interrupt_in_the_middle_of_the_update_books_what_was_trained(workshop: Workshop):
    """The weights have changed: the books must say so."""

    def meddle(place: Place, loop: Loop) -> None:
        events, finish = asyncio.get_running_loop(), loop.stages.ranks.finish

        def slow_finish() -> StepStats:
            events.call_soon_threadsafe(loop.interrupt)
            time.sleep(0.2)
            return finish()

        loop.stages.ranks.finish = slow_finish  # type: ignore[method-assign]

    loop = await play(workshop.config("caught", "loop.steps=5", reward="dense"), meddle)
    run = workshop.directory / "caught"
    assert loop.version == 1
    assert select(run, "SELECT trained_step, COUNT(*) FROM trajectories WHERE state = 'trained'") == [(1, 16)]
    assert [row.step for row in rows_of(run)] == [1]
    assert rows_of(run)[0].trained_tokens == books(run).trained.tokens
    assert_all_accounted_for(run, interrupted=True)


async def test_an_interrupt_in_the_middle_of_an_evaluation_keeps_the_row_of_the_step(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    def meddle(place: Place, loop: Loop) -> None:
        async def endless(*_: object) -> float:
            loop.interrupt()
            await asyncio.sleep(3600)
            return 1.0

        monkeypatch.setattr("headrace.loop.loop.evaluate", endless)

    async with asyncio.timeout(PATIENT_S):
        loop = await play(workshop.config("examined", "loop.steps=5", "loop.eval_every=1", reward="dense"), meddle)
    run = workshop.directory / "examined"
    assert loop.version == 1
    assert [(row.step, row.score) for row in rows_of(run)] == [(1, None)]
    assert_all_accounted_for(run, interrupted=True)


async def test_no_steps_at_all(workshop: Workshop):
    await play(workshop.config("none", "loop.steps=0"))
    run = workshop.directory / "none"
    assert_all_accounted_for(run)
    assert rows_of(run) == []
    assert same_bits(weights(run), load_file(workshop.model / "model.safetensors"))


# Failures of stages


@pytest.mark.parametrize(
    ("code", "why"), [("raise ValueError('it is broken')", "it is broken"), ("os._exit(7)", "code 7")]
)
async def test_a_filter_that_always_fails_stalls_and_says_why(workshop: Workshop, code: str, why: str):
    path = workshop.directory / "bad_filters.py"
    path.write_text(f"import os\ndef explode(group):\n    {code}\n")
    extra = (f'buffer.filters=["{path}:explode"]', "buffer.patience=1", "reward.retries=0")
    config = workshop.config(f"exploded-{why[-1]}", *extra, reward="dense")
    with pytest.raises(
        StalledError, match=rf"4 x filter_error(?s:.)*the filter 'explode' failed on prompt(?s:.)*{why}"
    ):
        async with asyncio.timeout(PATIENT_S):
            await play(config)
    run = workshop.directory / f"exploded-{why[-1]}"
    assert_all_accounted_for(run)
    assert drop_reasons(run)["filter_error"] >= 16


# the groups of two steps, in whatever order they come
KEEPS_EIGHT = """
import itertools, time
asked = itertools.count(1)

def sleepy(group):
    return next(asked) <= 8 or time.sleep(600)
"""


@pytest.mark.parametrize("rule", ["requeue", "resume", "drop"])
def test_an_interrupt_while_filters_are_asked(workshop: Workshop, rule: str):
    path, run = workshop.directory / f"sleepy_{rule}.py", workshop.directory / f"sleepy-{rule}"
    path.write_text(KEEPS_EIGHT)
    extra = (f'buffer.filters=["{path}:sleepy"]', "loop.max_lag=2", f"recovery.in_flight={rule}", "loop.steps=4")
    config = workshop.config(run.name, *extra, "reward.timeout_s=300", "buffer.drop=nothing", reward="dense")

    def meddle(place: Place, loop: Loop) -> None:
        loop.on_row = lambda row: loop.interrupt() if row.step == 2 else None

    asyncio.run(asyncio.wait_for(play(config, meddle), PATIENT_S))
    assert audit(run) == []
    path.write_text("def sleepy(group):\n    return True\n")
    assert api.resume(run)["finished"] is True
    assert_all_accounted_for(run)
    assert [row.step for row in rows_of(run)] == [1, 2, 3, 4]


async def test_a_run_is_complete_while_filters_are_asked(workshop: Workshop):
    path = workshop.directory / "endless.py"
    path.write_text(KEEPS_EIGHT)
    extra = (f'buffer.filters=["{path}:sleepy"]', "loop.max_lag=2", "loop.steps=2", "reward.timeout_s=300")
    async with asyncio.timeout(PATIENT_S):
        await play(workshop.config("asked", *extra, "buffer.drop=nothing", reward="dense"))
    assert_all_accounted_for(workshop.directory / "asked")


async def test_reward_workers_that_cannot_be_replaced_end_the_run_with_a_message(workshop: Workshop):
    path = workshop.directory / "vanishing.py"
    path.write_text("import os\n\ndef score(completion):\n    os.remove(__file__)\n    os._exit(3)\n")
    config = workshop.config("vanished", f"reward.function={path}:score")
    with pytest.raises(RewardError, match="there is no file"):
        async with asyncio.timeout(PATIENT_S):
            await play(config)
    assert audit(workshop.directory / "vanished") == []


async def test_an_engine_failure_ends_the_run_with_it(workshop: Workshop):
    def meddle(place: Place, loop: Loop) -> None:
        advance, calls = worker_of(place).engine.advance, []

        def failing(*args: Any) -> Any:
            calls.append(1)
            if len(calls) > 3:
                raise MemoryError("out of cache")
            return advance(*args)

        worker_of(place).engine.advance = failing  # type: ignore[method-assign]

    with pytest.raises(MemoryError, match="out of cache"):
        async with asyncio.timeout(PATIENT_S):
            await play(workshop.config("engine", "rollout.max_new_tokens=100"), meddle)
    assert audit(workshop.directory / "engine") == []
