"""The command line: training, and what runs left on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

import headrace  # its functions load torch when first called; checking settings and books does without
import headrace.cli_bench  # adds its commands
import headrace.cli_insight  # and these
from headrace.cli_app import RunDir, Settings, app, messages, settings_from
from headrace.config_file import explain, to_toml
from headrace.dashboard.serve import serve
from headrace.ledger.audit import audit as audit_books
from headrace.ledger.audit import books as read_books
from headrace.ledger.runs import read_runs
from headrace.ledger.scale import scale as scale_run
from headrace.ledger.show import read_details, read_trajectory, token_texts
from headrace.terminal import Terminal
from headrace.terminal_runs import RunsTerminal
from headrace.threads import choose_wait_policy

LAST_ROWS = 8  # of a run that is shown


@app.callback()
def before_any_command() -> None:
    choose_wait_policy()  # torch is not imported yet


@app.command()
def train(
    settings: Settings = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="show nothing")] = False,
) -> None:
    """Train. Without arguments: the demo, a small model that learns arithmetic in a few minutes on a CPU."""
    with messages(), Terminal(quiet=quiet) as terminal:
        terminal.summary(headrace.train(settings_from(settings), terminal))


@app.command()
def resume(
    run: RunDir,
    where: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="where it goes on, if elsewhere")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="show nothing")] = False,
) -> None:
    """Go on with a run that was interrupted, killed, or stopped by an error."""
    with messages(), Terminal(quiet=quiet) as terminal:
        terminal.summary(headrace.resume(run, terminal, where or ()))


@app.command()
def scale(run: RunDir, workers: Annotated[int, typer.Argument(help="how many rollout workers it is to have")]) -> None:
    """Give a run on a cluster more or fewer rollout workers, while it goes on."""
    with messages():
        print(scale_run(run, workers))


@app.command("eval")
def evaluate(
    run: RunDir, samples: Annotated[int | None, typer.Option(min=1, help="answers per held-out prompt")] = None
) -> None:
    """The held-out score of a run's weights."""
    with messages():
        score = headrace.evaluate_run(run, samples=samples)
        print("no answer could be scored" if score is None else f"held-out score {score:.4f}")


@app.command()
def export(run: RunDir, out: Annotated[Path, typer.Argument(metavar="OUT", help="directory to make")]) -> None:
    """Copy a run's weights and tokenizer into a directory that transformers and engines load."""
    with messages():
        print(f"wrote {headrace.export(run, out)}")


@app.command()
def audit(run: RunDir) -> None:
    """Check that every token and trajectory of a run is accounted for; exits with 1 when not."""
    with messages(), Terminal() as terminal:
        books = read_books(run)
        table = Table("account", "tokens", "trajectories")
        accounts = {"generated": books.generated, "trained": books.trained}
        accounts |= {f"dropped: {reason}": amount for reason, amount in sorted(books.dropped.items())}
        accounts |= {"buffered": books.buffered, "in flight": books.in_flight}
        for name, amount in accounts.items():
            table.add_row(name, f"{amount.tokens:,}", f"{amount.trajectories:,}")
        terminal.console.print(table)
        problems = audit_books(run)
        for problem in problems:
            terminal.console.print(f"- {problem}")
        terminal.console.print("the books do not balance" if problems else "the books balance")
        raise typer.Exit(1 if problems else 0)


@app.command()
def runs(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="where the runs are")] = Path("runs"),
) -> None:
    """List the runs in a directory: how each stands, how far it came, and what it learnt."""
    with messages(), RunsTerminal() as terminal:
        terminal.runs(read_runs(directory))


@app.command()
def show(
    run: RunDir,
    trajectory: Annotated[str | None, typer.Option(metavar="ID", help="one answer, token by token")] = None,
) -> None:
    """Show what happened in a run, or to one of its trajectories, and why what was dropped was dropped."""
    with messages(), RunsTerminal() as terminal:
        if trajectory is None:
            terminal.run(read_details(run, num_rows=LAST_ROWS))
        else:
            terminal.trajectory(read_trajectory(run, trajectory), token_texts(run))


@app.command()
def dash(
    run: Annotated[
        Path, typer.Argument(metavar="[RUN]", help="a run, or a directory of runs to choose from and compare")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="where the page is")] = 8080,
    host: Annotated[str, typer.Option(help="who may connect; 0.0.0.0 lets everybody")] = "127.0.0.1",
    dollars_per_hour: Annotated[
        float | None, typer.Option(help="what the machines cost, to see what a run costs")
    ] = None,
) -> None:
    """Show runs on a web page, also while they go on."""
    with messages():
        serve(run, host=host, port=port, dollars_per_hour=dollars_per_hour)


@app.command()
def config(
    settings: Settings = None,
    show: Annotated[bool, typer.Option("--explain", help="explain all settings, or a section or key")] = False,
) -> None:
    """Check settings and print them resolved; with --explain, say what each one does."""
    with messages(), Terminal() as terminal:
        if not show:
            print(to_toml(settings_from(settings)), end="")
            return
        key = Column("setting", no_wrap=True)  # a key that is cut cannot be copied
        table = Table(key, "type", "default", "what it does", box=None)
        for setting in explain(settings[0] if settings else None):
            table.add_row(setting.key, setting.type_text, setting.default, setting.doc)
        terminal.console.print(table)


if __name__ == "__main__":
    app()
