"""What was measured: seconds, counts and statistics as frozen records (no torch); the run's clock.

`Row` is the ledger's one line of numbers per step. Each number is declared once, here: ledger,
sinks, `/metrics` and the page's curves follow from it.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

STALL = "training waits"  # detail of a `checkpoint` or `publish` span that holds up training
STAGES = ("rollout", "reward", "reference", "train", "publish")
PublishTimes = Mapping[str, tuple[float, int]]  # seconds and bytes of a publication: gather, encode, transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds each stage was busy in some interval: the five τ of the goodput equation."""

    rollout: float = 0.0
    reward: float = 0.0
    reference: float = 0.0
    train: float = 0.0
    publish: float = 0.0

    @property
    def wall(self) -> str:
        """The bottleneck, at a first guess: the stage that was busy longest. No seconds."""
        return max(STAGES, key=lambda stage: float(getattr(self, stage)))


@dataclass(slots=True, kw_only=True)
class EngineCounts:
    """What engines did since they started. An engine counts in its own; others are copies."""

    computed_tokens: int = 0  # of prompts and answers: while it grows, engines make progress
    preemptions: int = 0  # times a sequence gave up its cache for others
    parks: int = 0  # times a sequence was laid aside at max_wall_s
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_tokens: int = 0  # of prompts that were started
    cached_tokens: int = 0  # of those, served from the cache of an earlier turn
    limit_s: float = 0.0  # that decoding takes at the GPU's limit, reading weights and caches from memory

    def __add__(self, other: "EngineCounts") -> "EngineCounts":
        return EngineCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """A stage was busy from `start_s` to `end_s`.

    Example: StageSpan(stage="train", start_s=12.0, end_s=12.8, version=3, detail="8192 tokens")
    """

    stage: str
    start_s: float
    end_s: float
    worker: str = "local"
    version: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """What a process that holds no weights knows about the policy."""

    name: str  # of the model's class, "Qwen3ForCausalLM"
    num_weights: int
    device: str
    dtype: str
    max_context: int
    eos_ids: tuple[int, ...] = ()  # tokens that end an answer
    exact: bool = False  # the bits of a token do not depend on its batch
    unchecked: str = ""  # what could not be compared with transformers when it was loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far the learner's log-probs are from the behaviour's, over `count` tokens.

    Δ is learner - behaviour, r = exp Δ. The defaults mean no mismatch.
    """

    count: int = 0
    mean_abs: float = 0.0  # mean |Δ|
    k3: float = 0.0  # estimated KL(behaviour || learner) per token
    ratio_mean: float = 1.0  # 1 in expectation where the two policies share their support
    ratio_p01: float = 1.0  # 1st percentile of r
    ratio_p99: float = 1.0  # 99th percentile of r
    ratio_outside: float = 0.0  # of tokens that are not near-on-policy
    effective_samples: float = 1.0  # (Σr)² / (n Σr²)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    entropy: float
    kl_reference: float
    clipped_share: float
    mismatch: Mismatch
    value_loss: float = 0.0
    limit_s: float = 0.0  # that forward and backward passes of a rank take at its GPU's limit of computing


@dataclass(frozen=True, slots=True)
class RowMetric:
    """What one number of `Row` is.

    Example: RowMetric(label="length/max", help="of the longest answer", unit="tokens", over="max")
    """

    label: str  # its name in plotting sinks
    help: str
    unit: str = ""
    over: Literal["mean", "sum", "max", "min", "last"] = "mean"  # how steps become one number
    exported: str = ""  # to Prometheus; empty: the field's name, with `_total` if it is a sum


def _metric(label: str, help: str, unit: str = "", over: Any = "mean", exported: str = "", **default: Any) -> Any:
    return field(**default, metadata={"metric": RowMetric(label, help, unit, over, exported)})


def _total(label: str, help: str, unit: str = "", exported: str = "") -> Any:
    return _metric(label, help, unit, "sum", exported)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The ledger's one line per step."""

    step: int
    version: int = _metric("step/version", "version of the policy after the step", "", "last", "policy_version")
    wall_s: float = _total("step/wall_s", "seconds since the last row", "s", "wall_seconds_total")
    num_groups: int = _total("step/num_groups", "groups trained on", exported="trained_groups_total")
    num_trajectories: int = _total(
        "step/num_trajectories", "trajectories trained on", exported="trained_trajectories_total"
    )
    generated_tokens: int = _total("tokens/generated", "tokens generated", "tokens")
    trained_tokens: int = _total("tokens/trained", "tokens trained on", "tokens")
    again_tokens: int = _total("tokens/again", "tokens of earlier steps, trained on again", "tokens")
    dropped_tokens: Mapping[str, int]  # by reason
    backlog_tokens: int = _metric("tokens/backlog", "tokens buffered and in flight after the step", "tokens", "last")
    preemptions: int = _total("engine/preemptions", "sequences preempted: the cache was full")
    parks: int = _total("engine/parks", "times a sequence that reached max_wall_s was laid aside for others")
    cached_share: float = _metric("engine/cached_share", "share of prompt tokens served from cache")
    turns_mean: float = _metric("episode/turns_mean", "turns per scored trajectory")
    environment_s: float = _metric("time/environment", "seconds in which environments worked", "seconds")
    lag_mean: float = _metric("lag/mean", "mean lag over trained tokens", "versions")
    lag_max: int = _metric("lag/max", "lag of the oldest trained token", "versions", "max")
    reward_mean: float = _metric("reward/mean", "mean reward of all scored trajectories")
    reward_std: float = _metric("reward/std", "standard deviation of these rewards")
    length_mean: float = _metric("length/mean", "sampled tokens per answer", "tokens", exported="answer_tokens_mean")
    length_max: int = _metric(
        "length/max", "sampled tokens of the longest scored trajectory", "tokens", "max", "answer_tokens_max"
    )
    length_bias: float = _metric("length/bias", "by how much buffer.first favours short answers, at least")
    truncated_share: float = _metric(
        "length/truncated_share", "share of answers cut by a limit", exported="answers_cut_share"
    )
    loss: float = _metric("learner/loss", "loss")
    grad_norm: float = _metric("learner/grad_norm", "norm of the gradient, before it is clipped")
    lr: float = _metric("learner/lr", "learning rate", "", "last", "learning_rate")
    skipped: bool = _total("learner/skipped", "no update: the gradient was not finite", exported="skipped_steps_total")
    entropy: float = _metric("learner/entropy", "mean of -log p over sampled tokens", "nats")
    kl_reference: float = _metric("learner/kl_reference", "KL from the reference", "nats")
    mismatch_mean: float = _metric("mismatch/mean", "mean |learner - behaviour| log-prob", "nats")
    mismatch_k3: float = _metric("mismatch/k3", "KL(behaviour || learner) per token", "nats")
    ratio_mean: float = _metric("mismatch/ratio_mean", "mean importance ratio")
    ratio_p01: float = _metric("mismatch/ratio_p01", "1st percentile of the ratio", "", "min")
    ratio_p99: float = _metric("mismatch/ratio_p99", "99th percentile of the ratio", "", "max")
    ratio_outside: float = _metric(
        "mismatch/ratio_outside", "share of tokens with ratio outside [0.9, 1.1]", exported="ratio_outside_share"
    )
    clipped_share: float = _metric("learner/clipped_share", "share of tokens whose ratio was clipped")
    value_loss: float = _metric("learner/value_loss", "half the squared error of the critic's values, a token's mean")
    effective_samples: float = _metric(
        "mismatch/effective_samples",
        "effective sample size of the importance weights, as a share: (Σw)² / (n Σw²)",
        exported="effective_samples_share",
    )
    stage_s: StageTimes
    publish_bytes: int = _metric("publish/bytes", "bytes of new weights", "bytes", exported="publish_bytes_total")
    mfu: float | None = _metric(
        "learner/mfu", "of training: operations of its passes over what the GPU can do in that time", default=None
    )
    bandwidth_share: float | None = _metric(
        "engine/bandwidth_share",
        "bytes that decoding reads over what the GPU's memory gives while engines are busy",
        default=None,
    )
    score: float | None = _metric(
        "eval/score", "held-out score, on the steps that evaluate", exported="held_out_score", default=None
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


class StageClock:
    """Which stage was busy when, on one monotonic clock that starts with the run. Thread-safe.

    `start_s` is the last time of the run that is resumed.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._origin = time.monotonic() - start_s
        self._lock = threading.Lock()
        self._finished: list[StageSpan] = []
        self._running: dict[object, StageSpan] = {}
        self._moves: Counter[str] = Counter()

    def now(self) -> float:
        """Seconds since the run began, without the time between two processes of it."""
        return time.monotonic() - self._origin

    @contextmanager
    def span(self, stage: str, **of: Any) -> Iterator[None]:
        """Measure the body as busy time of `stage`, also when it raises; `of` a worker or a version."""
        start_s, key = self.now(), object()
        with self._lock:
            self._running[key] = StageSpan(stage=stage, start_s=start_s, end_s=start_s, **of)
        try:
            yield
        finally:
            end_s = self.now()
            with self._lock:
                self._finished.append(replace(self._running.pop(key), end_s=end_s))
                self._moves[stage] += 1

    def add(self, span: StageSpan) -> None:
        with self._lock:
            self._finished.append(span)

    def moved(self, stage: str) -> None:
        with self._lock:
            self._moves[stage] += 1

    def moves(self) -> dict[str, int]:
        """How often each stage made progress: equal results mean that nothing happened."""
        with self._lock:
            return dict(self._moves)

    def drain(self) -> list[StageSpan]:
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def running(self) -> list[StageSpan]:
        """Unfinished spans, as if they ended now, for the next row.

        Call it before `drain`: a span that ends in between is in both and counts once, not in neither.
        """
        with self._lock:
            return [replace(span, end_s=self.now()) for span in self._running.values()]


def stages_of(rows: Sequence[Row]) -> tuple[dict[str, float], str]:
    """Seconds by stage, and the bottleneck at a first guess: the longest.

    Environments and agents work beside everything else: what counts is when nothing else was busy.
    """
    found = {stage: sum(float(getattr(row.stage_s, stage)) for row in rows) for stage in STAGES}
    if (played_s := sum(row.environment_s for row in rows)) > 0:
        found["environment"] = max(0.0, min(played_s, sum(row.wall_s for row in rows) - sum(found.values())))
    return found, max(found, key=found.__getitem__)


def busy_s(spans: Iterable[StageSpan], start_s: float, end_s: float) -> dict[str, float]:
    """By stage, the seconds in which it was busy; overlapping spans count once."""
    total: dict[str, float] = defaultdict(float)
    reached: dict[str, float] = defaultdict(lambda: start_s)
    for span in sorted(spans, key=lambda span: span.start_s):
        begin, end = max(span.start_s, reached[span.stage]), min(span.end_s, end_s)
        if end > begin:
            total[span.stage] += end - begin
            reached[span.stage] = end
    return total
