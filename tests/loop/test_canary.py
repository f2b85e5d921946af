"""One prompt, scored on both sides after every update."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tiny_runs import Workshop, play, rank_of, rows_of, same_bits, weights

from headrace import api
from headrace.errors import ModelError
from headrace.loop.loop import Loop
from headrace.place.place import Place
from headrace.runs.audit import audit


def spoil_step(place: Place, loop: Loop, step: int, value: float) -> None:
    """The learner's weights are copied for the engine, and the copy of one step is damaged."""
    forward, offer = rank_of(place).policy.logits, loop.stages.publisher.offer
    damaged = False

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found = forward(hidden)
        return found * value if damaged else found

    def damaging(version: int) -> None:
        nonlocal damaged
        damaged = version >= step
        offer(version)

    rank_of(place).policy.logits = logits  # type: ignore[method-assign]
    loop.stages.publisher.offer = damaging  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [1.5, float("nan")])
def test_a_publication_that_goes_wrong_stops_the_run(workshop: Workshop, value: float):
    name = f"sick{value}"
    with pytest.raises(ModelError, match=r"after step 2 .* is not what is trained"):
        asyncio.run(play(workshop.config(name, reward="dense"), lambda place, loop: spoil_step(place, loop, 2, value)))
    run = workshop.directory / name
    assert [row.step for row in rows_of(run)] == [1]
    assert audit(run) == []
    api.train(workshop.config(f"healthy{value}", reward="dense"))
    assert api.resume(run)["finished"]  # with an engine that is well again
    assert same_bits(weights(run), weights(workshop.directory / f"healthy{value}"))
