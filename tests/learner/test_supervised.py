from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headrace.config import ModelSection, WarmstartSection
from headrace.learner.learner import WarmStart
from headrace.policy.attention import PackedPlan
from headrace.policy.demo import build_demo
from headrace.policy.policy import Policy, load_policy
from headrace.recipes.arithmetic import tasks
from headrace.types import Example


def examples(policy: Policy, seed: int) -> Callable[[int], list[Example]]:
    """Worked problems, other ones for every seed."""
    records = iter(tasks(count=10_000, seed=seed))

    def some(n: int) -> list[Example]:
        return [worked(policy, record["prompt"], record["worked"]) for record in islice(records, n)]

    return some


def warm_start(
    policy: Policy,
    section: WarmstartSection,
    draw: Callable[[int], list[Example]],
    on_step: Callable[[int, float], None],
) -> None:
    """All steps of the section, each heard of."""
    warming = WarmStart(policy, section)
    for done in range(1, section.steps + 1):
        on_step(done, warming.step(draw(section.examples)))


def worked(policy: Policy, asked: str, solution: str) -> Example:
    ids = [policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (asked, solution)]
    tokens = np.array([*ids[0], *ids[1], policy.tokenizer.eos_token_id], np.int32)
    return tokens, np.arange(len(tokens)) >= len(ids[0])


@torch.no_grad()
def measure(policy: Policy, examples: list[Example]) -> tuple[float, float]:
    """Mean loss of the solutions' tokens, the end included, and the share that would be chosen greedily."""
    losses, hits = [], []
    for ids, learned in examples:
        tokens, num_asked = torch.from_numpy(ids.astype(np.int64)), int(np.count_nonzero(~learned))
        plan = PackedPlan([len(tokens)], policy.device)
        logits = policy.logits(policy.hidden(tokens, plan.positions, plan))[num_asked - 1 : -1]
        targets = tokens[num_asked:]
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        hits.append(logits.argmax(-1) == targets)
    return float(torch.cat(losses).mean()), float(torch.cat(hits).float().mean())


def test_the_demo_model_learns_from_worked_examples(tmp_path: Path):
    build_demo(tmp_path, seed=0)
    policy = load_policy(ModelSection(path=str(tmp_path), device="cpu"))
    unseen = examples(policy, seed=99)(40)
    before = measure(policy, unseen)
    heard: list[tuple[int, float]] = []
    section = WarmstartSection(steps=12, lr=2e-3, examples=24)
    warm_start(policy, section, examples(policy, seed=1), lambda done, loss: heard.append((done, loss)))
    after = measure(policy, unseen)
    assert [done for done, _ in heard] == list(range(1, 13))
    assert heard[0][1] == pytest.approx(before[0], rel=0.1)  # it is this loss that training is told about
    assert after[0] < 0.7 * before[0]
    assert after[1] > before[1] + 0.1


def test_only_the_solution_is_learned(make_policy: Callable[..., Policy]):
    """The prompt's own tokens carry no loss: with an empty solution only the end of the answer is left."""
    policy = make_policy(seed=3)
    example = worked(policy, "12+34=", "")
    heard: list[float] = []
    section = WarmstartSection(steps=1, examples=1)
    expected = measure(policy, [example])[0]
    warm_start(policy, section, lambda n: [example] * n, lambda _, loss: heard.append(loss))
    assert heard == pytest.approx([expected], rel=1e-5)


def test_the_rate_falls_over_the_last_quarter(make_policy: Callable[..., Policy]):
    policy = make_policy()
    seen: list[float] = []
    section = WarmstartSection(steps=8, lr=1e-3, examples=2)

    def spy(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen.append(optimizer.param_groups[0]["lr"])

    handle = register_optimizer_step_pre_hook(spy)
    try:
        warm_start(policy, section, examples(policy, seed=1), lambda done, loss: None)
    finally:
        handle.remove()
    assert seen == pytest.approx([1e-3] * 7 + [0.5e-3])


def test_the_same_examples_give_the_same_weights(make_policy: Callable[..., Policy]):
    policies = [make_policy(), make_policy()]
    for policy in policies:
        section = WarmstartSection(steps=3, examples=4)
        warm_start(policy, section, examples(policy, seed=1), lambda done, loss: None)
    one, other = (p.model.state_dict() for p in policies)
    start = make_policy().model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], start[name]) for name in one)
