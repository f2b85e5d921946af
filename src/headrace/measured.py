"""Records of what was measured: seconds, counts, statistics. Frozen, no torch. Each shows an instance."""

from dataclasses import dataclass, fields

STAGES = ("rollout", "reward", "reference", "train", "publish")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds each stage was busy in some interval: the five τ of the goodput equation.

    Example: StageTimes(rollout=1.9, reward=0.2, reference=0.0, train=0.8, publish=0.01)
    """

    rollout: float = 0.0
    reward: float = 0.0
    reference: float = 0.0
    train: float = 0.0
    publish: float = 0.0

    @property
    def wall(self) -> str:
        """The bottleneck, at a first guess: the stage that was busy longest. No seconds."""
        return max(STAGES, key=lambda stage: float(getattr(self, stage)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """What engines did since they started.

    Example: EngineCounts(computed_tokens=51200, drafted_tokens=800, accepted_tokens=610)
    """

    computed_tokens: int = 0  # of prompts and answers: while it grows, engines make progress
    preemptions: int = 0  # times a sequence gave up its cache for others
    parks: int = 0  # times a sequence was laid aside at max_wall_s
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_tokens: int = 0  # of prompts that were started
    cached_tokens: int = 0  # of those, served from the cache of an earlier turn

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
    """What a process that holds no weights knows about the policy.

    Example: PolicyFacts(name="Qwen3ForCausalLM", num_weights=1_025_408, device="cpu", ...)
    """

    name: str
    num_weights: int
    device: str
    dtype: str
    max_context: int
    eos_ids: tuple[int, ...] = ()  # tokens that end an answer
    unchecked: str = ""  # what could not be compared with transformers when it was loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far the learner's log-probs are from the behaviour's, over `count` tokens.

    Δ is learner - behaviour, r = exp Δ. The defaults mean no mismatch.

    Example: Mismatch(count=2, mean_abs=0.11, k3=0.006, ratio_mean=1.06, outside_share=0.5)
    """

    count: int = 0
    mean_abs: float = 0.0  # mean |Δ|
    k3: float = 0.0  # estimated KL(behaviour || learner) per token
    ratio_mean: float = 1.0  # 1 in expectation where the two policies share their support
    ratio_p01: float = 1.0  # 1st percentile of r
    ratio_p99: float = 1.0  # 99th percentile of r
    outside_share: float = 0.0  # of tokens that are not near-on-policy
    effective_samples: float = 1.0  # (Σr)² / (n Σr²)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one optimizer step did.

    Example: StepStats(loss=-0.01, grad_norm=0.7, lr=3e-6, mismatch=Mismatch(...), ...)
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    entropy: float
    kl_reference: float
    clipped_share: float
    mismatch: Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTimes:
    """Seconds and bytes of one publication, by operation.

    Example: PublishTimes(gather_s=0.2, encode_s=0.5, transfer_s=0.3, transfer_bytes=31_000_000)
    """

    gather_s: float = 0.0  # whole tensors from the learner's shards
    cast_s: float = 0.0
    encode_s: float = 0.0
    transfer_s: float = 0.0  # from the sender's memory to a receiver's, checked and decoded
    apply_s: float = 0.0  # the engine does not decode meanwhile
    gather_bytes: int = 0
    cast_bytes: int = 0
    encode_bytes: int = 0
    transfer_bytes: int = 0
    apply_bytes: int = 0

    @property
    def total_s(self) -> float:
        return self.gather_s + self.cast_s + self.encode_s + self.transfer_s + self.apply_s
