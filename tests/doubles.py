"""Test doubles: a tiny model, a scripted sampler, a scripted judge.

Example:
    tiny_model(tmp_path / "model")                 # a real model, random, loaded in milliseconds
    sampler = ScriptedSampler(lambda prompt, index: [([7, 8, 9], True)], decode=str)
    judge = ScriptedJudge(lambda completion: float(len(completion.text)))
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import Config
from headrace.place.inline import InlineCluster
from headrace.place.place import Place
from headrace.policy.demo import character_tokenizer, write_random
from headrace.roles import Judge, Sampler
from headrace.types import Completion, FinishReason, IntArray, News, Order, Prompt, Score, Span, Trajectory

Piece = tuple[Sequence[int], bool]
"""Token ids, and whether the policy sampled them; an environment's reply was not sampled."""


def tiny_model(directory: Path, seed: int = 0, tokenizer: Any = None, **shape: float) -> None:
    """Write a random Qwen3 of two layers, with a character tokenizer if no other is given.

    `shape` overrides fields of `Qwen3Config`.
    """
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 256}
    write_random(directory, seed, tokenizer or character_tokenizer(), **(small | shape))


@dataclass(eq=False)
class ScriptedSampler(Sampler):
    """A `Sampler` without a model: `script(prompt, index)` gives an answer's pieces, in order.

    Sampled tokens have the log-prob `logprob` and the version last committed. Answers are complete
    at once: nothing is ever under way, cached or staged, so what acts on that does nothing.
    """

    script: Callable[[Prompt, int], Sequence[Piece]]
    _: KW_ONLY
    decode: Callable[[IntArray], str]
    logprob: float = -1.0
    version: int = field(default=0, init=False)
    orders: list[Order] = field(default_factory=list, init=False)  # all that were taken
    _sampled_tokens: int = field(default=0, init=False)
    _begun: list[tuple[int, int]] = field(default_factory=list, init=False)
    _finished: list[Trajectory] = field(default_factory=list, init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _under_way: dict[int, dict[int, Trajectory]] | None = field(default=None, init=False)

    async def take(self, orders: Sequence[Order]) -> None:
        for order in orders:
            self.orders.append(order)
            for i, index in enumerate(order.indices):
                trajectory = self._trajectory(order, i, self.script(order.prompt, index))
                self._finished.append(trajectory)
                self._sampled_tokens += trajectory.num_sampled_tokens if order.counted else 0
            if order.counted:
                self._begun.append((order.serial, self.version))
        self._news.set()

    async def news(self) -> News:
        await self._news.wait()
        self._news.clear()
        begun, self._begun = tuple(self._begun), []
        finished, self._finished = tuple(self._finished), []
        told, self._under_way = self._under_way, None
        return News(sampled_tokens=self._sampled_tokens, begun=begun, finished=finished, under_way=told)

    async def tell_under_way(self) -> None:
        self._under_way = {}
        self._news.set()

    def greedy(self, prompt: IntArray) -> list[tuple[int, float]]:
        return []  # there is no model to ask

    def commit(self, version: int) -> float:
        self.version = version
        return 0.0

    def _trajectory(self, order: Order, i: int, pieces: Sequence[Piece]) -> Trajectory:
        token_ids, spans = [*order.prompt.token_ids], []
        sampled = [False] * len(token_ids)
        for ids, by_policy in pieces:
            start, end = len(token_ids), len(token_ids) + len(ids)
            if by_policy and len(ids):
                spans.append(Span(version=self.version, start=start, end=end))
            token_ids += ids
            sampled += [by_policy] * len(ids)
        return replace(
            order.nothing_sampled(i, now_s=0.0),
            token_ids=np.array(token_ids, np.int32),
            sampled=np.array(sampled),
            logprobs=np.where(sampled, self.logprob, 0.0).astype(np.float32),
            spans=tuple(spans),
            finish=FinishReason.EOS,
            text=self.decode(np.array(token_ids, np.int32)[np.array(sampled)]),
        )


@dataclass(eq=False)
class ScriptedJudge(Judge[Completion]):
    """A `Judge` in this process: `script(completion)` gives a reward, or a `Score`."""

    script: Callable[[Completion], float | Score]
    judged: list[Completion] = field(default_factory=list, init=False)
    num_retried: int = field(default=0, init=False)
    num_workers_replaced: int = field(default=0, init=False)

    async def run(self, completion: Completion) -> Score:
        self.judged.append(completion)
        found = self.script(completion)
        return found if isinstance(found, Score) else Score(reward=float(found))


def scripted_place(
    config: Config, run_dir: Path, sampler: ScriptedSampler, judge: ScriptedJudge, *, resumed: bool = False
) -> Place:
    """A place with the real loop, buffer, learner and ledger, but a scripted sampler and judge.

    Example:
        place = scripted_place(config, run_dir, sampler, judge)
        await (await place.loop()).run()
        await place.close()
    """
    made: dict[str, Any] = {"make_sampler": lambda *_: sampler, "judges": lambda _: judge}
    return Place(config, run_dir, InlineCluster(), None, resumed=resumed, **made)
