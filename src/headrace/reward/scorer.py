"""Scoring: a completion in, a Score out, by way of cache, reward function and overlong penalty."""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.config import RewardSection
from headrace.errors import RewardError
from headrace.reward.function import Judged, RewardFunction, Setup, digest, own_function, shipped
from headrace.reward.pool import JudgePool, own_copy
from headrace.roles import Judge
from headrace.types import Completion, DropReason, FinishReason, Group, Score

MAX_VERDICTS = 500_000  # a few hundred bytes each; the oldest goes first
NOTE_EVERY_S = 30.0
REPLACED = "replaced"
WORDS = {
    DropReason.REWARD_TIMEOUT: "{num} verdict{s} timed out after {timeout_s:g} s (reward.timeout_s)",
    DropReason.REWARD_UNAVAILABLE: "{num} verdict{s} could not be had: a service was unavailable",
    DropReason.REWARD_ERROR: "{num} verdict{s} failed",
    DropReason.FILTER_ERROR: "{num} group{s} dropped because a filter failed",
    REPLACED: "{num} worker process{es} replaced",
}


class Scorer:
    """Scores completions by the settings of one `[reward]` section.

    `function` is used instead of what the section names. `judges(setup)` makes what calls the
    function: without it, a `JudgePool` of child processes, or `InlineJudges` if `section.workers`
    is 0. `filters` (of `[buffer]`) are called in the same way, each in one process, so that it sees
    the groups one after the other. A sandbox shows nothing of `run_dir`. `on_verdict(key, score)`
    is called for every new verdict that may be cached, `on_note(text)` for what users should know.
    """

    def __init__(
        self,
        section: RewardSection,
        *,
        max_new_tokens: int,
        function: Callable[[Any], Any] | None = None,
        filters: Sequence[str] = (),
        run_dir: Path | None = None,
        judges: Callable[[Setup], Judge[Completion]] | None = None,
        on_verdict: Callable[[bytes, Score], None] = lambda key, score: None,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._section, self._max_new_tokens = section, max_new_tokens
        known = section.model_dump(include={"answer_field", "timeout_s", "sandbox"})
        hidden = () if run_dir is None else (str(run_dir.absolute()),)
        setup = Setup(**known, function=section.function or "exact", hidden=hidden)
        pool = partial(JudgePool, retries=section.retries)
        self._filters: dict[str, JudgePool | InlineJudges] = {}
        for spec in filters:
            asked = replace(setup, function=spec, setting="buffer.filters")
            self._filters[spec] = pool(asked, num_workers=1) if section.workers else InlineJudges(asked)
        # `_why_here`: why `function` is called in this process, though `section.workers` is not 0
        setup, self._why_here = (setup, "") if function is None else shipped(function, setup)
        self._own, self._setup, self.function = function, setup, setup.function
        if self._why_here and section.sandbox:
            raise RewardError(f"reward.sandbox = true, but '{self.function}' cannot be put there: {self._why_here}")
        if self._why_here or not (judges or section.workers):
            self._pool: Judge[Completion] = InlineJudges(setup, function)
        else:
            self._pool = judges(setup) if judges else pool(setup, num_workers=section.workers)
        settings = [self.function, digest(setup, function), setup.answer_field]
        self._cache = VerdictCache(json.dumps(settings), on_verdict) if section.cache else None
        self._on_note = on_note
        self._trouble, self._num_replaced = TroubleNotes(on_note, section.timeout_s), 0
        self.num_scored = self.num_failed = self.num_filtered = 0

    @property
    def num_retried(self) -> int:
        return sum(judge.num_retried for judge in (self._pool, *self._filters.values()))

    @property
    def num_workers_replaced(self) -> int:
        return sum(judge.num_workers_replaced for judge in (self._pool, *self._filters.values()))

    @property
    def moves(self) -> int:
        """Verdicts and retries so far: while it grows, scoring makes progress."""
        return self.num_scored + self.num_failed + self.num_filtered + self.num_retried

    async def start(self) -> None:
        try:
            await self._start_rewards()
            for judge in self._filters.values():
                await judge.start()
        except BaseException:
            await self.close()
            raise

    async def _start_rewards(self) -> None:
        try:
            await self._pool.start()
        except RewardError as error:
            if self._own is None or self._setup.sandbox or isinstance(self._pool, InlineJudges):
                raise
            await self._pool.close()
            self._why_here = str(error)
            self._pool = InlineJudges(self._setup, self._own)
            await self._pool.start()
        if self._why_here and self._section.workers:
            called = f"the reward function '{self.function}' is called in this process, not in one of its own"
            self._on_note(f"{called}: {self._why_here}. If it hangs or crashes, so does the run")

    def remember(self, verdicts: Mapping[bytes, Score]) -> None:
        """Fill the cache with the verdicts of the run so far."""
        if self._cache:
            self._cache.verdicts.update(verdicts)

    async def score(self, completion: Completion) -> Score:
        judge = partial(self._pool.run, completion)
        score = await (self._cache.fetch(completion, judge) if self._cache else judge())
        self._note_trouble(score.failure, score.detail)
        self.num_failed += score.failure is not None
        self.num_scored += score.failure is None
        if score.reward is None or not self._section.overlong_tokens:
            return score
        # an answer that ran out of time is as overlong as one that ran out of tokens
        ran_out = completion.finish == FinishReason.WALL
        num_tokens = self._max_new_tokens if ran_out else completion.num_tokens
        soft = self._section.overlong_tokens  # DAPO's punishment: linear to -1 over these
        taken = -min(max(num_tokens + soft - self._max_new_tokens, 0) / soft, 1.0)
        parts = {**score.parts, "overlong": score.parts.get("overlong", 0.0) + taken}
        return replace(score, reward=score.reward + taken, parts=parts)

    async def keeps(self, spec: str, group: Group) -> Score:
        """What a filter says: 1 to keep the group, 0 to drop it, rewards, or its failure."""
        score = await self._filters[spec].run(group)
        self.num_filtered += 1
        self._note_trouble(score.failure and DropReason.FILTER_ERROR, score.detail)
        return score

    async def close(self) -> None:
        """Stop judging; calls of `score` that still wait raise RewardError."""
        self._trouble.tell()
        await asyncio.gather(*(judge.close() for judge in (self._pool, *self._filters.values())))

    def _note_trouble(self, failure: DropReason | None, detail: str) -> None:
        num_replaced = self.num_workers_replaced - self._num_replaced
        self._num_replaced += num_replaced
        if failure or num_replaced:
            self._trouble.add(({failure: 1} if failure else {}) | {REPLACED: num_replaced}, detail)


class InlineJudges:
    """Calls the reward function in this process: `reward.workers = 0`.

    For tests, and for functions that are trusted: one that hangs or crashes takes the trainer with
    it, one that blocks delays this event loop. `timeout_s` limits coroutines. Nothing is retried.
    """

    num_retried = num_workers_replaced = 0

    def __init__(self, setup: Setup, function: Callable[[Any], Any] | None = None) -> None:
        self._setup, self._own = setup, function
        self._function: RewardFunction  # loaded by `start`

    async def start(self) -> None:
        self._function = self._setup.load() if self._own is None else own_function(self._own)

    async def run(self, completion: Judged) -> Score:
        read = partial(own_copy, completion)
        return await self._function.judge(read, self._setup.timeout_s, Exception, SystemExit)

    async def close(self) -> None:
        """Nothing to end."""


@dataclass(eq=False)
class VerdictCache:
    """Verdicts by content: equal answers to one prompt are judged once, also concurrent ones.

    Keeps scores in `verdicts` and calls `on_verdict` for each new one. Failures are not kept.
    """

    identity: str  # of the function and its settings
    on_verdict: Callable[[bytes, Score], None] = lambda key, score: None
    verdicts: dict[bytes, Score] = field(default_factory=dict, init=False)  # by key
    _running: dict[bytes, asyncio.Task[Score]] = field(default_factory=dict, init=False)

    def key(self, completion: Completion) -> bytes | None:
        """A digest of all that the function can see; None if the fields have no canonical JSON."""
        seen = [completion.prompt, completion.text, completion.num_tokens, str(completion.finish), completion.fields]
        try:
            text = json.dumps([self.identity, *seen], sort_keys=True, separators=(",", ":"), default=_plain)
        except (TypeError, ValueError, RecursionError):
            return None
        return hashlib.sha256(text.encode()).digest()

    async def fetch(self, completion: Completion, judge: Callable[[], Awaitable[Score]]) -> Score:
        if (key := self.key(completion)) is None:
            return await judge()
        if key in self.verdicts:
            return self.verdicts[key]
        if key not in self._running:
            task = self._running[key] = asyncio.create_task(self._judge_once(key, judge))
            # all callers may be cancelled: mark an exception as retrieved
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._running[key])  # others may wait for it

    async def _judge_once(self, key: bytes, judge: Callable[[], Awaitable[Score]]) -> Score:
        try:
            score = await judge()
            if score.failure is None:
                self.verdicts[key] = replace(score, output="", seconds=0.0)  # of this call, and of no other answer
                if not score.steps:  # a restart would not find them
                    self.on_verdict(key, score)
                if len(self.verdicts) > MAX_VERDICTS:
                    del self.verdicts[next(iter(self.verdicts))]
            return score
        finally:
            del self._running[key]


class TroubleNotes:
    """Tells the first trouble at once, then at most every 30 s how much more there was, by kind."""

    def __init__(self, on_note: Callable[[str], None], timeout_s: float) -> None:
        self._on_note, self._timeout_s = on_note, timeout_s
        self._untold: Counter[str] = Counter()
        self._detail = ""  # of the first that is not told
        self._told = self._pauses = False

    def add(self, trouble: Mapping[str, int], detail: str = "") -> None:
        """Note how much there was of each kind, a key of WORDS."""
        self._untold.update({kind: num for kind, num in trouble.items() if num})
        self._detail = self._detail or detail
        if not self._pauses:
            self.tell()

    def tell(self) -> None:
        """Tell the rest, and pause if there was any. The last pause of a run finds none."""
        self._pauses = bool(self._untold)
        if not self._pauses:
            return
        total, limit = self._untold.total(), self._timeout_s
        counts = [(WORDS[kind], num, "s" * (num > 1)) for kind, num in self._untold.items()]
        told = [words.format(num=n, s=s, es=s and "es", timeout_s=limit) for words, n, s in counts]
        lines = self._detail.splitlines()
        detail = lines[-1] if self._told and lines else self._detail  # one traceback is enough
        self._on_note(", ".join(told) + ("; the first" * (total > 1) + f": {detail}") * bool(detail))
        self._untold.clear()
        self._detail, self._told = "", True
        asyncio.get_running_loop().call_later(NOTE_EVERY_S, self.tell)


def _plain(value: Any) -> Any:
    """Read-only mappings and numpy values as JSON types."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value).__name__)
