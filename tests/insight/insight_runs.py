"""Runs made by hand: one of three steps in which every second and every token is known, and ones with given speeds."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path

from hand_made import group_of, trajectory

from headrace.config_file import load_config
from headrace.ledger.files import save_settings
from headrace.ledger.journal import row_from_json
from headrace.ledger.ledger import Ledger
from headrace.measured import STALL, Row, StageClock, StageSpan
from headrace.types import Attempt, FinishReason, Group, Timing

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
    save_settings(load_config(None, ["loop.steps=3", "loop.max_lag=1", "rollout.samples=3"]), run_dir)
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
        _drop(ledger, dull)
        ledger.closed(dull.serial, 1)
    ledger.buffered(groups[0])
    clock.now_s = begin_s + STEP_S
    ledger.trained(groups[0], version=step - 1)
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


def _drop(ledger: Ledger, group: Group) -> None:
    drops = [(t, "no_signal") for t in group.trajectories]
    ledger.dropped(group, drops, was_buffered=False, version=group.version)


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
    others = {field.name: "NaN" for field in fields(Row) if field.type in (int, float)}
    return row_from_json(json.dumps(others | known))


def made_up_run(
    run_dir: Path,
    *,
    lengths: tuple[int, ...] = (20,) * 8,
    decode_s: float = 0.01,
    verdict_s: float = 0.001,
    train_token_s: float = 1e-4,
    publish_s: float = 0.001,
    publish_parts: int = 1,
    barren: int = 0,
    settings: tuple[str, ...] = (),
    num_steps: int = 6,
) -> Path:
    """A run at lag 0 with these speeds: pairs of answers are generated, scored by one worker, trained on, published.

    In each step `barren` more pairs got equal rewards and were dropped. A cluster books publishing in several parts.
    """
    run_dir.mkdir(parents=True)
    given = [
        f"loop.steps={num_steps}",
        f"loop.groups_per_step={len(lengths) // 2}",
        "rollout.samples=2",
        "rollout.max_new_tokens=1000",
    ]
    save_settings(load_config(None, [*given, *settings]), run_dir)
    clock = SetClock()
    with Ledger.create(run_dir, clock=clock) as ledger:
        for step in range(1, num_steps + 1):
            begin_s, serial = clock.now_s, 100 * step
            ends_s = [begin_s + (length - 1) * decode_s for length in (*lengths, *lengths[: 2 * barren])]
            scored_s = _scored_s(ends_s, verdict_s)
            answers = [
                (length, float(i % 2 and i < len(lengths)), end_s - begin_s, at_s - begin_s)
                for i, (length, end_s, at_s) in enumerate(zip((*lengths, *lengths), ends_s, scored_s, strict=False))
            ]
            pairs = [tuple(answers[i : i + 2]) for i in range(0, len(answers), 2)]
            groups = [_group(serial + i, step - 1, begin_s, pair) for i, pair in enumerate(pairs)]
            trained, dropped = groups[: len(lengths) // 2], groups[len(lengths) // 2 :]
            for group in groups:
                ledger.started(2, Attempt(serial=group.serial, number=1, prompt_id="p", wave=step, version=step - 1))
                ledger.sampled(group.num_sampled_tokens)
            clock.now_s = max(scored_s)
            for group in dropped:
                _drop(ledger, group)
                ledger.closed(group.serial, 1)
            spans = [StageSpan(stage="rollout", start_s=begin_s, end_s=max(ends_s), version=step - 1)]
            for end_s, at_s in zip(ends_s, scored_s, strict=True):
                spans.append(StageSpan(stage="reward", start_s=end_s, end_s=at_s, version=step - 1))
            for group in trained:
                ledger.buffered(group)
                num_tokens = sum(len(t.token_ids) for t in group.trajectories)
                spans.append(_next_span(clock, "train", num_tokens * train_token_s, step - 1, f"{num_tokens} tokens"))
            spans.append(_next_span(clock, "train", 1e-3, step - 1))
            spans += [_next_span(clock, "publish", publish_s / publish_parts, step) for _ in range(publish_parts)]
            for group in trained:
                ledger.trained(group, version=group.version)
            ledger.spans(sorted(spans, key=lambda span: span.end_s))
            row = _row(step, sum(group.num_sampled_tokens for group in groups))
            tokens = sum(group.num_sampled_tokens for group in trained)
            ledger.row(replace(row, wall_s=clock.now_s - begin_s, trained_tokens=tokens))
    return run_dir


def _scored_s(ends_s: list[float], verdict_s: float) -> list[float]:
    """When one worker, first come, first served, has scored each."""
    order = sorted(range(len(ends_s)), key=lambda i: ends_s[i])
    done_s = accumulate((ends_s[i] for i in order), lambda free_s, end_s: max(free_s, end_s) + verdict_s, initial=0.0)
    by_answer = dict(zip(order, list(done_s)[1:], strict=True))
    return [by_answer[i] for i in range(len(ends_s))]


def _next_span(clock: SetClock, stage: str, seconds: float, version: int, detail: str = "") -> StageSpan:
    """A span from now on; the clock goes on to its end."""
    start_s, clock.now_s = clock.now_s, clock.now_s + seconds
    return StageSpan(stage=stage, start_s=start_s, end_s=clock.now_s, version=version, detail=detail)
