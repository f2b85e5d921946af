"""What the loop writes into the ledger (the run's database).

Of each trajectory whether it was trained on or dropped, and of each step one row of metrics.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headrace.ledger.database import DROPPED
from headrace.ledger.ledger import Dropped, Ledger
from headrace.measured import ROW_METRICS, STAGES, Row, Sample, StageClock, StageTimes, StepStats, busy_s
from headrace.rollout.pool import RolloutPool
from headrace.types import DropReason, Group, Prompt


@dataclass
class Bookkeeper:
    """Books trajectories as buffered, trained on or dropped, with their lag (staleness) behind `version`.

    Of one group in `sample_every`, `on_sample` gets the answers with the highest and lowest reward.
    """

    ledger: Ledger
    sample_every: int = 0
    on_sample: Callable[[Sample], None] = lambda sample: None
    version: int = 0
    _num_groups: int = 0

    def reached(self, version: int) -> None:
        self.version = version

    def buffered(self, group: Group) -> None:
        self.ledger.buffered(group)
        self._sample(group.prompt, [(t, "buffered") for t in group.trajectories])

    def trained(self, groups: Sequence[Group], *, skipped: bool) -> None:
        """Book the groups of the step that led to `version`; if it was `skipped`, as dropped."""
        before = self.version - 1
        for group in groups:
            if skipped:
                drops = [(t, DropReason.SKIPPED_STEP) for t in group.trajectories]
                self.ledger.dropped(group, drops, was_buffered=True, version=before)
            else:
                self.ledger.trained(group, version=before)

    def dropped(self, drops: Dropped, group: Group, was_buffered: bool) -> None:
        if not drops:
            return
        self.ledger.dropped(group, drops, was_buffered=was_buffered, version=self.version)
        if not was_buffered:
            whole = [(t, reason) for t, reason in drops if reason not in (DropReason.RUN_ENDED, DropReason.LATE)]
            self._sample(group.prompt, [(t, f"dropped: {reason}") for t, reason in whole])

    def _sample(self, prompt: Prompt, answers: Dropped) -> None:
        self._num_groups += bool(answers)
        if not answers or not self.sample_every or (self._num_groups - 1) % self.sample_every:
            return
        ranked = sorted(answers, key=lambda answer: (answer[0].reward is None, -(answer[0].reward or 0.0)))
        shown = [ranked[0]] if ranked[0][0].reward == ranked[-1][0].reward else [ranked[0], ranked[-1]]
        for t, fate in shown:
            step = self.version + 1
            self.on_sample(Sample(step=step, prompt=prompt.text, answer=t.text, reward=t.reward, fate=fate))


class RowMaker:
    """Collects what happened since the last row, and books it as the next `Row`."""

    def __init__(self, ledger: Ledger, clock: StageClock, pool: RolloutPool) -> None:
        self._ledger, self._clock, self._pool = ledger, clock, pool
        self.begin()
        self.turns: list[int] = []  # of the trajectories scored since the last row
        self.biases: list[float] = []  # of the lengths of groups whose last answers were ended, likewise
        self.first_reward_failure = ""

    def begin(self) -> None:
        """The first step begins now: what came before, such as an evaluation, is in no row."""
        self._start_s, self._counts = self._clock.now(), asdict(self._pool.counts)

    def reward_failed(self, detail: str) -> None:
        """Keep the first failure's `detail`, for the summary and for error messages."""
        self.first_reward_failure = self.first_reward_failure or detail

    def make(self, step: int, taken: list[Group], stats: StepStats, *, end_s: float, **own: Any) -> Row:
        """Book the row of a step that ended at `end_s`, with `own` numbers; the next begins."""
        running, finished = self._clock.running(), self._clock.drain()
        busy = busy_s([*running, *finished], self._start_s, end_s)
        moved, counts = self._ledger.moved_since_row(), asdict(self._pool.counts)
        did = {name: number - self._counts[name] for name, number in counts.items()}  # the engines
        dropped = {name: n for name, n in moved.items() if name.startswith(DROPPED)}
        trajectories = [t for group in taken for t in group.trajectories]
        tokens, oldest = np.array([(t.num_sampled_tokens, t.oldest_version) for t in trajectories]).T
        # those of an evaluation's time may all count to the step before it, and leave none to this one
        own_scores = [(t.reward, t.num_sampled_tokens, t.finish.cut) for t in trajectories]
        scored = self._ledger.scored_since_row() or own_scores
        # sorted: the order of a sum's terms decides its last bit, and rewards come in any order
        rewards, lengths, truncated = np.array(sorted(scored), np.float64).T
        limit_s, decoding_s = did["limit_s"], busy["rollout"] * len(self._pool.workers)
        known = did | asdict(stats) | asdict(stats.mismatch)  # most have the row's own names
        row = Row(
            step=step,
            version=step,
            wall_s=end_s - self._start_s,
            num_groups=len(taken),
            num_trajectories=len(trajectories),
            generated_tokens=moved.get("in_flight", 0),
            trained_tokens=moved.get("trained", 0),
            dropped_tokens={name.removeprefix(DROPPED): n for name, n in dropped.items() if n},
            backlog_tokens=self._ledger.totals().backlog_tokens,
            cached_share=did["cached_tokens"] / max(1, did["prompt_tokens"]),
            turns_mean=float(np.mean(self.turns or [1])),
            environment_s=busy["environment"],
            lag_mean=float(((step - 1 - oldest) * tokens).sum() / tokens.sum()),
            lag_max=int(step - 1 - oldest.min()),
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std()),
            length_mean=float(lengths.mean()),
            length_max=int(lengths.max()),
            length_bias=float(np.mean(self.biases or [0.0])),
            truncated_share=float(truncated.mean()),
            mismatch_mean=stats.mismatch.mean_abs,
            mismatch_k3=stats.mismatch.k3,
            **{name: known[name] for name in ROW_METRICS if name in known},
            mfu=stats.limit_s / busy["train"] if stats.limit_s else None,
            bandwidth_share=limit_s / decoding_s if limit_s and decoding_s else None,
            stage_s=StageTimes(**{stage: busy[stage] for stage in STAGES}),
            **own,
        )
        self._ledger.spans(finished)
        self._ledger.row(row)
        self._counts, self.turns, self.biases, self._start_s = counts, [], [], self._clock.now()
        return row
