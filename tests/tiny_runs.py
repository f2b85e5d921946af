"""Whole runs in a second: a random model of a few thousand weights, fifty prompts, rewards that any model earns."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from doubles import tiny_model
from safetensors.torch import load_file

from headrace import api
from headrace.config import Config
from headrace.config_file import load_config
from headrace.ledger.files import prepare_run_dir
from headrace.ledger.ledger import Ledger
from headrace.loop.loop import Loop
from headrace.measured import Row
from headrace.place.learner_rank import LearnerRank
from headrace.place.place import Place, open_place
from headrace.place.rollout_worker import RolloutWorker

NUM_PROMPTS = 50

# `score` is 1 or 0, so that groups of four often agree and are dropped; `dense` hardly ever agrees.
REWARDS = """
import os, random, time
ORDER = random.Random(f"{os.getpid()} {time.time_ns()}")

def score(completion):
    return float(completion.text[:1].islower())

def dense(completion):
    return sum(map(ord, completion.text)) % 97 / 97

def jittery(completion):
    time.sleep(ORDER.uniform(0.0, 0.01))
    return score(completion)

def late(completion):
    time.sleep(0.2 * completion.fields["late"])
    return dense(completion)

def tardy(completion):
    # a verdict that only comes when the run has that many rows
    wanted, rows = completion.fields["rows"], completion.fields["file"]
    while wanted and (not os.path.exists(rows) or len(open(rows).readlines()) < wanted):
        time.sleep(0.01)
    return dense(completion)

def chatty(completion):
    print("heard", repr(completion.text))
    return dense(completion)

def dull(completion):
    return 0.0 if completion.fields["dull"] else dense(completion)

def constant(completion):
    return 0.5

def broken(completion):
    raise RuntimeError("no judge today")

def huge(completion):
    return 1e38 * dense(completion) if completion.fields["huge"] else dense(completion)

def moody(completion):
    mood = sum(map(ord, completion.text)) % 4
    if mood == 0:
        raise ValueError("cannot read this answer")
    if mood == 1:
        return float("nan")
    if mood == 2 and completion.fields["slow"]:
        time.sleep(60)
    return 1.0 + dense(completion)
"""


def write_prompts(path: Path, **fields_of: Sequence[Any]) -> Path:
    """Fifty prompts `0+1=` ..; each of `fields_of` gives one more field of the records, the last value for the rest."""
    records = []
    for i in range(NUM_PROMPTS):
        extra = {name: values[min(i, len(values) - 1)] for name, values in fields_of.items()}
        records.append({"id": f"p{i}", "prompt": f"{i}+{i % 7}=", "answer": str(i + i % 7), **extra})
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


class Workshop:
    """A directory with a model, prompts and rewards, and settings that use them."""

    def __init__(self, directory: Path, *settings: str, **shape: int) -> None:
        self.directory, self.settings = directory, settings
        self.model = directory / "tiny"
        tiny_model(self.model, **shape)
        write_prompts(directory / "prompts.jsonl", late=[0], huge=[False], slow=[False])
        (directory / "rewards.py").write_text(REWARDS, encoding="utf-8")

    def overrides(self, name: str, *extra: str, reward: str = "score") -> list[str]:
        """Settings of a run in `name`, as on the command line."""
        return [
            f"run.dir={self.directory / name}",
            f"model.path={self.model}",
            "model.device=cpu",
            "model.threads=1",
            f"prompts.source={self.directory / 'prompts.jsonl'}",
            "prompts.eval_count=4",
            "rollout.samples=4",
            "rollout.max_new_tokens=12",
            'rollout.stop=["a", "e", "i", "o", "u", "1", "2", "3"]',
            f"reward.function={self.directory / 'rewards.py'}:{reward}",
            "learner.lr=1e-3",
            "loop.steps=3",
            "loop.groups_per_step=4",
            "warmstart.steps=0",
            *extra,
        ]

    def config(self, name: str, *extra: str, reward: str = "score") -> Config:
        """The settings of a run in `name`."""
        return load_config(None, self.overrides(name, *extra, reward=reward))


def rank_of(place: Place) -> LearnerRank:
    """The learner of a run in one process."""
    return place.ranks.first.served  # type: ignore[attr-defined, no-any-return]


def worker_of(place: Place) -> RolloutWorker:
    """The engine of a run in one process, with what drives it."""
    return place.pool.workers[0].served  # type: ignore[attr-defined, no-any-return]


async def play(config: Config, meddle: Callable[[Place, Loop], None] = lambda place, loop: None) -> Loop:
    """The loop alone, without evaluations before and after; `meddle` may change it before it starts."""
    run_dir = prepare_run_dir(config)
    place = open_place(config, run_dir)
    try:
        await place.start_user_code()
        loop = await place.loop()
        meddle(place, loop)
        await loop.run()
        return loop
    finally:
        await place.close()
        rank_of(place).policy.save(run_dir / api.files.WEIGHTS)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The weights a run left."""
    return load_file(run_dir / "model" / "model.safetensors")


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are equal to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def rows_of(run_dir: Path) -> list[Row]:
    """The rows of a run."""
    with Ledger.open(run_dir) as ledger:
        return ledger.rows()


def timeless(row: Row) -> dict[str, Any]:
    """A row without what a clock measured."""
    return {f.name: getattr(row, f.name) for f in fields(row) if f.name not in ("wall_s", "stage_s")}


def select(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    """What the run's database answers."""
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as connection:
        return connection.execute(query).fetchall()
