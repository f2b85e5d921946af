"""Hosts of reward functions: what goes wrong with a verdict there is a failure of its answer here, too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from headrace.config import RewardSection
from headrace.place.inline import InlineCluster
from headrace.place.reward_hosts import RewardHosts
from headrace.reward.function import Setup
from headrace.types import Completion

FORGER = """
import os, sys
def score(completion):
    if completion.text == "forge":
        os.write(int(sys.argv[1]), b"nonsense" * 10)
    return 1.0
"""


def answer(text: str, **fields: Any) -> Completion:
    return Completion(prompt="", text=text, fields=fields, num_tokens=1, finish="eos")


async def test_wrong_replies_and_fields_that_cannot_be_pickled_are_failures(tmp_path: Path):
    (tmp_path / "forger.py").write_text(FORGER)
    setup, cluster = Setup(function=f"{tmp_path}/forger.py:score", timeout_s=30.0), InlineCluster()
    judge = RewardHosts(cluster, RewardSection(retries=0), lambda text: None, setup)
    await judge.start()
    try:
        asked = [answer("forge"), answer("good", cannot=lambda: 0), answer("good")]
        forged, cannot, good = [await asyncio.wait_for(judge.run(one), 30) for one in asked]
    finally:
        await judge._hosts[0].result().served._pool.close()  # type: ignore[attr-defined]
        cluster.device.close()
    assert (forged.failure, cannot.failure, good.reward) == ("reward_error", "reward_error", 1.0)
    assert "no verdict" in forged.detail
    assert "cannot be pickled" in cannot.detail
    assert judge.num_workers_replaced == 1
