"""Where the stages of a run are: samplers and trainers in workers, the loop and the books here.

With `place.cluster = 'local'` there is one worker, in this process, with engine and learner on one
copy of the weights. On Ray this process holds no weights. A lost rollout worker is replaced
(`elastic.py`). If a rank of the learner is lost, new ones continue from the last checkpoint.
"""

import asyncio
import itertools
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from headrace.buffer.buffer import Buffer, LagPolicy, Sieve
from headrace.config import DEMOS, Config, ModelSection
from headrace.config_file import gpus_of, gpus_of_rewards, num_devices
from headrace.episode.chat import Chat
from headrace.episode.session import Desk, Episodes
from headrace.errors import ChatError, ConfigError, DataError, RunError
from headrace.learner.ranks import Ranks
from headrace.ledger.files import REFERENCE, SERVED, START, undo_start
from headrace.ledger.ledger import Ledger
from headrace.loop.books import Bookkeeper
from headrace.loop.checkpoint import Checkpoints
from headrace.loop.loop import Loop
from headrace.loop.publishing import WeightPublisher
from headrace.loop.self_check import Canary
from headrace.loop.stages import Stages
from headrace.measured import Row, Sample, StageClock
from headrace.place.elastic import Elastic
from headrace.place.episode_process import EpisodeProcess, Make, Note, playing
from headrace.place.inline import InlineCluster
from headrace.place.learner_rank import LearnerRank
from headrace.place.reward_hosts import RewardHosts
from headrace.place.rollout_worker import RolloutSpec, RolloutWorker
from headrace.policy.demo import build_demo
from headrace.policy.hub import located
from headrace.policy.policy import load_tokenizer, resolve_device
from headrace.prompts.stream import PromptStream
from headrace.publish.collective import CollectiveReceiver, CollectiveSender
from headrace.publish.disk import DiskReceiver, DiskSender
from headrace.reward.function import Setup
from headrace.reward.scorer import Scorer
from headrace.roles import Cluster, Judge, ReceivingEnd, Sampler, SendingEnd, Worker
from headrace.rollout.engine_server import refusal
from headrace.rollout.pool import RolloutPool
from headrace.types import Completion, Example, Prompt, Score, Trajectory
from headrace.user_code import load_optional

WARM_STEPS_AT_ONCE = 8
STORED_S = 0.05  # after which a sampled turn is in the ledger
PUBLISHED = "published"  # directory of a run in which weights travel

Reward = Callable[[Any], Any] | None
Ends = tuple[Callable[[], SendingEnd], Callable[[], ReceivingEnd]]


class Place:
    """Builds the stages from settings and puts them into workers of `cluster`.

    `ends` make the two ends of the transport for weights; None if engine and learner share one
    copy. `make_sampler(device, spec, rank)` and `judges(setup)` make the `Sampler` and the `Judge`;
    `reward` is called instead of the function that the settings name.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        cluster: Cluster,
        ends: Ends | None,
        *,
        resumed: bool = False,
        on_note: Note = lambda text: None,
        make_sampler: Callable[..., Sampler] = RolloutWorker,
        judges: Callable[[Setup], Judge[Completion]] | None = None,
        reward: Reward = None,
    ) -> None:
        config = config.model_copy(update={"model": _model_of(config, run_dir)})
        self.config, self.run_dir, self.cluster = config, run_dir, cluster
        self.device, self._gpus = cluster.device, _gpus_of_a_worker(config, cluster)
        self._make_sampler, self._on_note, self._names = make_sampler, on_note, itertools.count()
        self._colocated = ends is None or config.place.layout == "colocated"
        self._sending = ends[0] if ends else None
        self._receiving = ends[1] if ends else None
        self.ranks = Ranks(cluster, [*self._spawn_ranks()], config.learner)
        self.facts = self.device.call(self.ranks.meet)
        most, answer = self.facts.max_context, config.rollout.max_new_tokens
        if answer >= most:
            raise ConfigError(f"rollout.max_new_tokens = {answer} leaves no room in the model's context of {most}")
        self._tokenizer = load_tokenizer(config.model)
        self._storing: asyncio.TimerHandle | None = None
        self._worked_chats: dict[str, asyncio.Task[Example]] = {}  # by prompt id
        given = config.prompts, self._tokenizer, config.run.seed
        worked_source = "" if resumed else config.warmstart.source  # its steps are done by then
        self.prompts = PromptStream(*given, room_tokens=most - answer, worked_source=worked_source)
        hosts = partial(RewardHosts, cluster, config.reward, on_note) if ends and config.reward.workers else None
        self.scorer = Scorer(
            config.reward,
            max_new_tokens=config.rollout.max_new_tokens,
            function=reward,
            judges=judges or hosts,
            on_verdict=self._on_verdict,
            on_note=on_note,
            filters=config.buffer.filters,
            run_dir=run_dir,
        )
        self.ledger = Ledger.reopen(run_dir) if resumed else None
        self.clock = self.ledger.clock if self.ledger else StageClock()
        self._buffer: Buffer  # made by `loop`, as is the ledger of a new run
        self.pool = RolloutPool(
            clock=self.clock,
            on_sampled=lambda num_tokens: self._books.sampled(num_tokens),
            on_begun=lambda serial, version: self._buffer.begin(serial, version),
            on_redone=lambda num_tokens: self._books.redone(num_tokens),
            on_lost=self._on_lost,
            on_note=on_note,
            most_behind=int(config.loop.max_lag / 2),
        )
        has_turns = config.episode.agent or config.episode.environment
        self._episodes = self.episodes_of(partial(playing, run_dir, config), on_note) if has_turns else None
        self.answers = self._episodes or self.pool
        self.elastic = Elastic(run_dir, config, self.pool, on_note, self._spawn_rollout, lambda: self.publisher)
        # made before anything takes long, if the model is loaded: what does not fit is said at once
        self._engines = self._rollout_workers() if ends is None else []

    @cached_property
    def publisher(self) -> WeightPublisher:
        config, elastic = self.config, self.elastic
        # at max_lag = 0 who samples what may not depend on time
        waits = self._colocated or config.loop.max_lag == 0 or config.publish.transport == "collective"
        bring = None if waits else elastic.bring
        timeout_s = config.publish.timeout_s
        return WeightPublisher(self.ranks, self.clock, timeout_s, self.pool, elastic.give_up, bring)

    async def start_user_code(self) -> None:
        """Start the processes with reward functions, filters and environments. Raises what is wrong with them."""
        await self.scorer.start()
        if self._episodes is not None:
            await self._episodes.prepare()

    def episodes_of(self, make: Make, on_note: Note) -> Episodes | EpisodeProcess:
        """In this process, if its cores are the engine's: on a CPU another would win nothing."""
        if self._sending or resolve_device(self.config.model.device).type == "cuda":
            return EpisodeProcess(make, self.config, self.desk(), self.pool.abort, on_note)
        return Episodes(make(self.desk(), on_note), self.pool.abort)

    def desk(self) -> Desk:
        try:
            chat = Chat(self._tokenizer, stops=self.facts.eos_ids)
        except ChatError as error:
            raise ConfigError(f"model.path: {error}, which environments and agents need") from error
        return Desk(
            chat=chat,
            max_context=min(self.facts.max_context, self.config.rollout.kv_tokens or self.facts.max_context),
            sample=lambda order: self.pool.start(order)[0],
            forget=self.pool.forget,
            now=self.clock.now,
            span=self.clock.span,
            on_turn=self._on_turn,
            refusal=partial(refusal, self.config.rollout.engine),
        )

    async def start_engines(self) -> None:
        """Let every rollout worker join the pool, once they are ready."""
        for worker in self._engines or await self.device.run(self._rollout_workers):
            self.pool.join(worker)

    async def loop(
        self,
        on_row: Callable[[Row], None] = lambda row: None,
        on_sample: Callable[[Sample], None] = lambda sample: None,
    ) -> Loop:
        """The loop, once every rollout worker has the first weights."""
        config = self.config
        checkpoints = Checkpoints(self.run_dir, config.recovery.keep)
        begins = self.ledger is None
        if self.ledger is None:  # a ledger means that the run can be resumed
            await asyncio.to_thread(self._first_checkpoint, checkpoints)
            self.ledger = Ledger.create(self.run_dir, clock=self.clock)
            self.ledger.remember("num_prompts", str(self.prompts.num_train))
            undo_start(self.run_dir)  # this one stays: a run that it replaces goes
        self.scorer.remember(self.ledger.verdicts())
        await self.start_engines()
        if not self._colocated:
            self.elastic.start()
        if begins:  # a restart publishes the version that it continues from
            await self.device.run(self.publisher.commit, 0)
        sample_every = config.ledger.samples_every * config.loop.groups_per_step
        books = Bookkeeper(self.ledger, sample_every=sample_every, on_sample=on_sample)
        self._buffer = Buffer(
            LagPolicy(
                max_lag=config.loop.max_lag,
                groups_per_step=config.loop.groups_per_step,
                # with "drain", what starts during a step would delay its update
                eager=config.rollout.on_update == "drain",
                most_at_once=config.rollout.workers * config.rollout.max_running // config.rollout.samples,
            ),
            Sieve(config.buffer, self.scorer.keeps, config.learner),
            patience=config.buffer.patience,
            on_buffered=books.buffered,
            on_drop=books.dropped,
        )
        asked = self.prompts.held_out[0].token_ids
        stages = Stages(
            prompts=self.prompts,
            pool=self.pool,
            answers=self.answers,
            scorer=self.scorer,
            buffer=self._buffer,
            ranks=self.ranks,
            publisher=self.publisher,
            canary=Canary(self.pool.greedy, self.ranks.next_logprob, asked, dtype=self.facts.dtype),
            books=books,
            ledger=self.ledger,
            clock=self.clock,
            device=self.device,
            checkpoints=checkpoints,
            tokenizer=self._tokenizer,
            shares_memory=self._colocated and self._sending is not None,
        )
        return Loop(config.but(model={"exact": self.facts.exact}), stages, on_row, self._on_note)

    async def warm_start(self) -> AsyncIterator[tuple[int, float]]:
        """Supervised steps on worked examples. Yields the number of steps done and the loss."""
        section, rng = self.config.warmstart, np.random.default_rng([self.config.run.seed, 1])
        at_once = 1 if self._sending is None else WARM_STEPS_AT_ONCE  # calls to a process are slow
        sizes = [min(at_once, section.steps - done) for done in range(0, section.steps, at_once)]

        async def drawn(num_batches: int) -> list[list[Example]]:
            batches = [self.prompts.worked(section.examples, rng) for _ in range(num_batches)]
            return [await asyncio.gather(*(self._worked(*example) for example in batch)) for batch in batches]

        examples = await drawn(sizes[0])
        for number, following in enumerate([*sizes[1:], 0]):  # drawn while others are learned
            losses, examples = await asyncio.gather(self.device.run(self.ranks.warm_up, examples), drawn(following))
            yield sum(sizes[: number + 1]), losses[-1]

    async def _worked(self, prompt: Prompt, solution: Any) -> Example:
        """The tokens of a worked example, and which of them are learned."""
        if isinstance(solution, str):
            ids = self._tokenizer(solution, add_special_tokens=False)["input_ids"] + [self._tokenizer.eos_token_id]
            whole = np.concatenate([prompt.token_ids, np.array(ids, np.int32)])
            if len(whole) > self.facts.max_context:
                told = f"with its answer, and the model's context {self.facts.max_context}"
                raise DataError(f"worked example '{prompt.id}' has {len(whole)} tokens {told}")
            return whole, np.arange(len(whole)) >= len(prompt.token_ids)
        if self._episodes is None:
            needed = "which needs episode.environment or episode.agent"
            raise DataError(f"prompt '{prompt.id}' has a chat as its worked example, {needed}")
        if not any(message.get("role") == "assistant" for message in solution):
            raise DataError(f"prompt '{prompt.id}': its worked chat has no answer")
        if prompt.id not in self._worked_chats:
            self._worked_chats[prompt.id] = asyncio.create_task(self._episodes.worked(prompt, solution))
        return await self._worked_chats[prompt.id]

    def progress(self) -> object:
        """What the stages have done so far: equal results mean that nothing happened in between.

        Of engines the tokens count, not the steps: an engine could step for ever without progress.
        """
        moves, stepping = self.clock.moves(), ("rollout", "evaluate")
        others = {stage: n for stage, n in moves.items() if stage not in stepping}
        return self.pool.counts.computed_tokens, self.scorer.moves, others, len(self.pool.workers)

    async def close(self, *, hung: bool = False) -> None:
        """End the workers and close the ledger. With `hung`, do not wait for the device thread."""
        self.elastic.close()
        self.pool.close()
        if self._storing is not None:
            self._storing.cancel()
        await self.scorer.close()
        if self._episodes is not None:
            await self._episodes.close()
        self.cluster.close()
        shutil.rmtree(self.run_dir / SERVED, ignore_errors=True)  # if a worker was killed
        self.device.close(wait=not hung)
        if self.ledger is not None:
            self.ledger.close()

    def _first_checkpoint(self, checkpoints: Checkpoints) -> None:
        checkpoints.write(0, self.device.call(self.ranks.snapshot), {"prompts": self.prompts.state()})
        if self.ranks.keeps_reference:
            write = self.device.call(lambda: self.ranks.snapshot(reference=True))
            Checkpoints(self.run_dir, 1, REFERENCE).write(0, write, {})

    def _spawn_ranks(self) -> Iterator[Worker[LearnerRank]]:
        for rank in range(math.prod(self.config.learner.mesh)):
            name = f"{'worker' if self._colocated else 'learner'}-{rank}" if self._sending else "local"
            yield self.cluster.spawn(name, LearnerRank, self.config, rank, self._sending, gpus=self._gpus)

    def _rollout_workers(self) -> list[Worker[Sampler]]:
        """The first rollout workers, made and ready. Called in a thread."""
        if self._colocated:
            workers = [rank.beside(self._make_sampler, self._rollout_spec(rank.name)) for rank in self.ranks.ranks]
        else:
            # more than `rollout.workers` may have to wait for a node: those join later
            first = min(self.elastic.wanted, self.config.rollout.workers)
            workers = [self._spawn_rollout() for _ in range(first)]
        for worker in workers:
            worker.wait_ready()
        return workers

    def _spawn_rollout(self) -> Worker[Sampler]:
        spec = self._rollout_spec(f"rollout-{next(self._names)}")
        return self.cluster.spawn(spec.name, self._make_sampler, spec, gpus=self._gpus * gpus_of(self.config.rollout))

    def _rollout_spec(self, name: str) -> RolloutSpec:
        as_learner = {"exact": self.facts.exact}  # whether "auto" is
        return RolloutSpec(
            config=self.config.but(run={"dir": str(self.run_dir.absolute())}, model=as_learner),
            name=name,
            epoch_s=time.time() - self.clock.now(),
            longest_prompt=max(len(p.token_ids) for p in self.prompts.held_out),
            receiving=self._receiving,
            clock=self.clock if self._receiving is None else None,
        )

    @property
    def _books(self) -> Ledger:
        assert self.ledger is not None
        return self.ledger

    def _on_turn(self, serial: int, episode: Trajectory) -> None:
        """Turns of one moment are stored together, but soon: a reply may take minutes."""
        self._books.keep_turn(serial, episode)
        if self._storing is None or self._storing.when() < asyncio.get_running_loop().time():
            self._storing = asyncio.get_running_loop().call_later(STORED_S, self._store_turns)

    def _store_turns(self) -> None:
        with suppress(RunError):  # the next transaction raises it, where it ends the run
            self._books.flush()

    def _on_verdict(self, key: bytes, score: Score) -> None:
        if self.ledger is not None:  # the evaluation of a finished run has no ledger
            self.ledger.judged(key, score)

    def _on_lost(self, worker: Worker[Sampler], why: str) -> None:
        if self._colocated:  # a rank was in the same process
            self.pool.fail(self.ranks.gone(why))
            return
        self._on_note(f"{why}. What it was at goes to others")
        self.elastic.lost_one()


def open_place(
    config: Config, run_dir: Path, *, resumed: bool = False, on_note: Note = lambda text: None, reward: Reward = None
) -> Place:
    config = config.model_copy(update={"model": located(config.model)})  # fetched once, before there are workers
    cluster: Cluster
    if config.place.cluster == "local":
        cluster, ends = InlineCluster(), None
    else:
        cluster = load_optional("headrace.place.cluster_ray", "ray", "ray").RayCluster()
        ends = _ends(config, run_dir, "cuda" if _uses_gpus(config, cluster) else "cpu")
    try:
        return Place(config, run_dir, cluster, ends, resumed=resumed, on_note=on_note, reward=reward)
    except BaseException:
        cluster.close()
        raise


def _ends(config: Config, run_dir: Path, device: str) -> Ends:
    match config.publish.transport:
        case "disk":
            path = run_dir / START if config.model.path in DEMOS else Path(config.model.path)
            model_dir = None if path.suffix == ".gguf" else path.absolute()
            return partial(DiskSender, (run_dir / PUBLISHED).absolute(), model_dir=model_dir), DiskReceiver
        case "collective":
            if config.place.layout == "colocated" or config.rollout.engine != "embedded":  # one GPU, one NCCL member
                device = "cpu"
            return partial(CollectiveSender, device=device), partial(CollectiveReceiver, device=device)
        case "object_store":
            store = load_optional("headrace.publish.object_store_ray", "ray", "ray")
            return store.ObjectStoreSender, store.ObjectStoreReceiver


def _model_of(config: Config, run_dir: Path) -> ModelSection:
    """The model to load, by its absolute path; the demo's is made first."""
    path = Path(config.model.path)
    if config.model.path in DEMOS:
        path = run_dir / START
        if not (path / "config.json").exists():
            build_demo(path, config.run.seed, chat=config.model.path == "demo-chat")
    return config.model.model_copy(update={"path": str(path.absolute())})


def _uses_gpus(config: Config, cluster: Cluster) -> bool:
    return config.model.device.startswith("cuda") or (config.model.device == "auto" and cluster.num_gpus > 0)


def _gpus_of_a_worker(config: Config, cluster: Cluster) -> float:
    """1 if the model runs on GPUs, else 0. Raises if the cluster has too few."""
    if config.place.cluster == "local":
        return 0.0
    asked, wanted, uses = gpus_of_rewards(config), dict[str, int](), _uses_gpus(config, cluster)
    if uses:
        workers, ranks = config.rollout.workers, math.prod(config.learner.mesh)
        wanted = {"rollout.workers": workers, "learner.ranks": ranks}
    if asked:
        wanted["reward.workers"] = config.reward.workers
    if (needed := num_devices(config) if uses else asked) > cluster.num_gpus:
        told = " and ".join(f"{key} = {value}" for key, value in wanted.items())
        in_turns = config.place.layout == "colocated" or not uses
        advice = "use fewer" if in_turns else "lower one, or set place.layout = 'colocated'"
        told = f"{told} need {needed:g} GPUs"
        raise ConfigError(f"{told}, and the cluster has {cluster.num_gpus}: {advice}")
    return float(uses)
