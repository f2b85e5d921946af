"""The commands that show what runs left on disk: a list of runs, one run, one trajectory, the books, the web page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from headrace.cli.app import RunDir, app, messages
from headrace.cli.paper import Paper
from headrace.config_file import changed
from headrace.dashboard.serve import serve
from headrace.ledger.journal import Restart
from headrace.ledger.ledger import Amount, Books
from headrace.row import Row
from headrace.runs.audit import audit as audit_books
from headrace.runs.audit import books as read_books
from headrace.runs.facts import RunFacts, RunState, read_runs
from headrace.runs.report import Table, ago, count, printable
from headrace.runs.show import RunDetails, TokenTexts, TrajectoryDetails, read_details, read_trajectory, token_texts
from headrace.runs.tables import (
    ACCOUNT_COLUMNS,
    RUN_COLUMNS,
    accounts,
    generated_row,
    prompt_ids,
    run_row,
    scores,
    tokens,
    trajectory_facts,
    why_no_tokens,
)

LAST_ROWS = 8  # of a run that is shown
MOST_PROBLEMS = 3  # explained below the list of runs
TOKEN_COLUMNS = 40  # characters for a token with its number, log-prob and version
LONGEST_WORD = 14  # of a token's text, with its quotes


@app.command()
def audit(run: RunDir) -> None:
    """Check that every token and trajectory of a run is accounted for; exits with 1 when not."""
    with messages():
        paper, books = Paper(), read_books(run)
        paper.table(_accounts(books))
        problems = audit_books(run)
        for problem in problems:
            paper.print(Text(f"- {problem}"))
        paper.line("the books do not balance" if problems else "the books balance")
        raise typer.Exit(1 if problems else 0)


@app.command()
def runs(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="where the runs are")] = Path("runs"),
) -> None:
    """List the runs in a directory: how each stands, how far it came, and what it learnt."""
    with messages():
        show_runs(Paper(), read_runs(directory))


@app.command()
def show(
    run: RunDir,
    trajectory: Annotated[str | None, typer.Option(metavar="ID", help="one answer, token by token")] = None,
) -> None:
    """Show what happened in a run, or to one of its trajectories, and why what was dropped was dropped."""
    with messages():
        if trajectory is None:
            show_run(Paper(), read_details(run, num_rows=LAST_ROWS))
        else:
            show_trajectory(Paper(), read_trajectory(run, trajectory), token_texts(run))


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


def show_runs(paper: Paper, found: Sequence[RunFacts]) -> None:
    """A line for each, and below what can be done about those that did not finish."""
    rows = tuple(run_row(facts, paper.glyphs.arrow) for facts in found)
    paper.table(
        Table(columns=RUN_COLUMNS, rows=rows, numeric=frozenset(range(2, 6))), indent=0, whole=frozenset({1, 6})
    )
    lost = [f for f in found if f.state in (RunState.STOPPED, RunState.UNREADABLE) and not f.can_be_resumed]
    for facts in lost[:MOST_PROBLEMS]:
        paper.print()
        paper.paragraph(f"{facts.path.name}: {_standing(facts)}")
    if len(lost) > MOST_PROBLEMS:
        paper.print()
        paper.paragraph(f"... and {len(lost) - MOST_PROBLEMS} more; `headrace show` says what is wrong with each")
    paper.commands([("resume", facts.path, "") for facts in found if facts.can_be_resumed])


def show_run(paper: Paper, details: RunDetails) -> None:
    facts = details.facts
    settings = [text for text in changed(details.config) if not text.startswith("run.dir=")]
    steps = ", ".join(f"step {step}" for step in facts.checkpoints)
    paper.line(str(facts.path), style="bold")
    paper.facts(
        [
            ("state", _standing(facts)),
            ("set", "  ".join(settings) or "every setting is at its default"),
            ("held-out", scores(facts, f" {paper.glyphs.arrow} ")),
            ("checkpoints", f"of {steps}" if steps else "none"),
            ("written", f"{facts.written:%Y-%m-%d %H:%M:%S} ({ago(facts.written)})"),
        ]
    )
    _show_restarts(paper, details.restarts)
    if details.books is not None:
        _show_accounts(paper, details.books, details.examples)
    _show_rows(paper, details.rows)
    examples = [details.examples[account] for account in sorted(details.examples, reverse=True)]  # trained first
    more = [("resume", facts.path, "")] if facts.can_be_resumed else []
    paper.commands([*more, *(("show", facts.path, f" --trajectory {id}") for id in examples[:1])])


def _standing(facts: RunFacts) -> str:
    if facts.state is RunState.UNREADABLE:
        return facts.problem
    done = f"{facts.state} after step {facts.steps} of {facts.wanted_steps}"
    if facts.state is not RunState.STOPPED:
        return done
    return f"{done}; {'can be resumed' if facts.can_be_resumed else 'cannot be resumed: no checkpoint is left'}"


def _show_restarts(paper: Paper, restarts: Sequence[Restart]) -> None:
    if not restarts:
        return
    paper.section("restarts", "what each found, and did again")
    columns = ("", "at", "checkpoint", "resumed at", "taken again", "lost", "in flight")
    rows = [
        (
            str(r.number),
            f"{r.at_s:,.0f} s",
            f"step {r.checkpoint}",
            f"step {r.version}",
            f"{count(r.redone_steps, 'step')}, {count(r.retrained_tokens, 'token')}",
            f"{count(r.lost_trajectories, 'answer')}, {count(r.lost_tokens, 'token')}",
            r.rule,
        )
        for r in restarts
    ]
    paper.table(Table(columns=columns, rows=tuple(rows)))


def _show_accounts(paper: Paper, books: Books, examples: Mapping[str, str]) -> None:
    paper.section("accounts", "what became of every sampled token")
    paper.table(_accounts(books, examples))
    dropped = [account for account in accounts(books) if account.reason and account.amount != Amount()]
    if dropped:
        paper.print()
    for account in dropped:
        paper.paragraph(f"{account.reason}: {account.explanation}.", hang=2)


def _accounts(books: Books, examples: Mapping[str, str] | None = None) -> Table:
    """With `examples`, the newest trajectory of each account has a column."""
    lines = [generated_row(books)]
    for account in accounts(books):
        key = f"dropped:{account.reason}" if account.reason else account.state
        newest = () if examples is None else (examples.get(key, ""),)
        lines.append((*account.row(books.generated), *newest))
    columns = ACCOUNT_COLUMNS if examples is None else (*ACCOUNT_COLUMNS, "newest")
    return Table(columns=columns, rows=tuple(lines), numeric=frozenset(range(1, 5)))


def _show_rows(paper: Paper, rows: Sequence[Row]) -> None:
    if not rows:
        return
    paper.section("last rows")
    columns = ("step", "reward", "held-out", "length", "lag", "trained", "dropped", "seconds", "wall")
    lines = [
        (
            str(row.step),
            f"{row.reward_mean:.3f}",
            "-" if row.score is None else f"{row.score:.3f}",
            f"{row.length_mean:.1f}",
            f"{row.lag_mean:.1f}/{row.lag_max}",
            f"{row.trained_tokens:,}",
            f"{sum(row.dropped_tokens.values()):,}",
            f"{row.wall_s:.2f}",
            "step skipped" if row.skipped else row.stage_s.wall,
        )
        for row in rows
    ]
    paper.table(Table(columns=columns, rows=tuple(lines), numeric=frozenset(range(1, 8))))


def show_trajectory(paper: Paper, found: TrajectoryDetails, texts: TokenTexts | None) -> None:
    paper.line(f"trajectory {found.id}", style="bold")
    paper.facts(trajectory_facts(found).items())
    if found.whole is None:
        paper.section("tokens")
        paper.paragraph(why_no_tokens(found))
        return
    given = prompt_ids(found.whole)
    prompt = texts.text(given) if texts else f"token ids {given}"
    for title, text in (("prompt", prompt), ("answer", found.whole.text)):
        paper.section(title)
        paper.indented(Text(printable(text), overflow="fold"))
    paper.section("tokens", "" if texts else "as ids: the run's tokenizer cannot be read")
    sampled = [token for token in tokens(found.whole, texts) if token.logprob is not None]
    cells = [
        (str(number), _shortened(repr(one.text) if texts else one.text), f"{one.logprob:.3f}", f"v{one.version}")
        for number, one in enumerate(sampled, 1)
    ]
    across = max(1, min(paper.console.width // TOKEN_COLUMNS, len(cells)))  # in reading order, several to a line
    lines = [sum(cells[start : start + across], ()) for start in range(0, len(cells), across)]
    numeric = frozenset(place for place in range(4 * across) if place % 4 in (0, 2))
    paper.table(Table(columns=("", "token", "log-prob", "policy") * across, rows=tuple(lines), numeric=numeric))


def _shortened(word: str) -> str:
    return word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD - 3]}..."
