"""A whole run of a mixture model: its experts are recorded and replayed without a setting that says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import Workshop, play, rows_of

from headrace.loop.loop import Loop
from headrace.place.place import Place
from headrace.policy.policy import Policy
from headrace.types import Item


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("loop.max_lag=2", "rollout.on_update=recompute", "learner.checkpoint_activations=true"),
        ("learner.kl_coef=0.1", "rollout.top_p=0.9", "rollout.prefill_tokens=5"),
    ],
    ids=["synchronous", "ahead", "with reference"],
)
async def test_a_mixture_is_trained(
    workshop: Workshop, make_policy: Callable[..., Policy], tmp_path: Path, settings: tuple[str, ...]
):
    make_policy("Qwen3Moe").save(tmp_path / "mixture")
    seen: list[Item] = []

    def watch(place: Place, loop: Loop) -> None:
        trainer, accumulate = loop.stages.ranks, loop.stages.ranks.accumulate
        trainer.accumulate = lambda items: (seen.extend(items), accumulate(items))  # type: ignore[method-assign, assignment]

    overrides = (f"run.dir={tmp_path / 'run'}", f"model.path={tmp_path / 'mixture'}", *settings)
    await play(workshop.config("mixture", *overrides, reward="dense"), watch)
    assert len(seen) >= 3 * 4 * 2
    for item in seen:
        t = item.trajectory
        assert t.replay is not None
        assert t.replay.routes is not None
        assert t.replay.routes.shape == (len(t.token_ids), 2, 2)
    first = rows_of(tmp_path / "run")[0]
    assert first.mismatch_mean < 1e-5
