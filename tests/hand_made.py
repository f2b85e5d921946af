"""Trajectories, groups and rows made by hand, for tests that need no engine; and what is in the books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.ledger.ledger import Amount, Books, Ledger
from headrace.measured import Row, StageTimes
from headrace.types import FinishReason, Group, Prompt, Replay, Span, Timing, Trajectory


def trajectory(
    *,
    serial: int = 0,
    index: int = 0,
    prompt: Sequence[int] = (5, 6),
    answer: Sequence[int] = (7, 8, 1),
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    spans: tuple[Span, ...] | None = None,
    reward: float | None = 1.0,
    finish: FinishReason = FinishReason.EOS,
    replay: Replay | None = None,
) -> Trajectory:
    """An answer of the given tokens, sampled by `version` unless `spans` say otherwise."""
    num_prompt, num = len(prompt), len(prompt) + len(answer)
    given = np.zeros(len(answer), np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
    return Trajectory(
        id=f"{serial}:p{serial}/{index}",
        prompt_id=f"p{serial}",
        index=index,
        token_ids=np.array([*prompt, *answer], np.int32),
        sampled=np.arange(num) >= num_prompt,
        logprobs=np.concatenate([np.zeros(num_prompt, np.float32), given]),
        spans=spans if spans is not None else (Span(version=version, start=num_prompt, end=num),),
        finish=finish,
        text="x" * len(answer),
        timing=Timing(submitted_s=0.0, started_s=0.0, finished_s=1.0),
        reward=reward,
        replay=replay,
    )


def group_of(*trajectories: Trajectory, serial: int = 0, version: int = 0) -> Group:
    """A group of these answers."""
    prompt = Prompt(id=f"p{serial}", text="?", token_ids=np.array([5, 6], np.int32))
    return Group(serial=serial, prompt=prompt, version=version, trajectories=trajectories)


def group(serial: int = 0, *, version: int = 0, rewards: Sequence[float] = (0.0, 1.0)) -> Group:
    """A group with these rewards, sampled by `version`."""
    answers = [trajectory(serial=serial, index=i, version=version, reward=r) for i, r in enumerate(rewards)]
    return group_of(*answers, serial=serial, version=version)


def row(step: int, **given: Any) -> Row:
    """A row of known numbers, other than those that are given."""
    values: dict[str, Any] = {
        "step": step,
        "version": step,
        "wall_s": 2.0,
        "num_groups": 1,
        "num_trajectories": 2,
        "generated_tokens": 0,
        "trained_tokens": 0,
        "again_tokens": 0,
        "dropped_tokens": {},
        "backlog_tokens": 0,
        "preemptions": 0,
        "parks": 0,
        "cached_share": 0.0,
        "turns_mean": 1.0,
        "environment_s": 0.0,
        "lag_mean": 0.5,
        "lag_max": 1,
        "reward_mean": 0.25,
        "reward_std": 0.125,
        "length_mean": 3.5,
        "length_max": 4,
        "length_bias": 0.0,
        "truncated_share": 0.0,
        "loss": -0.75,
        "grad_norm": 1.5,
        "lr": 1e-6,
        "skipped": False,
        "entropy": 2.0,
        "kl_reference": 0.0,
        "mismatch_mean": 0.0,
        "mismatch_k3": 0.0,
        "ratio_mean": 1.0,
        "ratio_p01": 1.0,
        "ratio_p99": 1.0,
        "ratio_outside": 0.0,
        "clipped_share": 0.0,
        "value_loss": 0.0,
        "effective_samples": 1.0,
        "stage_s": StageTimes(rollout=1.5, reward=0.25, train=0.5, publish=0.125),
        "publish_bytes": 64,
    }
    return Row(**(values | given))


def accounts(ledger: Ledger) -> dict[str, Amount]:
    """What is in each account: `generated` is negative, all add up to zero."""
    held = ledger.read("SELECT name, tokens, trajectories FROM accounts")
    return {name: Amount(tokens, trajectories) for name, tokens, trajectories in held}


def balances(books: Books) -> bool:
    """Whether everything generated is accounted for, in tokens and in trajectories."""
    parts = [books.trained, books.buffered, books.in_flight, *books.dropped.values()]
    return books.generated == tuple(map(sum, zip(*parts, strict=True)))
