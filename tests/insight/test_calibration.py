"""A run's speeds are found in its ledger, and the command makes a simulation of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from tiny_runs import Workshop
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config_file import load_config
from headrace.errors import ConfigError
from headrace.insight.hardware import find_device, model_shape
from headrace.insight.roofline import Roofline
from headrace.insight.scenario import (
    Layout,
    Typed,
    amount,
    calibrate,
    decode_speed,
    lags,
    scenario,
    seconds,
    service_seconds,
    slow_workers,
    training_speed,
    worked_out,
)

STEP_S, ROW_S = 0.01, 0.0005


Answer = tuple[int, float, float]  # tokens, started_s, finished_s


def speed(answers: list[Answer], training: list[tuple[float, float]], like_row_s: float = 0.0) -> tuple[float, float]:
    tokens, started_s, finished_s = np.array(answers, np.float64).T
    elsewhere = np.array(training, np.float64).reshape(-1, 2).T
    return decode_speed((started_s, finished_s), tokens, (elsewhere[0], elsewhere[1]), like_row_s)


def passes(*found: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and tokens."""
    seconds, tokens = np.array(found, np.float64).T
    return seconds, tokens


def decoded(rng: np.random.Generator, training: list[tuple[float, float]]) -> list[Answer]:
    """Waves of answers, token by token: a step takes STEP_S and ROW_S for each row, and waits for training."""
    found, now_s = [], 0.0
    for _ in range(12):
        left = {len(found) + i: int(n) for i, n in enumerate(rng.integers(2, 60, 24))}
        lengths, started_s = dict(left), now_s
        while left:
            now_s += STEP_S + ROW_S * len(left)
            for start_s, end_s in training:
                if start_s < now_s <= start_s + 0.05:
                    now_s += end_s - start_s
                    training.remove((start_s, end_s))
                    break
            left = {row: n - 1 for row, n in left.items()}
            for row in [row for row, n in left.items() if n == 1]:
                found.append((lengths[row], started_s, now_s))
                del left[row]
    return found


def test_decode_speed_is_found_in_the_times_of_answers():
    answers = decoded(np.random.default_rng(0), [])
    assert speed(answers, []) == pytest.approx((STEP_S, ROW_S), rel=0.03)


def test_training_between_two_decode_steps_does_not_count_as_decoding():
    training = [(2.0, 4.5), (9.0, 9.7)]
    answers = decoded(np.random.default_rng(0), list(training))
    step_s, row_s = speed(answers, training)
    assert (step_s, row_s) == pytest.approx((STEP_S, ROW_S), rel=0.03)
    assert speed(answers, []) != pytest.approx((STEP_S, ROW_S), rel=0.2)  # it would otherwise


def test_a_speed_that_no_answer_tells_apart_is_never_negative():
    alike = [(11, 0.0, 1.0)] * 4
    step_s, row_s = speed(alike, [])
    assert min(step_s, row_s) >= 0
    assert 10 * step_s + 40 * row_s == pytest.approx(1.0)


def test_equal_batches_are_shared_out_by_what_a_row_is_like():
    """Sixteen rows always: 5 ms a step are 3.4 + 16 x 0.1, as well as anything else."""
    answers = [(101, 0.0, 0.5)] * 16
    step_s, row_s = speed(answers, [], like_row_s=1e-4)
    assert step_s == pytest.approx(0.005 - 16e-4, rel=0.01)
    assert row_s == pytest.approx(1e-4, rel=0.01)


def test_equal_passes_are_shared_out_by_what_a_pass_is_like():
    _, pass_s, token_s = training_speed(*passes(*[(0.05, 1000)] * 8), 2, like_pass_s=0.01)
    assert (pass_s, token_s) == pytest.approx((0.01, 4e-5), rel=0.01)


def test_unequal_passes_tell_themselves():
    unequal = passes(*((0.01 + 4e-5 * n, n) for n in (100, 500, 2000, 8000)))
    _, pass_s, token_s = training_speed(*unequal, 4, like_pass_s=0.002)
    assert (pass_s, token_s) == pytest.approx((0.01, 4e-5), rel=0.01)


def test_speeds_are_worked_out_from_a_model_and_a_device():
    config = load_config(None, ["prompts.source=x.jsonl", "model.path=m", "rollout.max_new_tokens=8192"])
    model, device = model_shape("7B"), find_device("H100")
    typed = worked_out(Typed(publish_s=3.0), config, Layout(gpus=16, gpus_per_worker=2), model, device)
    assert (typed.mean_tokens, typed.prompt_tokens, typed.publish_s) == (4096.0, 512.0, 3.0)
    roofline = Roofline(model, device)
    full_s = roofline.decode_step_s(batch=256, context_tokens=512 + 2048, tensor_parallel=2)
    assert 256 / typed.rollout_tokens_s + 256 * 2560 * typed.context_s == pytest.approx(full_s)
    assert 1 / typed.train_tokens_s == pytest.approx(roofline.train_s(num_tokens=1, sequence_tokens=4608))


def test_seconds_of_a_verdict_leave_out_the_wait_for_a_worker():
    """Two workers, verdicts of 1, 2 and 1 seconds for answers that come together, and one that was known already."""
    finished_s, scored_s = np.array([0.0, 0.0, 0.0, 0.5, 0.6]), np.array([1.0, 2.0, 2.0, 0.5, np.nan])
    assert service_seconds(finished_s, scored_s, 2) == pytest.approx([1.0, 2.0, 1.0, 0.0, np.nan], nan_ok=True)


def test_training_speed_is_told_apart_from_the_optimizer():
    """0.2 s a pass and 1 ms a token; 0.5 s for the optimizer in each of two steps."""
    batches = [(0.2 + 0.001 * tokens, tokens) for tokens in (100, 350, 200)]
    found = training_speed(*passes(*batches, (0.4, np.nan), (0.6, np.nan)), 2)
    assert found == pytest.approx((0.5, 0.2, 0.001), rel=0.01)


# ---- the command


def headrace(*words: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, [str(word) for word in words])


TYPED = ["--mean-tokens", "2k", "--rollout-tokens-s", "6k", "--decode", "20ms", "--train-tokens-s", "20k"]
RECIPE = ["loop.groups_per_step=16", "rollout.max_new_tokens=8000", "reward.workers=4"]


def test_a_real_run_is_simulated_from_its_ledger(tmp_path: Path):
    workshop = Workshop(tmp_path)
    words = workshop.overrides("run", "loop.steps=4", reward="score")
    assert headrace("train", "-q", *words).exit_code == 0
    known = calibrate(tmp_path / "run")
    assert known.workload.reward_s.mean > 0
    assert 0 < known.workload.no_signal_share < 1
    result = headrace("simulate", *words, "--from", tmp_path / "run", "--max-lag", "0,2", "--steps", 8, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.output)
    assert [one["max_lag"] for one in shown["simulated"]] == [0, 2]
    assert shown["step"]["mean_tokens"] == pytest.approx(known.workload.tokens.mean)
    assert min(one["step_s"] for one in shown["simulated"]) > 0
    assert [one["lag_max"] <= one["max_lag"] for one in shown["simulated"]] == [True, True]


def test_a_table_has_a_line_for_each_max_lag_and_says_what_it_shows():
    result = headrace("simulate", *RECIPE, *TYPED, "--gpus", 16, "--max-lag", "0,1,4", "--steps", 6)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert [line[0] for line in lines if line and line[0] in "014"] == ["0", "1", "4"]
    assert "rollout idle" in result.output
    assert "the tokens per second of max_lag = 0" in " ".join(result.output.split())


def test_slow_and_failing_workers_can_be_asked_for():
    words = ["simulate", *RECIPE, *TYPED, "--gpus", 16, "--max-lag", 1, "--steps", 6, "--json"]
    trouble = ["--straggler-share", 0.25, "--straggler-factor", 4, "--mtbf", "10min", "--repair", "30s"]
    well, ill = (json.loads(headrace(*words, *more).output)["simulated"][0] for more in ([], trouble))
    assert well["failures"] == 0 < ill["failures"]
    assert ill["goodput_tokens_s"] < 0.9 * well["goodput_tokens_s"]
    assert "redone" in ill["dropped_tokens"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Give --mean-tokens, --rollout-tokens-s, --train-tokens-s, or --from RUN"),
        ([*TYPED, "--max-lag", "0;1"], "write one or more numbers, such as 0,0.5,1,4"),
        ([*TYPED, "--mean-tokens", "many"], "'many' is not a number like 4096, 8k or 1.5M"),
        ([*TYPED, "--reward-p95", "4 weeks"], "'4 weeks' is not a time like 4s, 250ms or 2min"),
        ([*TYPED, "--decode", "2s"], "with a single row it cannot take longer (2 s)"),
        ([*TYPED, "--gpus", "8", "--rollout-share", "1"], "leave none to train; lower --rollout-share"),
        (["--params", "7B", "--gpus", "8", "--rollout-share", "1"], "leave none to train; lower --rollout-share"),
        (["--from", "no/such/run"], "no/such/run"),
    ],
)
def test_mistakes_are_answered_with_a_message(words: list[str], message: str):
    result = headrace("simulate", *RECIPE, *words)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())


def test_numbers_are_read_as_people_write_them():
    assert [amount(text) for text in ("8k", "1.5M", "4096")] == [8000, 1_500_000, 4096]
    assert [seconds(text) for text in ("4s", "250ms", "2min", "1.5")] == [4.0, 0.25, 120.0, 1.5]
    assert lags("0, 1,4") == [0, 1, 4]


def test_a_layout_shares_out_its_gpus():
    layout = Layout(gpus=1024, gpus_per_worker=8)
    assert (layout.rollout_workers, layout.learner_gpus, layout.turns) == (96, 256, False)
    assert Layout(gpus=64, colocated=True).learner_gpus == 64
    typed = Typed(mean_tokens=1000.0, rollout_tokens_s=5120.0, decode_s=0.025, train_tokens_s=1000.0)
    work, machine = scenario(load_config(None, ["prompts.source=x.jsonl", "model.path=m"]), typed, layout)
    assert machine.decode_s + 256 * machine.decode_row_s == pytest.approx(256 / 5120)
    assert machine.decode_s + machine.decode_row_s == pytest.approx(0.025)
    assert machine.train_token_s == pytest.approx(1 / 1000 / 256)
    assert (work.groups_per_step, work.samples) == (16, 8)
    with pytest.raises(ConfigError, match="how fast is the machine"):
        scenario(load_config(None, ["prompts.source=x.jsonl", "model.path=m"]), Typed(mean_tokens=5.0), layout)


@pytest.mark.parametrize(
    ("paces", "expected"),
    [
        ({}, (0.0, 1.0)),
        ({"a": 0.1}, (0.0, 1.0)),
        ({"a": 0.1, "b": 0.14}, (0.0, 1.0)),
        ({"a": 0.3, "b": 0.1}, (0.5, 3.0)),
        ({"a": 0.1, "b": 0.2, "c": 0.1, "d": 0.1}, (0.25, 2.0)),
    ],
)
def test_slow_workers_are_told_by_their_bursts(paces: dict[str, float], expected: tuple[float, float]):
    kinds = [("worker", "U8"), ("start_s", "f8"), ("end_s", "f8")]
    spans = [(name, 10.0 * i, 10.0 * i + taken_s) for name, taken_s in paces.items() for i in range(5)]
    assert slow_workers(np.array(spans, kinds)) == pytest.approx(expected)
