"""The commands that hold runs against each other, and that make runs for it."""

import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from pydantic_core import to_jsonable_python
from typer import Argument, Exit, Option

from headrace.cli.app import Json, Paper, app, settings_from
from headrace.config_file import rooted, values
from headrace.errors import ConfigError
from headrace.ledger.files import is_run, run_config
from headrace.runs.compare import Cost
from headrace.runs.compare import compare as compare_runs
from headrace.runs.facts import RunState, read_run

At = Annotated[Cost, Option(help="what is to be equal")]
Price = Annotated[float | None, Option(min=0.0, help="dollars that a device costs an hour")]


@app.command()
def compare(
    runs: Annotated[list[Path], Argument(metavar="RUN RUN ...", help="run directories")],
    at: At = Cost.TOKENS,
    price: Price = None,
    as_json: Json = False,
) -> None:
    """Compare the held-out scores of runs at equal cost; runs that differ in their seeds alone count as one."""
    _check(at, price)
    report, cost, sides = compare_runs(runs, at, price or 0.0)
    if as_json:
        print(json.dumps(to_jsonable_python({"at": at, "cost": cost, "sides": sides}, inf_nan_mode="null")))
    else:
        Paper().report(report)


@app.command()
def sweep(
    settings: Annotated[list[str], Argument(metavar="[FILE.toml] section.key=value,value ...", help="settings")],
    directory: Annotated[Path, Option("--dir", help="where the runs are made")] = Path("runs/sweep"),
    at_once: Annotated[int, Option(min=1, help="runs side by side")] = 1,
    at: At = Cost.TOKENS,
    price: Price = None,
) -> None:
    """Train with every combination of some values, and compare. Started again, it goes on where it was."""
    _check(at, price)
    choices = [alternatives(word) for word in settings]
    several = [i for i, words in enumerate(choices) if len(words) > 1]
    if not several:
        raise ConfigError("which values are to be tried? Separate them by commas: loop.max_lag=0,1,4 run.seed=0,1,2")
    if any(word.startswith("run.dir=") for word in settings):
        raise ConfigError("run.dir: a sweep names the directories of its runs itself; --dir says where they are")
    plans: dict[Path, list[str]] = {}
    for words in itertools.product(*choices):
        run_dir = directory / ",".join(words[i].replace("/", "_") for i in several)
        if plans.setdefault(run_dir, given := [*words, f"run.dir={run_dir}"]) is not given:
            raise ConfigError(f"two of these runs would be in {run_dir}: is a value given twice?")
    for run_dir, given in plans.items():  # what is wrong with one is said before the first begins
        wanted, known = values(rooted(settings_from(given))), values(run_config(run_dir)) if is_run(run_dir) else {}
        other = [key for key in known if key not in ("run.dir", "run.overwrite") and known[key] != wanted[key]]
        if other:
            raise ConfigError(f"{run_dir} holds a run with another {other[0]}; choose another directory (--dir)")
    paper = Paper()

    def make(run_dir: Path) -> int:
        known = read_run(run_dir) if is_run(run_dir) else None
        if known is not None and known.state is RunState.FINISHED:
            return 0
        command = ["train", *plans[run_dir]] if known is None else ["resume", str(run_dir)]
        paper.line(shlex.join(["headrace", *command]), style="bold")
        quiet = ["--quiet"] if at_once > 1 else []
        return subprocess.run([sys.executable, "-m", "headrace.cli", *command, *quiet], check=False).returncode

    with ThreadPoolExecutor(at_once) as pool:
        codes = dict(zip(plans, pool.map(make, plans), strict=True))
    if failed := [str(run_dir) for run_dir, code in codes.items() if code]:
        told = f"{len(failed)} of {len(plans)} runs did not come to their end: {', '.join(failed)}"
        paper.paragraph(f"{told}. The same command goes on with them.", indent=0)
        raise Exit(1)
    paper.report(compare_runs(list(plans), at, price or 0.0)[0])


def _check(at: Cost, price: float | None) -> None:
    if at is Cost.DOLLARS and price is None:
        raise ConfigError("--at dollars needs the price of a device: --price 2.5")


def alternatives(word: str) -> Sequence[str]:
    """`key=a,b` is `key=a` and `key=b`; commas inside brackets or quotes separate nothing."""
    key, equals, value = word.partition("=")
    if not equals:
        return [word]
    parts, depth, quoted = [""], 0, ""
    for character in value:
        if character in "\"'" and quoted in ("", character):
            quoted = "" if quoted else character
        depth += 0 if quoted else (character in "[{") - (character in "]}")
        if character == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    if len(parts) > 1 and not all(map(str.strip, parts)):
        raise ConfigError(f"{word}: there is nothing between two commas, or after the last")
    return [f"{key}={part.strip()}" for part in parts]
