"""The commands that show what runs left: a list, one run, a trajectory, the books, the web page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from typer import Argument, Option

from headrace.cli.app import Paper, RunDir, app
from headrace.config_file import changed
from headrace.dashboard.site import serve
from headrace.insight.triage import BOTTLENECK_OF_STAGE
from headrace.ledger.database import FILE_NAME
from headrace.ledger.files import read_summary, run_config
from headrace.ledger.ledger import Amount, Books, Ledger
from headrace.ledger.recovery import changes
from headrace.measured import Row, stages_of
from headrace.runs import audit as checks
from headrace.runs import show as shown
from headrace.runs.facts import RunFacts, RunState, read_run, read_runs
from headrace.runs.report import Table, ago, or_dash, printable

LAST_ROWS = 8  # of a run that is shown
MOST_PROBLEMS = 3  # explained below the list of runs
TOKEN_COLUMNS = 40  # characters for a token with its number, log-prob and version
LONGEST_WORD = 14  # of a token's text, with its quotes


@app.command()
def show(
    run: RunDir,
    trajectory: Annotated[str | None, Option(metavar="ID", help="one answer, token by token")] = None,
) -> None:
    """Show what happened in a run, or to one of its trajectories, and why what was dropped was dropped."""
    if trajectory is None:
        _show_run(Paper(), run)
    else:
        _show_trajectory(Paper(), run, trajectory)


@app.command()
def runs(
    directory: Annotated[Path, Argument(metavar="[DIR]", help="where the runs are")] = Path("runs"),
) -> None:
    """List the runs in a directory: how each stands, how far it came, and what it learnt."""
    paper, found = Paper(), read_runs(directory)
    rows = [shown.run_row(facts, paper.drawn("→")) for facts in found]
    paper.table(Table(columns=shown.RUN_COLUMNS, rows=rows, numeric=range(2, 6)), indent=0, whole={1, 6})
    ended = (RunState.STOPPED, RunState.UNREADABLE)
    lost = [facts for facts in found if facts.state in ended and not facts.can_be_resumed]
    told = [f"{facts.path.name}: {shown.standing(facts)}" for facts in lost[:MOST_PROBLEMS]]
    if (num_more := len(lost) - MOST_PROBLEMS) > 0:
        told.append(f"... and {num_more} more; `headrace show` says what is wrong with each")
    for text in told:
        paper.print()
        paper.paragraph(text)
    paper.commands({f"resume {facts.path}": "" for facts in found if facts.can_be_resumed})


@app.command()
def audit(run: RunDir) -> None:
    """Check that every token and trajectory of a run is accounted for; exits with 1 when not."""
    paper = Paper()
    paper.table(_accounts(checks.books(run)))
    problems = checks.audit(run)
    for problem in problems:
        paper.print(Text(f"- {problem}"))
    paper.line("the books do not balance" if problems else "the books balance")
    raise typer.Exit(1 if problems else 0)


@app.command()
def dash(
    run: Annotated[
        Path, Argument(metavar="[RUN]", help="a run, or a directory of runs to choose from and compare")
    ] = Path("runs"),
    port: Annotated[int, Option(min=1, max=65535, help="where the page is")] = 8080,
    host: Annotated[str, Option(help="who may connect; 0.0.0.0 lets everybody")] = "127.0.0.1",
    dollars_per_hour: Annotated[float | None, Option(help="what the machines cost, to see what a run costs")] = None,
) -> None:
    """Show runs on a web page, also while they go on."""
    serve(run, host=host, port=port, dollars_per_hour=dollars_per_hour)


def _show_run(paper: Paper, run_dir: Path) -> None:
    facts = read_run(run_dir).readable()
    settings = [text for text in changed(run_config(run_dir)) if not text.startswith("run.dir=")]
    steps = ", ".join(f"step {step}" for step in facts.checkpoints)
    paper.line(str(run_dir), style="bold")
    told = {
        "state": shown.standing(facts),
        "because": shown.why_it_ended(facts, read_summary(run_dir)),
        "set": "  ".join(settings) or "every setting is at its default",
        "held-out": shown.scores(facts, paper.drawn(" → ")),
        "checkpoints": f"of {steps}" if steps else "none",
        "written": f"{facts.written:%Y-%m-%d %H:%M:%S} ({ago(facts.written)})",
    }
    if (run_dir / FILE_NAME).exists():
        told["prompts"] = shown.DataSet().standing(run_dir)
    paper.facts(told.items())
    more = {f"resume {run_dir}": ""} if facts.can_be_resumed else {}
    if (run_dir / FILE_NAME).exists():
        newest = shown.newest_ids(run_dir)
        _show_books(paper, run_dir, facts, newest)
        if newest:
            paper.section("samples", "the newest answer of each kind")
            more[f"show {run_dir} --trajectory {newest[max(newest)]}"] = ""  # a trained one, if there is any
        for account, id in sorted(newest.items(), reverse=True):
            _show_sample(paper, run_dir, account, id)
    paper.commands(more)


def _show_books(paper: Paper, run_dir: Path, facts: RunFacts, newest: Mapping[str, str]) -> None:
    with Ledger.open(run_dir) as ledger:
        books, restarts, since = ledger.totals(), ledger.restarts(), changes(ledger)
        rows = ledger.rows(after_step=facts.steps - LAST_ROWS)
    if restarts:
        paper.section("restarts", "what each found, and did again")
        paper.table(Table.of(list(map(shown.restart_row, restarts))))
    if since:
        paper.section("changes", "settings that a restart changed")
        lines = [(str(change.step), change.key, change.before, change.after) for change in since]
        paper.table(Table(columns=("after step", "setting", "before", "since then"), rows=lines))
    paper.section("accounts", "what became of every sampled token")
    paper.table(_accounts(books, newest))
    found = [account for account in shown.accounts(books) if account.reason and account.amount != Amount()]
    if found:
        paper.print()
    for account in found:
        paper.paragraph(f"{account.reason}: {account.explanation}.", hang=2)
    if rows:
        paper.section("last rows")
        paper.table(Table.of(list(map(_row, rows)), numeric=range(1, 8)))


def _show_sample(paper: Paper, run_dir: Path, account: str, id: str) -> None:
    found = shown.TrajectoryDetails(run_dir, id)
    if found.whole is None:
        return
    with Ledger.open(run_dir) as ledger:
        asked = ledger.prompt(found.whole.prompt_id)
    expected = asked.get("fields", {}).get(run_config(run_dir).reward.answer_field)
    texts = {"prompt": asked.get("text", "(not kept)"), "answer": found.whole.text}
    texts |= {} if expected is None else {"expected": str(expected)}
    paper.sample(id, found.whole.reward, account.replace(":", ": ", 1), texts)


def _row(row: Row) -> dict[str, str]:
    return {
        "step": str(row.step),
        "reward": f"{row.reward_mean:.3f}",
        "held-out": or_dash(row.score, ".3f"),
        "length": f"{row.length_mean:.1f}",
        "lag": f"{row.lag_mean:.1f}/{row.lag_max}",
        "trained": f"{row.trained_tokens:,}",
        "dropped": f"{sum(row.dropped_tokens.values()):,}",
        "seconds": f"{row.wall_s:.2f}",
        "wall": "step skipped" if row.skipped else BOTTLENECK_OF_STAGE[stages_of([row])[1]],
    }


def _accounts(books: Books, newest: Mapping[str, str] | None = None) -> Table:
    """With `newest`, the newest trajectory of each account has a column."""
    everything = shown.Account("generated", books.generated)
    rows = [account.row(books.generated) for account in (everything, *shown.accounts(books))]
    columns = [*shown.ACCOUNT_COLUMNS]
    if newest is not None:
        columns.append("newest")
        rows = [(*row, newest.get(row[0].replace(": ", ":", 1), "")) for row in rows]
    return Table(columns=columns, rows=rows, numeric=range(1, 5))


def _show_trajectory(paper: Paper, run_dir: Path, id: str) -> None:
    found, texts = shown.TrajectoryDetails(run_dir, id), shown.token_texts(run_dir)
    paper.line(f"trajectory {found.id}", style="bold")
    paper.facts(shown.trajectory_facts(found).items())
    if found.whole is None:
        paper.section("tokens")
        paper.paragraph(shown.why_no_tokens(found))
        return
    given = shown.prompt_ids(found.whole)
    prompt = texts.text(given) if texts else f"token ids {given}"
    for title, text in {"prompt": prompt, **shown.said(found.whole)}.items():
        paper.section(title)
        paper.indented(Text(printable(text), overflow="fold"))
    paper.section("tokens", "" if texts else "as ids: the run's tokenizer cannot be read")
    cells: list[tuple[str, ...]] = []
    for token in shown.tokens(found.whole, texts):
        if token.logprob is not None:
            word = repr(token.text) if texts else token.text
            word = word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD - 3]}..."
            cells.append((str(len(cells) + 1), word, f"{token.logprob:.3f}", f"v{token.version}"))
    across = max(1, min(paper.console.width // TOKEN_COLUMNS, len(cells)))  # in reading order
    lines = [sum(cells[start : start + across], ()) for start in range(0, len(cells), across)]
    columns = ("", "token", "log-prob", "policy") * across
    paper.table(Table(columns=columns, rows=lines, numeric=range(0, len(columns), 2)))
