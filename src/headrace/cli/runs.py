"""The commands that show what runs left, hold runs against each other, and make runs for it."""

import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from rich.text import Text
from typer import Argument, Exit, Option

from headrace.cli.app import Json, Paper, RunDir, app, settings_from, tell
from headrace.config import Config
from headrace.config_file import changed, rooted, values
from headrace.dashboard.site import serve
from headrace.errors import ConfigError
from headrace.insight.triage import BOTTLENECK_OF_STAGE
from headrace.ledger.database import FILE_NAME
from headrace.ledger.files import is_run, read_summary, run_config
from headrace.ledger.ledger import Amount, Books, Ledger
from headrace.ledger.recovery import changes
from headrace.measured import Row, stages_of
from headrace.runs import audit as checks
from headrace.runs import show as shown
from headrace.runs.compare import Cost, compare
from headrace.runs.facts import RunFacts, RunState, read_run, read_runs
from headrace.runs.report import Table, ago, or_dash, printable

LAST_ROWS = 8  # of a run that is shown
MOST_PROBLEMS = 3  # explained below the list of runs
TOKEN_COLUMNS = 40  # characters for a token with its number, log-prob and version
LONGEST_WORD = 14  # of a token's text, with its quotes
HELD_TOGETHER = re.compile(r"""\[(?:"[^"]*"|'[^']*'|[^]])*\]|{[^}]*}|"[^"]*"|'[^']*'|[\[{"'].*""", re.DOTALL)
RunsDir = Annotated[Path, Argument(metavar="[DIR]", help="where the runs are")]
At = Annotated[Cost, Option(help="what is to be equal")]


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
def runs(directory: RunsDir = Path("runs")) -> None:
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
    raise Exit(1 if problems else 0)


@app.command()
def dash(
    run: Annotated[
        Path, Argument(metavar="[RUN]", help="a run, or a directory of runs to choose from and compare")
    ] = Path("runs"),
    port: Annotated[int, Option(min=1, max=65535, help="where the page is")] = 8080,
    host: Annotated[str, Option(help="who may connect; 0.0.0.0 lets everybody")] = "127.0.0.1",
) -> None:
    """Show runs on a web page, also while they go on."""
    serve(run, host=host, port=port)


@app.command("compare")
def compare_command(
    runs: Annotated[list[Path], Argument(metavar="RUN RUN ...", help="run directories")],
    at: At = Cost.TOKENS,
    as_json: Json = False,
) -> None:
    """Compare the held-out scores of runs at equal cost; runs that differ in their seeds alone count as one."""
    report, cost, sides = compare(runs, at)
    tell(report, {"at": at, "cost": cost, "sides": sides}, as_json)


@app.command()
def sweep(
    settings: Annotated[list[str], Argument(metavar="[FILE.toml] section.key=value,value ...", help="settings")],
    directory: Annotated[Path, Option("--dir", help="where the runs are made")] = Path("runs/sweep"),
    at_once: Annotated[int, Option(min=1, help="runs side by side")] = 1,
    at: At = Cost.TOKENS,
) -> None:
    """Train with every combination of some values, and compare. Started again, it goes on where it was."""
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
        _refuse_to_make(run_dir, rooted(settings_from(given)), at)
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
    paper.report(compare(list(plans), at)[0])


def _refuse_to_make(run_dir: Path, config: Config, at: Cost) -> None:
    if at is Cost.DOLLARS and not config.run.dollars_per_hour:
        raise ConfigError("--at dollars needs the price of a device: run.dollars_per_hour=2.5")
    wanted, known = values(config), values(run_config(run_dir)) if is_run(run_dir) else {}
    free = ("run.dir", "run.overwrite", "run.dollars_per_hour")
    if other := [key for key in known if key not in free and known[key] != wanted[key]]:
        raise ConfigError(f"{run_dir} holds a run with another {other[0]}; choose another directory (--dir)")


def alternatives(word: str) -> Sequence[str]:
    """`key=a,b` is `key=a` and `key=b`; commas inside brackets or quotes separate nothing."""
    key, equals, value = word.partition("=")
    if not equals:
        return [word]
    held = HELD_TOGETHER.sub(lambda found: found[0].replace(",", "\0"), value)
    parts = [part.strip().replace("\0", ",") for part in held.split(",")]
    if len(parts) > 1 and not all(parts):
        raise ConfigError(f"{word}: there is nothing between two commas, or after the last")
    return [f"{key}={part}" for part in parts]


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
    texts = {"prompt": asked["text"], "answer": found.whole.text}
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
        paper.paragraph(shown.NO_TOKENS)
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
