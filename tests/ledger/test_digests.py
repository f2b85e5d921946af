"""Any single row that was deleted, changed or added behind the run's back is named by `audit`."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Workshop

from headrace import api
from headrace.ledger.digests import tables
from headrace.ledger.ledger import Ledger
from headrace.runs.audit import audit


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interrupted and resumed, with something in every table."""
    workshop = Workshop(tmp_path_factory.mktemp("runs"))
    settings = ("loop.steps=4", "recovery.every_steps=2", "recovery.in_flight=resume", "loop.max_lag=1")

    class Impatient(api.Watcher):
        def row(self, row: object) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    config = workshop.config("digested", *settings, "rollout.max_new_tokens=40", reward="dense")
    assert not api.train(config, Impatient())["finished"]
    api.resume(workshop.directory / "digested")
    found = workshop.directory / "digested"
    with Ledger.reopen(found) as ledger, ledger.writing() as connection:  # a run that ended has no partials
        connection.execute("INSERT INTO partials VALUES (0, 0, x'00')")
    return found


def writable(path: Path) -> sqlite3.Connection:
    """Without the triggers that guard the books."""
    connection = sqlite3.connect(path / "ledger.sqlite", isolation_level=None)
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    return connection


def longer(text: str | bytes) -> Any:
    return b"x" if isinstance(text, bytes) else "x"


def about_rows(path: Path) -> list[str]:
    return [problem for problem in audit(path) if "table" in problem or "transaction" in problem]


def test_a_run_is_sound(run: Path):
    assert audit(run) == []
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
        empty = [
            table for table, *_ in tables(connection) if not connection.execute(f"SELECT 1 FROM {table}").fetchone()
        ]
    assert empty == []


def known_tables() -> list[str]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript((Path(__file__).parents[2] / "src/headrace/ledger/schema.sql").read_text())
        return [table for table, *_ in tables(connection)]


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("change", ["delete", "change", "add"])
@pytest.mark.parametrize("table", known_tables())
def test_a_changed_row_is_named(run: Path, tmp_path: Path, table: str, change: str, which: str):
    shutil.copytree(run, tmp_path / "run")
    with closing(writable(tmp_path / "run")) as connection:
        key, columns = next((key, columns) for name, key, columns in tables(connection) if name == table)
        order = "rowid" if which == "first" else "rowid DESC"
        some = "WHERE key <> 'schema'" if table == "meta" else ""  # without it nobody reads the books at all
        rowid, *values = connection.execute(f"SELECT rowid, * FROM {table} {some} ORDER BY {order} LIMIT 1").fetchone()
        name = "/".join(str(values[columns.index(column)]) for column in key)
        other = next(column for column in reversed(columns) if column not in key)
        if change == "delete":
            connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (rowid,))
        elif change == "change":
            connection.execute("PRAGMA ignore_check_constraints = 1")
            was = values[columns.index(other)]
            new = (was or 0) + 1 if isinstance(was, int | float | None) else was + longer(was)
            connection.execute(f"UPDATE {table} SET {other} = ? WHERE rowid = ?", (new, rowid))
        else:
            connection.execute("PRAGMA ignore_check_constraints = 1")
            for index, column in enumerate(columns):
                if column in key or column == "key":
                    old = values[index]
                    values[index] = (
                        old + 10_000 if isinstance(old, int) else old + (b"x" if isinstance(old, bytes) else "x")
                    )
            name = "/".join(str(values[columns.index(column)]) for column in key)
            if table == "transfers":
                values[columns.index("trajectory_id")] = None
            connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", values)
    said = {"delete": "is gone", "change": "was changed, and not by the run", "add": "was added, and not by the run"}
    assert about_rows(tmp_path / "run") == [f"row {name} of table {table} {said[change]}"]


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM digests WHERE id = 3",
        "UPDATE digests SET changes = '{}' WHERE id = 3",
        "UPDATE digests SET changes = '{[' WHERE id = 3",
    ],
)
def test_changed_digests_are_seen(run: Path, tmp_path: Path, change: str):
    shutil.copytree(run, tmp_path / "run")
    with closing(writable(tmp_path / "run")) as connection:
        connection.execute(change)
    assert any("do not follow from those before it" in problem for problem in audit(tmp_path / "run"))


def test_digests_that_were_cut_off_leave_rows_that_nobody_noted(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run")
    with closing(writable(tmp_path / "run")) as connection:
        connection.execute("DELETE FROM digests WHERE id > 5")
    assert any("was added, and not by the run" in problem for problem in audit(tmp_path / "run"))


def test_a_checkpoint_of_other_books_is_named(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run")
    manifest = max((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))
    text = manifest.read_text()
    head = text.split('"books"')[1].split('"')[1]
    manifest.write_text(text.replace(head, "0" * len(head)))
    assert audit(tmp_path / "run") == [f"the checkpoint {manifest.parent.name} belongs to other books"]


def test_books_whose_digests_are_gone_are_no_sound_ones(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as connection:
        connection.execute("DROP TABLE digests")
    assert "the table digests of the database is gone" in audit(tmp_path / "run")


def test_a_transaction_that_fails_leaves_no_digests(tmp_path: Path):
    with Ledger.create(tmp_path / "run") as ledger:
        before = ledger.sealed()
        with pytest.raises(sqlite3.IntegrityError), ledger.writing() as connection:
            connection.executemany("INSERT INTO meta VALUES (?, ?)", [("a", "b"), ("a", "c")])
        assert ledger.sealed() == before
        ledger.remember("c", "d")
        assert ledger.sealed() != before
    assert audit(tmp_path / "run") == []
