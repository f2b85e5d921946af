"""What the process of a run does for each answer on a cluster: its CPU time, and the bytes that pass through it.

    python benchmarks/driver.py                          # answers of 128, 1,024 and 8,192 tokens, about three minutes
    python benchmarks/driver.py --tokens 2000 --steps 20

Two rollout workers and a learner rank are on Ray as in any run, and compute nothing: a worker gives each answer at
once, the rank forgets what it gets. All else is real: prompts, rewards in a process of their own, buffer, books, new
weights of a tiny model. Time is that of the main thread, in which the event loop runs, and of the whole process, from
the end of the second step to the end of the last. What one thread can do at most is an answer in its own CPU time.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from script import commit, positive

from headrace import api
from headrace.config_file import DEMO, load_config
from headrace.ledger.database import FILE_NAME
from headrace.ledger.journal import read_trajectories
from headrace.ledger.ledger import Ledger
from headrace.measured import Mismatch, Row, StepStats
from headrace.place import place
from headrace.place.learner_rank import LearnerRank
from headrace.place.rollout_worker import RolloutWorker
from headrace.policy.demo import character_tokenizer, write_random
from headrace.rollout.rows import Generation, Request
from headrace.types import FinishReason, IntArray, Item, Span, Trajectory

GROUPS, SAMPLES, SKIPPED, AT_ONCE = 16, 8, 2, 64


class Instant:
    """An engine whose answers are there at once: random letters, as many as a request may have."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._waiting = engine, list[tuple[int, Request]]()
        self.policy, self.version, self.sampled_tokens = engine.policy, engine.version, 0
        self.begun: deque[tuple[str, int]] = deque()
        self._random = np.random.default_rng(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def submit(self, prompt: IntArray, requests: Sequence[Request], known: Any = None) -> None:
        self._waiting += [(len(prompt), request) for request in requests]

    def weights_changed(self, version: int) -> None:
        self.version = version

    def advance(self) -> list[Generation]:
        now, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
        return [self._answer(*one) for one in now]

    def _answer(self, num_prompt: int, request: Request) -> Generation:
        n, now_s = request.sampling.max_new_tokens, time.monotonic()
        self.sampled_tokens += n * request.counted
        self.begun.append((request.id, self.version))
        return Generation(
            id=request.id,
            finish=FinishReason.LENGTH,
            started_s=now_s,
            finished_s=now_s,
            token_ids=self._random.integers(3, 90, n, dtype=np.int32),
            logprobs=-self._random.random(n, dtype=np.float32),
            spans=(Span(version=self.version, start=num_prompt, end=num_prompt + n),),
        )


def instant_worker(*of_worker: Any) -> RolloutWorker:
    worker = RolloutWorker(*of_worker)
    worker.engine = worker.actor.engine = Instant(worker.engine)  # type: ignore[assignment]
    return worker


class Forgetful(LearnerRank):
    """A rank that takes what it is given, and learns nothing."""

    _tokens = 0

    def accumulate(self, items: Sequence[Item]) -> None:
        self._tokens += sum(item.trajectory.num_sampled_tokens for item in items)

    def finish(self) -> StepStats:
        tokens, self._tokens = self._tokens, 0
        none = dict.fromkeys(("loss", "grad_norm", "lr", "entropy", "kl_reference", "clipped_share"), 0.0)
        self.learner.step_index += 1
        return StepStats(**none, skipped=False, mismatch=Mismatch(count=tokens))

    def mismatch(self, trajectories: Sequence[Trajectory]) -> Mismatch:
        return Mismatch(count=sum(t.num_sampled_tokens for t in trajectories))


class Clock(api.Watcher):
    """CPU seconds at the end of each step: of this thread, of the process; and the wall clock."""

    def __init__(self) -> None:
        self.at: list[tuple[float, float, float]] = []

    def row(self, row: Row) -> None:
        self.at.append((time.thread_time(), time.process_time(), time.perf_counter()))


def measured(directory: Path, tokens: int, steps: int) -> str:
    """A line of the table."""
    run, model = directory / f"run-{tokens}", directory / f"model-{tokens}"
    shape = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "max_position_embeddings": tokens + 256}
    write_random(model, 0, character_tokenizer(), **shape)
    settings = [f"run.dir={run}", f"model.path={model}", "model.device=cpu", "model.threads=1", "warmstart.steps=0"]
    settings += ["prompts.eval_count=1", "loop.eval_samples=1", "reward.cache=false", "buffer.drop=nothing"]
    settings += ["place.cluster=ray", "rollout.workers=2", f"rollout.samples={SAMPLES}", "ledger.samples_every=0"]
    settings += [f"rollout.max_new_tokens={tokens}", f"loop.groups_per_step={GROUPS}", f"loop.steps={steps}"]
    settings += ["loop.max_lag=2", "loop.target_reward=10", "recovery.every_steps=1000", "learner.kl_coef=0"]
    clock = Clock()
    api.train(load_config(DEMO, settings), clock)
    main_s, process_s, wall_s = (b - a for a, b in zip(clock.at[SKIPPED - 1], clock.at[-1], strict=True))
    answers = (steps - SKIPPED) * GROUPS * SAMPLES
    with Ledger.open(run) as ledger:
        (one, *_) = read_trajectories(ledger.connection, "t.state = 'trained' AND t.trained_step = 1", ())
        stored = sum(path.stat().st_size for path in run.glob(f"{FILE_NAME}*")) / (steps * GROUPS * SAMPLES)
    most = answers / main_s
    cells = [f"{tokens:,}", f"{1e3 * main_s / answers:.2f}", f"{1e3 * process_s / answers:.2f}", f"{most:,.0f}"]
    cells += [f"{most * tokens:,.0f}", f"{answers / wall_s:,.0f}", f"{len(pickle.dumps(one)) / 1e3:,.1f}"]
    return f"| {' | '.join([*cells, f'{stored / 1e3:,.1f}'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[128, 1024, 8192], help="of each answer")
    parser.add_argument("--steps", type=positive, default=12)
    arguments = parser.parse_args()
    place.Place.__init__.__kwdefaults__["make_sampler"] = instant_worker  # type: ignore[index]
    place.LearnerRank = Forgetful  # type: ignore[misc]
    print(f"commit {commit()[:12]}")
    titles = ["tokens an answer", "main thread, ms an answer", "process, ms", "answers/s of one thread", "tokens/s"]
    titles += ["answers/s here", "kB an answer", "kB in the ledger"]
    print(f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", sep="\n")
    with tempfile.TemporaryDirectory() as scratch:
        for tokens in arguments.tokens:
            print(measured(Path(scratch), tokens, arguments.steps), flush=True)


if __name__ == "__main__":
    main()
