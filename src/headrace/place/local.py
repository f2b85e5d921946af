"""One machine: every stage in this process, engine and learner on one copy of the weights, rewards beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from headrace.buffer.buffer import Buffer
from headrace.buffer.filters import Sieve
from headrace.buffer.lag import LagPolicy
from headrace.config import Config
from headrace.ledger.clock import StageClock
from headrace.ledger.ledger import Ledger
from headrace.ledger.runs import REFERENCE
from headrace.loop.canary import Canary, next_logprob
from headrace.loop.checkpoint import Checkpoints
from headrace.loop.loop import Loop
from headrace.loop.stages import LocalTrainer, Stages
from headrace.place.build import make_engine, make_learner, model_of, room_for_prompts
from headrace.place.device import DeviceThread
from headrace.place.memory import LEARNER, MODEL, memory_for, training_bytes
from headrace.policy.policy import Lora, load_policy
from headrace.prompts.stream import PromptStream
from headrace.publish.shared import SharedPublisher
from headrace.reward.scorer import Scorer
from headrace.rollout.actor import RolloutActor
from headrace.types import Group, IntArray, Trajectory


class LocalPlace:
    """Builds the stages from settings and puts them where they run."""

    def __init__(self, config: Config, run_dir: Path, *, resumed: bool = False) -> None:
        self.config, self.run_dir = config, run_dir
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        self.device = DeviceThread()
        with memory_for("the model", MODEL):
            lora = Lora.of(config.learner, config.run.seed)
            self.policy = self.device.call(lambda: load_policy(model_of(config, run_dir), lora))
        self.prompts = PromptStream(
            config.prompts,
            self.policy.tokenizer,
            config.run.seed,
            room_tokens=room_for_prompts(config, self.policy.max_context),
        )
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

    def loop(self) -> Loop:
        """The loop of the run; a new one gets its ledger."""
        config = self.config
        with memory_for("the optimizer and the reference policy", LEARNER):
            learner = LocalTrainer(self.device.call(make_learner, config, self.policy))
        checkpoints = Checkpoints(self.run_dir, config.recovery.keep)
        if self.ledger is None:
            facts = {"prompts": self.prompts.state()}
            self.device.call(lambda: checkpoints.write(0, learner.snapshot(), facts))
            if learner.uses_reference:
                reference = Checkpoints(self.run_dir, 1, REFERENCE)
                self.device.call(lambda: reference.write(0, learner.snapshot_reference(), {}))
            self.ledger = Ledger.create(self.run_dir, clock=self.clock)
        self.scorer.verdicts.update(self.ledger.verdicts())
        self.scorer.on_verdict = self.ledger.judged
        lag = LagPolicy(
            max_lag=config.loop.max_lag,
            groups_per_step=config.loop.groups_per_step,
            min_share=config.buffer.min_share,
        )

        def on_drop(dropped: list[tuple[Trajectory, str]], group: Group, was_buffered: bool) -> None:
            loop.drop(dropped, from_buffer=was_buffered, of=(group.serial, group.attempt))

        buffer = Buffer(
            lag,
            self._sieve,
            patience=config.buffer.patience,
            on_buffered=self.ledger.buffered,
            on_drop=on_drop,
        )
        self.actor.on_begun = buffer.begin
        stages = Stages(
            prompts=self.prompts,
            actor=self.actor,
            scorer=self.scorer,
            buffer=buffer,
            learner=learner,
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
        loop = Loop(config, stages)
        return loop

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
