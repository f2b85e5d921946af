"""Where the stages of a run are: workers of a cluster behind their ports, the loop and the books in this process.

In one process (`place.cluster = 'local'`) there is one worker, with engine and learner on one copy of the weights. On
Ray this process holds no weights. A rollout worker that is lost is replaced (`elastic.py`); if a rank of the learner is
lost, the run continues from its last checkpoint with new ones.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.buffer.buffer import Buffer
from headrace.buffer.filters import Sieve
from headrace.buffer.lag import LagPolicy
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.learner.ranks import Ranks
from headrace.ledger.clock import StageClock
from headrace.ledger.files import REFERENCE
from headrace.ledger.ledger import Ledger
from headrace.loop.books import Bookkeeper
from headrace.loop.checkpoint import Checkpoints
from headrace.loop.loop import Loop
from headrace.loop.publishing import WeightPublisher
from headrace.loop.self_check import Canary
from headrace.loop.stages import Stages
from headrace.place.build import model_of, room_for_prompts
from headrace.place.elastic import Elastic
from headrace.place.learner_rank import LearnerRank, RankSpec
from headrace.place.reward_hosts import RewardHost, RewardHosts
from headrace.place.rollout_worker import RolloutSpec, RolloutWorker
from headrace.policy.policy import load_tokenizer
from headrace.prompts.stream import PromptStream
from headrace.reward.scorer import Scorer
from headrace.reward.worker import Setup
from headrace.roles import Cluster, Judge, ReceivingEnd, Sampler, SendingEnd, Worker
from headrace.rollout.pool import RolloutPool
from headrace.row import Row
from headrace.types import Score

WARM_STEPS_AT_ONCE = 8

Ends = tuple[Callable[[], SendingEnd], Callable[[], ReceivingEnd]]


class Place:
    """Builds the stages from settings and puts them where the cluster has room.

    `ends` are the two ends of the transport for weights; None where one worker has engine and learner on one copy.
    `make_sampler(device, spec, rank)` and `judges(setup)` make what samples and what judges.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        cluster: Cluster,
        ends: Ends | None,
        *,
        resumed: bool = False,
        on_note: Callable[[str], None] = lambda text: None,
        make_sampler: Callable[..., Sampler] = RolloutWorker,
        judges: Callable[[Setup], Judge] | None = None,
    ) -> None:
        self.config, self.run_dir = config, run_dir
        self._make_sampler = make_sampler
        self.cluster, self.device = cluster, cluster.device
        self._on_note = on_note
        self._colocated = ends is None or config.place.layout == "colocated"
        self._gpus = _gpus_of_a_worker(config, cluster)
        self._sending = ends[0] if ends else None
        self._receiving = ends[1] if ends else None
        model = model_of(config, run_dir)
        self._model = model.model_copy(update={"path": str(Path(model.path).absolute())})
        self.ranks = Ranks(cluster, self._spawn_ranks(), config.learner)
        self.facts = self.device.call(self.ranks.facts)
        room_tokens = room_for_prompts(config, self.facts.max_context)
        tokenizer = load_tokenizer(self._model)
        self.prompts = PromptStream(config.prompts, tokenizer, config.run.seed, room_tokens=room_tokens)
        self._sieve = Sieve(config.buffer)
        self.scorer = Scorer(
            config.reward,
            max_new_tokens=config.rollout.max_new_tokens,
            default_function=self.prompts.default_reward,
            judges=judges or (self._reward_hosts if ends and config.reward.workers else None),
            on_verdict=self._on_verdict,
        )
        self.ledger = Ledger.reopen(run_dir) if resumed else None
        self.clock = self.ledger.clock if self.ledger else StageClock()
        self.buffer: Buffer | None = None
        self.pool = RolloutPool(
            exact=config.model.exact,
            now=self.clock.now,
            on_span=self.clock.add,
            on_sampled=self._on_sampled,
            on_begun=self._on_begun,
            on_redone=self._on_redone,
            on_lost=self._on_lost,
        )
        self.elastic = Elastic(
            run_dir,
            config.rollout.workers,
            self.pool,
            on_note,
            spawn=self._spawn_rollout,
            publisher=lambda: self.publisher,
        )
        give_up, workers = self.elastic.give_up, lambda: self.pool.workers
        self.publisher = WeightPublisher(self.ranks, config.publish, self.clock, workers=workers, give_up=give_up)
        self._names = itertools.count()
        # where nothing has to be loaded, before anything takes long: what does not fit is said at once
        self._engines = self._rollout_workers() if ends is None else []

    async def start_engines(self) -> None:
        """Every rollout worker is up and takes part."""
        if not self.pool.workers:
            engines = self._engines or await self.device.run(self._rollout_workers)
            for worker in engines:
                self.pool.join(worker)

    async def loop(self, on_row: Callable[[Row], None] = lambda row: None) -> Loop:
        """The loop of the run: the ranks have met, every rollout worker has the first weights."""
        config = self.config
        await self.device.run(self.ranks.meet)
        checkpoints = Checkpoints(self.run_dir, config.recovery.keep)
        begins = self.ledger is None
        if self.ledger is None:  # a ledger means that the run can be resumed
            await asyncio.to_thread(self._first_checkpoint, checkpoints)
            self.ledger = Ledger.create(self.run_dir, clock=self.clock)
        self.scorer.remember(self.ledger.verdicts())
        await self.start_engines()
        self.elastic.start(watch=not self._colocated)
        if begins:  # a restart publishes the version that it continues from
            await self.device.run(self.publisher.commit, 0)
        books = Bookkeeper(self.ledger)
        self.buffer = Buffer(
            LagPolicy(
                max_lag=config.loop.max_lag,
                groups_per_step=config.loop.groups_per_step,
                min_share=config.buffer.min_share,
                eager=config.rollout.on_update == "drain",  # what starts during a step would hold up its update
            ),
            self._sieve,
            patience=config.buffer.patience,
            on_buffered=self.ledger.buffered,
            on_drop=books.drop_group,
        )
        stages = Stages(
            prompts=self.prompts,
            pool=self.pool,
            scorer=self.scorer,
            buffer=self.buffer,
            ranks=self.ranks,
            publisher=self.publisher,
            canary=Canary(
                self.pool.greedy,
                self.ranks.next_logprob,
                self.prompts.held_out[0].token_ids,
                dtype=self.facts.dtype,
            ),
            books=books,
            ledger=self.ledger,
            clock=self.clock,
            device=self.device,
            checkpoints=checkpoints,
            shares_memory=self._colocated and self._sending is not None,
        )
        return Loop(config, stages, on_row=on_row, on_note=self._on_note)

    async def warm_start(self, on_step: Callable[[int, float], None]) -> None:
        """Supervised steps on worked examples; `on_step(steps done, loss)` hears of progress."""
        section, rng = self.config.warmstart, np.random.default_rng([self.config.run.seed, 1])
        at_once = 1 if self._sending is None else WARM_STEPS_AT_ONCE  # a call to another process takes a while
        for done in range(0, section.steps, at_once):
            batches = min(at_once, section.steps - done)
            examples = [self.prompts.worked(section.examples, rng) for _ in range(batches)]
            losses = await self.device.run(self.ranks.warm_up, examples)
            on_step(done + batches, losses[-1])

    def progress(self) -> object:
        """What the stages have done so far; equal answers mean that nothing was done in between.

        Of the engines their tokens count, not their steps: one could step for ever without coming further.
        """
        moves = {stage: n for stage, n in self.clock.moves().items() if stage not in ("rollout", "evaluate")}
        return self.pool.counts.computed_tokens, self.scorer.moves, moves, len(self.pool.workers)

    async def close(self, *, hung: bool = False) -> None:
        """End the workers, close the books. What hangs is not waited for."""
        self.elastic.close()
        self.pool.close()
        await self.scorer.close()
        self.cluster.close()
        self.device.close(wait=not hung)
        if self.ledger is not None:
            self.ledger.close()

    def _first_checkpoint(self, checkpoints: Checkpoints) -> None:
        write = self.device.call(self.ranks.snapshot)
        checkpoints.write(0, write, {"prompts": self.prompts.state()})
        if self.ranks.uses_reference:
            write = self.device.call(lambda: self.ranks.snapshot(reference=True))
            Checkpoints(self.run_dir, 1, REFERENCE).write(0, write, {})

    # ---- workers

    def _spawn_ranks(self) -> list[Worker[LearnerRank]]:
        name = "worker" if self._colocated else "learner"
        if self._sending is None:
            name = "local"
        return [
            self.cluster.spawn(
                name if name == "local" else f"{name}-{rank}",
                LearnerRank,
                RankSpec(config=self.config, model=self._model, rank=rank, sending=self._sending),
                gpus=self._gpus,
            )
            for rank in range(self.config.learner.ranks)
        ]

    def _reward_hosts(self, setup: Setup) -> Judge:
        section, numbers = self.config.reward, itertools.count()

        def spawn(num_workers: int) -> Worker[RewardHost]:
            return self.cluster.spawn(f"reward-{next(numbers)}", RewardHost, setup, num_workers, section.retries)

        return RewardHosts(
            spawn,
            num_workers=section.workers,
            num_nodes=self.cluster.num_nodes,
            on_lost=lambda why: self._on_note(f"{why}. What it was judging is judged again"),
        )

    def _rollout_workers(self) -> list[Worker[Sampler]]:
        """The first ones, made and ready. Called in a thread."""
        workers: list[Worker[Sampler]]
        if self._colocated:
            ranks = self.ranks.ranks
            workers = [rank.beside(self._make_sampler, self._rollout_spec(rank.name)) for rank in ranks]
        else:
            # more than the settings say may have to wait for a node: they join when they can
            first = min(self.elastic.wanted, self.config.rollout.workers)
            workers = [self._spawn_rollout() for _ in range(first)]
        for worker in workers:
            worker.wait_ready()
        return workers

    def _spawn_rollout(self) -> Worker[Sampler]:
        spec = self._rollout_spec(f"rollout-{next(self._names)}")
        return self.cluster.spawn(spec.name, self._make_sampler, spec, gpus=self._gpus)

    def _rollout_spec(self, name: str) -> RolloutSpec:
        return RolloutSpec(
            config=self.config,
            model=self._model,
            name=name,
            epoch_s=time.time() - self.clock.now(),
            longest_prompt=max(len(p.token_ids) for p in self.prompts.held_out),
            receiving=self._receiving,
            clock=self.clock if self._receiving is None else None,
        )

    # ---- who hears what

    def _on_sampled(self, num_tokens: int) -> None:
        assert self.ledger is not None
        self.ledger.sampled(num_tokens)

    def _on_begun(self, serial: int, version: int) -> None:
        assert self.buffer is not None
        self.buffer.begin(serial, version)

    def _on_redone(self, num_tokens: int) -> None:
        assert self.ledger is not None
        self.ledger.redone(num_tokens)

    def _on_verdict(self, key: bytes, score: Score) -> None:
        if self.ledger is not None:  # an evaluation of a finished run has none
            self.ledger.judged(key, score)

    def _on_lost(self, worker: Worker[Sampler], why: str) -> None:
        if self._colocated:  # a rank went with it
            self.pool.fail(self.ranks.gone(why))
            return
        self._on_note(f"{why}. What it was at goes to others")
        self.elastic.lost_one()


def uses_gpus(config: Config, cluster: Cluster) -> bool:
    """Whether the model is to run on GPUs of the cluster."""
    return config.model.device.startswith("cuda") or (config.model.device == "auto" and cluster.num_gpus > 0)


def _gpus_of_a_worker(config: Config, cluster: Cluster) -> float:
    """One each, where the model is to run on GPUs; refused where there are too few."""
    if config.place.cluster == "local" or not uses_gpus(config, cluster):
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
