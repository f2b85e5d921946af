"""One machine: every stage in this process, engine and learner on one copy of the weights, rewards beside it."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.buffer.buffer import Buffer
from headrace.buffer.filters import Sieve
from headrace.buffer.lag import LagPolicy
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.learner.learner import Learner
from headrace.ledger.clock import StageClock
from headrace.ledger.ledger import Ledger
from headrace.ledger.runs import REFERENCE, START
from headrace.loop.checkpoint import Checkpoints, snapshot
from headrace.loop.loop import Loop, Stages
from headrace.place.device import DeviceThread
from headrace.place.memory import CACHE, LEARNER, MODEL, memory_for, training_bytes
from headrace.policy.demo import build_demo
from headrace.policy.policy import Lora, Policy, load_policy
from headrace.prompts.stream import PromptStream
from headrace.publish.shared import SharedPublisher
from headrace.reward.scorer import Scorer
from headrace.rollout.actor import RolloutActor
from headrace.rollout.engine import Engine, kv_budget, kv_bytes_per_token
from headrace.types import Group, Trajectory


class LocalPlace:
    """Builds the stages from settings and puts them where they run."""

    def __init__(self, config: Config, run_dir: Path, *, resumed: bool = False) -> None:
        self.config, self.run_dir = config, run_dir
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        self.device = DeviceThread()
        with memory_for("the model", MODEL):
            self.policy = self.device.call(self._load)
        self.prompts = PromptStream(
            config.prompts, self.policy.tokenizer, config.run.seed, room_tokens=self._room_for_prompts()
        )
        self._sieve = Sieve(config.buffer)
        self.scorer = Scorer(
            config.reward,
            max_new_tokens=config.rollout.max_new_tokens,
            default_function=self.prompts.default_reward,
        )
        self.ledger = Ledger.reopen(run_dir) if resumed else None
        self.clock = self.ledger.clock if self.ledger else StageClock()
        self.engine = self._engine()
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
            learner = self.device.call(self._learner)
        checkpoints = Checkpoints(self.run_dir, config.recovery.keep)
        if self.ledger is None:
            facts = {"prompts": self.prompts.state()}
            self.device.call(lambda: checkpoints.write(0, snapshot(learner.tensors()), facts))
            if learner.uses_reference:
                reference = Checkpoints(self.run_dir, 1, REFERENCE)
                self.device.call(lambda: reference.write(0, snapshot(learner.reference_tensors()), {}))
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
        return self.engine.computed_tokens, self.scorer.moves, moves

    async def close(self, *, hung: bool = False) -> None:
        """End the reward processes and the device thread, close the books. What hangs is not waited for."""
        await self.scorer.close()
        self.device.close(wait=not hung)
        if self.ledger is not None:
            self.ledger.close()

    def _load(self) -> Policy:
        section = self.config.model
        if section.path == "demo":
            start = self.run_dir / START
            if not (start / "config.json").exists():
                build_demo(start, self.config.run.seed)
            section = section.model_copy(update={"path": str(start)})
        return load_policy(section, Lora.of(self.config.learner, self.config.run.seed))

    def _engine(self) -> Engine:
        r = self.config.rollout
        kv_tokens = kv_budget(self.policy, r.kv_tokens, training_bytes(self.policy, self.config.learner))
        if not r.kv_tokens:  # more than this is never used
            kv_tokens = min(kv_tokens, r.max_running * (self.config.prompts.max_tokens + r.max_new_tokens + 64))
        needed = max(len(p.token_ids) for p in self.prompts.held_out) + r.max_new_tokens
        if kv_tokens < needed:
            raise ConfigError(
                f"the free memory holds a key/value cache of {kv_tokens} tokens, and one sequence may need {needed}: "
                "lower rollout.max_new_tokens, take a smaller model, or free memory (rollout.kv_tokens sets the size)"
            )
        with memory_for("the key/value cache", CACHE, wanted_bytes=kv_tokens * kv_bytes_per_token(self.policy)):
            return Engine(
                self.policy,
                max_running=r.max_running,
                prefill_tokens=r.prefill_tokens,
                kv_tokens=kv_tokens,
                on_update=r.on_update,
                max_wall_s=r.max_wall_s,
                on_wall=r.on_wall,
                speculate=r.speculate,
                clock=self.clock.now,
            )

    def _learner(self) -> Learner:
        return Learner(
            self.policy,
            self.config.learner,
            temperature=self.config.rollout.temperature,
            max_new_tokens=self.config.rollout.max_new_tokens,
            total_steps=self.config.loop.steps,
        )

    def _room_for_prompts(self) -> int:
        """Tokens of the model's context that answers leave."""
        context, answer = self.policy.max_context, self.config.rollout.max_new_tokens
        if answer >= context:
            raise ConfigError(
                f"rollout.max_new_tokens = {answer} leaves no room for a prompt: the model's context is {context}"
            )
        return context - answer

    def _on_sampled(self, num_tokens: int) -> None:
        assert self.ledger is not None
        self.ledger.sampled(num_tokens)
