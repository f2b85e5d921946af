"""The commands that train, and that take a run further: eval, export, scale; and the settings."""

import secrets
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Exit, Option

import headrace  # its functions load torch when they are first called
from headrace.cli.app import Paper, RunDir, Settings, app, prepare_process, settings_from
from headrace.cli.live import LiveDisplay, write_plot
from headrace.config_file import explain, to_toml
from headrace.errors import ConfigError
from headrace.ledger.database import FILE_NAME
from headrace.ledger.files import scale as scale_run

Quiet = Annotated[bool, Option("--quiet", "-q", help="show nothing")]
OutDir = Annotated[Path | None, Argument(metavar="[OUT]", help="directory to make")]
Push = Annotated[str, Option(metavar="OWNER/NAME", help="repository of the Hugging Face hub; a new one is private")]
Workers = Annotated[int, Argument(help="how many rollout workers it is to have")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="[section.key=value ...]", help="settings that differ from the run's")
]
Adapter = Annotated[bool, Option("--adapter", help="the LoRA adapter alone, not merged into the model")]
Best = Annotated[bool, Option("--best", help="the weights with the best held-out score (loop.keep_best)")]


@app.command()
def train(settings: Settings = None, quiet: Quiet = False) -> None:
    """Train. Without arguments: the demo, a small model that learns arithmetic in a few minutes on a CPU."""
    config = settings_from(settings)  # what is wrong with them is said before torch is loaded
    _watched(quiet, lambda display: headrace.train(config, display))


@app.command()
def resume(run: RunDir, changes: Overrides = None, quiet: Quiet = False) -> None:
    """Go on with a run that was interrupted, killed, or stopped by an error; or with more loop.steps."""
    _watched(quiet, lambda display: headrace.resume(run, display, changes or ()))


def _watched(quiet: bool, train: Callable[[LiveDisplay], dict[str, Any]]) -> None:
    """Show how a run goes, and how it went. An interrupted one ends the command with 130.

    Ctrl-C outside of training, in the warm start say, ends it without a summary.
    """
    prepare_process()
    with closing(LiveDisplay(Console(quiet=quiet))) as display, suppress(KeyboardInterrupt):
        summary = train(display)
        write_plot(summary)
        display.summary(summary)
        if summary["finished"]:
            return
    begun = display.run_dir is not None and (display.run_dir / FILE_NAME).exists()
    how = f"`headrace resume {display.run_dir}` goes on" if begun else "there was no checkpoint yet"
    print(f"interrupted; {how}", file=sys.stderr)
    raise Exit(130)


@app.command("eval")
def evaluate(run: RunDir, changes: Overrides = None, best: Best = False) -> None:
    """The held-out score of a run's weights, also on other data: prompts.eval_source=FILE."""
    prepare_process()
    score = headrace.evaluate_run(run, changes or (), best=best)
    print("no answer could be scored" if score is None else f"held-out score {score:.4f}")


@app.command()
def export(run: RunDir, out: OutDir = None, best: Best = False, adapter: Adapter = False, push: Push = "") -> None:
    """Copy a run's model, with a model card, into a directory that transformers and engines load, or to a hub."""
    if out is None and not push:
        raise ConfigError("where to? Give a directory OUT, or --push owner/name")
    with TemporaryDirectory() as scratch:
        made = headrace.export(run, out or scratch, best=best, adapter=adapter, push=push)
    print(f"wrote {made if out else push}" + f", and pushed it to {push}" * bool(out and push))


@app.command()
def serve(
    run: RunDir,
    port: Annotated[int, Option(min=0, max=65535, help="where it listens; 0 takes a free one")] = 8000,
    host: Annotated[str, Option(help="who may connect; 0.0.0.0 lets everybody")] = "127.0.0.1",
    key: Annotated[str, Option(envvar="HEADRACE_KEY", help="what clients must say; without one, it is made up")] = "",
    best: Best = False,
) -> None:
    """Serve a run's weights to clients of the OpenAI API, until Ctrl-C."""
    prepare_process()
    key = key or f"sk-{secrets.token_urlsafe(24)}"

    def on_ready(base_url: str) -> None:
        print(f"OPENAI_BASE_URL={base_url}\nOPENAI_API_KEY={key}", flush=True)

    with suppress(KeyboardInterrupt):
        headrace.serve_run(run, on_ready, host=host, port=port, key=key, best=best)


@app.command()
def scale(run: RunDir, workers: Workers) -> None:
    """Give a run on a cluster more or fewer rollout workers, while it goes on."""
    print(scale_run(run, workers))


@app.command()
def config(
    settings: Settings = None,
    show: Annotated[bool, Option("--explain", help="explain all settings, or a section or key")] = False,
) -> None:
    """Check settings and print them resolved; with --explain, say what each one does."""
    if not show:
        print(to_toml(settings_from(settings)), end="")
        return
    paper = Paper()
    for setting in explain(settings[0] if settings else None):
        paper.paragraph(f"{setting.key} = {setting.default}", indent=0, hang=4, style="bold")
        paper.paragraph(f"{setting.type_text}: {setting.doc}", indent=4)
