"""The commands that look at a run or at a plan: they need no torch, and each has `--json`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli_app import Json, app, messages
from headrace.errors import ConfigError
from headrace.insight.equation import Placement
from headrace.insight.frameworks import others_that_fit
from headrace.insight.hardware import find_device, read_hardware
from headrace.insight.model_shape import model_shape
from headrace.insight.planner import Question, plan, search
from headrace.insight.scenario import amount, seconds
from headrace.insight.tails import LogNormal
from headrace.insight.triage import triage, triage_typed
from headrace.terminal_plan import PlanTerminal
from headrace.terminal_plan import as_json as plan_as_json
from headrace.terminal_triage import TriageTerminal
from headrace.terminal_triage import as_json as triage_as_json
from headrace.types import StageTimes


def _print_json(found: dict[str, Any]) -> None:
    print(json.dumps(found, indent=1, default=str))


Seconds = Annotated[float | None, typer.Option(min=0.0, help="seconds a step")]


@app.command("triage")
def triage_command(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="a run directory")] = None,
    tau_r: Seconds = None,
    tau_v: Seconds = None,
    tau_ref: Seconds = None,
    tau_t: Seconds = None,
    tau_s: Seconds = None,
    placement: Annotated[
        Placement, typer.Option(help="of typed times: what may run at the same time")
    ] = Placement.OVERLAPPED,
    last_steps: Annotated[int | None, typer.Option(min=1, help="look at the last so many steps only")] = None,
    as_json: Json = False,
) -> None:
    """Name the stage that holds a run back, and what to change first; of a run, or of five stage times."""
    typed = (tau_r, tau_v, tau_ref, tau_t, tau_s)
    with messages(), TriageTerminal() as terminal:
        if run is not None and any(time is not None for time in typed):
            raise ConfigError("give a run, or stage times (--tau-r ...), not both")
        if run is None:
            if all(time is None for time in typed):
                raise ConfigError("give a run directory, or stage times: --tau-r 30 --tau-t 8 ...")
            times = StageTimes(
                **dict(
                    zip(("rollout", "reward", "reference", "train", "publish"), [t or 0.0 for t in typed], strict=True)
                )
            )
            found = triage_typed(times, placement)
            _print_json(triage_as_json(found)) if as_json else terminal.typed(found)
            return
        verdict = triage(run, last_steps=last_steps)
        _print_json(triage_as_json(verdict)) if as_json else terminal.run(verdict)


@app.command("plan")
def plan_command(
    params: Annotated[str, typer.Option(help="size of the model, 7B or 235B-A22B, or its config.json")],
    gpus: Annotated[str, typer.Option(help="how many of which, 64xH100")],
    prompts: Annotated[int, typer.Option(min=1, help="per step")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="answers per prompt")] = 16,
    mean_tokens: Annotated[str, typer.Option(help="of an answer, 512 or 8k")] = "1k",
    cv: Annotated[float, typer.Option(min=0.0, help="spread of the lengths: standard deviation over mean")] = 1.0,
    max_tokens: Annotated[str, typer.Option(help="an answer is cut here; 0 never")] = "0",
    prompt_tokens: Annotated[str, typer.Option(help="of a prompt")] = "512",
    reward_p95: Annotated[str, typer.Option(help="seconds that a verdict takes, 95 in 100: 4s or 200ms")] = "0s",
    max_lag: Annotated[int, typer.Option(min=0, help="how many versions old a trained token may be")] = 4,
    kl: Annotated[bool, typer.Option("--kl", help="with a reference policy")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="train a low-rank adapter only")] = False,
    useful: Annotated[float, typer.Option(min=0.01, max=1.0, help="share of the tokens that is not dropped")] = 1.0,
    hardware: Annotated[Path | None, typer.Option(help="TOML file with devices and prices of your own")] = None,
    target: Annotated[
        str | None, typer.Option("--search", help="find the fewest devices for so many trained tokens a second")
    ] = None,
    as_json: Json = False,
) -> None:
    """Work out a layout for a model, a workload and a number of GPUs: stage times, wall, memory, lag, cost."""
    with messages(), PlanTerminal() as terminal:
        number, device = _gpus(gpus)
        question = Question(
            model=model_shape(params),
            device=find_device(device, read_hardware(hardware)),
            num_devices=number,
            num_prompts=prompts,
            num_samples=samples,
            lengths=LogNormal(amount(mean_tokens), cv, amount(max_tokens) or float("inf")),
            prompt_tokens=amount(prompt_tokens),
            reward_s=seconds(reward_p95),
            max_lag=max_lag,
            reference=kl,
            adapter=adapter,
            useful=useful,
        )
        if target is not None:
            question, found = search(question, amount(target))
        else:
            found = plan(question)
        others = others_that_fit(found[0].wall, num_params=question.model.num_params, may_lag=max_lag > 0)
        if as_json:
            _print_json(plan_as_json(question, found, others))
        else:
            terminal.plans(question, found, others)


def _gpus(text: str) -> tuple[int, str]:
    found = re.fullmatch(r"\s*(\d+)\s*[x×]\s*(\S.*?)\s*", text)
    if found is None or int(found[1]) < 1:
        raise ConfigError(f"--gpus {text}: write how many of which, such as 8xH100")
    return int(found[1]), found[2]
