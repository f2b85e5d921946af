"""The commands that look into a run or a plan: each has `--json`, and none needs torch."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from headrace.cli.app import Json, RunDir, Settings, app, settings_from, tell
from headrace.errors import ConfigError
from headrace.insight.hardware import find_device, model_shape, read_hardware
from headrace.insight.planner import Question, plan, search
from headrace.insight.reading import VIEWERS, write_trace
from headrace.insight.reports import plan_report, simulation_report, triage_report
from headrace.insight.scenario import Layout, Typed, amount, lags, scenario, seconds, worked_out
from headrace.insight.simulator import Simulated, simulate
from headrace.insight.triage import ADVICE, Placement, Triage, TypedTriage, others_that_fit
from headrace.insight.workload import LogNormal, Machine, Workload
from headrace.measured import STAGES, StageTimes

Seconds = Annotated[float | None, Option(min=0.0, help="seconds a step")]
Placed = Annotated[Placement, Option(help="of typed times: what may run at the same time")]
HardwareFile = Annotated[Path | None, Option("--hardware", help="TOML file with devices and prices of your own")]


@app.command("triage")
def triage_command(
    run: Annotated[Path | None, Argument(metavar="[RUN]", help="a run directory")] = None,
    tau_r: Seconds = None,
    tau_v: Seconds = None,
    tau_ref: Seconds = None,
    tau_t: Seconds = None,
    tau_s: Seconds = None,
    placement: Placed = Placement.OVERLAPPED,
    last_steps: Annotated[int | None, Option(min=1, help="look only at this many of the last steps")] = None,
    as_json: Json = False,
) -> None:
    """Name the stage that holds a run back, and what to change first; of a run, or of five stage times."""
    typed = (tau_r, tau_v, tau_ref, tau_t, tau_s)
    some = any(time is not None for time in typed)
    if run is not None and some:
        raise ConfigError("give a run, or stage times (--tau-r ...), not both")
    if run is None and not some:
        raise ConfigError("give a run directory, or stage times: --tau-r 30 --tau-t 8 ...")
    times = StageTimes(**{stage: taken or 0.0 for stage, taken in zip(STAGES, typed, strict=True)})
    found = TypedTriage(times, placement) if run is None else Triage(run, last_steps=last_steps)
    tell(triage_report(found), triage_json(found), as_json)


@app.command()
def trace(
    run: RunDir,
    out: Annotated[Path | None, Option(metavar="FILE", help="file to write; by default RUN/trace.json")] = None,
    as_json: Json = False,
) -> None:
    """Write a timeline of every stage and worker, to look at in a browser."""
    path, num_events = write_trace(run, out)
    if as_json:
        print(json.dumps({"file": str(path), "events": num_events}))
    else:
        print(f"wrote {path} ({num_events:,} events). Open it in {VIEWERS}")


@app.command("plan")
def plan_command(
    params: Annotated[str, Option(help="size of the model, 7B or 235B-A22B, or its config.json")],
    gpus: Annotated[str, Option(help="how many of which, 64xH100")],
    prompts: Annotated[int, Option(min=1, help="per step")] = 64,
    samples: Annotated[int, Option(min=1, help="answers per prompt")] = 16,
    mean_tokens: Annotated[str, Option(help="of an answer, 512 or 8k")] = "1k",
    cv: Annotated[float, Option(min=0.0, help="spread of the lengths: standard deviation over mean")] = 1.0,
    max_tokens: Annotated[str, Option(help="an answer is cut here; 0 never")] = "0",
    prompt_tokens: Annotated[str, Option(help="of a prompt")] = "512",
    reward_p95: Annotated[str, Option(help="seconds that a verdict takes, 95 in 100: 4s or 200ms")] = "0s",
    environment: Annotated[str, Option(help="seconds that an episode waits for its environment, in all")] = "0s",
    max_lag: Annotated[int, Option(min=0, help="how many versions old a trained token may be")] = 4,
    kl: Annotated[bool, Option("--kl", help="with a reference policy")] = False,
    adapter: Annotated[bool, Option("--adapter", help="train a low-rank adapter only")] = False,
    useful: Annotated[float, Option(min=0.01, max=1.0, help="share of the tokens that is not dropped")] = 1.0,
    hardware: HardwareFile = None,
    target: Annotated[
        str | None, Option("--search", help="find the fewest devices that train this many tokens a second")
    ] = None,
    as_json: Json = False,
) -> None:
    """Work out a layout for a model, a workload and a number of GPUs: stage times, bottleneck, memory, lag, cost."""
    number, device = _gpus(gpus)
    cap = amount(max_tokens, "--max-tokens") or float("inf")
    question = Question(
        model=model_shape(params),
        device=find_device(device, read_hardware(hardware)),
        num_devices=number,
        num_prompts=prompts,
        num_samples=samples,
        lengths=LogNormal(amount(mean_tokens, "--mean-tokens"), cv, cap),
        prompt_tokens=amount(prompt_tokens, "--prompt-tokens"),
        reward_s=seconds(reward_p95, "--reward-p95"),
        environment_s=seconds(environment, "--environment"),
        max_lag=max_lag,
        reference=kl,
        adapter=adapter,
        useful=useful,
    )
    if target is not None:
        question, found = search(question, amount(target, "--search"))
    else:
        found = plan(question)
    others = others_that_fit(found[0].bottleneck, question.model.num_params, may_lag=max_lag > 0)
    for_programs = {
        "model": question.model,
        "device": question.device.name,
        "num_devices": question.num_devices,
        "plans": [vars(plan) | {"wall": plan.bottleneck} for plan in found],
        "others": [other.name for other in others],
    }
    tell(plan_report(question, found), for_programs, as_json)


@app.command("simulate")
def simulate_command(
    settings: Settings = None,
    run: Annotated[Path | None, Option("--from", metavar="RUN", help="answers and speeds of this run")] = None,
    max_lag: Annotated[str, Option(help="one or more, e.g. 0,1,4,8; else the recipe's")] = "",
    params: Annotated[str, Option(help="speeds of a model of this size, 7B, or of this config.json")] = "",
    gpus: Annotated[str, Option(help="in all, 1024 or 64xH200; H100 if it matters and nobody says")] = "1",
    gpus_per_worker: Annotated[int, Option(min=1, help="GPUs of one rollout worker")] = 1,
    rollout_share: Annotated[float, Option(min=0.0, max=1.0, help="of the GPUs, to generate with")] = 0.75,
    colocated: Annotated[bool, Option(help="generate and train in turns, on all GPUs")] = False,
    mean_tokens: Annotated[str, Option(help="of an answer, e.g. 8k")] = "0",
    cv: Annotated[float, Option(min=0.0, help="spread of that: standard deviation over mean")] = 1.0,
    prompt_tokens: Annotated[str, Option(help="of a prompt")] = "0",
    reward_mean: Annotated[str, Option(help="seconds of a verdict, e.g. 200ms")] = "0",
    reward_p95: Annotated[str, Option(help="that 95 in 100 verdicts stay below")] = "0",
    environment: Annotated[str, Option(help="seconds that an episode waits for its environment, in all")] = "0",
    decode: Annotated[str, Option(help="seconds of a decode step with one row")] = "0",
    rollout_tokens_s: Annotated[str, Option(help="tokens a second of a full rollout worker")] = "0",
    train_tokens_s: Annotated[str, Option(help="tokens a second that one GPU trains on")] = "0",
    publish: Annotated[str, Option(help="seconds until rollout workers have new weights")] = "0",
    straggler_share: Annotated[float, Option(min=0.0, max=1.0, help="of the rollout workers are slow")] = 0.0,
    straggler_factor: Annotated[float, Option(min=1.0, help="that slow ones are slower by")] = 2.0,
    mtbf: Annotated[str, Option(help="mean time between failures of a rollout worker, e.g. 10h; 0: none")] = "0",
    repair: Annotated[str, Option(help="time until a failed rollout worker is back")] = "1min",
    hardware: HardwareFile = None,
    steps: Annotated[int, Option(min=1, help="to simulate")] = 32,
    seed: Annotated[int, Option(min=0, help="of the answers' lengths and the like")] = 0,
    as_json: Json = False,
) -> None:
    """Run a recipe on a virtual clock: the real buffer and lag policy, with any number of GPUs."""
    recipe = settings_from(settings)
    wanted = lags(max_lag) if max_lag else [recipe.loop.max_lag]
    typed = Typed(
        mean_tokens=amount(mean_tokens, "--mean-tokens"),
        cv=cv,
        prompt_tokens=amount(prompt_tokens, "--prompt-tokens"),
        reward_s=seconds(reward_mean, "--reward-mean"),
        reward_p95_s=seconds(reward_p95, "--reward-p95"),
        environment_s=seconds(environment, "--environment"),
        decode_s=seconds(decode, "--decode"),
        rollout_tokens_s=amount(rollout_tokens_s, "--rollout-tokens-s"),
        train_tokens_s=amount(train_tokens_s, "--train-tokens-s"),
        publish_s=seconds(publish, "--publish"),
    )
    mtbf_s, repair_s = seconds(mtbf, "--mtbf"), seconds(repair, "--repair")
    number, device = _gpus(gpus, "H100")
    layout = Layout(gpus=number, gpus_per_worker=gpus_per_worker, rollout_share=rollout_share, colocated=colocated)
    own = recipe.model.path
    model = params or (own if run is None and Path(own).is_dir() else "")
    if hardware and not model:
        raise ConfigError("--hardware says what a device can do with a model: name one with --params")
    if model:
        shape, gpu = model_shape(model), find_device(device, read_hardware(hardware))
        typed = worked_out(typed, recipe, layout, shape, gpu)
    work, machine = scenario(recipe, typed, layout, run)
    if straggler_share:  # else those that the run had, if any
        machine = replace(machine, straggler_share=straggler_share, straggler_factor=straggler_factor)
    machine = replace(machine, worker_mtbf_s=mtbf_s or math.inf, repair_s=repair_s)
    found = [simulate(work, machine, max_lag=lag, steps=steps, seed=seed) for lag in wanted]
    told = simulation_report(work, machine, layout, found)
    tell(told, simulation_json(work, machine, layout, found), as_json)


def _gpus(text: str, default: str | None = None) -> tuple[int, str]:
    found = re.fullmatch(r"\s*(\d+)\s*(?:[x×]\s*(\S.*?)\s*)?", text)
    if found is None or int(found[1]) < 1 or (found[2] or default) is None:
        raise ConfigError(f"--gpus {text}: write how many of which, such as 8xH100")
    return int(found[1]), found[2] or default or ""


def triage_json(found: Triage | TypedTriage) -> dict[str, Any]:
    sign = ADVICE[found.bottleneck].sign
    known: dict[str, Any] = {"wall": found.bottleneck, "sign": sign, "moves": found.moves}
    if isinstance(found, TypedTriage):
        return known | {"placement": found.placement, "step_s": found.step_s, "stage_s": found.times}
    reading = found.reading
    own = ("run_dir", "step_s", "stage_s", "goodput_tokens_per_s", "useful_share", "dropped_tokens")
    known |= {name: getattr(reading, name) for name in own}
    return known | {
        "steps": reading.num_steps,
        "simulated_s": found.simulated_s,
        "without_s": found.without,
        "overlap_share": reading.occupancy.overlap_share if reading.occupancy else None,
        "idle": reading.occupancy.idle_shares if reading.occupancy else {},
    }


def simulation_json(work: Workload, machine: Machine, layout: Layout, found: Sequence[Simulated]) -> dict[str, Any]:
    times = {name: value for name, value in asdict(machine).items() if value != math.inf}
    step = {"groups_per_step": work.groups_per_step, "samples": work.samples, "mean_tokens": work.tokens.mean}
    step |= {"reward_s": work.reward_s.mean, "environment_s": work.environment_s}
    step["no_signal_share"] = work.no_signal_share
    simulated = [vars(one) | {"steps": len(one.steps)} for one in found]
    return {"step": step, "layout": layout, "machine": times, "simulated": simulated}
