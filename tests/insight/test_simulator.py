"""The simulator: with nothing random it is the formulas, and with everything random it keeps the loop's promises."""

from __future__ import annotations

import asyncio
import heapq
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError, StalledError
from headrace.insight.engine_pool import EnginePool, run_virtually
from headrace.insight.hardware import find_device, model_shape
from headrace.insight.roofline import Roofline
from headrace.insight.scenario import speeds, with_speeds
from headrace.insight.simulator import Simulated, simulate
from headrace.insight.triage import Placement, step_s
from headrace.insight.workload import LogNormal, Machine, Recorded, Workload
from headrace.measured import StageTimes

ROLLOUT_S, REFERENCE_S, TRAIN_S, PUBLISH_S = 30.0, 3.0, 8.0, 1.0
STEP_TOKENS = 16 * 301  # four prompts with four answers; 301 tokens are 300 decode steps after the first one

WORK = Workload(groups_per_step=4, samples=4, tokens=LogNormal(mean=301.0))


def machine(*, train_s: float = TRAIN_S, reference_s: float = REFERENCE_S, **changes: Any) -> Machine:
    """All sixteen rows at once, a tenth of a second for each of their tokens."""
    defaults = {"rollout_workers": 1, "rows_per_worker": 16, "decode_s": 0.1, "publish_s": PUBLISH_S}
    speeds = {"train_token_s": train_s / STEP_TOKENS, "reference_token_s": reference_s / STEP_TOKENS}
    return Machine(**(defaults | speeds | changes))


def rough(**changes: Any) -> Machine:
    """Several workers, some slow, some dying."""
    defaults = {
        "rollout_workers": 6,
        "rows_per_worker": 8,
        "decode_s": 0.02,
        "decode_row_s": 0.001,
        "prefill_token_s": 1e-4,
        "train_token_s": 5e-4,
        "optimizer_s": 0.5,
        "publish_s": 0.3,
        "reward_workers": 4,
        "straggler_share": 0.3,
        "straggler_factor": 3.0,
        "worker_mtbf_s": 100.0,
        "repair_s": 5.0,
    }
    return Machine(**(defaults | changes))


UNEVEN = Workload(
    groups_per_step=8,
    samples=4,
    tokens=LogNormal(mean=200.0, cv=1.2, cap=2000.0),
    reward_s=LogNormal.of_p95(0.2, 0.6),
    prompt_tokens=50.0,
    no_signal_share=0.25,
)


def off_balance(run: Simulated) -> int:
    """Tokens that were generated and are nowhere, or the other way round."""
    known = run.trained_tokens + sum(run.dropped_tokens.values()) + run.buffered_tokens + run.in_flight_tokens
    return abs(run.generated_tokens - known)


# ---- the formulas


@pytest.mark.parametrize("max_lag", [0, 1])
def test_colocated_is_the_sum_of_the_stages(max_lag: int):
    work = replace(WORK, reward_s=LogNormal(mean=2.0))
    run = simulate(work, machine(colocated=True, batchwise=True), max_lag=max_lag, steps=6)
    busy = ROLLOUT_S + REFERENCE_S + TRAIN_S + PUBLISH_S
    # while one step's answers wait for their verdicts, the device may train on another's
    assert run.step_s == pytest.approx(busy + 2.0 if max_lag == 0 else busy, abs=2.0 * max_lag)
    if max_lag == 0:
        times = run.steps[3].stage_s
        assert (times.rollout, times.reward) == pytest.approx((ROLLOUT_S, 2.0))
        assert (times.reference, times.train, times.publish) == pytest.approx((REFERENCE_S, TRAIN_S, PUBLISH_S))


@pytest.mark.parametrize(
    ("reward_s", "reference_s", "train_s", "publish_s"),
    [(0, 3, 8, 1), (40, 3, 8, 1), (10, 36, 8, 1), (10, 3, 50, 1), (10, 3, 8, 60), (0, 20, 20, 20)],
)
def test_fully_asynchronous_is_the_slowest_side(reward_s: float, reference_s: float, train_s: float, publish_s: float):
    """Generation, scoring, the learner, which computes the reference, too, and the way of its weights."""
    work = replace(WORK, reward_s=LogNormal(mean=reward_s / 16))
    one = machine(train_s=train_s, reference_s=reference_s, publish_s=publish_s, reward_workers=1)
    run = simulate(work, one, max_lag=8, steps=40)
    times = StageTimes(rollout=ROLLOUT_S, reward=reward_s, reference=reference_s, train=train_s, publish=publish_s)
    assert run.step_s == pytest.approx(step_s(times, Placement.ASYNCHRONOUS), rel=0.01)
    assert 1 - run.learner_idle == pytest.approx((reference_s + train_s) / run.step_s, rel=0.1)


def test_with_one_version_of_lag_a_batch_is_generated_while_another_is_trained_on():
    """Batch by batch, 30 s to generate and 5 s for verdicts, against 3 + 8 s of the learner."""
    work = replace(WORK, reward_s=LogNormal(mean=5.0))
    assert simulate(work, machine(batchwise=True), max_lag=1, steps=8).step_s == pytest.approx(30 + 5)
    assert simulate(work, machine(batchwise=True, train_s=50.0), max_lag=1, steps=8).step_s == pytest.approx(53)


def test_at_lag_zero_training_hides_behind_generation_only_as_far_as_groups_come_early():
    """Groups of 100, 200, 300 and 400 tokens: three are trained on before the last one is there."""

    class Stairs:
        mean = 250.0

        def __init__(self) -> None:
            self.calls = 0

        def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
            self.calls += 1
            return np.full(count, 100.0 * (1 + (self.calls - 1) % 4) + 1)

    one = Machine(rollout_workers=1, rows_per_worker=16, decode_s=0.1, train_token_s=0.005, publish_s=PUBLISH_S)
    run = simulate(replace(WORK, tokens=Stairs()), one, max_lag=0, steps=4)  # type: ignore[arg-type]
    last_group_s = 4 * 401 * 0.005
    assert run.step_s == pytest.approx(40.0 + last_group_s + PUBLISH_S)
    assert run.step_s > max(40.0, run.stage_s.train) + PUBLISH_S  # a strict maximum is out of reach


def test_a_decode_step_takes_longer_with_more_rows():
    whole = Machine(rollout_workers=1, rows_per_worker=16, decode_s=0.1, decode_row_s=0.01)
    assert simulate(WORK, whole, max_lag=0, steps=2).step_s == pytest.approx(300 * (0.1 + 16 * 0.01))
    halves = simulate(WORK, replace(whole, rows_per_worker=8), max_lag=0, steps=2)
    assert halves.step_s == pytest.approx(2 * 300 * (0.1 + 8 * 0.01))


# ---- the promises


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_lag_is_bounded_and_the_books_balance(max_lag: int):
    run = simulate(UNEVEN, rough(), max_lag=max_lag, steps=15, seed=3)
    assert run.lag_max <= max_lag
    assert sum(run.lag_shares.values()) == pytest.approx(1.0)
    assert run.failures
    assert run.dropped_tokens["redone"]
    assert off_balance(run) <= len(run.dropped_tokens) + 2  # each is rounded
    assert len(run.steps) == 15
    assert min(step.lags.total() for step in run.steps) > 0


@settings(max_examples=25, deadline=None)
@given(
    max_lag=st.integers(0, 3),
    groups=st.integers(1, 5),
    samples=st.integers(2, 9),
    rows=st.integers(1, 9),
    workers=st.integers(1, 4),
    colocated=st.booleans(),
    batchwise=st.booleans(),
    mtbf_s=st.sampled_from([20.0, np.inf]),
    seed=st.integers(0, 9),
)
def test_any_machine_keeps_the_promises(
    max_lag: int,
    groups: int,
    samples: int,
    rows: int,
    workers: int,
    colocated: bool,
    batchwise: bool,
    mtbf_s: float,
    seed: int,
):
    work = replace(UNEVEN, groups_per_step=groups, samples=samples, tokens=LogNormal(mean=40.0, cv=1.5, cap=400.0))
    one = rough(
        rollout_workers=workers,
        rows_per_worker=rows,
        colocated=colocated,
        batchwise=batchwise,
        worker_mtbf_s=mtbf_s,
        train_token_s=3e-3,
    )
    run = simulate(work, one, max_lag=max_lag, steps=4, seed=seed)
    assert len(run.steps) == 4
    assert run.lag_max <= max_lag
    assert off_balance(run) <= len(run.dropped_tokens) + 2
    assert -1e-9 <= run.rollout_idle <= 1
    assert 0 <= run.learner_idle <= 1
    assert 0 <= run.reward_idle <= 1


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    first, again, other = (vars(simulate(UNEVEN, rough(), max_lag=2, steps=6, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_what_becomes_too_old_is_ended_and_booked_as_stale():
    """One worker with one row for a group at a time and a learner that never waits: old answers lose."""
    work = Workload(groups_per_step=1, samples=2, tokens=LogNormal(mean=100.0, cv=3.0, cap=5000.0))
    one = Machine(rollout_workers=4, rows_per_worker=2, decode_s=0.1, optimizer_s=0.1)
    run = simulate(work, one, max_lag=1, steps=60)
    assert run.dropped_tokens["stale"] > 0
    assert run.lag_max == 1
    assert off_balance(run) <= 2


@pytest.mark.parametrize("rows", [16, 3])
def test_the_first_answers_of_a_group_end_the_others(rows: int):
    work = Workload(groups_per_step=4, samples=8, tokens=LogNormal(mean=100.0, cv=1.5, cap=2000.0))
    engines = Machine(rollout_workers=3, rows_per_worker=rows, decode_s=0.1, optimizer_s=1.0)
    all_of_them = simulate(work, engines, max_lag=0, steps=30)
    some = simulate(replace(work, first=6), engines, max_lag=0, steps=30)
    assert some.dropped_tokens.keys() == {"late"}
    assert off_balance(some) <= 2
    at_limit = simulate(replace(work, first=6, max_new_tokens=80), engines, max_lag=0, steps=30)
    assert at_limit.dropped_tokens["late"] < 0.2 * at_limit.generated_tokens, "those that end with the sixth count"
    assert off_balance(at_limit) <= 2
    assert some.wall_s < 0.7 * all_of_them.wall_s, "nobody waits for the longest two of eight"
    assert 0.3 < some.trained_tokens / all_of_them.trained_tokens < 0.6, "two of eight, the longest, have most tokens"


def test_groups_without_signal_are_dropped_and_replaced():
    run = simulate(replace(WORK, no_signal_share=0.5), machine(), max_lag=1, steps=40)
    assert run.dropped_tokens.keys() == {"no_signal"}
    assert run.useful_share == pytest.approx(0.5, abs=0.1)
    assert {step.lags.total() for step in run.steps} == {STEP_TOKENS}


def test_answers_that_come_with_the_end_are_left_out_quietly(caplog: pytest.LogCaptureFixture):
    work = replace(WORK, tokens=LogNormal(mean=20.0, cv=0.5), no_signal_share=0.85)
    at_once = machine(decode_s=1e-11, rows_per_worker=256, colocated=True, reward_workers=1)
    assert len(simulate(work, at_once, max_lag=0, steps=24).steps) == 24
    assert not caplog.records


def test_nothing_but_drops_ends_the_simulation_with_a_message():
    with pytest.raises(StalledError, match="no_signal"):
        simulate(replace(WORK, no_signal_share=0.999), machine(), max_lag=1, steps=10)


def test_answers_at_the_limit_are_cut_and_dropped_if_so_set():
    work = replace(UNEVEN, no_signal_share=0.0, max_new_tokens=300, drop_overlong=True)
    run = simulate(work, rough(worker_mtbf_s=np.inf), max_lag=0, steps=4)
    assert run.dropped_tokens["overlong"] % 300 == 0
    assert run.dropped_tokens["overlong"] > 0


# ---- what machines do


def test_failures_cost_tokens_and_time():
    well, ill = (simulate(UNEVEN, rough(worker_mtbf_s=mtbf_s), max_lag=1, steps=20) for mtbf_s in (np.inf, 30.0))
    assert well.failures == 0 < ill.failures
    assert ill.goodput_tokens_s < 0.95 * well.goodput_tokens_s


def test_slow_workers_cost_time():
    even, uneven = (rough(worker_mtbf_s=np.inf, straggler_factor=factor) for factor in (1.0, 6.0))
    work = replace(UNEVEN, no_signal_share=0.0)
    assert simulate(work, uneven, max_lag=0, steps=10).step_s > 1.5 * simulate(work, even, max_lag=0, steps=10).step_s


def test_publishing_stops_the_learner_and_not_engines_that_are_apart():
    apart = machine(publish_s=4.0, reference_s=0.0)
    assert simulate(WORK, apart, max_lag=3, steps=20).step_s == pytest.approx(ROLLOUT_S)
    assert simulate(WORK, apart, max_lag=0, steps=4).step_s == pytest.approx(ROLLOUT_S + TRAIN_S + 4.0)


@pytest.mark.parametrize(("lengths", "measured_s"), [(LogNormal(512), 4.18), (LogNormal(512, 1.0, cap=4096), 10.92)])
def test_a_rollout_takes_what_was_measured(lengths: LogNormal, measured_s: float):
    """docs/results/engine.json: 512 prompts of 128 tokens, one answer each, the shape of Qwen3-0.6B on one H200."""
    known = speeds(
        Roofline(model_shape("0.6B"), find_device("H200")),
        rows=512,
        prompt_tokens=128,
        mean_tokens=lengths.cut_mean,
        gpus_per_worker=1,
    )
    one = replace(with_speeds(Machine(rollout_workers=1, rows_per_worker=512, decode_s=1.0), known), train_token_s=0.0)
    work = Workload(groups_per_step=512, samples=1, tokens=lengths, prompt_tokens=128)
    found = [simulate(work, one, max_lag=0, steps=2, seed=seed).step_s for seed in range(3)]
    assert np.mean(found) == pytest.approx(measured_s, rel=0.2)


def test_lag_counts_the_time_of_verdicts():
    """Half a step to generate and two for a verdict, in steps of 20 s: 2.5 versions."""
    work = Workload(groups_per_step=16, samples=8, tokens=LogNormal(mean=101.0), reward_s=LogNormal(mean=40.0))
    one = Machine(rollout_workers=1, rows_per_worker=512, decode_s=0.1, train_token_s=20.0 / (128 * 101))
    run = simulate(work, one, max_lag=8, steps=150)
    assert run.step_s == pytest.approx(20.0, rel=0.1)
    assert run.lag_mean == pytest.approx(2.5, abs=0.4)


def test_recorded_answers_are_drawn_group_by_group():
    recorded = Recorded(groups=(np.array([10.0, 20.0]), np.array([1000.0, 2000.0])))
    rng = np.random.default_rng(0)
    for count in (1, 2, 5):
        assert len({value >= 1000 for value in recorded.draw(rng, count)}) == 1
    assert recorded.mean == 757.5


def test_a_spread_has_the_mean_and_the_p95_that_were_asked_for():
    drawn = LogNormal.of_p95(2.0, 5.0).draw(np.random.default_rng(0), 200_000)
    assert drawn.mean() == pytest.approx(2.0, rel=0.01)
    assert np.quantile(drawn, 0.95) == pytest.approx(5.0, rel=0.01)
    with pytest.raises(ConfigError, match=r"between 1 and 3\.8"):
        LogNormal.of_p95(1.0, 9.0)


def queued_s() -> float:
    """Seconds of this process for 100,000 entries through a heap: how fast Python is here, now."""
    started_s, heap = time.process_time(), list[tuple[int, int]]()
    for i in range(100_000):
        heapq.heappush(heap, (i * 7919 % 100_003, i))
    while heap:
        heapq.heappop(heap)
    return time.process_time() - started_s


def test_a_thousand_gpus_are_simulated_quickly():
    """Two steps of 8,192 answers cost as much as 300,000 entries through a heap; twice that is too much."""
    work = Workload(groups_per_step=512, samples=16, tokens=LogNormal(mean=4096.0, cv=1.0, cap=32768.0))
    one = Machine(
        rollout_workers=96,  # of eight GPUs each
        rows_per_worker=256,
        decode_s=0.02,
        decode_row_s=5e-5,
        train_token_s=2e-6,
        publish_s=2.0,
        reward_workers=64,
    )
    ratios: list[float] = []
    while not ratios or (min(ratios) > 6 and len(ratios) < 3):  # others may be using the machine
        queued, started_s = queued_s(), time.process_time()
        assert len(simulate(work, one, max_lag=0, steps=2).steps) == 2
        ratios.append((time.process_time() - started_s) / queued)
    assert min(ratios) < 6


def test_virtual_time_passes_without_waiting_and_in_order():
    async def sleepers() -> tuple[list[int], float]:
        order: list[int] = []

        async def sleeper(number: int, seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append(number)

        await asyncio.gather(sleeper(1, 3e6), sleeper(2, 5.0), sleeper(3, 1e5))
        return order, asyncio.get_running_loop().time()

    order, now_s = run_virtually(sleepers())
    assert order == [2, 3, 1]
    assert now_s == pytest.approx(3e6)


def test_who_resumes_the_engines_goes_on_at_the_same_moment():
    """The learner resumes them between two passes: its next one must not wait for the end of an answer."""

    async def resumed() -> float:
        pool = EnginePool(machine(), np.random.default_rng(0), 0.0, lambda owner: None, lambda owner, length: None)
        pool.pause()
        pool.submit("a group", [100])
        await asyncio.sleep(1.0)
        pool.resume()
        return asyncio.get_running_loop().time()

    assert run_virtually(resumed()) == 1.0


def test_a_worker_that_is_down_gets_nothing_even_if_what_it_had_is_given_up():
    begun: dict[str, float] = {}

    async def given_up() -> float:
        now = asyncio.get_running_loop().time
        one, rng = machine(repair_s=50.0), np.random.default_rng(0)
        pool = EnginePool(one, rng, 0.0, lambda owner: begun.update({owner: now()}), lambda *_: None)
        (part,) = pool.submit("ended", [1])
        await asyncio.sleep(10.0)
        pool.fail(pool.workers[0])
        pool.abort([part])
        pool.submit("next", [1])
        await asyncio.sleep(100.0)
        return begun["next"]

    assert run_virtually(given_up()) == pytest.approx(60.0)


def test_waiting_for_nothing_is_an_error_not_a_hang():
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StalledError, match="stands still"):
        run_virtually(forever())


def test_the_simulator_needs_no_torch():
    code = "import sys, headrace.insight.simulator, headrace.insight.scenario; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
