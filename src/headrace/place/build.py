"""What every place builds in the same way, in this process or in a worker's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from headrace.config import Config, ModelSection
from headrace.errors import ConfigError
from headrace.learner.learner import Learner, Sharding
from headrace.ledger.files import START
from headrace.place.device import DeviceThread
from headrace.place.memory import CACHE, GIB, memory_for, room
from headrace.place.threads import ThreadChoice
from headrace.policy.demo import build_demo
from headrace.policy.policy import Lora, Policy, load_policy
from headrace.rollout.engine import Engine, kv_budget, kv_bytes_per_token


def model_of(config: Config, run_dir: Path) -> ModelSection:
    """The model to load; the demo's is made first."""
    section = config.model
    if section.path == "demo":
        start = run_dir / START
        if not (start / "config.json").exists():
            build_demo(start, config.run.seed)
        section = section.model_copy(update={"path": str(start)})
    return section


def load(device: DeviceThread, config: Config, section: ModelSection) -> Policy:
    """The policy, with adapters if they are what is trained. `device` computes with `model.threads` from here on."""
    if section.threads:
        torch.set_num_threads(section.threads)
    policy = device.call(load_policy, section, Lora.of(config.learner, config.run.seed))
    if not section.threads and policy.device.type == "cpu":
        choice = device.call(ThreadChoice, policy.model.get_input_embeddings().weight.shape[1])
        device.call(choice.choose)
        if not section.exact:  # bits depend on the number of threads
            device.do_between(choice.choose_if_due)
    return policy


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
