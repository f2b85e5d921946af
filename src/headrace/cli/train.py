"""The commands that train, take a run further, or measure this machine; and the settings."""

from __future__ import annotations

import importlib
import json
import signal
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

import headrace  # its functions load torch when they are first called
from headrace.cli.app import Json, Paper, RunDir, Settings, app, settings_from
from headrace.cli.live import LiveDisplay
from headrace.config_file import explain, to_toml
from headrace.errors import ConfigError
from headrace.insight.scenario import amount
from headrace.ledger.files import scale as scale_run
from headrace.runs.report import Table, count

Quiet = Annotated[bool, Option("--quiet", "-q", help="show nothing")]
OutDir = Annotated[Path, Argument(metavar="OUT", help="directory to make")]
Workers = Annotated[int, Argument(help="how many rollout workers it is to have")]
Samples = Annotated[int | None, Option(min=1, help="answers per held-out prompt")]
bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

_MAX_PARAMS = 4e9  # their copies fill the memory of a large machine


def prepare_process() -> None:
    """SIGTERM, with which clusters preempt, does what Ctrl-C does; for commands, not for who imports us."""
    with suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by a script, in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


@app.command()
def train(settings: Settings = None, quiet: Quiet = False) -> None:
    """Train. Without arguments: the demo, a small model that learns arithmetic in a few minutes on a CPU."""
    prepare_process()
    with LiveDisplay(Console(quiet=quiet)) as display:
        display.summary(headrace.train(settings_from(settings), display))


@app.command()
def resume(
    run: RunDir,
    where: Annotated[
        list[str] | None, Argument(metavar="[section.key=value ...]", help="where it goes on, if elsewhere")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was interrupted, killed, or stopped by an error."""
    prepare_process()
    with LiveDisplay(Console(quiet=quiet)) as display:
        display.summary(headrace.resume(run, display, where or ()))


@app.command()
def scale(run: RunDir, workers: Workers) -> None:
    """Give a run on a cluster more or fewer rollout workers, while it goes on."""
    print(scale_run(run, workers))


@app.command("eval")
def evaluate(run: RunDir, samples: Samples = None) -> None:
    """The held-out score of a run's weights."""
    prepare_process()
    score = headrace.evaluate_run(run, samples=samples)
    print("no answer could be scored" if score is None else f"held-out score {score:.4f}")


@app.command()
def export(run: RunDir, out: OutDir) -> None:
    """Copy a run's weights and tokenizer into a directory that transformers and engines load."""
    print(f"wrote {headrace.export(run, out)}")


@app.command()
def config(
    settings: Settings = None,
    show: Annotated[bool, Option("--explain", help="explain all settings, or a section or key")] = False,
) -> None:
    """Check settings and print them resolved; with --explain, say what each one does."""
    if not show:
        print(to_toml(settings_from(settings)), end="")
        return
    found = explain(settings[0] if settings else None)
    columns = ("setting", "type", "default", "what it does")
    rows = [(setting.key, setting.type_text, setting.default, setting.doc) for setting in found]
    Paper().table(Table(columns=columns, rows=rows), whole={0})


@bench.command("sync")
def sync_command(
    params: Annotated[str, Option(help="how many weights, 1M or 500M")] = "50M",
    receivers: Annotated[int, Option(min=1, max=64, help="engines that get them")] = 1,
    as_json: Json = False,
) -> None:
    """Tell what it costs here to bring new weights to engines: every encoding by every transport, after a real step."""
    prepare_process()
    num_params = int(amount(params, "--params"))
    if not 1 <= num_params <= _MAX_PARAMS:
        raise ConfigError(f"--params {params}: measure with 1 to {_MAX_PARAMS / 1e9:g} thousand million weights")
    found = _measured(num_params, receivers)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    paper, lines = Paper(), []
    for one in found["publications"]:
        moved = one["times"]["transfer_bytes"]
        cells = {"transport": one["transport"], "encoding": str(one["encoding"])}
        cells |= {"MB": f"{moved / 1e6:,.3g}", "of full": f"{moved / one['full_bytes']:.1%}"}
        for operation in ("cast", "encode", "transfer", "apply"):
            cells[operation] = f"{one['times'][f'{operation}_s']:.3f}"
        plain = one["total_s"] / found["save_and_load_s"]
        lines.append(cells | {"total": f"{one['total_s']:.3f}", "/ plain": f"{plain:.2f}"})
    paper.table(Table.of(lines, numeric=range(2, 10)), indent=0, whole={0, 1})
    paper.paragraph(
        f"Seconds, for {num_params:,} weights in bfloat16 and {count(receivers, 'engine')}. "
        f"The plain way, torch.save and torch.load, takes {found['save_and_load_s']:.3g} s; "
        f"one copy in memory takes {found['copy_s']:.3g} s.",
        indent=0,
    )
    if found["missing"]:
        paper.paragraph(f"The object store was left out: {found['missing']}", indent=0)


def _measured(num_params: int, receivers: int) -> dict[str, Any]:
    measuring = importlib.import_module("headrace.publish.measure")  # loads torch
    versions = measuring.two_versions(num_params)
    full = {name: tensor.bfloat16() for name, tensor in versions[1].items() if "lora_" not in name}
    num_bytes = sum(2 * tensor.numel() for tensor in full.values())
    found: dict[str, Any] = {"num_params": num_params, "receivers": receivers}
    found |= {"full_bytes": num_bytes, "missing": "", "copy_s": measuring.copy_s(num_bytes)}
    found |= {"save_and_load_s": measuring.save_and_load_s(full), "publications": []}
    del full
    with ExitStack() as stack:
        transports = stack.enter_context(measuring.local_transports())
        try:
            store = importlib.import_module("headrace.publish.object_store_ray")
            transports["object_store"] = stack.enter_context(store.local_store(3 * num_bytes))
        except ImportError:
            found["missing"] = "ray is not installed. Run: pip install 'headrace[ray]'"
        for transport, ends in transports.items():
            for encoding in measuring.EncodingKind:
                times = measuring.measure(encoding, versions, ends, receivers)
                one = {"encoding": encoding, "transport": transport, "full_bytes": num_bytes}
                one |= {"times": asdict(times), "total_s": times.total_s}
                found["publications"].append(one)
    return found
