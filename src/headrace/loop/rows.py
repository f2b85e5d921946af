"""Rows for the ledger: what happened since the row before."""

from __future__ import annotations

from collections import Counter

import numpy as np

from headrace.ledger.clock import StageClock, busy_s
from headrace.ledger.ledger import Amount, Books, Ledger
from headrace.rollout.pool import RolloutPool
from headrace.row import Row
from headrace.types import Group, StepStats, Trajectory


class RowMaker:
    """Collects what a row needs and books it."""

    def __init__(self, ledger: Ledger, clock: StageClock, pool: RolloutPool) -> None:
        self._ledger, self._clock, self._pool = ledger, clock, pool
        self._start_s = clock.now()
        self._books = ledger.totals()
        self._counts = pool.counts
        self._scored: list[tuple[float, int, bool]] = []  # reward, tokens, truncated
        self.first_reward_failure = ""

    def begin(self) -> None:
        """The first step begins now: what came before, such as an evaluation, is in no row."""
        self._start_s = self._clock.now()
        self._count_laid_aside()

    def restore(self, scored: list[tuple[float, int, bool]]) -> None:
        """Go on from the last row of a run that ended too soon; `scored` is what was since then."""
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
        """A trajectory got its reward."""
        assert trajectory.reward is not None
        self._scored.append((trajectory.reward, trajectory.num_sampled_tokens, trajectory.finish.cut))

    def reward_failed(self, detail: str) -> None:
        """A trajectory could not be scored; the first such detail is kept for the summary."""
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
        """Book the row of a step that ended at `end_s`, and begin the next: an evaluation since then is in neither."""
        running, finished = self._clock.running(), self._clock.drain()
        books, before = self._ledger.totals(), self._books
        preemptions, parks = self._count_laid_aside()
        trajectories = [t for group in taken for t in group.trajectories]
        tokens, lags = np.array([(t.num_sampled_tokens, version - 1 - t.oldest_version) for t in trajectories]).T
        # sorted: a sum's last bit follows the order of its terms, and verdicts come in any order
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
            preemptions=preemptions,
            parks=parks,
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
        self._books, self._scored, self._start_s = books, [], self._clock.now()
        return row

    def _count_laid_aside(self) -> tuple[int, int]:
        """Preemptions and parks since the row before."""
        before, self._counts = self._counts, self._pool.counts
        return self._counts.preemptions - before.preemptions, self._counts.parks - before.parks

    def flush(self) -> None:
        """Book the spans measured after the last row."""
        self._ledger.spans(self._clock.drain())


def _dropped_tokens(before: Books, books: Books) -> dict[str, int]:
    """What was dropped between the two, by reason."""
    dropped = {
        reason: amount.tokens - (before.dropped[reason].tokens if reason in before.dropped else 0)
        for reason, amount in books.dropped.items()
    }
    return {reason: count for reason, count in dropped.items() if count}
