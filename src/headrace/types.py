"""The records that cross a stage border. Frozen, numpy only, no torch. Each shows an instance.

T tokens of one trajectory, S of them sampled, L mixture layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

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
    """Why tokens were paid for but not trained on; a user's own filter is booked as `filter:<its name>`."""

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
    """Tokens `start` to `end` (exclusive) were sampled by `version`. Example: Span(version=7, start=5, end=9)."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the engine chose besides the tokens, so that the learner can choose it again.

    `support_ids[support_offsets[i]:support_offsets[i + 1]]` are the tokens that could be sampled at the i-th sampled
    position (top-k, top-p, min-p leave a subset of the vocabulary).

    `routes` are the experts of each token, prompt tokens too, in each mixture layer, in the smallest unsigned type. The
    last token was never computed with: its row is zeros, and nothing depends on it.

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
    """A reward function's verdict, or why there is none: a failure is a value here, never a reward of zero.

    Example:
        Score(reward=1.0, parts={"correct": 1.0}), Score(failure=DropReason.REWARD_TIMEOUT, detail="no answer in 5 s")
    """

    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: DropReason | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an episode: a trajectory with its reward, or with why it has none (`failure`, `detail`).

    Example:
        Outcome(trajectory=Trajectory(...)), Outcome(trajectory=Trajectory(...), failure=DropReason.REWARD_TIMEOUT)
    """

    trajectory: Trajectory
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
class Sampling:
    """How one request is sampled. A temperature of 0 takes the likeliest token.

    Example:
        Sampling(max_new_tokens=64, temperature=0.7, top_p=0.95, stop=("</answer>",))
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled at all."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Answers to sample for one prompt: all of a group, or those that are left of it.

    Example:
        Order(serial=40, prompt=Prompt(...), samplings=(Sampling(max_new_tokens=64),) * 2, indices=(0, 3))
    """

    serial: int
    prompt: Prompt
    samplings: tuple[Sampling, ...]
    indices: tuple[int, ...]  # of the answers in their group
    counted: bool = True  # evaluation is not: it stays out of the books
    attempt: int = 1
    so_far: Mapping[int, Trajectory] | None = None  # by index, what an earlier attempt had; it is continued

    def request_id(self, i: int) -> str:
        """Of the i-th answer. The serial tells epochs apart in which a prompt comes again, the attempt its tries."""
        attempt = f".{self.attempt}" if self.attempt > 1 else ""
        return f"{'' if self.counted else 'eval:'}{self.serial}{attempt}:{self.prompt.id}/{self.indices[i]}"

    def nothing_sampled(self, i: int, now_s: float) -> Trajectory:
        """The i-th answer before its first token: the prompt alone."""
        prompt_ids = self.prompt.token_ids
        return Trajectory(
            id=self.request_id(i),
            prompt_id=self.prompt.id,
            index=self.indices[i],
            token_ids=prompt_ids,
            sampled=np.zeros(len(prompt_ids), np.bool_),
            logprobs=np.zeros(len(prompt_ids), np.float32),
            spans=(),
            finish=FinishReason.ABORT,
            text="",
            timing=Timing(submitted_s=now_s, started_s=now_s, finished_s=now_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """What engines did since they exist.

    Example:
        EngineCounts(computed_tokens=51200, preemptions=2, parks=0, drafted_tokens=800, accepted_tokens=610)
    """

    computed_tokens: int = 0  # of prompts and answers: as long as it grows, something moves
    preemptions: int = 0  # times a sequence had to make room
    parks: int = 0  # times one was laid aside at max_wall_s
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __add__(self, other: EngineCounts) -> EngineCounts:
        return EngineCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """A stage was busy from `start_s` to `end_s`.

    Example:
        StageSpan(stage="train", start_s=12.0, end_s=12.8, worker="local", version=3, detail="16 groups")
    """

    stage: str
    start_s: float
    end_s: float
    worker: str = "local"
    version: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What happened on a worker since it was last asked.

    Example:
        News(sampled_tokens=5120, begun=((40, 7),), finished=(Trajectory(...),), spans=(), counts=EngineCounts(...))
    """

    sampled_tokens: int  # counted ones, ever: those of `finished` are among them
    begun: tuple[tuple[int, int], ...]  # serial of a group, and the version that sampled its first token
    finished: tuple[Trajectory, ...]
    spans: tuple[StageSpan, ...]
    counts: EngineCounts
    under_way: Mapping[int, Mapping[int, Trajectory]] | None = None  # by serial and index, if that was asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at generating a group. A restart makes another of what was under way, and only the newest counts.

    Example:
        Attempt(serial=40, number=1, prompt_id="train-17", wave=3, version=7)
    """

    serial: int
    number: int
    prompt_id: str
    wave: int  # groups of one wave were started together, and nothing else ran beside them
    version: int  # of the policy when it was admitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A trajectory with what the loss needs besides. Example: Item(trajectory=Trajectory(...), advantage=0.8)."""

    trajectory: Trajectory
    advantage: float
    reference: FloatArray | None = None  # [S] log-probs of its sampled tokens under the reference

    def __len__(self) -> int:
        return len(self.trajectory.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """What is to be known of a policy without holding it.

    Example:
        PolicyFacts(name="Qwen3ForCausalLM", num_weights=1_025_408, device="cpu", dtype="float32", max_context=1024)
    """

    name: str
    num_weights: int
    device: str
    dtype: str
    max_context: int
    unchecked: str = ""  # what could not be compared with transformers when it was loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far the learner's log-probs are from the behaviour's, over `count` tokens. Defaults read as not at all.

    Δ is learner - behaviour, r = exp Δ.

    Example:
        Mismatch(count=2, mean_abs=0.11, k3=0.006, ratio_mean=1.06, ratio_p99=1.2, outside_share=0.5)
    """

    count: int = 0
    mean_abs: float = 0.0  # mean |Δ|
    k3: float = 0.0  # estimated KL(behaviour || learner) per token
    ratio_mean: float = 1.0  # 1 in expectation where the two policies share their support
    ratio_p01: float = 1.0  # one token in a hundred has a smaller r
    ratio_p99: float = 1.0  # one in a hundred a larger one
    outside_share: float = 0.0  # of tokens that are not near-on-policy
    effective_samples: float = 1.0  # (Σr)² / (n Σr²)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one optimizer step did.

    Example:
        StepStats(loss=-0.01, grad_norm=0.7, lr=3e-6, skipped=False, entropy=0.4, kl_reference=0.0,
            clipped_share=0.02, mismatch=Mismatch(...))
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    entropy: float
    kl_reference: float
    clipped_share: float
    mismatch: Mismatch


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a receiver needs to fetch a version.

    Example:
        Ticket(Manifest(version=8, ...), where="/shared/weights/version-00000008")
    """

    manifest: Any  # a `publish.encoding.Manifest`: what the payload holds
    where: Any  # the transport's own: a directory, a meeting, references

    @property
    def version(self) -> int:
        """That it is for."""
        return int(self.manifest.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTimes:
    """Seconds and bytes of one publication, by operation.

    Example:
        PublishTimes(gather_s=0.2, cast_s=0.1, encode_s=0.5, transfer_s=0.3, apply_s=0.1, transfer_bytes=31_000_000)
    """

    gather_s: float = 0.0  # whole tensors from the learner's shards
    cast_s: float = 0.0
    encode_s: float = 0.0
    transfer_s: float = 0.0  # from the sender's memory to a receiver's, checked and decoded
    apply_s: float = 0.0  # during which the engine stands still
    gather_bytes: int = 0
    cast_bytes: int = 0
    encode_bytes: int = 0
    transfer_bytes: int = 0
    apply_bytes: int = 0

    @property
    def total_s(self) -> float:
        """One after the other."""
        return self.gather_s + self.cast_s + self.encode_s + self.transfer_s + self.apply_s
