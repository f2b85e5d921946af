"""Ranks of a learner as real processes, and what they are asked to do in tests."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked
import torch
from torch import Tensor
from torch.distributed import TCPStore

from headrace.config import LearnerSection, ModelSection
from headrace.learner import optimizer
from headrace.learner.batch import split
from headrace.learner.learner import Learner
from headrace.learner.optimizer import Sharding
from headrace.learner.ranks import Intake
from headrace.measured import StepStats
from headrace.policy.policy import Policy, load_policy
from headrace.types import Group

HERE = "127.0.0.1"
WAIT_S = 300  # a busy machine takes a minute to start the fork server


def on_ranks(
    ranks: int | tuple[int, int], work: Callable[..., Any], *args: Any, hosts: Sequence[str] = ()
) -> list[Any]:
    """What `work(sharding, *args)` returns in each of so many processes, which may say that they are on these hosts."""
    shape = (1, ranks) if isinstance(ranks, int) else ranks
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(shape[0] * shape[1]):
        here, there = forked.context.Pipe()
        seat = {"rank": rank, "shape": shape}
        job = (there, seat, hosts[rank] if hosts else HERE, store.port, work, args)
        process = forked.context.Process(target=_rank, args=job, daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        found = [pickle.loads(pipe.recv_bytes()) if pipe.poll(WAIT_S) else "no answer" for pipe in pipes]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    failures = [text for text in found if isinstance(text, str)]
    assert not failures, "\n".join(failures)
    return [result for (result,) in found]


def _rank(pipe: Connection, seat: dict[str, Any], host: str, port: int, work: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    optimizer.own_address = lambda: host
    try:
        store, device = TCPStore(HERE, port, is_master=False), torch.device("cpu")
        sharding = Sharding(**seat, store=store, device=device, timeout_s=WAIT_S)
        result = (work(sharding, *args),)
        pipe.send_bytes(pickle.dumps(result))  # plainly: what torch does of itself needs a sender that lives on
        torch.distributed.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps(traceback.format_exc()))


@dataclass
class Outcome:
    """What some steps did."""

    weights: dict[str, Tensor]
    stats: list[StepStats]


def load(directory: Path, sharding: Sharding | None = None, *, exact: bool = False, dtype: str = "float32") -> Policy:
    section = ModelSection(path=str(directory), device="cpu", exact=exact, dtype=dtype)  # type: ignore[arg-type]
    return load_policy(section, mesh=sharding and sharding.mesh)


def learner_of(policy: Policy, section: LearnerSection, sharding: Sharding | None) -> Learner:
    return Learner(policy, section, temperatures=(0.8,), max_new_tokens=12, total_steps=10, sharding=sharding)


def take_steps(
    sharding: Sharding | None,
    directory: Path,
    section: LearnerSection,
    steps: Sequence[Sequence[Group]],
    dtype: str = "float32",
) -> Outcome:
    """The steps as a loop takes them; a rank does its own part of each micro-batch."""
    learner = learner_of(load(directory, sharding, dtype=dtype), section, sharding)
    stats = [take_step(learner, groups) for groups in steps]
    return Outcome({name: weight.clone() for name, weight in learner.weights(torch.float32)}, stats)


def take_step(learner: Learner, groups: Sequence[Group]) -> StepStats:
    rank, num_ranks = (0, 1) if learner.sharding is None else (learner.sharding.rank, learner.sharding.num_ranks)
    intake = Intake(learner.section, num_ranks)
    for group in groups:
        references = references_of(learner, group) if learner.reference_tensors() else None
        for items in intake.add(group, references):
            learner.accumulate(split(items, num_ranks)[rank])
    for items in intake.rest():
        learner.accumulate(split(items, num_ranks)[rank])
    return learner.finish()


def references_of(learner: Learner, group: Group) -> list[Any]:
    """Each rank scores its part; here they tell each other, so that each can do what a driver would."""
    if learner.sharding is None:
        return learner.reference_logprobs(group)
    num_ranks = learner.sharding.num_ranks
    parts = [group.trajectories[i::num_ranks] for i in range(num_ranks)]
    mine = learner.reference_logprobs(replace(group, trajectories=parts[learner.sharding.rank]))
    told: list[Any] = [None] * num_ranks
    torch.distributed.all_gather_object(told, mine)
    order = [trajectory.id for part in parts for trajectory in part]
    known = dict(zip(order, (values for part in told for values in part), strict=True))
    return [known[t.id] for t in group.trajectories]
