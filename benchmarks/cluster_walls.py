"""Whether triage and the simulator are right on a cluster: four runs on Ray that are built to wait for one thing.

    python benchmarks/cluster_walls.py                 # about seven minutes on two quiet cores
    python benchmarks/cluster_walls.py --only reward

Two rollout workers and one learner. The first steps of each run are trained, triage names what holds it back, and the
simulator says how long a step takes. Only then is the run resumed, and its next steps are measured. In `sync` every
worker takes 2 s longer to fetch new weights, in `slow worker` one of the two waits 0.15 s in every burst of its engine,
in `reward` a verdict takes 0.2 s, and `train` has long prompts in small passes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cpu_model import build

from headrace import api
from headrace.config_file import load_config
from headrace.insight.triage import Bottleneck, Triage
from headrace.ledger.ledger import Ledger
from headrace.place import place
from headrace.place.rollout_worker import RolloutWorker
from headrace.publish.object_store_ray import ObjectStoreReceiver, ObjectStoreSender

REWARD = Path(__file__).with_name("insight_reward.py")
SEEN, STEPS, SKIPPED = 10, 22, 2  # steps before the prediction, in all, and not counted after it
GROUPS, SAMPLES, ANSWER = 8, 4, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run that is built to wait for one thing.

    Example:
        Case(bottleneck=Bottleneck.SYNC, fetch_s=2.0)
    """

    bottleneck: Bottleneck
    fetch_s: float = 0.0
    burst_s: float = 0.0  # of one of the two workers
    reward_ms: int = 1
    prompt_tokens: int = 16
    settings: tuple[str, ...] = ()


CASES = {
    "sync": Case(bottleneck=Bottleneck.SYNC, fetch_s=2.0),
    "slow worker": Case(bottleneck=Bottleneck.GENERATION, burst_s=0.15),
    "reward": Case(bottleneck=Bottleneck.REWARD, reward_ms=200, settings=("reward.workers=2",)),
    "train": Case(
        bottleneck=Bottleneck.LEARNER,
        prompt_tokens=192,
        settings=("learner.micro_batch_tokens=384", "rollout.max_new_tokens=8"),
    ),
}


class SlowReceiver(ObjectStoreReceiver):
    """Takes longer for every version but the first."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def fetch(self, ticket: Any, timeout_s: float) -> Any:
        time.sleep(self._seconds if ticket.version else 0.0)
        return super().fetch(ticket, timeout_s)


def sampler(seconds: float, taken: Path, *of_worker: Any) -> RolloutWorker:
    """A rollout worker; the engine of the first one waits in every burst."""
    worker = RolloutWorker(*of_worker)
    with suppress(FileExistsError):
        taken.mkdir()
        advance = worker.engine.advance

        def slowly() -> Any:
            time.sleep(seconds)
            return advance()

        worker.engine.advance = slowly  # type: ignore[method-assign]
    return worker


def settings(directory: Path, name: str, case: Case) -> list[str]:
    rng, letters = np.random.default_rng(0), list("abcdefghijklmnopqrstuvwxyz")
    lengths = rng.integers(case.prompt_tokens // 2, case.prompt_tokens * 3 // 2, STEPS * GROUPS * 4, endpoint=True)
    prompts = directory / f"{case.prompt_tokens}.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "".join(rng.choice(letters, n))}) + "\n" for n in lengths))
    return [
        f"run.dir={directory / name}",
        f"model.path={directory / 'model'}",
        "model.device=cpu",
        "model.threads=1",
        "warmstart.steps=0",
        f"prompts.source={prompts}",
        "prompts.chat=never",
        "prompts.eval_count=1",
        f"rollout.samples={SAMPLES}",
        f"rollout.max_new_tokens={ANSWER}",
        "rollout.workers=2",
        f"reward.function={REWARD}:takes_{case.reward_ms}_ms",
        "reward.cache=false",
        "buffer.drop=nothing",
        "place.cluster=ray",
        f"loop.steps={SEEN}",
        f"loop.groups_per_step={GROUPS}",
        *case.settings,
    ]


def measured(directory: Path, name: str, case: Case) -> str:
    """A line of the table."""
    run = directory / name
    place._ends = lambda *of_run: (ObjectStoreSender, partial(SlowReceiver, case.fetch_s))
    make = partial(sampler, case.burst_s, run.with_suffix(".taken")) if case.burst_s else RolloutWorker
    place.Place.__init__.__kwdefaults__["make_sampler"] = make  # type: ignore[index]
    api.train(load_config(None, settings(directory, name, case)))
    found = Triage(run)
    predicted_s, said = found.simulated_s, str(found.bottleneck)
    with suppress(FileNotFoundError):
        run.with_suffix(".taken").rmdir()
    api.resume(run, overrides=[f"loop.steps={STEPS}"])
    with Ledger.open(run) as ledger:
        seconds = [row.wall_s for row in ledger.rows()]
    seen_s, step_s = statistics.fmean(seconds[SKIPPED:SEEN]), statistics.fmean(seconds[SEEN + SKIPPED :])
    off = f"{predicted_s / step_s - 1:+.0%}"
    return f"| {name} | {case.bottleneck} | {said} | {seen_s:.2f} s | {predicted_s:.2f} s | {step_s:.2f} s | {off} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--keep", type=Path, help="keep the runs there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.keep or Path(scratch)
        build(directory / "model", endless=True)
        print("| run | built to wait for | named | steps seen | predicted step | measured step | off by |")
        print("|---|---|---|---|---|---|---|")
        for name, case in CASES.items():
            if arguments.only in (None, name):
                print(measured(directory, name, case), flush=True)


if __name__ == "__main__":
    main()
