"""What the digests of the ledger's rows cost, as a share of a step.

    python benchmarks/digests.py                 # about two minutes
    python benchmarks/digests.py --steps 12 --repeats 9

The demo trains some steps, and every statement that changes its ledger is recorded. These are then sent to two fresh
ledgers in turns, one that keeps digests and one that does not. Printed is the difference in processor time, as the
median over repeats, over the time that the recorded steps took; and how much larger the file is.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from headrace import api
from headrace.config_file import load_config
from headrace.ledger import database
from headrace.ledger.digests import Digests
from headrace.ledger.ledger import Ledger

DEMO = Path(__file__).parent.parent / "recipes" / "demo.toml"


class Recording(sqlite3.Connection):
    """Remembers the statements that change something, and what they were given."""

    sent: ClassVar[list[tuple[str, Any]]] = []

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        if sql.split()[0] in ("BEGIN", "INSERT", "UPDATE", "DELETE", "COMMIT") and "digests" not in sql:
            self.sent.append((sql, parameters))
        return super().execute(sql, parameters)

    def __exit__(self, *error: Any) -> bool:
        self.sent.append(("ROLLBACK" if error[0] else "COMMIT", ()))
        return super().__exit__(*error)

    def executemany(self, sql: str, parameters: Iterable[Any]) -> sqlite3.Cursor:
        given = list(parameters)
        self.sent += [(sql, one) for one in given]
        return super().executemany(sql, given)


def recorded(directory: Path, settings: list[str]) -> tuple[list[tuple[str, Any]], float, int]:
    """The statements of a run; the seconds of its steps, and their number."""
    connect = partial(sqlite3.connect, factory=Recording)
    with patch("headrace.ledger.database.sqlite3.connect", connect):
        api.train(load_config(DEMO, [f"run.dir={directory / 'run'}", *settings]))
    with Ledger.open(directory / "run") as ledger:
        seconds = [row.wall_s for row in ledger.rows()]
    meta = next(i for i, (sql, _) in enumerate(Recording.sent) if sql.startswith("BEGIN"))  # after the file was made
    return Recording.sent[meta:], sum(seconds), len(seconds)


def replayed(directory: Path, sent: list[tuple[str, Any]], *, kept: bool) -> tuple[float, int]:
    """Processor seconds, and the bytes of the file."""
    connection = database.create_database(directory)
    digests = Digests(connection) if kept else None
    began = time.process_time()
    for sql, parameters in sent:
        if digests is not None and sql == "COMMIT":
            digests.seal(connection, 1)
        connection.execute(sql, parameters)
    taken = time.process_time() - began
    database.close_database(connection)
    return taken, (directory / database.FILE_NAME).stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("settings", nargs="*", help="of the run, besides the demo's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        given = [f"loop.steps={arguments.steps}", "warmstart.steps=200", "prompts.eval_count=32", *arguments.settings]
        statements, steps_s, num_steps = recorded(Path(room), given)
        extra, sizes = [], (0, 0)
        for repeat in range(arguments.repeats):
            with_s, large = replayed(Path(room) / f"with{repeat}", statements, kept=True)
            without_s, small = replayed(Path(room) / f"without{repeat}", statements, kept=False)
            extra.append(with_s - without_s)
            sizes = (large, small)
    middle = statistics.median(extra)
    low, high = (value / steps_s for value in (min(extra), max(extra)))
    print(f"{num_steps} steps of {steps_s / num_steps:.2f} s, {len(statements) / num_steps:,.0f} statements each")
    print(f"digests take {1000 * middle / num_steps:.2f} ms a step: {middle / steps_s:.2%} ({low:.2%} to {high:.2%})")
    print(f"the file is {sizes[0] / sizes[1]:.2f} times as large")


if __name__ == "__main__":
    main()
