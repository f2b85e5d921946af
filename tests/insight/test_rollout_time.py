from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_roofline import IDEAL, MODEL, ROUND

from headrace.errors import ConfigError
from headrace.insight.hardware import find_device
from headrace.insight.model_shape import model_shape
from headrace.insight.rollout_time import RolloutWork, answer_finish_s, rollout_s
from headrace.insight.tails import LogNormal

BARE = replace(MODEL, kv_size=1)  # next to no cache: a step takes 2 ms, whatever it runs
WORK = RolloutWork(
    model=BARE, device=ROUND, lengths=LogNormal(100, 0.0), num_answers=6, max_running=2, efficiency=IDEAL
)


def test_equal_lengths_in_two_slots_by_hand():
    # three rounds of 100 steps of 2 ms
    assert sorted(answer_finish_s(WORK)) == pytest.approx([0.2, 0.2, 0.4, 0.4, 0.6, 0.6], rel=1e-3)
    assert rollout_s(replace(WORK, num_engines=3)) == pytest.approx(0.2, rel=1e-3)
    assert rollout_s(replace(WORK, max_running=None)) == pytest.approx(0.2, rel=1e-3)


def test_the_cache_that_grows_counts_with_its_mean():
    # 100 steps, each 2e9 bytes and on average 50 tokens of 20,000 bytes, at 1e12
    assert rollout_s(replace(WORK, model=MODEL, num_answers=1)) == pytest.approx(0.2001)
    # and a prompt of 1,000 tokens: 1,000 * 20,000 more bytes a step, and 1,000 * 2.02e9 operations at 1e14 before
    with_prompt = replace(WORK, model=MODEL, num_answers=1, prompt_tokens=1000)
    assert rollout_s(with_prompt) == pytest.approx(0.2001 + 0.002 + 0.0202)
    # two answers to one prompt share its prefill
    assert rollout_s(replace(with_prompt, num_answers=2, num_samples=2)) == pytest.approx(
        0.2001 + 0.0001 + 0.004 + 0.0202
    )


def test_the_longest_of_all_answers_is_waited_for():
    lengths = LogNormal(100, 1.0)
    work = replace(WORK, lengths=lengths, num_answers=64, num_engines=4, max_running=None)
    # everything runs from the start, and steps of 2 ms do not depend on the batch: a barrier over 64, not over 16
    assert rollout_s(work) == pytest.approx(lengths.expected_max(64) * 2e-3, rel=1e-3)
    assert np.median(answer_finish_s(work)) == pytest.approx(lengths.median_max(1) * 2e-3, rel=0.05)


def test_every_answer_ends_and_more_slots_are_never_slower():
    work = replace(WORK, model=MODEL, lengths=LogNormal(100, 1.0), num_answers=200)
    seconds = [rollout_s(replace(work, max_running=slots)) for slots in (1, 4, 16, 64, 200)]
    assert seconds == sorted(seconds, reverse=True)
    assert answer_finish_s(work).min() > 0


@pytest.mark.parametrize(
    ("lengths", "measured_s"),
    [
        (LogNormal(512, 0.0), 4.18),
        (LogNormal(512, 1.0, cap=4096), 10.92),
    ],
)
def test_a_rollout_takes_what_was_measured(lengths: LogNormal, measured_s: float):
    """docs/results/engine.json: 512 prompts of 128 tokens, one answer each, the shape of Qwen3-0.6B on one H200."""
    work = RolloutWork(
        model=model_shape("0.6B"), device=find_device("H200"), lengths=lengths, num_answers=512, prompt_tokens=128
    )
    assert rollout_s(work) == pytest.approx(measured_s, rel=0.15)


def test_nothing_to_do_is_refused():
    with pytest.raises(ConfigError, match="num_answers is 0; it must be a number of at least 1"):
        replace(WORK, num_answers=0)
