"""A row as flat, named numbers: what every plotting sink shows."""

from __future__ import annotations

from headrace.types import STAGES, Row


def scalars(row: Row) -> dict[str, float]:
    """Names such as `reward/mean`, `stage_s/rollout`, `dropped_tokens/no_signal`; the score only where there is one."""
    values: dict[str, float] = {
        "goodput/trained_tokens_per_s": row.trained_tokens / row.wall_s if row.wall_s > 0 else 0.0,
        "step/version": row.version,
        "step/wall_s": row.wall_s,
        "step/num_groups": row.num_groups,
        "step/num_trajectories": row.num_trajectories,
        "tokens/generated": row.generated_tokens,
        "tokens/trained": row.trained_tokens,
        "tokens/backlog": row.backlog_tokens,
        "engine/preemptions": row.preemptions,
        "engine/parks": row.parks,
        "lag/mean": row.lag_mean,
        "lag/max": row.lag_max,
        "reward/mean": row.reward_mean,
        "reward/std": row.reward_std,
        "length/mean": row.length_mean,
        "length/max": row.length_max,
        "length/truncated_share": row.truncated_share,
        "learner/loss": row.loss,
        "learner/grad_norm": row.grad_norm,
        "learner/lr": row.lr,
        "learner/skipped": row.skipped,
        "learner/entropy": row.entropy,
        "learner/kl_reference": row.kl_reference,
        "learner/clipped_share": row.clipped_share,
        "mismatch/mean": row.mismatch_mean,
        "mismatch/k3": row.mismatch_k3,
        "mismatch/ratio_mean": row.ratio_mean,
        "mismatch/ratio_p01": row.ratio_p01,
        "mismatch/ratio_p99": row.ratio_p99,
        "mismatch/ratio_outside": row.ratio_outside,
        "mismatch/effective_samples": row.effective_samples,
        "publish/bytes": row.publish_bytes,
    }
    values |= {f"stage_s/{stage}": getattr(row.stage_s, stage) for stage in STAGES}
    values |= {f"dropped_tokens/{reason}": num_tokens for reason, num_tokens in row.dropped_tokens.items()}
    if row.score is not None:
        values["eval/score"] = row.score
    return {name: float(value) for name, value in values.items()}
