"""Whether a run on a cluster survives: workers, ranks and whole nodes killed in the middle of each stage.

    python benchmarks/chaos.py                                   # everything, some fifteen minutes
    python benchmarks/chaos.py --victim node --during publish
    python benchmarks/chaos.py --first                           # a group is trained on with four of six answers

Three nodes of a Ray cluster on this machine (the first has the driver), 2 rollout workers, 2 learner ranks, 2 reward
processes, six steps of a tiny model. In the third step, when the stage begins, one is killed with SIGKILL; a node with
all that runs on it. Or one rollout worker is not wanted any more (scale): then no token may be sampled twice.
Groups move from one rollout worker to the other whenever that has nothing to do, however few they are.
Afterwards the books are audited, and every answer must have been trained on once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from headrace import api
from headrace.config_file import load_config
from headrace.ledger.files import scale
from headrace.ledger.ledger import Ledger
from headrace.ledger.recovery import Recovery
from headrace.loop.loop import Loop
from headrace.measured import Row
from headrace.place import elastic
from headrace.place.place import Place
from headrace.rollout import pool
from headrace.runs.audit import audit, books

VICTIMS, STAGES = ("rollout", "reward", "rank", "node", "scale"), ("rollout", "reward", "train", "publish")
STEPS, GROUPS, SAMPLES, AT_STEP = 6, 4, 4, 2
ANSWER_TOKENS = 96
FIRST = [f"rollout.samples={SAMPLES + 2}", f"buffer.first={SAMPLES}", 'rollout.stop=["e"]']
LATER_S = {"rollout": 0.15}  # when answers are half done
QUICK = {  # a dead node is noticed in a second or two
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}
REWARD = """
import time

def score(completion):
    time.sleep(0.02)
    return len(set(completion.text)) / 16
"""


class Nodes:
    """A cluster on this machine."""

    def __init__(self) -> None:
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": QUICK})
        self.others = [self._cluster.add_node(num_cpus=2) for _ in range(2)]
        ray.init(address=self._cluster.address, log_to_driver=False, runtime_env={"env_vars": environment})

    def kill(self, node_id: str) -> bool:
        """A node that is not the driver's, with all that runs there."""
        for node in self.others:
            if node.node_id == node_id:
                self.others.remove(node)
                self._cluster.remove_node(node, allow_graceful=False)
                return True
        return False

    def mend(self) -> None:
        """As many nodes as before."""
        while len(self.others) < 2:
            self.others.append(self._cluster.add_node(num_cpus=2))

    def close(self) -> None:
        """End all of them."""
        ray.shutdown()
        self._cluster.shutdown()


class Watcher(api.Watcher):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.step = 0

    def note(self, text: str) -> None:
        """Its first line."""
        self.notes.append(text.splitlines()[0])

    def row(self, row: Row) -> None:
        """How far the run is."""
        self.step = row.step


def victim_of(place: Place, kind: str, nodes: Nodes, run_dir: Path) -> None:
    """Kill one of the kind."""
    if kind == "scale":
        elastic.LOOK_S = 0.02  # the run is short
        scale(run_dir, 1)
        return
    hosts: Any = place.scorer._pool
    if kind == "node":
        everyone: list[Any] = [*place.pool.workers, *place.ranks.ranks]
        for worker in everyone:
            if not worker.pid:
                worker.wait_ready()
        away = Counter(worker.node for worker in everyone if worker.node in {n.node_id for n in nodes.others})
        nodes.kill(away.most_common(1)[0][0])
        return
    judging = [host.result() for host in hosts._hosts]
    worker: Any = {"rollout": place.pool.workers, "rank": place.ranks.ranks, "reward": judging}[kind][0]
    if not worker.pid:
        worker.wait_ready()
    os.kill(worker.pid, signal.SIGKILL)


def strike(place: Place, loop: Loop, stage: str, harm: Callable[[], None], watcher: Watcher) -> None:
    """Do the harm once, when the stage begins in the step after AT_STEP."""
    done = threading.Event()

    def before(work: Callable[..., Any]) -> Callable[..., Any]:
        def worked(*args: Any, **named: Any) -> Any:
            if watcher.step >= AT_STEP and not done.is_set():
                done.set()
                threading.Timer(LATER_S.get(stage, 0.0), harm).start()
                time.sleep(0.005)
            return work(*args, **named)

        return worked

    owner, name = {
        "rollout": (place.pool, "start"),
        "reward": (place.scorer, "score"),
        "train": (place.ranks, "accumulate"),
        "publish": (place.publisher, "deliver"),
    }[stage]
    setattr(owner, name, before(getattr(owner, name)))


def moving(moved: list[int]) -> None:
    """Let workers take over few groups, too, and count those."""
    relieve = pool.RolloutPool._relieve

    def counted(self: Any, idle: Any) -> None:
        before = {id(member): len(member.moving) for member in self._members.values()}
        relieve(self, idle)
        moved.extend(len(m.moving) for m in self._members.values() if len(m.moving) > before.get(id(m), 0))

    pool.MOVE_ANSWERS, pool.IDLE_S = 2, 0.0
    pool.RolloutPool._relieve = counted  # type: ignore[method-assign]


def survive(directory: Path, victim: str, stage: str, nodes: Nodes, settings: list[str]) -> str:
    run_dir, watcher, struck = directory / f"{victim}-{stage}", Watcher(), []
    config = load_config(
        None,
        [
            f"run.dir={run_dir}",
            f"model.path={directory / 'model'}",
            "model.device=cpu",
            f"prompts.source={directory / 'prompts.jsonl'}",
            "prompts.chat=never",
            "prompts.eval_count=2",
            f"rollout.samples={SAMPLES}",
            f"rollout.max_new_tokens={ANSWER_TOKENS}",
            f"reward.function={directory / 'rewards.py'}:score",
            "reward.workers=2",
            "reward.cache=false",
            "buffer.drop=nothing",
            f"loop.steps={STEPS}",
            f"loop.groups_per_step={GROUPS}",
            "loop.max_lag=1",
            "recovery.every_steps=4",
            "place.cluster=ray",
            "rollout.workers=2",
            "learner.ranks=2",
            *settings,
        ],
    )
    build = Place.loop

    async def loop(place: Place, *args: Any) -> Loop:
        made = await build(place, *args)
        if not struck:
            struck.append(place)
            strike(place, made, stage, lambda: victim_of(place, victim, nodes, run_dir), watcher)
        return made

    Place.loop = loop  # type: ignore[method-assign]
    started = time.perf_counter()
    try:
        summary = api.train(config, watcher)
    finally:
        Place.loop = build  # type: ignore[method-assign]
    assert summary["steps"] == STEPS, summary
    assert audit(run_dir) == [], audit(run_dir)
    found = books(run_dir)
    if settings:
        assert found.trained.trajectories >= STEPS * GROUPS * SAMPLES, found
        assert found.dropped["late"].trajectories, found
    else:
        assert found.trained.trajectories == STEPS * GROUPS * SAMPLES, found
    with Ledger.open(run_dir) as ledger:
        trained = [pair for _, groups in Recovery(ledger).steps_after(0) for pair in groups]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS, "a group was trained on twice"
    redone = found.dropped["redone"].tokens if "redone" in found.dropped else 0
    assert watcher.notes, "nothing was noticed"
    if victim == "scale":
        assert any("go on elsewhere" in note for note in watcher.notes), watcher.notes
        assert redone == 0, f"{redone} tokens of a worker that only left were sampled twice"
    return f"{time.perf_counter() - started:.0f} s | {redone} | {watcher.notes[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victim", choices=VICTIMS)
    parser.add_argument("--during", choices=STAGES)
    parser.add_argument("--first", action="store_true", help="with buffer.first, and answers of different lengths")
    arguments = parser.parse_args()
    settings = FIRST if arguments.first else []
    from cpu_model import build, write_prompts  # torch comes after Ray's own settings

    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        build(directory / "model", endless=True)
        write_prompts(directory / "prompts.jsonl")
        (directory / "rewards.py").write_text(REWARD)
        print("| killed | during | it took | tokens redone | the user was told |\n|---|---|---|---|---|", flush=True)
        nodes, moved = Nodes(), list[int]()
        moving(moved)
        try:
            for victim in [arguments.victim] if arguments.victim else VICTIMS:
                for stage in [arguments.during] if arguments.during else STAGES:
                    nodes.mend()
                    print(f"| {victim} | {stage} | {survive(directory, victim, stage, nodes, settings)} |", flush=True)
            print(f"{sum(moved)} groups moved")
        finally:
            nodes.close()


if __name__ == "__main__":
    main()
