"""Whether a run's books are true: everything is recomputed from the transfers, nothing is believed.

Rows are held against accounts in totals. A row counts what was booked up to its writing, so a run
that stopped in the middle of a step has booked more than its rows show. Of a finished run they must
show all that was booked up to the last row; only what was thrown away after it may be missing.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from headrace.ledger.database import FILE_NAME, explain
from headrace.ledger.files import SUMMARY
from headrace.ledger.journal import row_from_json
from headrace.ledger.ledger import Books, Ledger
from headrace.ledger.schema import DROPPED, SCHEMA
from headrace.row import Row
from headrace.runs.columns import reading

_SHOWN = 5  # examples per kind of problem

# Stands before each of the checks.
_SUMS = """
WITH entries (name, tokens, trajectories) AS (
    SELECT credit, tokens, trajectories FROM transfers
    UNION ALL SELECT debit, -tokens, -trajectories FROM transfers),
sums (name, tokens, trajectories) AS (
    SELECT name, SUM(tokens), SUM(trajectories) FROM entries GROUP BY name)
"""
# Each query selects what the sentence above it needs; of a sound ledger it finds nothing.
_CHECKS = """
-- account {} holds {} tokens and {} trajectories, but its transfers add up to {} and {}
SELECT a.name, a.tokens, a.trajectories, COALESCE(s.tokens, 0), COALESCE(s.trajectories, 0)
FROM accounts a LEFT JOIN sums s ON s.name = a.name
WHERE a.tokens <> COALESCE(s.tokens, 0) OR a.trajectories <> COALESCE(s.trajectories, 0);
-- account {} has transfers but does not exist
SELECT name FROM sums WHERE name NOT IN (SELECT name FROM accounts);
-- the accounts add up to {} tokens and {} trajectories instead of zero
SELECT * FROM (SELECT SUM(tokens) AS t, SUM(trajectories) AS n FROM accounts)
WHERE t <> 0 OR n <> 0;
-- account {} is below zero: {} tokens, {} trajectories
SELECT name, tokens, trajectories FROM accounts
WHERE name <> 'generated' AND (tokens < 0 OR trajectories < 0);
-- transfer {} goes from {} to {}, which no trajectory does
SELECT id, debit, credit FROM transfers
WHERE (debit, credit) NOT IN (
    VALUES ('generated', 'in_flight'), ('in_flight', 'buffered'), ('buffered', 'trained'))
AND NOT (debit IN ('in_flight', 'buffered') AND credit GLOB 'dropped:?*');
-- transfer {} is of a negative amount: {} tokens, {} trajectories
SELECT id, tokens, trajectories FROM transfers WHERE tokens < 0 OR trajectories < 0;
-- trajectory {} entered account {} {} times
SELECT trajectory_id, credit, COUNT(*) FROM transfers WHERE trajectory_id IS NOT NULL
GROUP BY trajectory_id, credit HAVING COUNT(*) > 1;
-- trajectory {} left account {} {} times
SELECT trajectory_id, debit, COUNT(*) FROM transfers WHERE trajectory_id IS NOT NULL
GROUP BY trajectory_id, debit HAVING COUNT(*) > 1;
-- trajectory {} left the buffer for {} without having entered it
SELECT x.trajectory_id, x.credit FROM transfers x WHERE x.debit = 'buffered' AND NOT EXISTS (
    SELECT 1 FROM transfers y
    WHERE y.trajectory_id = x.trajectory_id AND y.credit = 'buffered' AND y.id < x.id);
-- transfer {} names trajectory {}, which is not recorded
SELECT id, trajectory_id FROM transfers
WHERE trajectory_id IS NOT NULL AND trajectory_id NOT IN (SELECT id FROM trajectories);
-- transfer {} moves {} tokens of trajectory {}, which has {}
SELECT x.id, x.tokens, t.id, t.num_tokens
FROM transfers x JOIN trajectories t ON t.id = x.trajectory_id WHERE x.tokens <> t.num_tokens;
-- trajectory {} is recorded as {}, but its last transfer went to {}
SELECT * FROM (
    SELECT t.id, CASE t.state WHEN 'dropped' THEN 'dropped:' || t.drop_reason ELSE t.state END AS recorded,
    COALESCE((SELECT credit FROM transfers x WHERE x.trajectory_id = t.id ORDER BY x.id DESC LIMIT 1),
        'no account') AS booked FROM trajectories t) WHERE recorded IS NOT booked;
-- trajectory {} is recorded with lag {}, but was booked with lag {}
SELECT t.id, t.lag, x.lag FROM transfers x JOIN trajectories t ON t.id = x.trajectory_id
WHERE x.credit NOT IN ('in_flight', 'buffered') AND t.lag IS NOT x.lag;
-- span {} of stage {} ends at {} s, before its start at {} s
SELECT id, stage, end_s, start_s FROM spans WHERE end_s < start_s;
"""


def audit(run_dir: Path, *, finished: bool | None = None) -> list[str]:
    """What is wrong with the run's books, in sentences; nothing means they balance.

    `finished` decides how strictly rows are held against accounts; else `summary.json` says it.
    """
    problems: list[str] = []
    if finished is None:
        finished, problems = _says_finished(run_dir)
    with reading(run_dir) as connection:
        try:
            problems += _schema_problems(connection)
            for sentence, query in re.findall(r"-- (.+)\n([^;]+);", _CHECKS):
                problems += _sentences(sentence, connection.execute(_SUMS + query))
            problems += _row_problems(connection, finished)
        except sqlite3.DatabaseError as error:
            problems.append(str(explain(error, run_dir / FILE_NAME)))
    return problems


def books(run_dir: Path) -> Books:
    with Ledger.open(run_dir) as ledger:
        return ledger.totals()


def _schema_problems(connection: sqlite3.Connection) -> Iterator[str]:
    """Whether the file is whole, and its constraints and triggers are the ones it was made with."""
    for (finding,) in connection.execute("PRAGMA quick_check"):
        if finding != "ok":
            yield f"the file is damaged: {finding}"
    listing = "SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    found = dict(connection.execute(listing))
    with closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(SCHEMA)
        for name, sql in fresh.execute(listing):
            if found.get(name) != sql:
                yield f"the {name} of the database {'was changed' if name in found else 'is gone'}"


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
    findings = iter(findings)
    for values in islice(findings, _SHOWN):
        yield sentence.format(*values)
    if num_more := sum(1 for _ in findings):
        yield f"... and {num_more} more such"


def _row_problems(connection: sqlite3.Connection, finished: bool) -> Iterator[str]:
    """Rows: readable, contiguous, and with the tokens that the accounts have."""
    steps, rows = [], []
    query = "SELECT step, generated_tokens, trained_tokens, data FROM rows ORDER BY step"
    for *own, text in connection.execute(query):
        steps.append(own[0])
        try:
            row = row_from_json(text)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            yield f"row {own[0]} cannot be read: {error}"
            continue
        if [row.step, row.generated_tokens, row.trained_tokens] != own:
            yield f"row {own[0]} disagrees with its own columns"
        rows.append(row)
    if steps and steps[0] > 1:
        yield f"the first row is of step {steps[0]}"
    gaps = [(after, before) for before, after in pairwise(steps) if after != before + 1]
    yield from _sentences("row {} follows row {}: steps are missing between them", gaps)
    query = "SELECT step, SUM(tokens) FROM transfers WHERE credit = 'trained' GROUP BY step"
    booked = Counter(dict(connection.execute(query)))
    both = [(row.step, row.trained_tokens, booked[row.step]) for row in rows]
    wrong = [found for found in both if found[1] != found[2]]
    yield from _sentences("row {} shows {} trained tokens, but {} were booked for its step", wrong)
    yield from _total_problems(connection, rows, steps[-1] if steps else 0, finished)


def _total_problems(connection: sqlite3.Connection, rows: list[Row], last_step: int, finished: bool) -> Iterator[str]:
    shown: Counter[str] = Counter()
    for row in rows:
        shown.update({"generated": row.generated_tokens, "trained": row.trained_tokens})
        shown.update({f"{DROPPED}{reason}": num for reason, num in row.dropped_tokens.items()})
    accounts = Counter(dict(connection.execute("SELECT name, ABS(tokens) FROM accounts")))
    for name in sorted(shown):
        if (num := shown[name]) > accounts[name]:
            yield f"the rows show {num} tokens {name}, more than the {accounts[name]} in its account"
    if not finished:
        return
    due = connection.execute(
        "SELECT CASE debit WHEN 'generated' THEN debit ELSE credit END AS name, SUM(tokens) "
        "FROM transfers WHERE credit <> 'buffered' AND (step <= ? OR credit = 'trained') GROUP BY name",
        (last_step,),
    )
    for name, num in due:
        if shown[name] < num:
            yield f"the run has finished, but its rows show {shown[name]} of the {num} tokens {name}"
