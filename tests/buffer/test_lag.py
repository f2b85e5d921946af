from __future__ import annotations

from math import ceil

import pytest
from hand_made import group, group_of, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffer.buffer import LagPolicy
from headrace.types import Span

SYNC = LagPolicy(max_lag=0, groups_per_step=4)
ASYNC = LagPolicy(max_lag=2, groups_per_step=4)


def admitted(
    policy: LagPolicy, *, version: int, committed: int, in_flight: int, buffered: int, wave_left: int, window: int
) -> int:
    capacity = policy.capacity(version=version, committed=committed)
    return policy.admit(capacity, wave_left=wave_left, free=window - in_flight - buffered)


@pytest.mark.parametrize(
    ("max_lag", "version", "committed", "room"),
    [
        (0, 0, 0, 4),  # the first step's groups and no more
        (0, 0, 4, 0),
        (0, 0, 3, 1),  # one was dropped: its place is free again
        (0, 1, 4, 4),
        (0, 7, 30, 2),
        (2, 0, 0, 12),  # this step's and two steps' worth ahead
        (2, 0, 12, 0),
        (2, 1, 12, 4),
        (2, 5, 31, 1),
        (0.5, 0, 0, 6),  # this step's and half a step's worth ahead
        (0.5, 1, 6, 4),
    ],
)
def test_capacity_by_hand(max_lag: float, version: int, committed: int, room: int):
    policy = LagPolicy(max_lag=max_lag, groups_per_step=4)
    assert policy.capacity(version=version, committed=committed) == room


@settings(deadline=None)
@given(
    max_lag=st.sampled_from([0, 0.5, 1, 1.3, 2, 6]),
    size=st.integers(1, 9),
    version=st.integers(0, 40),
    ahead=st.integers(0, 80),
)
def test_a_full_buffer_trains_within_max_lag(max_lag: float, size: int, version: int, ahead: int):
    """However much was admitted, the last admitted group has its turn at most max_lag versions from now."""
    policy = LagPolicy(max_lag=max_lag, groups_per_step=size)
    committed = version * size + ahead
    committed += max(0, policy.capacity(version=version, committed=committed))
    turn = (committed - 1) // size  # the version that trains on the last one, oldest first
    if committed > version * size and policy.capacity(version=version, committed=committed) >= 0:
        assert turn - version <= ceil(max_lag)
        assert not policy.is_too_old(turn - version)


def test_on_policy_replacements_wait_for_the_wave():
    # four admitted, one dropped: room for one, but three are still running
    assert admitted(SYNC, version=0, committed=3, in_flight=3, buffered=0, wave_left=0, window=4) == 0
    assert admitted(SYNC, version=0, committed=3, in_flight=0, buffered=0, wave_left=1, window=4) == 1
    # a wave that is only partly started may be completed
    assert admitted(SYNC, version=0, committed=1, in_flight=1, buffered=0, wave_left=3, window=4) == 3


@pytest.mark.parametrize(
    ("missing", "begun", "kept", "most_at_once", "size"),
    [
        (4, 0, 0, 100, 4),  # nothing is known yet
        (4, 7, 7, 100, 4),  # all were kept
        (4, 7, 3, 100, 8),  # half of them
        (1, 7, 3, 100, 2),
        (4, 15, 0, 100, 64),  # none: as if one of sixteen were
        (4, 15, 0, 20, 20),  # as many as there are rows for
        (4, 15, 0, 1, 4),  # but never fewer than are missing
        (0, 15, 0, 100, 0),
        (-2, 15, 0, 100, -2),
    ],
)
def test_a_wave_is_as_large_as_its_need(missing: int, begun: int, kept: int, most_at_once: int, size: int):
    policy = LagPolicy(max_lag=0, groups_per_step=4, most_at_once=most_at_once)
    wave = policy.wave(missing, begun=begun, kept=kept)
    assert wave == size or (missing < 0 and wave <= 0)


def test_off_policy_replacements_start_at_once():
    assert admitted(ASYNC, version=0, committed=11, in_flight=11, buffered=0, wave_left=0, window=12) == 1


def test_the_window_counts_what_runs_and_what_waits_for_the_learner():
    assert admitted(ASYNC, version=1, committed=9, in_flight=2, buffered=3, wave_left=0, window=6) == 1
    assert admitted(ASYNC, version=1, committed=9, in_flight=2, buffered=3, wave_left=0, window=4) < 1
    # never more than the lag allows: three steps' worth from version 1 on, four groups of it trained
    assert admitted(ASYNC, version=1, committed=14, in_flight=2, buffered=3, wave_left=0, window=12) == 2


@pytest.mark.parametrize(("idle", "less"), [(0, 0), (1, 1), (8, 1), (9, 2), (64, 8), (10**6, 20)])
def test_the_window_between_a_step_and_all_that_the_lag_allows(idle: int, less: int):
    policy = LagPolicy(max_lag=4, groups_per_step=16)
    assert (policy.least_window, policy.most_ahead) == (16, 80)
    assert policy.narrowed(36, idle=idle) == 36 - less
    assert (policy.widened(36), policy.widened(79)) == (38, 80)
    eager = LagPolicy(max_lag=4, groups_per_step=16, eager=True)
    assert eager.narrowed(80, idle=idle) == eager.least_window == 80


def test_on_policy_order_is_by_serial_and_waits_for_earlier_groups():
    buffered = sorted([group(3), group(2)], key=SYNC.order)
    assert SYNC.select(buffered, {1: 0}) is None
    assert SYNC.select(buffered, {4: 0}) is buffered[0]
    assert buffered[0].serial == 2
    assert SYNC.select([], {}) is None


def test_off_policy_order_is_oldest_first_and_waits_for_nobody():
    buffered = sorted([group(5, version=1), group(9, version=0), group(2, version=1)], key=ASYNC.order)
    taken = []
    while buffered:
        chosen = ASYNC.select(buffered, {0: 0})
        assert chosen is not None
        buffered.remove(chosen)
        taken.append(chosen.serial)
    assert taken == [9, 2, 5]
    assert ASYNC.select([], {0: 0}) is None


def test_age_is_that_of_the_oldest_token():
    """A group that a weight update caught half-way is as old as its first tokens, whatever its other answers are."""
    spans = (Span(version=1, start=2, end=3), Span(version=4, start=3, end=5))
    mixed = group_of(trajectory(serial=1, spans=spans), trajectory(serial=1, index=1, version=4), serial=1, version=1)
    fresh = group(0, version=4)
    assert mixed.lag(4) == 3
    buffered = sorted([fresh, mixed], key=ASYNC.order)
    assert ASYNC.evict(buffered, version=3) == []
    assert ASYNC.evict(buffered, version=4) == [mixed]
    assert ASYNC.select(buffered, {}) is mixed


@pytest.mark.parametrize("policy", [SYNC, ASYNC])
def test_evicts_exactly_what_is_beyond_max_lag(policy: LagPolicy):
    buffered = [group(i, version=i) for i in range(8)]
    evicted = policy.evict(buffered, version=7)
    assert {g.serial for g in evicted} == set(range(7 - policy.max_lag))


@pytest.mark.parametrize("policy", [SYNC, ASYNC])
def test_aborts_exactly_the_running_groups_without_hope(policy: LagPolicy):
    in_flight = {10 + v: v for v in range(6)} | {99: None}  # the last one still waits for the engine
    assert set(policy.abort(in_flight, version=5)) == {10 + v for v in range(5 - policy.max_lag)}
    assert policy.abort({}, version=5) == []
