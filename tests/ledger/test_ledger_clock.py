from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.measured import StageClock, StageSpan, busy_s


def union_length(intervals):
    spans = [StageSpan(stage="train", start_s=start, end_s=end) for start, end in intervals]
    return busy_s(spans, -100.0, 100.0).get("train", 0.0)


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0.0),
        ([(1.0, 3.0)], 2.0),
        ([(1.0, 3.0), (2.0, 5.0)], 4.0),
        ([(2.0, 5.0), (1.0, 3.0)], 4.0),
        ([(0.0, 10.0), (2.0, 3.0), (4.0, 5.0)], 10.0),
        ([(0.0, 1.0), (1.0, 2.0), (5.0, 6.0)], 3.0),
        ([(3.0, 1.0), (4.0, 4.0)], 0.0),
        ([(-2.0, -1.0), (-1.5, 1.0)], 3.0),
    ],
)
def test_union_length(intervals, length):
    assert union_length(intervals) == length


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_union_length_counts_each_unit_once(intervals):
    covered = {unit for start, end in intervals for unit in range(start, end)}
    assert union_length(intervals) == len(covered)


def test_busy_seconds_are_clipped_and_overlaps_count_once():
    spans = [
        StageSpan(stage="rollout", start_s=0.0, end_s=12.0),
        StageSpan(stage="reward", start_s=9.0, end_s=13.0, worker="a"),
        StageSpan(stage="reward", start_s=11.0, end_s=14.0, worker="b"),
        StageSpan(stage="train", start_s=19.0, end_s=25.0),
        StageSpan(stage="train", start_s=1.0, end_s=2.0),
        StageSpan(stage="evaluate", start_s=10.0, end_s=20.0),
    ]
    assert busy_s(spans, 10.0, 20.0) == {"rollout": 2.0, "reward": 4.0, "train": 1.0, "evaluate": 10.0}


def test_spans_are_measured_also_when_the_body_raises():
    clock = StageClock()
    before = clock.now()
    with pytest.raises(ValueError, match="no"), clock.span("train", version=3, worker="w", detail="d"):
        raise ValueError("no")
    (span,) = clock.drain()
    assert (span.stage, span.version, span.worker, span.detail) == ("train", 3, "w", "d")
    assert before <= span.start_s <= span.end_s <= clock.now()
    assert clock.drain() == []
    assert clock.running() == []


def test_a_span_that_goes_on_is_split_between_two_intervals():
    clock = StageClock()
    with clock.span("rollout"):
        (running,) = clock.running()
        border = running.end_s
        first = busy_s([*clock.running(), *clock.drain()], 0.0, border)
    (whole,) = clock.drain()
    second = busy_s([whole], border, whole.end_s)
    assert first["rollout"] + second["rollout"] == pytest.approx(whole.end_s - whole.start_s)


def test_spans_measured_elsewhere_are_drained_too():
    clock, span = StageClock(), StageSpan(stage="reward", start_s=1.0, end_s=2.0)
    clock.add(span)
    assert clock.drain() == [span]


def test_a_move_is_a_span_that_ended_or_one_that_came_further():
    clock = StageClock()
    with clock.span("train"):
        assert clock.moves() == {}
        clock.moved("train")
        assert clock.moves() == {"train": 1}
    assert clock.moves() == {"train": 2}


def test_no_span_is_lost_between_threads():
    clock, drained, stop = StageClock(), [], threading.Event()

    def measure(worker):
        for number in range(200):
            with clock.span("reward", worker=str(worker), version=number):
                pass

    def drain():
        while not stop.is_set():
            drained.extend(clock.drain())

    drainer = threading.Thread(target=drain)
    drainer.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(measure, range(4)))
    stop.set()
    drainer.join()
    drained.extend(clock.drain())
    assert {(span.worker, span.version) for span in drained} == {(str(w), n) for w in range(4) for n in range(200)}
    assert len(drained) == 800
