"""The command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

import headrace  # its functions load torch when first called; checking settings and books does without
from headrace.config import Config
from headrace.config_file import DEMO, explain, load_config, to_toml
from headrace.errors import HeadraceError, HungError
from headrace.insight.scenario import Layout, Typed, amount, lags, scenario, seconds
from headrace.insight.simulator import simulate as simulate_run
from headrace.ledger.audit import audit as audit_books
from headrace.ledger.audit import books as read_books
from headrace.ledger.runs import read_runs
from headrace.ledger.show import read_details, read_trajectory, token_texts
from headrace.terminal import Terminal
from headrace.terminal_runs import RunsTerminal
from headrace.terminal_simulation import SimulationTerminal, simulations_json

app = typer.Typer(
    help="Headrace trains language models by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

LAST_ROWS = 8  # of a run that is shown

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")]


@contextmanager
def _messages() -> Iterator[None]:
    """Errors meant for the user are shown as a message, without a traceback."""
    try:
        yield
    except HungError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # the libraries' own clearing up could wait for what hangs
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from error


@app.command()
def train(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE.toml] [section.key=value ...]", help="settings")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="show nothing")] = False,
) -> None:
    """Train. Without arguments: the demo, a small model that learns arithmetic in a few minutes on a CPU."""
    with _messages(), Terminal(quiet=quiet) as terminal:
        terminal.summary(headrace.train(_load(settings), terminal))


@app.command()
def resume(run: RunDir, quiet: Annotated[bool, typer.Option("--quiet", "-q", help="show nothing")] = False) -> None:
    """Go on with a run that was interrupted, killed, or stopped by an error."""
    with _messages(), Terminal(quiet=quiet) as terminal:
        terminal.summary(headrace.resume(run, terminal))


@app.command("eval")
def evaluate(
    run: RunDir, samples: Annotated[int | None, typer.Option(min=1, help="answers per held-out prompt")] = None
) -> None:
    """The held-out score of a run's weights."""
    with _messages():
        score = headrace.evaluate_run(run, samples=samples)
        print("no answer could be scored" if score is None else f"held-out score {score:.4f}")


@app.command()
def export(run: RunDir, out: Annotated[Path, typer.Argument(metavar="OUT", help="directory to make")]) -> None:
    """Copy a run's weights and tokenizer into a directory that transformers and engines load."""
    with _messages():
        print(f"wrote {headrace.export(run, out)}")


@app.command()
def audit(run: RunDir) -> None:
    """Check that every token and trajectory of a run is accounted for; exits with 1 when not."""
    with _messages(), Terminal() as terminal:
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
    with _messages(), RunsTerminal() as terminal:
        terminal.runs(read_runs(directory))


@app.command()
def show(
    run: RunDir,
    trajectory: Annotated[str | None, typer.Option(metavar="ID", help="one answer, token by token")] = None,
) -> None:
    """Show what happened in a run, or to one of its trajectories, and why what was dropped was dropped."""
    with _messages(), RunsTerminal() as terminal:
        if trajectory is None:
            terminal.run(read_details(run, num_rows=LAST_ROWS))
        else:
            terminal.trajectory(read_trajectory(run, trajectory), token_texts(run))


@app.command()
def simulate(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE.toml] [section.key=value ...]", help="the recipe")
    ] = None,
    run: Annotated[Path | None, typer.Option("--from", metavar="RUN", help="answers and speeds of this run")] = None,
    max_lag: Annotated[str, typer.Option(help="one or more, e.g. 0,1,4,8; else the recipe's")] = "",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs in all")] = 1,
    gpus_per_worker: Annotated[int, typer.Option(min=1, help="GPUs of one rollout worker")] = 1,
    rollout_share: Annotated[float, typer.Option(min=0.0, max=1.0, help="of the GPUs, to generate with")] = 0.75,
    colocated: Annotated[bool, typer.Option(help="generate and train in turns, on all GPUs")] = False,
    mean_tokens: Annotated[str, typer.Option(help="of an answer, e.g. 8k")] = "0",
    cv: Annotated[float, typer.Option(min=0.0, help="spread of that: standard deviation over mean")] = 1.0,
    reward_mean: Annotated[str, typer.Option(help="seconds of a verdict, e.g. 200ms")] = "0",
    reward_p95: Annotated[str, typer.Option(help="that 95 in 100 verdicts stay below")] = "0",
    decode: Annotated[str, typer.Option(help="seconds of a decode step with one row")] = "0",
    rollout_tokens_s: Annotated[str, typer.Option(help="tokens a second of a full rollout worker")] = "0",
    train_tokens_s: Annotated[str, typer.Option(help="tokens a second that one GPU trains on")] = "0",
    publish: Annotated[str, typer.Option(help="seconds until rollout workers have new weights")] = "0",
    steps: Annotated[int, typer.Option(min=1, help="to simulate")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="of the answers' lengths and the like")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Run a recipe on a virtual clock: the real buffer and lag policy, with any number of GPUs."""
    with _messages(), SimulationTerminal() as terminal:
        recipe = _load(settings)
        typed = Typed(
            mean_tokens=amount(mean_tokens),
            cv=cv,
            reward_s=seconds(reward_mean),
            reward_p95_s=seconds(reward_p95),
            decode_s=seconds(decode),
            rollout_tokens_s=amount(rollout_tokens_s),
            train_tokens_s=amount(train_tokens_s),
            publish_s=seconds(publish),
        )
        layout = Layout(gpus=gpus, gpus_per_worker=gpus_per_worker, rollout_share=rollout_share, colocated=colocated)
        work, cluster = scenario(recipe, typed, layout, run)
        wanted = lags(max_lag) if max_lag else [recipe.loop.max_lag]
        found = [simulate_run(work, cluster, max_lag=lag, steps=steps, seed=seed) for lag in wanted]
        if as_json:
            print(simulations_json(work, cluster, layout, found))
        else:
            terminal.simulations(work, cluster, layout, found)


@app.command()
def config(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE.toml] [section.key=value ...]", help="settings to check")
    ] = None,
    show: Annotated[bool, typer.Option("--explain", help="explain all settings, or a section or key")] = False,
) -> None:
    """Check settings and print them resolved; with --explain, say what each one does."""
    with _messages(), Terminal() as terminal:
        if not show:
            print(to_toml(_load(settings)), end="")
            return
        key = Column("setting", no_wrap=True)  # a key that is cut cannot be copied
        table = Table(key, "type", "default", "what it does", box=None)
        for setting in explain(settings[0] if settings else None):
            table.add_row(setting.key, setting.type_text, setting.default, setting.doc)
        terminal.console.print(table)


def _load(words: list[str] | None) -> Config:
    """Settings from a file, if the first word is one, and overrides.

    Without a file they start from the demo's, or from the defaults where the prompts are the user's own.
    """
    words = list(words or [])
    if words and "=" not in words[0]:
        return load_config(Path(words.pop(0)), words)
    own_prompts = any(word.startswith("prompts.source=") for word in words)
    return load_config(None if own_prompts else DEMO, words)


if __name__ == "__main__":
    app()
