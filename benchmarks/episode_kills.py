"""Whether episodes survive kill -9: runs with an environment and with agents, killed at random instants and resumed.

    python benchmarks/episode_kills.py                                    # everything, some fifteen minutes
    python benchmarks/episode_kills.py --kind command --max-lag 1 --kills 20 --seed 3
    python benchmarks/episode_kills.py --apart            # the episodes are in a process of their own, as with a GPU
    python benchmarks/episode_kills.py --ray --kills 4    # the driver is killed; its workers are those of Ray

Each run is killed with SIGKILL up to three times, at instants between its start and its end, and resumed at once. It
must come to its end; each time it died and at the end its books are audited. A witness outside of the books writes down
every turn that is asked of the engines: none that the dead process had journaled may be asked for again. All of those
turns are in the final record, unchanged, or were booked as crashed. Processes that the dead one had started end by
themselves. With `loop.max_lag = 0` the weights are those of an unbroken run, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headrace import api
from headrace.config_file import load_config
from headrace.errors import RunError
from headrace.ledger.files import SUMMARY
from headrace.ledger.journal import read_partials, read_trajectories
from headrace.ledger.ledger import Amount, Ledger
from headrace.ledger.recovery import Recovery
from headrace.place import place
from headrace.place.place import Place
from headrace.policy.demo import chat_tokenizer, write_random
from headrace.runs.audit import audit, books
from headrace.types import Order, Trajectory

KINDS = ("environment", "function", "command")
ON_RAY = ("place.cluster=ray", "rollout.workers=2")
APART = "apart"  # among the settings: the episodes have a process of their own
STEPS, GROUPS, SAMPLES, TURNS = 4, 3, 3, 3
MOST_KILLS = 3  # of one run
END_S = 10.0  # for what a dead process had started
SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 256}
PRELOADED = ["headrace.api", "headrace.serve.agent", "transformers.models.qwen3.modeling_qwen3"]
Key = tuple[int, int]  # a group's serial, and the index of an episode in it

# Any text is an answer. How long a reply takes, what it says and what it is worth follow from the text alone.
USER_CODE = f"""
import asyncio, json, os, sys, time, urllib.request

def number(text):
    return sum(map(ord, text)) % 97 / 97

class Echo:
    def start(self, prompt):
        self.worth = []
        return f"say something about {{prompt.id}}"

    async def reply(self, text):
        await asyncio.sleep(number(text) / 10)
        self.worth.append(number(text))
        if len(self.worth) == {TURNS}:
            from headrace import Done
            raise Done("enough", reward=sum(self.worth))
        return f"I heard {{len(text)}} characters: {{number(text):.2f}}"

def agent(task, base_url, api_key):
    messages, worth = [{{"role": "user", "content": task["prompt"]}}], 0.0
    for _ in range({TURNS}):
        body = json.dumps({{"model": "m", "messages": messages}}).encode()
        headers = {{"Authorization": f"Bearer {{api_key}}"}}
        with urllib.request.urlopen(urllib.request.Request(f"{{base_url}}/chat/completions", body, headers)) as reply:
            said = json.load(reply)["choices"][0]["message"]
        text = said["content"] or ""
        time.sleep(number(text) / 10)
        worth += number(text)
        messages += [said, {{"role": "user", "content": f"I heard {{len(text)}} characters: {{number(text):.2f}}"}}]
    return worth

if __name__ == "__main__":
    reward = agent(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    print(json.dumps({{"reward": reward}}))
"""


def settings(directory: Path, name: str, kind: str, max_lag: int, more: Sequence[str] = ()) -> list[str]:
    """Of a run in `name`; what it needs is made if it is not there."""
    code, prompts = directory / "user_code.py", directory / "prompts.jsonl"
    if not prompts.exists():
        write_random(directory / "model", 0, chat_tokenizer(), **SMALL)
        code.write_text(USER_CODE)
        records = ({"id": f"p{i}", "prompt": f"Say {i}."} for i in range(60))
        prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = f"{shlex.quote(sys.executable)} -S -E {shlex.quote(str(code))}"
    player = {
        "environment": f"episode.environment={code}:Echo",
        "function": f"episode.agent={code}:agent",
        "command": f"episode.agent={command}",
    }
    return [
        f"run.dir={directory / name}",
        f"model.path={directory / 'model'}",
        "model.device=cpu",
        "model.threads=1",
        "model.exact=true",
        f"prompts.source={prompts}",
        "prompts.eval_count=1",
        player[kind],
        f"rollout.samples={SAMPLES}",
        "rollout.max_new_tokens=8",
        "warmstart.steps=0",
        "learner.lr=1e-3",
        f"loop.steps={STEPS}",
        f"loop.groups_per_step={GROUPS}",
        f"loop.max_lag={max_lag}",
        "recovery.every_steps=2",
        *more,
    ]


# ---- in a process of its own


def live(words: list[str], run: Path, log: Path, witness: Path) -> None:
    """Train, or resume what is there. Every turn that is asked of the engines is written to `witness`."""
    file, told = (os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND) for path in (log, witness))
    os.dup2(file, 1)
    os.dup2(file, 2)
    build = Place.desk

    def desk(of: Place) -> Any:
        made = build(of)

        def sample(order: Order) -> Any:
            if order.counted:
                os.write(told, f"{order.serial} {order.indices[0]} {order.turn}\n".encode())
            return made.sample(order)

        return replace(made, sample=sample)

    Place.desk = desk  # type: ignore[method-assign]
    if APART in words:
        place.resolve_device = lambda name: torch.device("cuda")
    if (run / "config.toml").exists():
        api.resume(run)
    else:
        api.train(load_config(None, [word for word in words if word != APART]))


# ---- what a dead run left


@dataclass(eq=False)
class Left:
    """What the ledger has of a run that was killed."""

    under_way: dict[Key, Trajectory] = field(default_factory=dict)
    over: dict[Key, Trajectory] = field(default_factory=dict)  # of groups that no restart generates again


def left_by(run: Path) -> Left:
    """The books balance also where it died."""
    try:
        ledger = Ledger.open(run)
    except RunError:  # it was just starting
        return Left()
    assert audit(run, finished=is_finished(run)) == [], audit(run)
    with ledger:
        serials = [attempt.serial for attempt in Recovery(ledger).attempts(state="open")]
        partials = {(s, t.index): t for s in serials for t in read_partials(ledger.connection, s) if t.turns}
        closed = "EXISTS (SELECT 1 FROM attempts a WHERE a.serial = t.serial AND a.number = t.attempt "
        over = read_trajectories(ledger.connection, f"{closed} AND a.state = 'closed')", ())
        serial_of = dict(ledger.read("SELECT id, serial FROM trajectories"))
    return Left(partials, {(serial_of[t.id], t.index): t for t in over})


def assert_not_asked_again(left: Left, witness: Path) -> None:
    """`witness` is of the life after."""
    if not witness.exists():
        return
    journaled = {key: len(t.turns) for key, t in (left.under_way | left.over).items()}
    for line in witness.read_text().splitlines():
        serial, index, turn = map(int, line.split())
        assert turn > journaled.get((serial, index), 0), f"turn {turn} of {serial}/{index} was sampled again"


def assert_begins_with(after: Trajectory, before: Trajectory) -> None:
    """The turns of `before` are in `after` as they were sampled."""
    end, spans = before.turns[-1].end, len([span for span in before.spans if span.end <= before.turns[-1].end])
    for name in ("token_ids", "sampled", "logprobs"):
        assert getattr(after, name)[:end].tobytes() == getattr(before, name)[:end].tobytes(), (name, before.id)
    assert after.spans[:spans] == before.spans[:spans], before.id
    for later, turn in zip(after.turns, before.turns, strict=False):
        assert (later.start, later.end, later.text) == (turn.start, turn.end, turn.text), before.id
    assert len(after.turns) >= len(before.turns), before.id


def assert_kept(run: Path, lefts: list[Left]) -> int:
    """Every turn that was journaled at some death is in the final record, or crashed; returns how many there are."""
    last, num_turns, gone = left_by(run).over, 0, {}
    with Ledger.open(run) as ledger:
        crashed = {attempt.serial for attempt in Recovery(ledger).attempts(state="crashed")}
    for left in lefts:
        for key, before in (left.over | left.under_way).items():
            if key in last:
                assert_begins_with(last[key], before)
                num_turns += len(before.turns) * (key in left.under_way)
            else:
                assert key[0] in crashed, f"{key} is gone"
                gone[key] = before.num_sampled_tokens
    booked = books(run).dropped.get("crashed", Amount()).tokens
    assert sum(gone.values()) <= booked, f"{sum(gone.values())} journaled tokens are gone, {booked} booked as crashed"
    return num_turns


def assert_whole(run: Path) -> None:
    """Of a run that is finished: nothing is under way, and every group was trained on once or dropped."""
    found = books(run)
    assert found.in_flight == found.buffered == Amount(), found
    with Ledger.open(run) as ledger:
        recovery = Recovery(ledger)
        assert [row.step for row in ledger.rows()] == list(range(1, STEPS + 1))
        trained = [serial for _, groups in recovery.steps_after(0) for serial, _ in groups]
        assert len(trained) == len(set(trained)) == STEPS * GROUPS, "a group was trained on twice"
        assert not recovery.attempts(state="open")
        states = "SELECT serial FROM trajectories UNION SELECT serial FROM attempts WHERE state = 'crashed'"
        known = {serial for (serial,) in ledger.read(states)}
    assert known == set(range(max(known) + 1)), "a prompt was left out"


# ---- processes


def started_by(pid: int) -> dict[int, str]:
    """All that it and its children have started, with the time of their start."""
    parents: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(path.parent.name)] = int(words[1]), words[19]
    found, new = dict[int, str](), {pid}
    while new:
        new = {child for child, (parent, _) in parents.items() if parent in new}
        found |= {child: parents[child][1] for child in new}
    return found


def is_alive(pid: int, began: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return words[19] == began and words[0] != "Z"


def kill(process: Any) -> dict[int, str]:
    """Returns what it had started. It is stopped first: what it starts in between would be missed."""
    os.kill(process.pid, signal.SIGSTOP)
    children = started_by(process.pid)
    process.kill()
    process.join()
    return children


def assert_gone(children: dict[int, str]) -> None:
    until = time.monotonic() + END_S
    while alive := [pid for pid, began in children.items() if is_alive(pid, began)]:
        assert time.monotonic() < until, f"these processes outlive the run that started them: {alive}"
        time.sleep(0.02)


# ---- all together


@dataclass
class Tally:
    """Of all runs of one kind."""

    runs: int = 0
    kills: int = 0
    same: int = 0  # weights
    turns: int = 0  # journaled, of episodes under way, that the final record has
    lost_tokens: int = 0  # of turns that were being sampled
    processes: int = 0  # started by those that were killed

    def __str__(self) -> str:
        counts = self.kills, self.runs, self.same, self.turns, self.lost_tokens, self.processes
        return " | ".join(f"{count:,}" for count in counts)


def is_finished(run: Path) -> bool:
    return (run / SUMMARY).exists() and json.loads((run / SUMMARY).read_text())["finished"]


def survive(words: list[str], run: Path, delays_s: list[float], tally: Tally, of_turns: bool = False) -> float:
    """One run, killed after each of these many seconds of a life; the last one goes on to the end.

    With `of_turns` seconds count from a life's first turn: the workers of a cluster take long to start. Returns the
    seconds of the last life.
    """
    start = multiprocessing.get_context("forkserver").Process
    log, lefts, children = run.with_suffix(".log"), list[Left](), dict[int, str]()
    for life, delay_s in enumerate([*delays_s, 300.0]):
        witness = run.with_suffix(f".turns{life}")
        process = start(target=live, args=(words, run, log, witness), daemon=True)
        process.start()
        while of_turns and process.exitcode is None and not (witness.exists() and witness.stat().st_size):
            process.join(0.01)
        began = time.perf_counter()
        process.join(delay_s)
        lived_s = time.perf_counter() - began
        hit = process.exitcode is None
        if hit:
            assert life < len(delays_s), f"{run} did not end"
            children |= kill(process)
        else:
            assert process.exitcode == 0, log.read_text()
        if lefts:
            assert_not_asked_again(lefts[-1], witness)
        if not hit:
            break
        tally.kills += 1
        lefts.append(left_by(run))
        if is_finished(run):  # killed on its way out
            break
    assert_whole(run)
    tally.turns += assert_kept(run, lefts)
    assert_gone(children)
    with Ledger.open(run) as ledger:
        tally.lost_tokens += sum(restart.lost_tokens for restart in ledger.restarts())
    tally.processes += len(children)
    tally.runs += 1
    return lived_s


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def soak(
    directory: Path,
    kind: str,
    max_lag: int,
    num_kills: int,
    seed: int,
    more: Sequence[str] = (),
    say: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Runs until there were so many kills."""
    rng, name, tally = random.Random(f"{kind} {max_lag} {seed}"), f"{kind}-{max_lag}", Tally()
    whole, context = directory / f"{name}-whole", multiprocessing.get_context("forkserver")
    first = context.Process()  # what all of them import takes seconds, once
    first.start()
    first.join()
    whole_s = survive(settings(directory, whole.name, kind, max_lag, more), whole, [], Tally(), bool(more))
    while tally.kills < num_kills:
        run = directory / f"{name}-{tally.runs}"
        delays_s = [rng.uniform(0, whole_s) for _ in range(min(MOST_KILLS, num_kills - tally.kills))]
        survive(settings(directory, run.name, kind, max_lag, more), run, delays_s, tally, bool(more))
        tally.same += weights(run) == weights(whole)
        say(tally)
    if kind == "environment" and max_lag == 0:
        assert tally.same == tally.runs
    return tally


@contextmanager
def cluster(wanted: bool) -> Iterator[Sequence[str]]:
    """Settings of runs on a Ray cluster of this machine that outlives them; none if it is not `wanted`."""
    if not wanted:
        yield ()
        return
    import ray

    own = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    told = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 200_000_000}
    context = ray.init(address="local", num_cpus=1, runtime_env={"env_vars": own}, **told)
    try:
        os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]  # for the processes that train
        yield ON_RAY
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--max-lag", type=int, choices=(0, 1, 2))
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--apart", action="store_true", help="the episodes are in a process of their own")
    parser.add_argument("--ray", action="store_true", help="engines and learner are workers of a Ray cluster")
    parser.add_argument("--keep", type=Path, help="keep the runs there")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    print("| run | `loop.max_lag` | kills | runs | same weights | turns kept | tokens lost | processes |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary, cluster(options.ray) as more:
        more = [*more, *[APART] * options.apart]
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for kind in [options.kind] if options.kind else KINDS:
            for max_lag in (0, 1) if options.max_lag is None else (options.max_lag,):
                known = options.kills, options.seed, more
                tally = soak(directory, kind, max_lag, *known, say=lambda t: print(t, file=sys.stderr))
                print(f"| {kind} | {max_lag} | {tally} |", flush=True)


if __name__ == "__main__":
    main()
