"""Whether a run's books are true: everything is recomputed from the transfers, nothing is believed.

Rows are held against accounts in totals. A row counts what was booked up to its writing, so a run that stopped in the
middle of a step has booked more than its rows show: rows may be short, never long. Of a finished run they must show
all that was booked up to the last row; only what was booked after it (work thrown away at the end) may be missing.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.ledger.database import FILE_NAME, explain, open_database
from headrace.ledger.files import SUMMARY
from headrace.ledger.journal import row_from_json
from headrace.ledger.ledger import Books, Ledger
from headrace.ledger.schema import DROPPED, SCHEMA
from headrace.row import Row

_SHOWN = 5  # examples per kind of problem

_ENTRIES = """
WITH entries (name, tokens, trajectories) AS (
    SELECT credit, tokens, trajectories FROM transfers
    UNION ALL SELECT debit, -tokens, -trajectories FROM transfers),
sums AS (SELECT name, SUM(tokens) AS tokens, SUM(trajectories) AS trajectories FROM entries GROUP BY name)
"""

# Each query selects what its sentence needs; a sound ledger answers every one with nothing.
_CHECKS = (
    (
        "account {} holds {} tokens and {} trajectories, but its transfers add up to {} and {}",
        _ENTRIES + "SELECT a.name, a.tokens, a.trajectories, COALESCE(s.tokens, 0), COALESCE(s.trajectories, 0) "
        "FROM accounts a LEFT JOIN sums s ON s.name = a.name "
        "WHERE a.tokens <> COALESCE(s.tokens, 0) OR a.trajectories <> COALESCE(s.trajectories, 0)",
    ),
    (
        "account {} has transfers but does not exist",
        _ENTRIES + "SELECT name FROM sums WHERE name NOT IN (SELECT name FROM accounts)",
    ),
    (
        "the accounts add up to {} tokens and {} trajectories instead of zero",
        "SELECT * FROM (SELECT SUM(tokens) AS t, SUM(trajectories) AS n FROM accounts) WHERE t <> 0 OR n <> 0",
    ),
    (
        "account {} is below zero: {} tokens, {} trajectories",
        "SELECT name, tokens, trajectories FROM accounts "
        "WHERE name <> 'generated' AND (tokens < 0 OR trajectories < 0)",
    ),
    (
        "transfer {} goes from {} to {}, which no trajectory does",
        "SELECT id, debit, credit FROM transfers WHERE NOT ("
        "(debit = 'generated' AND credit = 'in_flight') OR (debit = 'in_flight' AND credit = 'buffered') OR "
        "(debit = 'buffered' AND credit = 'trained') OR "
        "(debit IN ('in_flight', 'buffered') AND credit GLOB 'dropped:?*'))",
    ),
    (
        "transfer {} is of a negative amount: {} tokens, {} trajectories",
        "SELECT id, tokens, trajectories FROM transfers WHERE tokens < 0 OR trajectories < 0",
    ),
    (
        "trajectory {} entered account {} {} times",
        "SELECT trajectory_id, credit, COUNT(*) FROM transfers WHERE trajectory_id IS NOT NULL "
        "GROUP BY trajectory_id, credit HAVING COUNT(*) > 1",
    ),
    (
        "trajectory {} left account {} {} times",
        "SELECT trajectory_id, debit, COUNT(*) FROM transfers WHERE trajectory_id IS NOT NULL "
        "GROUP BY trajectory_id, debit HAVING COUNT(*) > 1",
    ),
    (
        "trajectory {} left the buffer for {} without having entered it",
        "SELECT x.trajectory_id, x.credit FROM transfers x WHERE x.debit = 'buffered' AND NOT EXISTS "
        "(SELECT 1 FROM transfers y WHERE y.trajectory_id = x.trajectory_id AND y.credit = 'buffered' AND y.id < x.id)",
    ),
    (
        "transfer {} names trajectory {}, which is not recorded",
        "SELECT id, trajectory_id FROM transfers WHERE trajectory_id IS NOT NULL "
        "AND trajectory_id NOT IN (SELECT id FROM trajectories)",
    ),
    (
        "transfer {} moves {} tokens of trajectory {}, which has {}",
        "SELECT x.id, x.tokens, t.id, t.num_tokens FROM transfers x JOIN trajectories t ON t.id = x.trajectory_id "
        "WHERE x.tokens <> t.num_tokens",
    ),
    (
        "trajectory {} is recorded as {}, but its last transfer went to {}",
        "SELECT * FROM (SELECT t.id, CASE t.state WHEN 'dropped' THEN 'dropped:' || t.drop_reason ELSE t.state END "
        "AS recorded, COALESCE((SELECT credit FROM transfers x WHERE x.trajectory_id = t.id ORDER BY x.id DESC "
        "LIMIT 1), 'no account') AS booked FROM trajectories t) WHERE recorded IS NOT booked",
    ),
    (
        "trajectory {} is recorded with lag {}, but was booked with lag {}",
        "SELECT t.id, t.lag, x.lag FROM transfers x JOIN trajectories t ON t.id = x.trajectory_id "
        "WHERE x.credit NOT IN ('in_flight', 'buffered') AND t.lag IS NOT x.lag",
    ),
    (
        "span {} of stage {} ends at {} s, before its start at {} s",
        "SELECT id, stage, end_s, start_s FROM spans WHERE end_s < start_s",
    ),
)


def audit(run_dir: Path, *, finished: bool | None = None) -> list[str]:
    """What is wrong with the run's books, in sentences; nothing means they balance.

    `finished` decides how strictly rows are held against accounts; by default `summary.json` says it.
    """
    problems: list[str] = []
    if finished is None:
        finished, problems = _says_finished(run_dir)
    connection = open_database(run_dir)
    try:
        connection.execute("BEGIN")  # one view of the books, however much a live run adds meanwhile
        problems += _schema_problems(connection)
        for sentence, query in _CHECKS:
            problems += _sentences(sentence, connection.execute(query))
        problems += _row_problems(connection, finished)
    except sqlite3.DatabaseError as error:
        problems.append(str(explain(error, run_dir / FILE_NAME)))
    finally:
        connection.close()
    return problems


def books(run_dir: Path) -> Books:
    """The run's accounts, for printing."""
    with Ledger.open(run_dir) as ledger:
        return ledger.totals()


def _schema_problems(connection: sqlite3.Connection) -> Iterator[str]:
    """Whether the file is whole, and its constraints and triggers are the ones it was made with."""
    for (finding,) in connection.execute("PRAGMA quick_check"):
        if finding != "ok":
            yield f"the file is damaged: {finding}"
    listing = "SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    found = dict(connection.execute(listing))
    fresh = sqlite3.connect(":memory:")
    try:
        fresh.executescript(SCHEMA)
        for name, sql in fresh.execute(listing):
            if name not in found:
                yield f"the {name} of the database is gone"
            elif found[name] != sql:
                yield f"the {name} of the database was changed"
    finally:
        fresh.close()


def _says_finished(run_dir: Path) -> tuple[bool, list[str]]:
    """Whether the run's summary has `finished: true`; a run without a summary has not finished."""
    path = run_dir / SUMMARY
    if not path.is_file():
        return False, []
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        return summary.get("finished") is True, []
    except (ValueError, AttributeError) as error:
        return False, [f"{SUMMARY} cannot be read: {error}"]


def _sentences(sentence: str, findings: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    """The first few findings in words, and how many more there are."""
    num_more = 0
    for number, values in enumerate(findings):
        if number < _SHOWN:
            yield sentence.format(*values)
        else:
            num_more += 1
    if num_more:
        yield f"... and {num_more} more such"


def _row_problems(connection: sqlite3.Connection, finished: bool) -> Iterator[str]:
    """Rows: readable, contiguous, and with the tokens that the accounts have."""
    rows: list[Row] = []
    for step, generated, trained, text in connection.execute(
        "SELECT step, generated_tokens, trained_tokens, data FROM rows ORDER BY step"
    ):
        try:
            row = row_from_json(text)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            yield f"row {step} cannot be read: {error}"
            continue
        if (row.step, row.generated_tokens, row.trained_tokens) != (step, generated, trained):
            yield f"row {step} disagrees with its own columns"
        rows.append(row)
    steps = [step for (step,) in connection.execute("SELECT step FROM rows ORDER BY step")]
    if steps and steps[0] > 1:
        yield f"the first row is of step {steps[0]}"
    gaps = [(after, before) for before, after in pairwise(steps) if after != before + 1]
    yield from _sentences("row {} follows row {}: steps are missing between them", gaps)
    yield from _sentences("row {} shows {} trained tokens, but {} were booked for its step", _trained(connection, rows))
    last_step = steps[-1] if steps else None
    yield from _total_problems(connection, rows, last_step, finished)


def _trained(connection: sqlite3.Connection, rows: list[Row]) -> Iterator[tuple[int, int, int]]:
    query = "SELECT step, SUM(tokens) FROM transfers WHERE credit = 'trained' GROUP BY step"
    booked = dict(connection.execute(query))
    for row in rows:
        if row.trained_tokens != booked.get(row.step, 0):
            yield row.step, row.trained_tokens, booked.get(row.step, 0)


def _total_problems(
    connection: sqlite3.Connection, rows: list[Row], last_step: int | None, finished: bool
) -> Iterator[str]:
    shown: Counter[str] = Counter()
    for row in rows:
        shown["generated"] += row.generated_tokens
        shown["trained"] += row.trained_tokens
        shown.update({f"{DROPPED}{reason}": num_tokens for reason, num_tokens in row.dropped_tokens.items()})
    accounts = {name: abs(tokens) for name, tokens in connection.execute("SELECT name, tokens FROM accounts")}
    for name in sorted(shown):
        if shown[name] > accounts.get(name, 0):
            yield f"the rows show {shown[name]} tokens {name}, more than the {accounts.get(name, 0)} in its account"
    if not finished:
        return
    if last_step is None:
        last_step = 0
    due = connection.execute(
        "SELECT CASE debit WHEN 'generated' THEN debit ELSE credit END AS name, SUM(tokens) FROM transfers "
        "WHERE credit <> 'buffered' AND (step <= ? OR credit = 'trained') GROUP BY name",
        (last_step,),
    )
    for name, num_tokens in due:
        if shown[name] < num_tokens:
            yield f"the run has finished, but its rows show {shown[name]} of the {num_tokens} tokens {name}"
