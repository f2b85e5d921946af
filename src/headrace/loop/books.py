"""What the loop writes into the ledger (the run's database).

Of each trajectory whether it was trained on or dropped, and of each step one row of metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from headrace.ledger.clock import StageClock, busy_s, union_length
from headrace.ledger.ledger import Amount, Books, Ledger
from headrace.measured import StepStats
from headrace.rollout.pool import RolloutPool
from headrace.row import Row, Sample
from headrace.types import Drop, DropReason, Group, Prompt, Trajectory

Dropped = Sequence[tuple[Trajectory, str]]  # each with its reason


class Bookkeeper:
    """Books trajectories as buffered, trained on or dropped, with their lag (staleness) behind `version`.

    Of one group in `sample_every`, `on_sample` gets the answers with the highest and lowest reward.
    """

    def __init__(
        self, ledger: Ledger, *, sample_every: int = 0, on_sample: Callable[[Sample], None] = lambda sample: None
    ) -> None:
        self.version = 0
        self._ledger = ledger
        self._sample_every, self._on_sample = sample_every, on_sample
        self._num_groups = 0

    def reached(self, version: int) -> None:
        self.version = version

    def buffered(self, group: Group) -> None:
        self._ledger.buffered(group)
        self._sample(group.prompt, [(t, "buffered") for t in group.trajectories])

    def trained(self, groups: Sequence[Group], *, step: int, skipped: bool) -> None:
        """Book the groups of the step that led to `version`; if it was `skipped`, as dropped."""
        before = self.version - 1
        for group in groups:
            if skipped:
                drops = [(t, DropReason.SKIPPED_STEP) for t in group.trajectories]
                self._ledger.dropped(_drops(drops, before), source="buffered")
            else:
                self._ledger.trained(group, step=step, lag_of=lambda t: before - t.oldest_version)

    def drop_group(self, dropped: Dropped, group: Group, was_buffered: bool) -> None:
        """Book trajectories of `group` that the buffer dropped."""
        if was_buffered:
            self.drop_buffered(dropped)
        else:
            self.drop_in_flight(dropped, group.prompt, of=(group.serial, group.attempt))

    def drop_buffered(self, dropped: Dropped) -> None:
        if dropped:
            self._ledger.dropped(_drops(dropped, self.version), source="buffered")

    def drop_in_flight(self, dropped: Dropped, prompt: Prompt, *, of: tuple[int, int]) -> None:
        """Book answers to `prompt` that never reached the buffer, `of` a group's serial and attempt."""
        if dropped:
            drops, trajectories = _drops(dropped, self.version), [t for t, _ in dropped]
            self._ledger.dropped(drops, source="in_flight", trajectories=trajectories, prompt=prompt, of=of)
            whole = [(t, reason) for t, reason in dropped if reason != DropReason.RUN_ENDED]
            self._sample(prompt, [(t, f"dropped: {reason}") for t, reason in whole])

    def _sample(self, prompt: Prompt, answers: Dropped) -> None:
        self._num_groups += bool(answers)
        if not answers or not self._sample_every or (self._num_groups - 1) % self._sample_every:
            return
        ranked = sorted(answers, key=lambda answer: (answer[0].reward is None, -(answer[0].reward or 0.0)))
        shown = [ranked[0]] if ranked[0][0].reward == ranked[-1][0].reward else [ranked[0], ranked[-1]]
        for t, fate in shown:
            step = self.version + 1
            self._on_sample(Sample(step=step, prompt=prompt.text, answer=t.text, reward=t.reward, fate=fate))


def _drops(dropped: Dropped, version: int) -> list[Drop]:
    return [
        Drop(
            trajectory_id=t.id,
            prompt_id=t.prompt_id,
            reason=str(reason),
            num_tokens=t.num_sampled_tokens,
            lag=version - t.oldest_version if t.spans else 0,
            reward=t.reward,
        )
        for t, reason in dropped
    ]


class RowMaker:
    """Collects what happened since the last row, and books it as the next `Row`."""

    def __init__(self, ledger: Ledger, clock: StageClock, pool: RolloutPool) -> None:
        self._ledger, self._clock, self._pool = ledger, clock, pool
        self._start_s = clock.now()
        self._books = ledger.totals()
        self._counts = pool.counts
        self._scored: list[tuple[float, int, bool]] = []  # reward, tokens, truncated
        self._turns: list[int] = []  # of the same trajectories
        self.first_reward_failure = ""

    def begin(self) -> None:
        """The first step begins now: what came before, such as an evaluation, is in no row."""
        self._start_s, self._counts = self._clock.now(), self._pool.counts

    def restore(self, scored: list[tuple[float, int, bool]]) -> None:
        """Continue after the last row of a resumed run; `scored` was scored after that row."""
        rows = self._ledger.rows()
        dropped: Counter[str] = Counter()
        for row in rows:
            dropped.update(row.dropped_tokens)
        self._books = Books(
            generated=Amount(tokens=sum(row.generated_tokens for row in rows)),
            trained=Amount(tokens=sum(row.trained_tokens for row in rows)),
            buffered=Amount(),
            in_flight=Amount(),
            dropped={reason: Amount(tokens=tokens) for reason, tokens in dropped.items()},
        )
        self._scored = scored

    def scored(self, trajectory: Trajectory) -> None:
        assert trajectory.reward is not None
        scored = (trajectory.reward, trajectory.num_sampled_tokens, trajectory.finish.cut)
        self._scored.append(scored)
        self._turns.append(max(1, len(trajectory.turns)))

    def reward_failed(self, detail: str) -> None:
        """Keep the first failure's `detail`, for the summary and for error messages."""
        self.first_reward_failure = self.first_reward_failure or detail

    def make(
        self,
        step: int,
        version: int,
        taken: list[Group],
        stats: StepStats,
        *,
        end_s: float,
        moved_bytes: int,
        score: float | None,
    ) -> Row:
        """Book the row of a step that ended at `end_s`; the next begins now, after an evaluation."""
        running, finished = self._clock.running(), self._clock.drain()
        books, before, counts = self._ledger.totals(), self._books, self._pool.counts
        prompt_tokens = counts.prompt_tokens - self._counts.prompt_tokens
        working = [s for s in (*running, *finished) if s.stage == "environment"]
        environment_s = union_length((max(s.start_s, self._start_s), min(s.end_s, end_s)) for s in working)
        trajectories = [t for group in taken for t in group.trajectories]
        tokens = np.array([t.num_sampled_tokens for t in trajectories])
        lags = np.array([version - 1 - t.oldest_version for t in trajectories])
        # sorted: the order of a sum's terms decides its last bit, and rewards come in any order
        rewards, lengths, truncated = np.array(sorted(self._scored) or [(0.0, 0, False)], np.float64).T
        row = Row(
            step=step,
            version=version,
            wall_s=end_s - self._start_s,
            num_groups=len(taken),
            num_trajectories=len(trajectories),
            generated_tokens=books.generated.tokens - before.generated.tokens,
            trained_tokens=books.trained.tokens - before.trained.tokens,
            dropped_tokens=_dropped_tokens(before, books),
            backlog_tokens=books.backlog_tokens,
            preemptions=counts.preemptions - self._counts.preemptions,
            parks=counts.parks - self._counts.parks,
            cached_share=(counts.cached_tokens - self._counts.cached_tokens) / max(1, prompt_tokens),
            turns_mean=float(np.mean(self._turns or [1])),
            environment_s=environment_s,
            lag_mean=float((lags * tokens).sum() / tokens.sum()),
            lag_max=int(lags.max()),
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std()),
            length_mean=float(lengths.mean()),
            length_max=int(lengths.max()),
            truncated_share=float(truncated.mean()),
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            lr=stats.lr,
            skipped=stats.skipped,
            entropy=stats.entropy,
            kl_reference=stats.kl_reference,
            mismatch_mean=stats.mismatch.mean_abs,
            mismatch_k3=stats.mismatch.k3,
            ratio_mean=stats.mismatch.ratio_mean,
            ratio_p01=stats.mismatch.ratio_p01,
            ratio_p99=stats.mismatch.ratio_p99,
            ratio_outside=stats.mismatch.outside_share,
            clipped_share=stats.clipped_share,
            effective_samples=stats.mismatch.effective_samples,
            stage_s=busy_s([*running, *finished], self._start_s, end_s),
            publish_bytes=moved_bytes,
            score=score,
        )
        self._ledger.spans(finished)
        self._ledger.row(row)
        self._books, self._counts, self._scored, self._start_s = books, counts, [], self._clock.now()
        self._turns = []
        return row

    def flush(self) -> None:
        """Book the spans measured after the last row."""
        self._ledger.spans(self._clock.drain())


def _dropped_tokens(before: Books, books: Books) -> dict[str, int]:
    known = {reason: amount.tokens for reason, amount in before.dropped.items()}
    more = {reason: a.tokens - known.get(reason, 0) for reason, a in books.dropped.items()}
    return {reason: tokens for reason, tokens in more.items() if tokens}
