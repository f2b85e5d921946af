"""The commands that measure this machine."""

from __future__ import annotations

import importlib
import json
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer import Option

from headrace.cli.app import Json, Paper, app, prepare_process
from headrace.errors import ConfigError
from headrace.insight.scenario import amount
from headrace.runs.report import Table, count

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

_MAX_PARAMS = 4e9  # their copies fill the memory of a large machine


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
    versions, missing = measuring.two_versions(num_params), ""
    full = {name: tensor.bfloat16() for name, tensor in versions[1].items() if "lora_" not in name}
    full_bytes = sum(2 * tensor.numel() for tensor in full.values())
    plain = {"copy_s": measuring.copy_s(full_bytes), "save_and_load_s": measuring.save_and_load_s(full)}
    del full
    publications = []
    with ExitStack() as stack:
        transports = stack.enter_context(measuring.local_transports())
        try:
            store = importlib.import_module("headrace.publish.object_store_ray")
            transports["object_store"] = stack.enter_context(store.local_store(3 * full_bytes))
        except ImportError:
            missing = "ray is not installed. Run: pip install -e '.[ray]'"
        for transport, ends in transports.items():
            for encoding in measuring.EncodingKind:
                times = measuring.measure(encoding, versions, ends, receivers)
                one = {"encoding": encoding, "transport": transport, "full_bytes": full_bytes}
                publications.append(one | {"times": asdict(times), "total_s": times.total_s})
    about = {"num_params": num_params, "receivers": receivers, "full_bytes": full_bytes, "missing": missing}
    return about | plain | {"publications": publications}
