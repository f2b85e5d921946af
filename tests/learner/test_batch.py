from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hand_made import trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.learner.batch import Packer, balanced, pack
from headrace.policy.policy import Policy
from headrace.types import FinishReason, Item, Replay, Span, Turn

CPU = torch.device("cpu")
lengths = st.lists(st.integers(2, 40), min_size=1, max_size=30)


def items_of(sizes: list[int]) -> list[Item]:
    """Sequences of these many tokens, one of them the prompt's, with nothing in common."""
    return [
        Item(trajectory=trajectory(serial=i, prompt=(i,), answer=[7] * (size - 1)), advantage=float(i))
        for i, size in enumerate(sizes)
    ]


def size(item: Item) -> int:
    return len(item.trajectory.token_ids)


def sizes_of(batches: list[list[Item]]) -> list[list[int]]:
    return [[size(item) for item in batch] for batch in batches]


def support(*subsets: list[int]) -> Replay:
    offsets = np.cumsum([0, *map(len, subsets)])
    return Replay(support_ids=np.concatenate(subsets).astype(np.int32), support_offsets=offsets.astype(np.int64))


def experts(*shape: int, expert: int = 1) -> Replay:
    return Replay(routes=np.full(shape, expert, np.uint8))


def test_pack_by_hand():
    first = trajectory(serial=0, prompt=(5, 6), answer=(7, 1), logprobs=(-0.5, -0.25), replay=support([7, 9], [1]))
    second = trajectory(
        serial=1, prompt=(4,), answer=(8, 9, 1), logprobs=(-1, -2, -3), replay=support([8], [9], [1, 2])
    )
    ref = np.array([-0.125, -0.25], np.float32), np.array([-1, -1, -1], np.float32)
    batch = pack(
        [
            Item(trajectory=first, advantage=0.5, reference=ref[0]),
            Item(trajectory=second, advantage=-2.0, reference=ref[1]),
        ],
        CPU,
    )
    assert batch.token_ids.tolist() == [5, 6, 7, 1, 4, 8, 9, 1]
    assert batch.plan.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch.at.tolist() == [2, 3, 5, 6, 7]
    assert batch.behaviour.tolist() == [-0.5, -0.25, -1, -2, -3]
    assert batch.advantage.tolist() == [0.5, 0.5, -2, -2, -2]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 1, 1]
    assert batch.reference is not None
    assert batch.reference.tolist() == [-0.125, -0.25, -1, -1, -1]
    assert batch.support is not None
    assert batch.support.ids.tolist() == [7, 9, 1, 8, 9, 1, 2]
    assert batch.support.offsets.tolist() == [0, 2, 3, 4, 5, 7]


def test_turns_of_an_environment_are_context_not_samples():
    """Sampled tokens need not be the tail: what lies between them is seen and not trained on."""
    whole = trajectory(prompt=(5,), answer=(7, 8, 9, 1))
    sampled = np.array([False, True, False, False, True])
    fields = {name: getattr(whole, name) for name in whole.__dataclass_fields__}
    span = type(whole.spans[0])
    spans = (span(version=0, start=1, end=2), span(version=0, start=4, end=5))
    turned = type(whole)(**(fields | {"sampled": sampled, "spans": spans}))
    batch = pack([Item(trajectory=turned, advantage=1.0)], CPU)
    assert batch.at.tolist() == [1, 4]
    assert batch.sequence_ids.tolist() == [0, 0]


@pytest.mark.parametrize("broken", [None, Replay(), support([7, 9], [8])])
def test_missing_support_is_an_error(broken: Replay | None):
    """Three tokens were sampled: without the subset of each of them the loss would be of another distribution."""
    whole = trajectory(serial=0, answer=(7, 8, 1), replay=support([7, 9], [8], [1, 2]))
    lacking = trajectory(serial=1, answer=(7, 8, 1), replay=broken)
    with pytest.raises(ValueError, match="1:p1/0 lacks the sampling support"):
        pack([Item(trajectory=t, advantage=1.0) for t in (whole, lacking)], CPU)


def test_routes_are_laid_end_to_end(make_policy: Callable[..., Policy]):
    routers, rng = make_policy("Qwen3Moe").routers, np.random.default_rng(0)
    routes = [rng.integers(0, 4, (2 + n, 2, 2)).astype(np.uint8) for n in (3, 1)]
    answers = [trajectory(answer=[7] * (len(r) - 2), replay=Replay(routes=r)) for r in routes]
    batch = pack([Item(trajectory=t, advantage=1.0) for t in answers], CPU, routers)
    assert batch.routes is not None
    np.testing.assert_array_equal(batch.routes.numpy(), np.concatenate(routes))
    assert pack([Item(trajectory=t, advantage=1.0) for t in answers], CPU, make_policy().routers).routes is None


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (None, "1:p1/0 lacks the expert routing"),
        (Replay(), "1:p1/0 lacks the expert routing"),
        (experts(4, 2, 2), r"1:p1/0 has experts of shape \[4, 2, 2\]; .* are \[5, 2, 2\]"),
        (experts(5, 1, 2), r"1:p1/0 has experts of shape \[5, 1, 2\]; .* are \[5, 2, 2\]"),
        (experts(5, 2, 3), r"1:p1/0 has experts of shape \[5, 2, 3\]; .* are \[5, 2, 2\]"),
        (experts(5, 2, 2, expert=4), "1:p1/0 names expert 4; the model has 4"),
    ],
)
def test_missing_routes_are_an_error(make_policy: Callable[..., Policy], broken: Replay | None, message: str):
    whole = trajectory(serial=0, answer=(7, 8, 1), replay=experts(5, 2, 2))
    lacking = trajectory(serial=1, answer=(7, 8, 1), replay=broken)
    with pytest.raises(ValueError, match=message):
        pack([Item(trajectory=t, advantage=1.0) for t in (whole, lacking)], CPU, make_policy("Qwen3Moe").routers)


def test_packer_by_hand():
    packer = Packer(budget=10)
    sizes = [4, 6, 1, 25, 3, 3, 3, 3]
    full = packer.add(items_of(sizes))
    assert sizes_of(full) == [[4, 6], [1], [25], [3, 3, 3]]
    assert sizes_of(packer.rest()) == [[3]]
    assert packer.rest() == []


@settings(deadline=None)
@given(sizes=lengths, budget=st.integers(2, 60), data=st.data())
def test_packer_cuts_alike_however_groups_come(sizes: list[int], budget: int, data: st.DataObject):
    items = items_of(sizes)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=6)))
    at_once, bit_by_bit = Packer(budget), Packer(budget)
    whole = at_once.add(items) + at_once.rest()
    parts = [batch for a, b in pairwise([0, *cuts, len(items)]) for batch in bit_by_bit.add(items[a:b])]
    assert parts + bit_by_bit.rest() == whole
    assert [item for batch in whole for item in batch] == items
    assert all(sum(map(size, batch)) <= budget or len(batch) == 1 for batch in whole)
    # nothing is cut earlier than it must be
    assert all(sum(map(size, a)) + size(b[0]) > budget for a, b in pairwise(whole))


@settings(deadline=None)
@given(sizes=lengths, budget=st.integers(2, 60))
def test_balanced_holds_everything_once_within_the_budget(sizes: list[int], budget: int):
    items = items_of(sizes)
    batches = balanced(items, budget)
    assert sorted(item.trajectory.id for batch in batches for item in batch) == sorted(i.trajectory.id for i in items)
    assert all(batches)
    assert all(sum(map(size, batch)) <= budget or len(batch) == 1 for batch in batches)


@settings(deadline=None)
@given(sizes=lengths, budget=st.integers(40, 200))
def test_balanced_is_balanced_and_not_wasteful(sizes: list[int], budget: int):
    loads = [sum(map(size, batch)) for batch in balanced(items_of(sizes), budget)]
    assert max(loads) - min(loads) <= max(sizes)
    assert len(loads) <= max(1, 2 * -(-sum(sizes) // budget))


def test_balanced_by_hand():
    assert sizes_of(balanced(items_of([2, 9, 5, 4]), budget=11)) == [[9, 2], [5, 4]]
    assert sizes_of(balanced(items_of([2, 9, 5, 4]), budget=10)) == [[9], [5], [4, 2]]
    assert sizes_of(balanced(items_of([2, 9, 5, 4]), budget=20)) == [[9, 5, 4, 2]]


def test_a_sequence_beyond_the_budget_stands_alone_and_leaves_the_rest_together():
    sizes = sizes_of(balanced(items_of([30, *[2] * 20]), budget=10))
    assert [30] in sizes
    rest = [batch for batch in sizes if batch != [30]]
    assert sum(map(sum, rest)) == 40
    assert all(sum(batch) <= 10 for batch in rest)
    assert len(rest) <= 5


def test_a_sampled_token_needs_a_token_before_it():
    whole = trajectory(prompt=(5,), answer=(7, 1))
    rootless = replace(whole, sampled=np.array([True, False, True]), spans=(Span(version=0, start=0, end=2),))
    with pytest.raises(ValueError, match="0:p0/0 begins with a sampled token"):
        pack([Item(trajectory=whole, advantage=0.0), Item(trajectory=rootless, advantage=0.0)], CPU)


def test_the_answers_of_a_group_take_the_temperatures_in_turns():
    answers = [trajectory(serial=0, prompt=(5,), answer=(7,) * size) for size in (2, 3, 1)]
    items = [Item(trajectory=replace(answer, index=i), advantage=1.0) for i, answer in enumerate(answers)]
    batch = pack(items, CPU, None, (0.5, 2.0))
    assert batch.temperature.tolist() == [0.5] * 2 + [2.0] * 3 + [0.5]
    assert pack(items[::2], CPU, None, (0.5, 2.0)).temperature.tolist() == [0.5] * 3
    turned = replace(items[1].trajectory, turns=(Turn(start=1, end=4, finish=FinishReason.EOS, temperature=1.5),))
    one_for_all = pack([items[0], replace(items[1], trajectory=turned)], CPU, None, 0.5)
    assert one_for_all.temperature.tolist() == [0.5] * 5
