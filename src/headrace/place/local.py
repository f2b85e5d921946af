"""One machine: every stage in this process, engine and learner on one copy of the weights, rewards beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from headrace.buffer.filters import Sieve
from headrace.config import Config
from headrace.learner.supervised import warm_start
from headrace.ledger.clock import StageClock
from headrace.ledger.ledger import Ledger
from headrace.loop.canary import Canary, next_logprob
from headrace.loop.checkpoint import Checkpoints
from headrace.loop.loop import Loop
from headrace.loop.stages import LocalTrainer
from headrace.place.build import (
    PolicyFacts,
    first_checkpoint,
    keep_verdicts,
    load,
    make_engine,
    make_learner,
    make_loop,
    model_of,
    room_for_prompts,
)
from headrace.place.device import DeviceThread
from headrace.place.memory import LEARNER, MODEL, memory_for, training_bytes
from headrace.prompts.stream import PromptStream
from headrace.publish.shared import SharedPublisher
from headrace.reward.scorer import Scorer
from headrace.rollout.actor import RolloutActor
from headrace.types import IntArray


class LocalPlace:
    """Builds the stages from settings and puts them where they run."""

    lost = False  # the weights live as long as this process

    def __init__(self, config: Config, run_dir: Path, *, resumed: bool = False) -> None:
        self.config, self.run_dir = config, run_dir
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        self.device = DeviceThread()
        with memory_for("the model", MODEL):
            self.policy = self.device.call(lambda: load(config, model_of(config, run_dir)))
        self.prompts = PromptStream(
            config.prompts,
            self.policy.tokenizer,
            config.run.seed,
            room_tokens=room_for_prompts(config, self.policy.max_context),
        )
        self.on_note: Callable[[str], None] = lambda text: None
        self._sieve = Sieve(config.buffer)
        self.scorer = Scorer(
            config.reward,
            max_new_tokens=config.rollout.max_new_tokens,
            default_function=self.prompts.default_reward,
        )
        self.ledger = Ledger.reopen(run_dir) if resumed else None
        self.clock = self.ledger.clock if self.ledger else StageClock()
        self.engine = make_engine(
            config,
            self.policy,
            longest_prompt=max(len(p.token_ids) for p in self.prompts.held_out),
            reserved_bytes=training_bytes(self.policy, config.learner),
            clock=self.clock.now,
        )
        self.actor = RolloutActor(
            self.engine,
            self.device,
            seed=config.run.seed,
            clock=self.clock.now,
            span=lambda stage: self.clock.span(stage, version=self.engine.version),
            on_sampled=self._on_sampled,
        )

    async def loop(self) -> Loop:
        """The loop of the run; a new one gets its ledger."""
        config = self.config
        with memory_for("the optimizer and the reference policy", LEARNER):
            trainer = LocalTrainer(await self.device.run(make_learner, config, self.policy))
        checkpoints = Checkpoints(self.run_dir, config.recovery.keep)
        if self.ledger is None:
            await self.device.run(first_checkpoint, self.run_dir, trainer, self.prompts, checkpoints)
            self.ledger = Ledger.create(self.run_dir, clock=self.clock)
        keep_verdicts(self.scorer, self.ledger)
        return make_loop(
            config,
            self._sieve,
            prompts=self.prompts,
            actor=self.actor,
            scorer=self.scorer,
            learner=trainer,
            publisher=SharedPublisher(self.engine),
            canary=Canary(
                self._likeliest,
                partial(next_logprob, self.policy),
                self.prompts.held_out[0].token_ids,
                dtype=self.policy.dtype,
            ),
            ledger=self.ledger,
            clock=self.clock,
            device=self.device,
            checkpoints=checkpoints,
        )

    @property
    def facts(self) -> PolicyFacts:
        """Of the policy."""
        return PolicyFacts.of(self.policy)

    async def warm_start(self, on_step: Callable[[int, float], None]) -> None:
        """Supervised steps on worked examples; `on_step(steps done, loss)` hears of progress, in another thread."""
        section, rng = self.config.warmstart, np.random.default_rng([self.config.run.seed, 1])
        await self.device.run(warm_start, self.policy, section, lambda n: self.prompts.worked(n, rng), on_step)

    def save_weights(self, directory: Path) -> None:
        """Write the policy as it is now."""
        self.policy.save(directory)

    def progress(self) -> object:
        """What the stages have done so far; equal answers mean that nothing was done in between.

        Of the engine its tokens count, not its steps: it could step for ever without coming further.
        """
        moves = {stage: n for stage, n in self.clock.moves().items() if stage not in ("rollout", "evaluate")}
        return self.engine.counts.computed_tokens, self.scorer.moves, moves

    async def close(self, *, hung: bool = False) -> None:
        """End the reward processes and the device thread, close the books. What hangs is not waited for."""
        await self.scorer.close()
        self.device.close(wait=not hung)
        if self.ledger is not None:
            self.ledger.close()

    def _likeliest(self, prompt: IntArray) -> list[tuple[int, float]]:
        found = self.engine.likeliest(prompt)
        return [] if found is None else [found]

    def _on_sampled(self, num_tokens: int) -> None:
        assert self.ledger is not None
        self.ledger.sampled(num_tokens)
