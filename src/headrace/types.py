"""The records that cross a stage border.

Frozen, numpy only, no torch: they pickle cheaply and can be read on any machine. Each shows an instance.
Shapes in comments: T tokens of one trajectory, S of them sampled, L mixture layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
RouteArray = npt.NDArray[Any]  # [T, L, K] uint8 or uint16

STAGES = ("rollout", "reward", "reference", "train", "publish")


class FinishReason(StrEnum):
    """Why a generation ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    WALL = "wall"
    ABORT = "abort"

    @property
    def cut(self) -> bool:
        """Whether the policy had more to say: it ran into max_new_tokens or max_wall_s."""
        return self in (FinishReason.LENGTH, FinishReason.WALL)


class DropReason(StrEnum):
    """Why tokens were paid for but not trained on. A user's own filter is booked as `filter:<its name>`."""

    STALE = "stale"
    NO_SIGNAL = "no_signal"
    OVERLONG = "overlong"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_ERROR = "reward_error"
    REWARD_UNAVAILABLE = "reward_unavailable"  # what the function needs (a judge, a sandbox) was not to be had
    INCOMPLETE = "incomplete"
    SKIPPED_STEP = "skipped_step"
    RUN_ENDED = "run_ended"
    REDONE = "redone"  # lost with a process that died; its prompt was started again
    CRASHED = "crashed"  # lost with a process that died; its prompt was not


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem, with a stable id. `fields` is the rest of the data set's record, for the reward.

    Example:
        Prompt(id="train-17", text="12+9=", token_ids=np.array([5, 6, 14, 13, 15], np.int32), fields={"answer": "21"})
    """

    id: str
    text: str
    token_ids: IntArray
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens `start` to `end` (exclusive) of a trajectory were sampled by policy `version`.

    Example:
        Span(version=7, start=5, end=9)
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the engine chose besides the tokens, so that the learner can choose it again.

    `support_ids[support_offsets[i]:support_offsets[i + 1]]` are the tokens that could be sampled at the i-th sampled
    position (top-k, top-p, min-p leave a subset of the vocabulary).

    `routes` are the experts of each token, prompt tokens too, in each mixture layer, in the smallest unsigned type. The
    last token was sampled but never computed with, so it has no experts: its row is zeros, and nothing depends on it.

    Example:
        Replay(support_ids=np.array([4, 9, 2], np.int32), support_offsets=np.array([0, 2, 3], np.int64))
    """

    support_ids: IntArray | None = None  # [sum of subset sizes]
    support_offsets: npt.NDArray[np.int64] | None = None  # [S + 1]
    routes: RouteArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds on the run's monotonic clock.

    Example:
        Timing(submitted_s=1.0, started_s=1.1, finished_s=2.4, scored_s=2.5)
    """

    submitted_s: float
    started_s: float
    finished_s: float
    scored_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One complete answer: the tokens, which of them were sampled, by which policy, and what they earned.

    Example:
        Trajectory(id="40:train-17/3", prompt_id="train-17", index=3, token_ids=[5, 6, 14, 13, 15, 7, 6, 1],
            sampled=[F, F, F, F, F, T, T, T], logprobs=[0, 0, 0, 0, 0, -0.1, -0.9, -0.2],
            spans=(Span(version=7, start=5, end=8),), finish=FinishReason.EOS, text="21", reward=1.0, ...)
    """

    id: str
    prompt_id: str
    index: int
    token_ids: IntArray  # [T]
    sampled: BoolArray  # [T] True where the policy chose the token
    logprobs: FloatArray  # [T] of the distribution actually sampled from; 0 where not sampled
    spans: tuple[Span, ...]  # cover the sampled tokens, in order
    finish: FinishReason
    text: str
    timing: Timing
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    replay: Replay | None = None

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        assert len(self.sampled) == len(self.logprobs) == num_tokens, self.id
        assert sum(span.end - span.start for span in self.spans) == self.num_sampled_tokens, self.id

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy was paid to sample: the unit of every account."""
        return int(np.count_nonzero(self.sampled))

    @property
    def oldest_version(self) -> int:
        """The version of the oldest span: what lag is measured from."""
        return min(span.version for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All trajectories of one prompt. `serial` counts groups in the order their prompts were drawn.

    Example:
        Group(serial=40, prompt=Prompt(...), version=7, trajectories=(Trajectory(...), Trajectory(...)))
    """

    serial: int
    prompt: Prompt
    version: int  # of the policy when the group was admitted
    trajectories: tuple[Trajectory, ...]
    attempt: int = 1  # a restart tries again what was under way, and only the newest attempt counts

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens over all trajectories."""
        return sum(t.num_sampled_tokens for t in self.trajectories)

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled any token of the group."""
        return min((t.oldest_version for t in self.trajectories), default=self.version)

    def lag(self, version: int) -> int:
        """How many versions the learner is ahead of this group's oldest token."""
        return version - self.oldest_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """One trajectory that was paid for and is not trained on.

    Example:
        Drop(trajectory_id="40:train-17/3", prompt_id="train-17", reason="stale", num_tokens=212, lag=5, reward=0.0)
    """

    trajectory_id: str
    prompt_id: str
    reason: str  # a DropReason, or "filter:<name>"
    num_tokens: int
    lag: int
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a reward function sees of one trajectory.

    Example:
        Completion(prompt="12+9=", text="21", fields={"answer": "21"}, num_tokens=3, finish="eos")
    """

    prompt: str
    text: str
    fields: Mapping[str, Any]
    num_tokens: int
    finish: str

    @classmethod
    def of(cls, prompt: Prompt, trajectory: Trajectory) -> Completion:
        """What the reward function is to see."""
        return cls(
            prompt=prompt.text,
            text=trajectory.text,
            fields=prompt.fields,
            num_tokens=trajectory.num_sampled_tokens,
            finish=str(trajectory.finish),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward function's verdict, or why there is none. A failure is a value here, never a reward of zero.

    Example:
        Score(reward=1.0, parts={"correct": 1.0}), Score(failure=DropReason.REWARD_TIMEOUT, detail="no answer in 5 s")
    """

    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: DropReason | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds each stage was busy (the union of its spans) in some interval: the five τ of the goodput equation.

    Example:
        StageTimes(rollout=1.9, reward=0.2, reference=0.0, train=0.8, publish=0.01)
    """

    rollout: float = 0.0
    reward: float = 0.0
    reference: float = 0.0
    train: float = 0.0
    publish: float = 0.0

    @property
    def wall(self) -> str:
        """The stage that binds: the largest."""
        return max(STAGES, key=lambda stage: float(getattr(self, stage)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMetric:
    """What a number of `Row` is, declared with its field: sinks, `/metrics` and the page's curves follow from it.

    Example:
        RowMetric(label="length/mean", help="mean sampled tokens of a scored trajectory", unit="tokens",
            over="mean", exported="answer_tokens_mean")
    """

    label: str  # its name in plotting sinks
    help: str
    unit: str = ""
    over: Literal["mean", "sum", "max", "min", "last"] = "mean"  # how the numbers of several steps become one
    exported: str = ""  # its name for Prometheus, if not the field's; with `_total`: the sum over all rows


def _metric(label: str, help: str, default: Any = MISSING, **more: Any) -> Any:
    return field(default=default, metadata={"metric": RowMetric(label=label, help=help, **more)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The ledger's one line per step.

    Example:
        Row(step=12, version=12, wall_s=1.4, num_groups=16, num_trajectories=128, generated_tokens=4310,
            trained_tokens=4096, dropped_tokens={"no_signal": 214}, backlog_tokens=0, lag_mean=0.0, lag_max=0, ...)
    """

    step: int
    version: int = _metric(
        "step/version", "version of the policy after the step", over="last", exported="policy_version"
    )
    wall_s: float = _metric(
        "step/wall_s", "seconds since the row before", unit="s", over="sum", exported="wall_seconds_total"
    )
    num_groups: int = _metric("step/num_groups", "groups trained on", over="sum", exported="trained_groups_total")
    num_trajectories: int = _metric(
        "step/num_trajectories", "trajectories trained on", over="sum", exported="trained_trajectories_total"
    )
    generated_tokens: int = _metric(
        "tokens/generated", "tokens generated", unit="tokens", over="sum", exported="generated_tokens_total"
    )
    trained_tokens: int = _metric(
        "tokens/trained", "tokens trained on", unit="tokens", over="sum", exported="trained_tokens_total"
    )
    dropped_tokens: Mapping[str, int]  # by reason
    backlog_tokens: int = _metric(
        "tokens/backlog", "tokens buffered and in flight, at the end of the step", unit="tokens", over="last"
    )
    preemptions: int = _metric(
        "engine/preemptions",
        "times a sequence gave up its cache because there was no more, and was computed again",
        over="sum",
        exported="preemptions_total",
    )
    parks: int = _metric(
        "engine/parks",
        "times a sequence that reached max_wall_s was laid aside for others",
        over="sum",
        exported="parks_total",
    )
    lag_mean: float = _metric("lag/mean", "mean lag over trained tokens", unit="versions")
    lag_max: int = _metric("lag/max", "lag of the oldest trained token", unit="versions", over="max")
    reward_mean: float = _metric(
        "reward/mean", "mean reward of every scored trajectory of the interval, trained or not"
    )
    reward_std: float = _metric("reward/std", "standard deviation of these rewards")
    length_mean: float = _metric(
        "length/mean", "sampled tokens per scored trajectory", unit="tokens", exported="answer_tokens_mean"
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
    skipped: bool = _metric(
        "learner/skipped",
        "the gradient was not finite, the weights stayed as they were",
        over="sum",
        exported="skipped_steps_total",
    )
    entropy: float = _metric("learner/entropy", "estimated from the sampled tokens: mean of -log p", unit="nats")
    kl_reference: float = _metric("learner/kl_reference", "divergence from the reference policy", unit="nats")
    mismatch_mean: float = _metric("mismatch/mean", "mean |learner log-prob - behaviour log-prob|", unit="nats")
    mismatch_k3: float = _metric(
        "mismatch/k3", "the same as a divergence: estimated KL(behaviour || learner) per token", unit="nats"
    )
    ratio_mean: float = _metric("mismatch/ratio_mean", "mean importance ratio")
    ratio_p01: float = _metric("mismatch/ratio_p01", "one token in a hundred has a smaller ratio", over="min")
    ratio_p99: float = _metric("mismatch/ratio_p99", "one token in a hundred has a larger ratio", over="max")
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


ROW_METRICS: Mapping[str, RowMetric] = {f.name: f.metadata["metric"] for f in fields(Row) if f.metadata}
"""By field, every number of a row; `dropped_tokens` and `stage_s` hold several each."""
