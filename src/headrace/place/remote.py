"""Workers in other processes: rollout engines and learner ranks wherever the cluster has room, the loop here.

This process holds no weights. It draws prompts, has answers scored, keeps the buffer and the books, and asks workers
for the rest. A rollout worker that is lost is replaced; if a rank of the learner is lost the run goes on from its last
checkpoint, with new ones.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headrace.buffer.filters import Sieve
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.ledger.clock import StageClock
from headrace.ledger.files import wanted_workers
from headrace.ledger.ledger import Ledger
from headrace.loop.canary import Canary
from headrace.loop.checkpoint import Checkpoints
from headrace.loop.loop import Loop
from headrace.place.build import (
    PolicyFacts,
    first_checkpoint,
    keep_verdicts,
    make_loop,
    model_of,
    room_for_prompts,
)
from headrace.place.colocated import ColocatedWorker
from headrace.place.device import DeviceThread
from headrace.place.learner_rank import LearnerRank, RankSpec
from headrace.place.remote_publisher import RemotePublisher
from headrace.place.remote_trainer import RemoteTrainer
from headrace.place.reward_hosts import RewardHost, RewardHosts
from headrace.place.rollout_pool import RolloutPool
from headrace.place.rollout_worker import RolloutSpec, RolloutWorker
from headrace.place.workers import Cluster, LearnerLostError, Worker, WorkerLostError
from headrace.policy.policy import load_tokenizer
from headrace.prompts.stream import PromptStream
from headrace.publish.transport import ReceivingEnd, SendingEnd
from headrace.reward.scorer import Scorer
from headrace.reward.worker import Setup

WARM_STEPS_AT_ONCE = 8
LOOK_S = 1.0  # whether another number of rollout workers is asked for
MOST_FAILURES = 3  # of new workers in a row: there is no use in another


class RemotePlace:
    """Builds the stages from settings and puts them where the cluster has room."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        cluster: Cluster,
        ends: tuple[Callable[[], SendingEnd], Callable[[], ReceivingEnd]],
        *,
        resumed: bool = False,
    ) -> None:
        self.config, self.run_dir = config, run_dir
        self._cluster = cluster
        self._colocated = config.place.layout == "colocated"
        self._gpus = _gpus_of_a_worker(config, cluster)
        self._sending, self._receiving = ends
        self.device = DeviceThread()  # in which the loop waits for ranks and workers
        self._model = model_of(config, run_dir)
        self._model = self._model.model_copy(update={"path": str(Path(self._model.path).absolute())})
        self.trainer = RemoteTrainer(cluster, self._spawn_ranks(), config.learner)
        self.facts: PolicyFacts = self.device.call(lambda: self.trainer.all("facts"))[0]
        tokenizer = load_tokenizer(self._model)
        room_tokens = room_for_prompts(config, self.facts.max_context)
        self.prompts = PromptStream(config.prompts, tokenizer, config.run.seed, room_tokens=room_tokens)
        self._sieve = Sieve(config.buffer)
        self.scorer = Scorer(
            config.reward,
            max_new_tokens=config.rollout.max_new_tokens,
            default_function=self.prompts.default_reward,
            judges=self._reward_hosts,
        )
        self.ledger = Ledger.reopen(run_dir) if resumed else None
        self.clock = self.ledger.clock if self.ledger else StageClock()
        self.actor = RolloutPool(
            exact=config.model.exact,
            clock=self.clock,
            on_sampled=self._on_sampled,
            on_redone=self._on_redone,
            on_lost=self._on_lost,
        )
        self.publisher = RemotePublisher(
            self.trainer,
            config.publish,
            self.clock,
            workers=lambda: self.actor.workers,
            give_up=self._give_up,
        )
        self._numbers = itertools.count()
        self._failures = 0
        self._events: asyncio.AbstractEventLoop | None = None
        self._wanted = wanted_workers(run_dir, config.rollout.workers)
        self._joining: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_note: Callable[[str], None] = lambda text: None

    async def loop(self) -> Loop:
        """The loop of the run; the ranks meet, every rollout worker is up and has the first weights."""
        self._events = asyncio.get_running_loop()
        await self.device.run(self.trainer.meet)
        checkpoints = Checkpoints(self.run_dir, self.config.recovery.keep)
        begins = self.ledger is None
        if begins:
            await self.device.run(first_checkpoint, self.run_dir, self.trainer, self.prompts, checkpoints)
            self.ledger = Ledger.create(self.run_dir, clock=self.clock)
        assert self.ledger is not None
        keep_verdicts(self.scorer, self.ledger)
        for worker in await self.device.run(self._first_workers):
            self.actor.join(worker)
        if not self._colocated:
            self._fit()
            self._in_background(self._watch_wanted())
        if begins:  # a restart publishes the version that it goes on from
            await self.device.run(self.publisher.commit, 0)
        return make_loop(
            self.config,
            self._sieve,
            prompts=self.prompts,
            actor=self.actor,
            scorer=self.scorer,
            learner=self.trainer,
            publisher=self.publisher,
            canary=Canary(
                self.actor.likeliest,
                self.trainer.next_logprob,
                self.prompts.held_out[0].token_ids,
                dtype=self.facts.dtype,
            ),
            ledger=self.ledger,
            clock=self.clock,
            device=self.device,
            checkpoints=checkpoints,
        )

    async def warm_start(self, on_step: Callable[[int, float], None]) -> None:
        """Supervised steps on worked examples, on one rank before it meets the others."""
        section, rng = self.config.warmstart, np.random.default_rng([self.config.run.seed, 1])
        for done in range(0, section.steps, WARM_STEPS_AT_ONCE):
            batches = min(WARM_STEPS_AT_ONCE, section.steps - done)
            examples = [self.prompts.worked(section.examples, rng) for _ in range(batches)]
            ask = partial(self.trainer.all, "warm_up", examples, ranks=self.trainer.ranks[:1])
            losses = (await self.device.run(ask))[0]
            on_step(done + batches, losses[-1])

    @property
    def lost(self) -> bool:
        """Whether the weights are gone: only a checkpoint has them."""
        return self.trainer.lost

    def save_weights(self, directory: Path) -> None:
        """Write the policy as it is now."""
        self.trainer.save(directory)

    def progress(self) -> object:
        """What the stages have done so far; equal answers mean that nothing was done in between."""
        moves = {stage: n for stage, n in self.clock.moves().items() if stage not in ("rollout", "evaluate")}
        return self.actor.counts.computed_tokens, self.scorer.moves, moves, len(self.actor.workers)

    async def close(self, *, hung: bool = False) -> None:
        """End the workers, close the books. What hangs is not waited for."""
        for task in self._tasks:
            task.cancel()
        self.actor.close()
        await self.scorer.close()
        self._cluster.close()
        self.device.close(wait=not hung)
        if self.ledger is not None:
            self.ledger.close()

    # ---- workers

    def _spawn_ranks(self) -> list[Worker]:
        kind, name = (ColocatedWorker, "worker") if self._colocated else (LearnerRank, "learner")
        return [
            self._cluster.spawn(
                f"{name}-{rank}",
                kind,
                RankSpec(config=self.config, model=self._model, rank=rank, sending=self._sending),
                gpus=self._gpus,
            )
            for rank in range(self.config.learner.ranks)
        ]

    def _reward_hosts(self, setup: Setup) -> RewardHosts:
        section, numbers = self.config.reward, itertools.count()

        def spawn(num_workers: int) -> Worker:
            return self._cluster.spawn(f"reward-{next(numbers)}", RewardHost, setup, num_workers, section.retries)

        return RewardHosts(
            spawn,
            num_workers=section.workers,
            num_nodes=self._cluster.num_nodes,
            on_lost=lambda why: self.on_note(f"{why}. What it was judging is judged again"),
        )

    def _spawn_rollout(self) -> Worker:
        spec = self._rollout_spec(f"rollout-{next(self._numbers)}")
        return self._cluster.spawn(spec.name, RolloutWorker, spec, gpus=self._gpus)

    def _rollout_spec(self, name: str) -> RolloutSpec:
        return RolloutSpec(
            config=self.config,
            model=self._model,
            name=name,
            epoch_s=time.time() - self.clock.now(),
            longest_prompt=max(len(p.token_ids) for p in self.prompts.held_out),
            receiving=self._receiving,
        )

    def _first_workers(self) -> list[Worker]:
        if self._colocated:
            workers = self.trainer.ranks
            begun = [worker.ask("begin_rollout", self._rollout_spec(worker.name)) for worker in workers]
            self._cluster.first_failure(begun)
        else:
            # more than the settings say may have to wait for a node: they join when they can
            first = min(self._wanted, self.config.rollout.workers)
            workers = [self._spawn_rollout() for _ in range(first)]
        for worker in workers:
            worker.wait_ready()
        return workers

    def _give_up(self, worker: Worker, why: str) -> None:
        """From the device thread: a worker did not take part."""

        async def lose(worker: Worker) -> None:
            self.actor.lose(worker, why)

        self._in_loop(lose, worker)

    def _on_lost(self, worker: Worker, why: str) -> None:
        if self._colocated:  # a rank went with it
            self.trainer.lost = True
            self.actor.fail(LearnerLostError(f"{why}; the learner cannot go on without it"))
            return
        self.on_note(f"{why}. What it was at goes to others")
        self._failures = 0
        self._fit()

    async def _watch_wanted(self) -> None:
        """Have as many rollout workers as the run's directory says."""
        while True:
            wanted = wanted_workers(self.run_dir, self.config.rollout.workers)
            if wanted != self._wanted:
                self.on_note(f"{self._wanted} -> {wanted} rollout workers are asked for")
                self._wanted, self._failures = wanted, 0
                self._fit()
            await asyncio.sleep(LOOK_S)

    def _fit(self) -> None:
        """Start or dismiss rollout workers, until there are as many as wanted."""
        staying = self.actor.staying
        for _ in range(self._wanted - len(staying) - len(self._joining)):
            task = self._in_background(self._add())
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)
        for worker in staying[self._wanted :]:
            self._in_background(self._dismiss(worker, self.actor.retire(worker)))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _dismiss(self, worker: Worker, done: asyncio.Event) -> None:
        """Let a worker finish what it owes, then end it."""
        await done.wait()
        await asyncio.to_thread(self.publisher.farewell, worker, partial(self._in_loop, self._leave))

    async def _leave(self, worker: Worker) -> None:
        if worker in self.actor.workers:
            self.actor.dismiss(worker)
            self.on_note(f"{worker.name} has finished its answers and is gone")
            self._fit()

    async def _add(self) -> None:
        """A new worker: it takes part once it holds the present version."""
        task = asyncio.current_task()
        assert task is not None
        while self._failures < MOST_FAILURES:
            worker = self._spawn_rollout()
            try:
                await worker.ready()
                await asyncio.to_thread(self.publisher.welcome, worker, partial(self._in_loop, self._join))
            except LearnerLostError as error:  # nobody else may ask it for long: without answers, no step begins
                worker.kill()
                self.actor.fail(error)
                return
            except Exception as error:  # whatever it is, the others go on
                self._failures += 1
                self.on_note(f"{worker.name} could not join: {error}")
                worker.kill()
                continue
            self._failures = 0
            self._joining.discard(task)
            self.on_note(f"{worker.name} takes part")
            self._fit()  # fewer may be wanted by now
            return
        if not self.actor.staying:
            self.actor.fail(WorkerLostError(f"no rollout worker is left, and {MOST_FAILURES} new ones could not join"))

    def _in_loop(self, act: Callable[[Worker], Coroutine[Any, Any, None]], worker: Worker) -> None:
        """From a thread, while no version is being published."""
        assert self._events is not None
        asyncio.run_coroutine_threadsafe(act(worker), self._events).result()

    async def _join(self, worker: Worker) -> None:
        self.actor.join(worker)

    # ---- books

    def _on_sampled(self, num_tokens: int) -> None:
        assert self.ledger is not None
        self.ledger.sampled(num_tokens)

    def _on_redone(self, num_tokens: int) -> None:
        assert self.ledger is not None
        self.ledger.redone(num_tokens)


def uses_gpus(config: Config, cluster: Cluster) -> bool:
    """Whether the model is to run on GPUs."""
    return config.model.device.startswith("cuda") or (config.model.device == "auto" and cluster.num_gpus > 0)


def _gpus_of_a_worker(config: Config, cluster: Cluster) -> float:
    """One each, where the model is to run on GPUs; refused where there are too few."""
    if not uses_gpus(config, cluster):
        return 0.0
    workers, ranks = config.rollout.workers, config.learner.ranks
    colocated = config.place.layout == "colocated"
    needed = ranks if colocated else workers + ranks
    if needed > cluster.num_gpus:
        advice = "lower both" if colocated else "lower one of them, or set place.layout = 'colocated'"
        raise ConfigError(
            f"rollout.workers = {workers} and learner.ranks = {ranks} need {needed} GPUs, and the cluster has "
            f"{cluster.num_gpus}: {advice}"
        )
    return 1.0
