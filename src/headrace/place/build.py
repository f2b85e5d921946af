"""What every place builds in the same way, in this process or in a worker's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from headrace.buffer.buffer import Buffer
from headrace.buffer.filters import Sieve
from headrace.buffer.lag import LagPolicy
from headrace.config import Config, ModelSection
from headrace.errors import ConfigError
from headrace.learner.learner import Learner
from headrace.learner.sharding import Sharding
from headrace.ledger.files import REFERENCE, START
from headrace.ledger.ledger import Ledger
from headrace.loop.checkpoint import Checkpoints
from headrace.loop.loop import Loop
from headrace.loop.stages import Stages, Trainer
from headrace.place.memory import CACHE, GIB, memory_for, room
from headrace.policy.demo import build_demo
from headrace.policy.policy import Lora, Policy, load_policy
from headrace.prompts.stream import PromptStream
from headrace.reward.scorer import Scorer
from headrace.rollout.engine import Engine, kv_budget, kv_bytes_per_token
from headrace.types import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """What is to be known of a policy without holding it.

    Example:
        PolicyFacts(name="Qwen3ForCausalLM", num_weights=1_025_408, device="cpu", dtype=torch.float32, max_context=1024)
    """

    name: str
    num_weights: int
    device: str
    dtype: torch.dtype
    max_context: int

    @classmethod
    def of(cls, policy: Policy) -> PolicyFacts:
        """Of a whole policy."""
        return cls(
            name=type(policy.model).__name__,
            num_weights=sum(p.numel() for p in policy.model.parameters()),
            device=policy.device.type,
            dtype=policy.dtype,
            max_context=policy.max_context,
        )


class Starting(Trainer, Protocol):
    """A trainer at the start of a run, whose reference is still to be kept."""

    def snapshot_reference(self) -> Callable[[Path], None]:
        """What writes the reference into a directory."""
        ...


def model_of(config: Config, run_dir: Path) -> ModelSection:
    """The model to load; the demo's is made first."""
    section = config.model
    if section.path == "demo":
        start = run_dir / START
        if not (start / "config.json").exists():
            build_demo(start, config.run.seed)
        section = section.model_copy(update={"path": str(start)})
    return section


def load(config: Config, section: ModelSection) -> Policy:
    """The policy, with adapters if they are what is trained."""
    return load_policy(section, Lora.of(config.learner, config.run.seed))


def room_for_prompts(config: Config, max_context: int) -> int:
    """Tokens of the model's context that answers leave."""
    answer = config.rollout.max_new_tokens
    if answer >= max_context:
        raise ConfigError(
            f"rollout.max_new_tokens = {answer} leaves no room for a prompt: the model's context is {max_context}"
        )
    return max_context - answer


def make_engine(
    config: Config, policy: Policy, *, longest_prompt: int, reserved_bytes: int, clock: Callable[[], float]
) -> Engine:
    """An engine whose cache takes what memory there is, but for `reserved_bytes`, and no more than it can use."""
    r = config.rollout
    kv_tokens = kv_budget(policy, r.kv_tokens, reserved_bytes)
    if not r.kv_tokens:  # more than this is never used
        kv_tokens = min(kv_tokens, r.max_running * (config.prompts.max_tokens + r.max_new_tokens + 64))
    needed = longest_prompt + r.max_new_tokens
    if kv_tokens < needed:
        free = room() if policy.device.type == "cuda" else ""
        raise ConfigError(
            f"{free}With {reserved_bytes / GIB:.1f} GiB kept for training, memory holds a key/value cache of "
            f"{kv_tokens} tokens, and one sequence may need {needed}: lower rollout.max_new_tokens, take a smaller "
            "model, or free memory (rollout.kv_tokens sets the size)"
        )
    with memory_for("the key/value cache", CACHE, wanted_bytes=kv_tokens * kv_bytes_per_token(policy)):
        return Engine(
            policy,
            max_running=r.max_running,
            prefill_tokens=r.prefill_tokens,
            kv_tokens=kv_tokens,
            on_update=r.on_update,
            max_wall_s=r.max_wall_s,
            on_wall=r.on_wall,
            speculate=r.speculate,
            clock=clock,
        )


def make_loop(config: Config, sieve: Sieve, **stages: Any) -> Loop:
    """The loop around stages that are there, with its buffer between them."""
    lag = LagPolicy(
        max_lag=config.loop.max_lag,
        groups_per_step=config.loop.groups_per_step,
        min_share=config.buffer.min_share,
        eager=config.rollout.on_update == "drain",  # what is started during a step, its update would have to wait for
    )

    def on_drop(dropped: list[tuple[Trajectory, str]], group: Group, was_buffered: bool) -> None:
        loop.drop(dropped, from_buffer=was_buffered, of=(group.serial, group.attempt))

    buffer = Buffer(lag, sieve, patience=config.buffer.patience, on_buffered=stages["ledger"].buffered, on_drop=on_drop)
    stages["actor"].on_begun = buffer.begin
    loop = Loop(config, Stages(buffer=buffer, **stages))
    return loop


def first_checkpoint(run_dir: Path, trainer: Starting, prompts: PromptStream, checkpoints: Checkpoints) -> None:
    """Of a new run; before its ledger, which says that there is something to resume."""
    checkpoints.write(0, trainer.snapshot(), {"prompts": prompts.state()})
    if trainer.uses_reference:
        Checkpoints(run_dir, 1, REFERENCE).write(0, trainer.snapshot_reference(), {})


def keep_verdicts(scorer: Scorer, ledger: Ledger) -> None:
    """Verdicts of the run so far are not asked for again, and new ones are kept."""
    scorer.verdicts.update(ledger.verdicts())
    scorer.on_verdict = ledger.judged


def make_learner(config: Config, policy: Policy, sharding: Sharding | None = None) -> Learner:
    """A learner, or one rank of it."""
    return Learner(
        policy,
        config.learner,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        total_steps=config.loop.steps,
        sharding=sharding,
    )
