"""Whether triage and the simulator are right: runs with different bottlenecks, predicted and then measured.

    python benchmarks/insight.py walls                # trains six short runs, about four minutes on two quiet cores
    python benchmarks/insight.py speed                # 1,024 GPUs for 100 steps
    python benchmarks/insight.py published            # the speed-ups that others report, simulated

`walls` trains a run that waits for its rewards, one with long outputs and one that trains on long prompts in small
passes. Triage names what holds each back, its first move is made, and the gain is measured. Each run is also predicted
from the ledgers of the two others: their speeds, its own settings, and what its user knows beforehand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headrace.cli.app import settings_from
from headrace.insight.hardware import find_device, model_shape
from headrace.insight.scenario import Layout, Typed, scenario, worked_out
from headrace.insight.simulator import simulate
from headrace.insight.triage import Bottleneck, Triage
from headrace.insight.workload import LogNormal, Machine, Workload
from headrace.ledger.ledger import Ledger

STEPS, WARM_UP = 14, 2
GROUPS, SAMPLES = 8, 8
REWARD = Path(__file__).with_name("insight_reward.py")


@dataclass(frozen=True, slots=True)
class Case:
    """A run that is built to have a bottleneck.

    Example:
        Case(bottleneck=Bottleneck.REWARD, prompt_tokens=16, answer_tokens=16, reward_s=0.05, settings=())
    """

    bottleneck: Bottleneck
    prompt_tokens: int  # mean; from half to one and a half of it
    answer_tokens: int  # of every answer
    reward_s: float
    settings: tuple[str, ...] = ()


CASES = {
    "slow reward": Case(Bottleneck.REWARD, prompt_tokens=16, answer_tokens=24, reward_s=0.05),
    "long outputs": Case(
        Bottleneck.GENERATION, prompt_tokens=16, answer_tokens=192, reward_s=0.001, settings=("rollout.max_running=16",)
    ),
    "heavy training": Case(
        Bottleneck.LEARNER,
        prompt_tokens=192,
        answer_tokens=24,
        reward_s=0.001,
        settings=("learner.micro_batch_tokens=384",),
    ),
}


# ---- walls


def walls(directory: Path) -> None:
    from cpu_model import build  # brings torch, which only this needs

    build(directory / "model", endless=True)
    runs = {}
    print("| run | bottleneck | first move | predicted gain | measured gain | off by |\n|---|---|---|---|---|---|")
    for name, case in CASES.items():
        runs[name] = run = train(directory, name, case)
        found = Triage(run)
        move = next(move for move in found.moves if move.settings)  # others want another device
        moved = train(directory, f"{name}, moved", case, move.settings)
        gain = goodput(moved) / goodput(run)
        named = str(found.bottleneck)
        if found.bottleneck is not case.bottleneck:
            named += f" (built to be {case.bottleneck})"
        change = f"`{' '.join(move.settings)}`"
        print(
            f"| {name} | {named} | {change} | {move.gain:.2f}x | {gain:.2f}x | {move.gain / gain - 1:+.0%} |",
            flush=True,
        )
    print("\n| run | measured step | predicted from | step | off by |\n|---|---|---|---|---|")
    for name, case in CASES.items():
        measured_s = float(np.mean(step_seconds(runs[name])))
        for other in runs:
            predicted_s = predict(case, settings(directory, name, case), runs[other], own=other == name)
            source = f"{other}'s ledger" if other != name else "its own"
            off = predicted_s / measured_s - 1
            print(f"| {name} | {measured_s:.2f} s | {source} | {predicted_s:.2f} s | {off:+.0%} |")


def settings(directory: Path, name: str, case: Case) -> list[str]:
    """Of a run of this case."""
    return [
        f"run.dir={directory / name}",
        f"model.path={directory / 'model'}",
        "model.device=cpu",
        "warmstart.steps=0",
        f"prompts.source={directory / f'{case.prompt_tokens}.jsonl'}",
        "prompts.chat=never",
        "prompts.eval_count=1",
        f"rollout.samples={SAMPLES}",
        f"rollout.max_new_tokens={case.answer_tokens}",
        f"reward.function={REWARD}:takes_{round(1e3 * case.reward_s)}_ms",
        "reward.cache=false",
        "buffer.drop=nothing",
        f"loop.steps={STEPS}",
        f"loop.groups_per_step={GROUPS}",
        *case.settings,
    ]


def train(directory: Path, name: str, case: Case, changed: tuple[str, ...] = ()) -> Path:
    """A run, as a user starts it."""
    rng, letters = np.random.default_rng(0), list("abcdefghijklmnopqrstuvwxyz")
    lengths = rng.integers(case.prompt_tokens // 2, case.prompt_tokens * 3 // 2, STEPS * GROUPS * 4, endpoint=True)
    prompts = [{"prompt": "".join(rng.choice(letters, length))} for length in lengths]
    path = directory / f"{case.prompt_tokens}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in prompts))
    words = ["train", *settings(directory, name, case), *changed, "--quiet"]
    subprocess.run([sys.executable, "-m", "headrace.cli", *words], check=True)
    return directory / name


def step_seconds(run: Path) -> list[float]:
    with Ledger.open(run) as ledger:
        return [row.wall_s for row in ledger.rows()][WARM_UP:]


def goodput(run: Path) -> float:
    """Trained tokens per second."""
    with Ledger.open(run) as ledger:
        rows = ledger.rows()[WARM_UP:]
    return sum(row.trained_tokens for row in rows) / sum(row.wall_s for row in rows)


def predict(case: Case, words: list[str], run: Path, *, own: bool) -> float:
    """Seconds of a step with these settings, at the speeds of another run."""
    config = settings_from(words)
    known = Typed(mean_tokens=case.answer_tokens, prompt_tokens=case.prompt_tokens, reward_s=case.reward_s)
    work, machine = scenario(config, Typed() if own else known, Layout(), run)
    return simulate(work, machine, max_lag=config.loop.max_lag, steps=24).step_s


# ---- speed


def speed() -> None:
    """A thousand GPUs: 96 engines of 8 each, and 256 that train."""
    tokens = LogNormal(mean=8192.0, cv=1.0, cap=32768.0)
    work = Workload(
        groups_per_step=512, samples=16, tokens=tokens, reward_s=LogNormal.of_p95(2.0, 4.0), prompt_tokens=512.0
    )
    machine = Machine(
        rollout_workers=96,
        rows_per_worker=256,
        decode_s=0.02,
        decode_row_s=5e-5,
        prefill_token_s=1e-5,
        train_token_s=2e-7,
        optimizer_s=0.5,
        publish_s=2.0,
        reward_workers=1024,
    )
    print("| max_lag | simulated | answers | seconds of one core |\n|---|---|---|---|")
    for lag in (0, 1, 4, 8):
        started = time.process_time()
        found = simulate(work, machine, max_lag=lag, steps=100)
        taken_s = time.process_time() - started
        print(f"| {lag} | {found.wall_s / 3600:.1f} h | {100 * 512 * 16:,} | {taken_s:.0f} |", flush=True)


# ---- published


def published() -> None:
    """What others report, from what they say of their settings."""
    print("| reported | by them | simulated |\n|---|---|---|")
    for mean_tokens in (4096.0, 8192.0, 12288.0):
        both = [areal(mean_tokens, asynchronous=asynchronous) for asynchronous in (False, True)]
        print(
            f"| AReaL, 1.5B on 128 H800, answers of {mean_tokens / 1024:.0f}k tokens | 148 s -> 53 s, 2.77x "
            f"| {both[0]:.0f} s -> {both[1]:.0f} s, {both[0] / both[1]:.2f}x |",
            flush=True,
        )
    for name, lag, theirs_s in (("streamed", 0, 231.34), ("staleness 0.5, partial rollouts", 1, 150.63)):
        step_s = verl(lag)
        print(
            f"| verl, 7B on 64 + 64 H20, {name} | 356 s -> {theirs_s:.0f} s, {356.3 / theirs_s:.2f}x "
            f"| 356 s -> {step_s:.0f} s, {356.3 / step_s:.2f}x |",
            flush=True,
        )


def areal(mean_tokens: float, *, asynchronous: bool) -> float:
    """Seconds of a step: 512 prompts x 16 answers of up to 27k tokens; 96 engines and 32 learners, or all in turns.

    Speeds are worked out from the datasheet. How long their answers were they do not say.
    """
    config = settings_from(
        ["rollout.samples=16", "rollout.max_new_tokens=27648", "rollout.max_running=256", "loop.groups_per_step=512"]
    )
    layout = Layout(gpus=128, rollout_share=0.75, colocated=not asynchronous)
    typed = worked_out(Typed(mean_tokens=mean_tokens, cv=1.0), config, layout, model_shape("1.5B"), find_device("H100"))
    work, machine = scenario(config, typed, layout)
    machine = replace(machine, batchwise=not asynchronous, reward_workers=0)
    return simulate(work, machine, max_lag=4 if asynchronous else 0, steps=24).step_s


def verl(lag: int) -> float:
    """Seconds of a step with their stage times: 177.85 s to generate a batch on 128 GPUs, 113.16 s to train on 64.

    Lengths are log-normal around 4k tokens with the limit they set, and a decode step takes what makes the batch last
    as long as theirs: one answer of 28k tokens, beside 63 others at first.
    """
    tokens = LogNormal(mean=4096.0, cv=1.0, cap=28672.0)
    work = Workload(groups_per_step=512, samples=16, tokens=tokens)
    sync = Machine(rollout_workers=128, rows_per_worker=256, decode_s=0.005, decode_row_s=2e-5, batchwise=True)
    factor = 177.85 / simulate(work, replace(sync, colocated=True), max_lag=0, steps=8).step_s
    apart = replace(
        sync,
        rollout_workers=64,
        decode_s=sync.decode_s * factor,
        decode_row_s=sync.decode_row_s * factor,
        train_token_s=113.16 / (512 * 16 * tokens.mean),
        batchwise=False,
    )
    return simulate(work, apart, max_lag=lag, steps=24).step_s


# ---- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["walls", "speed", "published"])
    parser.add_argument("--keep", type=Path, help="keep the runs there")
    arguments = parser.parse_args()
    if arguments.what == "walls":
        with tempfile.TemporaryDirectory() as directory:
            walls(arguments.keep or Path(directory))
    elif arguments.what == "speed":
        speed()
    else:
        published()


if __name__ == "__main__":
    main()
