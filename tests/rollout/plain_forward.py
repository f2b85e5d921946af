"""What the engine's results are held against: the same weights in a stock `transformers` model, one sequence at a time.

Truncation is written out again here, in float64 and in the plainest way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tight_store import TightStore

from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Generation, Request, request_seed
from headrace.types import IntArray, Sampling

Doubles = npt.NDArray[np.float64]
PromptGroup = tuple[IntArray, list[Request]]
Arrival = tuple[int, IntArray, list[Request]]  # the engine step at which it comes


class Steps:
    """A clock that shows how many engine steps were begun, so that times of generations are step numbers."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> float:
        return float(self.now)


def make_engine(policy: Policy, **changes: Any) -> Engine:
    settings = {"max_running": 16, "prefill_tokens": 64, "kv_tokens": 10**6, "on_update": "keep"}
    return Engine(policy, **(settings | changes))


def tight_engine(policy: Policy, kv_tokens: int, most_steps: int = 1, **changes: Any) -> tuple[Engine, TightStore]:
    """An engine with a cache of `kv_tokens`, counted in pages, and that cache."""
    engine = make_engine(policy, **changes)
    engine._store = store = TightStore(policy, kv_tokens, engine._rows, most_steps)
    return engine, store


def prompt_ids(length: int, seed: int = 0) -> IntArray:
    return np.random.default_rng([length, seed]).integers(3, 99, length).astype(np.int32)


def requests(name: str, samplings: Sequence[Sampling], seed: int = 0) -> list[Request]:
    return [
        Request(id=f"{name}/{i}", sampling=s, seed=request_seed(seed, *name.encode(), i))
        for i, s in enumerate(samplings)
    ]


def mixed_groups(max_new_tokens: int = 24) -> list[PromptGroup]:
    """Prompts of 1 to 37 tokens, with 1 to 3 samples of different lengths each."""
    lengths = [5, 37, 1, 16, 8, 29, 3, 12, 21]
    return [
        (
            prompt_ids(n),
            requests(
                f"p{n}", [Sampling(max_new_tokens=1 + (7 * n + 11 * i) % max_new_tokens) for i in range(1 + n % 3)]
            ),
        )
        for n in lengths
    ]


def finish(engine: Engine, arrivals: Iterable[Arrival] = (), clock: Steps | None = None) -> dict[str, Generation]:
    """Step the engine until nothing is left, with requests that come at their steps."""
    waiting = sorted(arrivals, key=lambda arrival: arrival[0])
    found: dict[str, Generation] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            engine.submit(*waiting.pop(0)[1:])
        step += 1
        assert step < 5000, "the engine does not come to an end"
        if clock is not None:
            clock.now = step
        for generation in engine.advance(max_steps=1):
            assert generation.id not in found, generation.id
            found[generation.id] = generation
    return found


def run(engine: Engine, *groups: PromptGroup) -> dict[str, Generation]:
    return finish(engine, [(0, prompt, members) for prompt, members in groups])


def stock_model(policy: Policy) -> Any:
    """Another model with the policy's present weights and the attention it came with."""
    config = copy.deepcopy(policy.model.config)  # a model keeps its attention's name there
    model = type(policy.model)._from_config(config, attn_implementation="eager").to(policy.dtype).eval()
    model.load_state_dict(policy.model.state_dict())
    return model


@torch.no_grad()
def perturb(policy: Policy, version: int) -> None:
    """What an optimizer does, in place, only more of it."""
    generator = torch.Generator().manual_seed(version)
    for parameter in policy.model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise * 0.3 * parameter.abs().mean())


@torch.no_grad()
def next_logits(model: Any, token_ids: IntArray) -> Doubles:
    """Logits `[T, V]` after each of the tokens."""
    ids = torch.from_numpy(np.asarray(token_ids).astype(np.int64))[None]
    assert model.config._attn_implementation == "eager"
    logits: Doubles = model(input_ids=ids, use_cache=False).logits[0].double().numpy()
    return logits


def allowed_ids(logits: Doubles, sampling: Sampling) -> npt.NDArray[np.int64]:
    """The tokens that top-k, then top-p, then min-p leave, by falling probability."""
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    scaled = logits[order] / (sampling.temperature or 1.0)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    kept, mass = [], 0.0
    for token, prob in zip(order, probs, strict=True):
        if sampling.top_p < 1 and mass >= sampling.top_p:
            break
        mass += prob
        if prob >= sampling.min_p * probs[0]:
            kept.append(token)
    return np.array(kept)


def distribution(logits: Doubles, sampling: Sampling) -> Doubles:
    """Probabilities `[V]` of what may be sampled; 0 for the rest."""
    ids = allowed_ids(logits, sampling)
    scaled = logits[ids] / sampling.temperature
    probs = np.zeros(len(logits))
    probs[ids] = np.exp(scaled - scaled.max())
    normalised: Doubles = probs / probs.sum()
    return normalised


def plain_logprobs(model: Any, prompt: IntArray, tokens: IntArray, sampling: Sampling) -> Doubles:
    """Log-probs of the sampled tokens, from one forward pass over the whole sequence."""
    logits = next_logits(model, np.concatenate([prompt, tokens]))[len(prompt) - 1 : -1]
    with np.errstate(divide="ignore"):
        return np.array([np.log(distribution(row, sampling)[t]) for row, t in zip(logits, tokens, strict=True)])


def assert_right(model: Any, groups: Iterable[PromptGroup], found: dict[str, Generation], atol: float = 1e-5) -> None:
    """Every request came back once, with the log-probs of a plain forward pass."""
    groups = list(groups)
    assert found.keys() == {r.id for _, members in groups for r in members}
    for prompt, members in groups:
        for request in members:
            generation = found[request.id]
            assert 1 <= len(generation.token_ids) <= request.sampling.max_new_tokens
            expected = plain_logprobs(model, prompt, generation.token_ids, request.sampling)
            np.testing.assert_allclose(generation.logprobs, expected, rtol=0, atol=atol, err_msg=request.id)


def assert_same(ours: Generation, theirs: Generation, atol: float = 1e-5) -> None:
    """The same answer, as far as float32 tells."""
    np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=atol)
    assert (ours.finish, ours.spans) == (theirs.finish, theirs.spans)


def most_at_once(found: dict[str, Generation]) -> int:
    """How many were running in the busiest step, from times that are step numbers."""
    last = int(max(g.finished_s for g in found.values()))
    return max(sum(g.started_s <= step <= g.finished_s for g in found.values()) for step in range(last + 1))
