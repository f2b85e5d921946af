"""What is shown of a step: `Row`, the ledger's one line of numbers, and a `Sample` of the answers.

Each number is declared once, here: ledger, sinks, `/metrics` and the page's curves follow from it.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from headrace.measured import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMetric:
    """What one number of `Row` is.

    Example: RowMetric(label="length/max", help="of the longest answer", unit="tokens", over="max")
    """

    label: str  # its name in plotting sinks
    help: str
    unit: str = ""
    over: Literal["mean", "sum", "max", "min", "last"] = "mean"  # how steps become one number
    exported: str = ""  # to Prometheus; empty: the field's name, with `_total` if it is a sum


def _metric(label: str, help: str, default: Any = MISSING, **more: Any) -> Any:
    return field(default=default, metadata={"metric": RowMetric(label=label, help=help, **more)})


def _total(label: str, help: str, unit: str = "", exported: str = "") -> Any:
    return _metric(label, help, unit=unit, over="sum", exported=exported)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The ledger's one line per step.

    Example: Row(step=12, version=12, wall_s=1.4, num_groups=16, num_trajectories=128,
        generated_tokens=4310, trained_tokens=4096, dropped_tokens={"no_signal": 214}, ...)
    """

    step: int
    version: int = _metric(
        "step/version",
        "version of the policy after the step",
        over="last",
        exported="policy_version",
    )
    wall_s: float = _total("step/wall_s", "seconds since the last row", "s", "wall_seconds_total")
    num_groups: int = _total("step/num_groups", "groups trained on", exported="trained_groups_total")
    num_trajectories: int = _total(
        "step/num_trajectories", "trajectories trained on", exported="trained_trajectories_total"
    )
    generated_tokens: int = _total("tokens/generated", "tokens generated", "tokens")
    trained_tokens: int = _total("tokens/trained", "tokens trained on", "tokens")
    dropped_tokens: Mapping[str, int]  # by reason
    backlog_tokens: int = _metric(
        "tokens/backlog", "tokens buffered and in flight after the step", unit="tokens", over="last"
    )
    preemptions: int = _total(
        "engine/preemptions",
        "times a sequence gave up its cache because there was no more, and was computed again",
    )
    parks: int = _total("engine/parks", "times a sequence that reached max_wall_s was laid aside for others")
    cached_share: float = _metric(
        "engine/cached_share", "share of prompt tokens that were served from the cache of an earlier turn"
    )
    turns_mean: float = _metric("episode/turns_mean", "turns per scored trajectory")
    environment_s: float = _metric("time/environment", "seconds in which environments worked", unit="seconds")
    lag_mean: float = _metric("lag/mean", "mean lag over trained tokens", unit="versions")
    lag_max: int = _metric("lag/max", "lag of the oldest trained token", unit="versions", over="max")
    reward_mean: float = _metric("reward/mean", "mean reward of all scored trajectories")
    reward_std: float = _metric("reward/std", "standard deviation of these rewards")
    length_mean: float = _metric(
        "length/mean", "sampled tokens per scored answer", unit="tokens", exported="answer_tokens_mean"
    )
    length_max: int = _metric(
        "length/max",
        "sampled tokens of the longest scored trajectory",
        unit="tokens",
        over="max",
        exported="answer_tokens_max",
    )
    truncated_share: float = _metric(
        "length/truncated_share",
        "share of the scored trajectories that ran into max_new_tokens or max_wall_s",
        exported="answers_cut_share",
    )
    loss: float = _metric("learner/loss", "loss")
    grad_norm: float = _metric("learner/grad_norm", "norm of the gradient, before it is clipped")
    lr: float = _metric("learner/lr", "learning rate", over="last", exported="learning_rate")
    skipped: bool = _total(
        "learner/skipped",
        "the gradient was not finite, the weights stayed as they were",
        exported="skipped_steps_total",
    )
    entropy: float = _metric("learner/entropy", "mean of -log p over sampled tokens", unit="nats")
    kl_reference: float = _metric("learner/kl_reference", "KL from the reference", unit="nats")
    mismatch_mean: float = _metric("mismatch/mean", "mean |learner - behaviour| log-prob", unit="nats")
    mismatch_k3: float = _metric("mismatch/k3", "KL(behaviour || learner) per token", unit="nats")
    ratio_mean: float = _metric("mismatch/ratio_mean", "mean importance ratio")
    ratio_p01: float = _metric("mismatch/ratio_p01", "1st percentile of the ratio", over="min")
    ratio_p99: float = _metric("mismatch/ratio_p99", "99th percentile of the ratio", over="max")
    ratio_outside: float = _metric(
        "mismatch/ratio_outside",
        "share of tokens with ratio outside [0.9, 1.1]",
        exported="ratio_outside_share",
    )
    clipped_share: float = _metric("learner/clipped_share", "share of tokens whose ratio was clipped")
    effective_samples: float = _metric(
        "mismatch/effective_samples",
        "effective sample size of the importance weights, as a share: (Σw)² / (n Σw²)",
        exported="effective_samples_share",
    )
    stage_s: StageTimes
    publish_bytes: int = _metric(
        "publish/bytes",
        "bytes moved to bring new weights to the engine",
        unit="bytes",
        exported="publish_bytes_total",
    )
    score: float | None = _metric(
        "eval/score", "held-out score, on the steps that evaluate", None, exported="held_out_score"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer, to be read by a person.

    Example: Sample(step=20, prompt="12+9=", answer="22", reward=0.0, fate="dropped: no_signal")
    """

    step: int
    prompt: str
    answer: str
    reward: float | None
    fate: str  # "buffered", or why it was dropped


ROW_METRICS: Mapping[str, RowMetric] = {f.name: f.metadata["metric"] for f in fields(Row) if f.metadata}
"""By field, every number of a row; `dropped_tokens` and `stage_s` hold several each."""
