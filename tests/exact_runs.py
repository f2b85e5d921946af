"""A busy engine, and how far the learner's log-probs are from those it recorded. For the tests of exact mode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.learner.batch import pack
from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Request
from headrace.types import FloatArray, Item, Sampling, Timing, Trajectory

TEMPERATURE = 0.7
NEVER = Timing(submitted_s=0.0, started_s=0.0, finished_s=0.0)


def busy_run(
    policy: Policy,
    *,
    num_groups: int,
    max_new_tokens: int,
    spread_steps: int,
    top_p: float = 1.0,
    longest_prompt: int = 150,
    **settings: int,
) -> list[Trajectory]:
    """Groups of 1 to 7 with prompts and answers of all lengths, that come over time; no token ends an answer."""
    engine = Engine(
        policy, **({"max_running": 16, "prefill_tokens": 64, "kv_tokens": 10**6} | settings), on_update="keep"
    )
    rng = np.random.default_rng(0)
    arrivals = []
    for i in range(num_groups):
        prompt = rng.integers(3, 90, rng.integers(1, longest_prompt)).astype(np.int32)
        lengths = rng.integers(1, max_new_tokens, rng.integers(1, 8))
        samplings = [Sampling(max_new_tokens=int(n), temperature=TEMPERATURE, top_p=top_p) for n in lengths]
        members = [Request(id=f"{i}/{k}", sampling=s, seed=100 * i + k) for k, s in enumerate(samplings)]
        arrivals.append((int(rng.integers(0, spread_steps)), i, prompt, members))
    arrivals.sort(key=lambda arrival: arrival[:2])
    prompts = {request.id: prompt for _, _, prompt, members in arrivals for request in members}
    found, step = [], 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= step:
            engine.submit(*arrivals.pop(0)[2:])
        found += engine.advance(max_steps=1)
        step += 1
    return [
        Trajectory(
            id=g.id,
            prompt_id=g.id,
            index=0,
            token_ids=np.concatenate([prompts[g.id], g.token_ids]),
            sampled=np.arange(len(prompts[g.id]) + len(g.token_ids)) >= len(prompts[g.id]),
            logprobs=np.concatenate([np.zeros(len(prompts[g.id]), np.float32), g.logprobs]),
            spans=g.spans,
            finish=g.finish,
            text="",
            timing=NEVER,
            replay=g.replay,
        )
        for g in found
    ]


@torch.no_grad()
def gaps(policy: Policy, found: Sequence[Trajectory], num_per_pack: int) -> FloatArray:
    """|learner's - engine's| of every sampled token, with the trajectories in micro-batches of so many."""
    order = np.random.default_rng(num_per_pack).permutation(len(found))
    differences = []
    for start in range(0, len(order), num_per_pack):
        items = [Item(trajectory=found[i], advantage=0.0) for i in order[start : start + num_per_pack]]
        batch = pack(items, policy.device, policy.routers)
        ours, _ = policy.logprobs(batch.token_ids, batch.plan, batch.at, TEMPERATURE, batch.support, batch.routes)
        differences.append((ours.float() - batch.behaviour).abs().cpu().numpy())
    return np.concatenate(differences)
