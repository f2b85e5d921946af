"""Whether a run's books are true: everything is recomputed from the transfers, nothing is believed.

Rows are held against accounts in totals. A row counts what was booked up to its writing, so a run
that stopped in the middle of a step has booked more than its rows show. Of a finished run they must
show all that was booked up to the last row; only what was thrown away after it may be missing.
"""

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import groupby, islice
from pathlib import Path

from headrace.ledger import digests
from headrace.ledger.database import FILE_NAME, SCHEMA, explain
from headrace.ledger.files import CHECKPOINTS, SUMMARY
from headrace.ledger.journal import row_from_json
from headrace.ledger.ledger import Books, Ledger
from headrace.runs.columns import reading

_SUMS, _CHECKS = Path(__file__).with_name("audit.sql").read_text(encoding="utf-8").split("\n\n")
_SHOWN = 5  # examples per kind of problem


def audit(run_dir: Path, *, finished: bool | None = None) -> list[str]:
    """What is wrong with the run's books, in sentences; nothing means they balance.

    `finished` decides how strictly rows are held against accounts; else `summary.json` says it.
    """
    problems: list[str] = []
    if finished is None:
        try:
            finished = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8")).get("finished") is True
        except (FileNotFoundError, IsADirectoryError):
            finished = False  # it has none before it ends
        except (ValueError, AttributeError) as error:
            problems.append(f"{SUMMARY} cannot be read: {error}")
    with reading(run_dir) as connection:
        try:
            problems += _damages(connection)
            for _, found in groupby(_not_of_the_run(run_dir, connection), key=lambda told: told[0]):
                problems += [sentence for _, sentence in islice(found, _SHOWN)]
            for sentence, query in re.findall(r"-- (.+)\n([^;]+);", _CHECKS):
                found = connection.execute(f"{_SUMS}\n{query}", {"finished": finished})
                problems += [sentence.format(*values) for values in islice(found, _SHOWN)]
                if num_more := sum(1 for _ in found):
                    problems.append(f"... and {num_more} more such")
        except sqlite3.DatabaseError as error:
            problems.append(str(explain(error, run_dir / FILE_NAME)))
    return problems


def books(run_dir: Path) -> Books:
    with Ledger.open(run_dir) as ledger:
        return ledger.totals()


def _damages(connection: sqlite3.Connection) -> Iterator[str]:
    """Of the file, of the constraints and triggers that it was made with, and of its rows."""
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
    for step, text in connection.execute("SELECT step, data FROM rows ORDER BY step"):
        try:
            row_from_json(text)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            yield f"row {step} cannot be read: {error}"


def _not_of_the_run(run_dir: Path, connection: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """Rows that are not as the run wrote them, and checkpoints of other books."""
    yield from digests.problems(connection)
    for manifest in sorted((run_dir / CHECKPOINTS).glob("step-*/manifest.json")):
        with suppress(OSError, ValueError, KeyError):  # a damaged one is not used
            id, head = json.loads(manifest.read_text(encoding="utf-8"))["facts"]["books"]
            if connection.execute("SELECT 1 FROM digests WHERE (id, head) = (?, ?)", (id, head)).fetchone() is None:
                yield "checkpoints", f"the checkpoint {manifest.parent.name} belongs to other books"
