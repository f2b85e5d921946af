"""The records that cross a stage border. Frozen, numpy only, no torch. Each shows an instance.

Shapes: T tokens of a trajectory, S of them sampled, L mixture layers, K experts per token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.measured import EngineCounts, StageSpan

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Outcomes = Mapping[int, tuple[int, Sequence[float]]]  # of groups, by serial: version and rewards
RouteArray = npt.NDArray[Any]  # [T, L, K] uint8 or uint16
Example = tuple[IntArray, BoolArray]  # tokens of a worked example, and which of them are learned


class FinishReason(StrEnum):
    """Why a generation ended. WALL: after `rollout.max_wall_s` seconds on the clock."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    WALL = "wall"
    ABORT = "abort"

    @property
    def cut(self) -> bool:
        """Whether the answer was cut, at max_new_tokens or max_wall_s."""
        return self in (FinishReason.LENGTH, FinishReason.WALL)


class DropReason(StrEnum):
    """Why tokens were generated but not trained on. A user's filter is `filter:<name>`."""

    STALE = "stale"
    NO_SIGNAL = "no_signal"
    OVERLONG = "overlong"
    LATE = "late"  # enough answers of its group were complete before it
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_ERROR = "reward_error"
    REWARD_UNAVAILABLE = "reward_unavailable"  # a service it needs was not available
    INCOMPLETE = "incomplete"
    SKIPPED_STEP = "skipped_step"
    RUN_ENDED = "run_ended"
    REDONE = "redone"  # lost with a process that died; its prompt was started again
    FILTER_ERROR = "filter_error"  # a user's filter failed on its group
    CRASHED = "crashed"  # lost with a process that died; its prompt was not started again
    # of episodes: what the policy caused (turn limit, context full) is an end with a reward
    ENV_ERROR = "env_error"  # the environment failed, or gave no reward
    ENV_TIMEOUT = "env_timeout"
    ENV_UNAVAILABLE = "env_unavailable"
    AGENT_ERROR = "agent_error"  # the user's agent failed, or gave no reward
    ABANDONED = "abandoned"  # sampled for a client that went away


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem, with a stable id. `fields` is the rest of the data set's record, for the reward.

    Example: Prompt(id="train-17", text="12+9=", token_ids=[5, 6, 14, 13], fields={"answer": "21"})
    """

    id: str
    text: str
    token_ids: IntArray
    fields: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()  # if it is a chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a prompt; a function in `prompts.select` gets one for each.

    Example: Known(id="train-17", fields={"level": 3}, seen=2, rewards=(0.0, 1.0), version=31)
    """

    id: str
    fields: Mapping[str, Any]  # its whole record
    seen: int = 0  # groups that are over
    rewards: tuple[float, ...] = ()  # of the newest of them
    version: int | None = None  # of the policy when that was started


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`version` sampled tokens `start` to `end` (exclusive). Example: Span(version=7, start=5, end=9)."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the engine chose besides the tokens, for the learner to choose again.

    `support_ids[support_offsets[i]:support_offsets[i + 1]]` is the support of the i-th sampled
    token: the tokens that top-k, top-p and min-p left to sample from.

    `routes` are the experts of each token, also of prompt tokens, in each mixture layer. The last
    token was never an input: its row is zeros, and nothing depends on it.

    Example: Replay(support_ids=np.array([4, 9, 2]), support_offsets=np.array([0, 2, 3]))
    """

    support_ids: IntArray | None = None  # [sum of subset sizes]
    support_offsets: npt.NDArray[np.int64] | None = None  # [S + 1]
    routes: RouteArray | None = None

    @classmethod
    def of(cls, supports: Sequence[IntArray], routes: RouteArray | None) -> Replay | None:
        """`supports` are of the sampled tokens, or empty; `routes` of all tokens, or None."""
        if not supports:
            return None if routes is None else cls(routes=routes)
        offsets = np.cumsum([0, *map(len, supports)], dtype=np.int64)
        return cls(support_ids=np.concatenate(supports), support_offsets=offsets, routes=routes)

    @property
    def supports(self) -> list[IntArray]:
        """The support of each sampled token; none if sampling was not truncated."""
        if self.support_ids is None or self.support_offsets is None:
            return []
        return np.split(self.support_ids, self.support_offsets[1:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds on the run's monotonic clock.

    Example: Timing(submitted_s=1.0, started_s=1.1, finished_s=2.4, scored_s=2.5)
    """

    submitted_s: float
    started_s: float
    finished_s: float
    scored_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One generation within an episode: tokens `start` to `end` (exclusive) of the trajectory.

    Example: Turn(start=12, end=20, finish="eos", text="guess(32)", replies=("higher",), ...)
    """

    start: int
    end: int
    finish: FinishReason
    temperature: float = 1.0
    reward: float | None = None  # given by the environment for this turn alone
    text: str = ""
    replies: tuple[str, ...] = ()  # of the environment: one per tool call, or one to the text
    environment_s: float = 0.0  # that these took
    state: str = ""  # of the environment before the turn; turns with equal ones can be compared
    snapshot: str = ""  # of the environment after the turn, to restore it; of the newest only
    agent: str = ""  # who asked for it, where an episode has several agents


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A branch: tokens from `start` to the next segment's go on after `after` (-1: a new root).

    Example: Segment(start=40, after=11)
    """

    start: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One complete answer: its tokens, which of them were sampled, by which policy, and its reward.

    An episode of several turns is one trajectory. Its tokens form a tree if its history was edited:
    `segments` says where a branch begins. Without segments each token follows the one before it.

    Example: Trajectory(id="40:train-17/3", prompt_id="train-17", index=3,
        token_ids=[5, 6, 14, 7, 6, 1], sampled=[F, F, F, T, T, T], logprobs=[0, 0, 0, -0.1, -0.9, -0.2],
        spans=(Span(version=7, start=3, end=6),), text="21", reward=1.0, ...)
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
    verdict_s: float = 0.0  # seconds that the reward function took
    verdict_output: str = ""  # what it printed
    verdict_failure: str = ""  # why there is no reward
    replay: Replay | None = None
    turns: tuple[Turn, ...] = ()  # in the order they were sampled; none for a single answer
    segments: tuple[Segment, ...] = ()  # by `start`; each goes on after a token before its start

    def __post_init__(self) -> None:
        assert len(self.sampled) == len(self.logprobs) == len(self.token_ids), self.id
        assert sum(span.end - span.start for span in self.spans) == self.num_sampled_tokens, self.id

    @property
    def num_sampled_tokens(self) -> int:
        """How many tokens the policy sampled: what every account counts."""
        return int(np.count_nonzero(self.sampled))

    @property
    def oldest_version(self) -> int:
        """The version of the oldest span: what lag is measured from."""
        return min(span.version for span in self.spans)

    def rewarded(self, name: str, given: Sequence[float]) -> Trajectory:
        """With a further part of its reward: one number, or one for each turn."""
        turns, more = self.turns, sum(given)
        if len(given) == len(turns):
            turns = tuple(replace(t, reward=(t.reward or 0.0) + own) for t, own in zip(turns, given, strict=True))
        parts = {**self.reward_parts, name: self.reward_parts.get(name, 0.0) + more}
        return replace(self, reward=(self.reward or 0.0) + more, reward_parts=parts, turns=turns)

    def ranges(self, place: int) -> list[tuple[int, int]]:
        """Where the tokens from the root to `place` are, as starts and ends (exclusive)."""
        found = []
        while place >= 0:
            number = bisect_right(self.segments, place, key=lambda segment: segment.start)
            segment = self.segments[number - 1] if number else Segment(start=0, after=-1)
            found.append((segment.start, place + 1))
            place = segment.after
        return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All trajectories of one prompt. `serial` counts groups in the order their prompts were drawn.

    Example: Group(serial=40, prompt=Prompt(...), version=7, trajectories=(Trajectory(...), ...))
    """

    serial: int
    prompt: Prompt
    version: int  # of the policy when the group was admitted
    trajectories: tuple[Trajectory, ...]
    attempt: int = 1  # see `Attempt`

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
class Completion:
    """What a reward function sees of one trajectory.

    Example: Completion(prompt="12+9=", text="21", fields={"answer": "21"}, num_tokens=3, ...)
    """

    prompt: str
    text: str
    fields: Mapping[str, Any]
    num_tokens: int
    finish: str

    @classmethod
    def of(cls, prompt: Prompt, trajectory: Trajectory) -> Completion:
        """The view of `trajectory`, an answer to `prompt`."""
        return cls(
            prompt=prompt.text,
            text=trajectory.text,
            fields=prompt.fields,
            num_tokens=trajectory.num_sampled_tokens,
            finish=str(trajectory.finish),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward function's verdict (its reward), or a `failure`, which is never a reward of zero.

    Example:
        Score(reward=1.0, parts={"correct": 1.0})
        Score(failure=DropReason.REWARD_TIMEOUT, detail="no answer in 5 s")
    """

    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[tuple[int, float], ...] = ()  # where each ends in the text, its reward
    failure: DropReason | None = None
    detail: str = ""
    value: Any = None  # what an environment says, in place of a reward
    output: str = field(default="", compare=False)  # what the function printed
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What an episode asks of its environment, which lives in a worker process.

    Example: Command(episode="40:train-17/3", do="turn", given={"calls": [["guess", {"x": 32}]]})
    """

    episode: str
    do: str  # describe, start, restore, turn, score, end
    given: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an episode: a trajectory with its reward, or with why it has none.

    Example: Outcome(trajectory=Trajectory(...), failure=DropReason.REWARD_TIMEOUT)
    """

    trajectory: Trajectory
    failure: DropReason | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request is sampled. A temperature of 0 takes the likeliest token.

    Example: Sampling(max_new_tokens=64, temperature=0.7, top_p=0.95, stop=("</answer>",))
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None  # of the noise, instead of the number of the turn
    grammar: str = ""  # that the answer must follow (policy/grammar_llguidance.py)

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled at all."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or bool(self.grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Answers to sample for one prompt: all of a group, or those that are not finished yet.

    Example: Order(serial=40, prompt=Prompt(...), samplings=(Sampling(...),) * 2, indices=(0, 3))
    """

    serial: int
    prompt: Prompt
    samplings: tuple[Sampling, ...]
    indices: tuple[int, ...]  # of the answers in their group
    counted: bool = True  # False for evaluation, which is not booked
    attempt: int = 1
    so_far: Mapping[int, Trajectory] | None = None  # by index, answers to continue
    turn: int = 0  # of an episode, from 1: `prompt` is all that came before it in the episode
    routes: RouteArray | None = None  # experts of the first tokens of a turn's prompt
    first: int | None = None  # when so many are complete, the others end

    @classmethod
    def group(cls, serial: int, prompt: Prompt, samplings: Sequence[Sampling], **more: Any) -> Order:
        """All answers of a group."""
        indices = tuple(range(len(samplings)))
        return cls(serial=serial, prompt=prompt, samplings=tuple(samplings), indices=indices, **more)

    def request_id(self, i: int) -> str:
        """The id of the i-th answer: unique, since serials tell epochs apart and attempts tries."""
        attempt = f".{self.attempt}" if self.attempt > 1 else ""
        turn = f"#{self.turn}" if self.turn else ""
        return f"{'' if self.counted else 'eval:'}{self.serial}{attempt}:{self.prompt.id}/{self.indices[i]}{turn}"

    def session(self, i: int) -> str:
        """The episode that the i-th answer is a turn of; empty for a single answer."""
        return self.request_id(i).rpartition("#")[0] if self.turn else ""

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
class News:
    """What happened on a worker since it was last asked.

    Example: News(sampled_tokens=5120, begun=((40, 7),), finished=(Trajectory(...),), ...)
    """

    sampled_tokens: int  # of all counted orders since the start
    begun: tuple[tuple[int, int], ...]  # a group's serial, and the version of its first token
    finished: tuple[Trajectory, ...]
    spans: tuple[StageSpan, ...] = ()
    counts: EngineCounts = field(default_factory=EngineCounts)
    under_way: Mapping[int, Mapping[int, Trajectory]] | None = None  # by serial and index, if asked
    notes: tuple[str, ...] = ()  # for the user


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at generating a group. A restart (resumed run) makes another; only the newest counts.

    Example: Attempt(serial=40, number=1, prompt_id="train-17", wave=3, version=7)
    """

    serial: int
    number: int
    prompt_id: str
    wave: int  # groups of one wave started together, and nothing else ran beside them
    version: int  # of the policy when it was admitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What the loss needs of a trajectory. Example: Item(trajectory=Trajectory(...), advantage=0.8)."""

    trajectory: Trajectory
    advantage: float | FloatArray  # one for all, or of each sampled token [S]; for GAE first their rewards
    reference: FloatArray | None = None  # [S] log-probs of its sampled tokens under the reference
    start: FloatArray | None = None  # [3, S] at the start of the step: log-probs, values, returns
    minibatch: int = 0  # in which of the updates of an epoch it is trained on


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a receiver needs to fetch a version.

    Example: Ticket(Manifest(version=8, ...), where="/shared/weights/version-00000008")
    """

    manifest: Any  # a `publish.encoding.Manifest`: what the payload holds
    where: Any  # the transport's own: a directory, a meeting, references

    @property
    def version(self) -> int:
        """The version that can be fetched."""
        return int(self.manifest.version)
