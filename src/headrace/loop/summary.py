"""What a run came to: the content of `summary.json`."""

from __future__ import annotations

from typing import Any

from headrace.ledger.ledger import Ledger
from headrace.loop.loop import Loop
from headrace.types import STAGES, StageTimes


def summarise(ledger: Ledger, loop: Loop, *, wall_s: float) -> dict[str, Any]:
    """Totals of the run. `wall_s` is the whole command, `loop_s` the steps alone; goodput is over the latter."""
    rows, books, counts = ledger.rows(), ledger.totals(), loop.stages.pool.counts
    loop_s = sum(row.wall_s for row in rows)
    stage_s = StageTimes(**{stage: sum(getattr(row.stage_s, stage) for row in rows) for stage in STAGES})
    return {
        "wall_s": wall_s,
        "loop_s": loop_s,
        "steps": len(rows),
        "version": loop.version,
        "generated_tokens": books.generated.tokens,
        "trained_tokens": books.trained.tokens,
        "dropped_tokens": {reason: amount.tokens for reason, amount in sorted(books.dropped.items())},
        "goodput_tokens_per_s": books.trained.tokens / loop_s if loop_s else 0.0,
        "mean_lag_seen": sum(row.lag_mean * row.trained_tokens for row in rows) / max(1, books.trained.tokens),
        "max_lag_seen": max((row.lag_max for row in rows), default=0),
        "stage_s": {stage: getattr(stage_s, stage) for stage in STAGES},
        "wall": stage_s.wall,
        "drafted_tokens": counts.drafted_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "reward_failure": loop.rows.first_reward_failure,
    }
