"""A run of three steps in which every second and every token is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hand_made import group_of, trajectory

from headrace.config_file import dump, load_config
from headrace.ledger.clock import STALL, StageClock
from headrace.ledger.ledger import Ledger
from headrace.ledger.row_json import row_from_json
from headrace.row import Row
from headrace.types import Attempt, Drop, FinishReason, Group, StageSpan, Timing

STEP_S, EVALUATION_S = 10.0, 5.0
BEGINS_S = (0.0, 10.0, 25.0)  # of the steps: an evaluation lies before the third

# In each step, from its beginning. Nobody works from 9 to 9.5.
SPANS = (
    ("rollout", 0.0, 3.0),
    ("rollout", 3.0, 6.0),
    ("reward", 2.0, 4.0),
    ("reward", 4.5, 7.0),
    ("reward", 6.0, 8.0),
    ("train", 6.0, 9.0),
    ("publish", 9.5, 10.0),
)
ANSWERS = ((10, 1.0, 2.0, 4.0), (20, 0.0, 4.5, 7.0), (30, 0.5, 6.0, 8.0))  # tokens, reward, finished, scored
DULL = ((5, 0.0, 1.0, 1.0), (5, 0.0, 1.0, 1.0))  # in the second step only


class SetClock(StageClock):
    """A clock that says what it is told to."""

    now_s = 0.0

    def now(self) -> float:
        return self.now_s


def hand_made_run(run_dir: Path, *, num_steps: int = 3, close: bool = True) -> Path:
    """Write the run. Not closed, it is a run that goes on."""
    run_dir.mkdir(parents=True)
    dump(load_config(None, ["loop.steps=3", "loop.max_lag=1", "rollout.samples=3"]), run_dir / "config.toml")
    clock = SetClock()
    ledger = Ledger.create(run_dir, clock=clock)
    for step in range(1, num_steps + 1):
        _write_step(ledger, clock, step)
    if close:
        ledger.close()
    return run_dir


def _write_step(ledger: Ledger, clock: SetClock, step: int) -> None:
    begin_s, version = BEGINS_S[step - 1], step - 1 - (step == 3)  # the third trains on older answers
    groups = [_group(2 * step, version, begin_s, ANSWERS)]
    if step == 2:
        groups.append(_group(2 * step + 1, version, begin_s, DULL))
    clock.now_s = begin_s
    for group in groups:
        attempt = Attempt(serial=group.serial, number=1, prompt_id=group.prompt.id, wave=step, version=version)
        ledger.started(len(group.trajectories), attempt)
    for group in groups:
        clock.now_s = begin_s + 6.0
        ledger.sampled(group.num_sampled_tokens)
    clock.now_s = begin_s + 8.0
    for dull in groups[1:]:
        ledger.dropped(
            [_drop(t) for t in dull.trajectories],
            source="in_flight",
            trajectories=dull.trajectories,
            of=(dull.serial, 1),
        )
        ledger.closed(dull.serial, 1)
    ledger.buffered(groups[0])
    clock.now_s = begin_s + STEP_S
    ledger.trained(groups[0], step=step, lag_of=lambda t: step - 1 - t.oldest_version)
    ledger.spans(sorted(_spans(step, begin_s), key=lambda span: span.end_s))
    ledger.row(_row(step, sum(group.num_sampled_tokens for group in groups)))


def _group(serial: int, version: int, begin_s: float, answers: tuple[tuple[int, float, float, float], ...]) -> Group:
    made = []
    for index, (num_tokens, reward, finished_s, scored_s) in enumerate(answers):
        timing = Timing(
            submitted_s=begin_s, started_s=begin_s, finished_s=begin_s + finished_s, scored_s=begin_s + scored_s
        )
        finish = FinishReason.LENGTH if num_tokens == 30 else FinishReason.EOS
        answer = trajectory(
            serial=serial, index=index, answer=[7] * num_tokens, version=version, reward=reward, finish=finish
        )
        made.append(replace(answer, timing=timing))
    return group_of(*made, serial=serial, version=version)


def _drop(t: object) -> Drop:
    return Drop(trajectory_id=t.id, prompt_id=t.prompt_id, reason="no_signal", num_tokens=5, lag=0, reward=0.0)  # type: ignore[attr-defined]


def _spans(step: int, begin_s: float) -> list[StageSpan]:
    found = [
        StageSpan(stage=stage, start_s=begin_s + start_s, end_s=begin_s + end_s, version=step - (stage != "publish"))
        for stage, start_s, end_s in SPANS
    ]
    if step == 3:  # what lies between two steps counts for neither
        found.append(StageSpan(stage="evaluate", start_s=20.0, end_s=25.0, version=2))
        found.append(StageSpan(stage="rollout", start_s=21.0, end_s=23.0, version=2))
        found.append(StageSpan(stage="checkpoint", start_s=25.0, end_s=25.25, version=2, detail=STALL))
        found.append(StageSpan(stage="checkpoint", start_s=25.25, end_s=29.0, version=2))
    return found


def _row(step: int, generated_tokens: int) -> Row:
    trained = sum(num_tokens for num_tokens, *_ in ANSWERS)
    dropped = {"no_signal": generated_tokens - trained} if generated_tokens > trained else {}
    stage_s = {"rollout": 6.0, "reward": 5.5, "reference": 0.0, "train": 3.0, "publish": 0.5}
    known = {
        "step": step,
        "version": step,
        "wall_s": STEP_S,
        "num_groups": 1,
        "num_trajectories": 3,
        "generated_tokens": generated_tokens,
        "trained_tokens": trained,
        "dropped_tokens": dropped,
        "backlog_tokens": 0,
        "preemptions": step,
        "parks": 0,
        "lag_mean": float(step == 3),
        "lag_max": int(step == 3),
        "reward_mean": 0.5,
        "length_max": 30,
        "loss": "NaN" if step == 2 else 0.25,
        "skipped": False,
        "ratio_outside": 0.01 * step,
        "effective_samples": 1.0 - 0.1 * step,
        "publish_bytes": 64,
        "stage_s": stage_s,
    }
    return row_from_json(json.dumps(known))
