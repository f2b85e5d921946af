"""Digests of all rows, so that `headrace audit` names any row that the run did not write as it is.

Triggers on the writer's own connection note each row that a transaction changes. At its end one row
goes into `digests`: the notes, and the head of a chain over all notes so far. Account balances are
left out: they are recomputed from the transfers.
"""

import hashlib
import json
import marshal
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

LAST = "SELECT id, head FROM digests ORDER BY id DESC LIMIT 1"


class Digests:
    """What is noted of the transaction under way."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.noted: dict[Any, tuple[Any, ...]] = {}  # table, key and columns, by the first two; none if deleted
        connection.create_function("note", -1, lambda *row: self.noted.__setitem__(row[:2], row))
        connection.execute("BEGIN IMMEDIATE")  # a process that dies leaves all of it, or nothing
        is_new = connection.execute(LAST).fetchone() is None
        for table, key, columns in tables(connection):
            for event, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
                told = ", ".join(f"{row}.{column}" for column in columns if row == "NEW")
                given = f"'{table}', {_named(key, f'{row}.')}{told and ', '}{told}"
                trigger = f"TRIGGER note_{table}_{event} AFTER {event} ON {table}"
                connection.execute(f"CREATE TEMP {trigger} BEGIN SELECT note({given}); END")
            if is_new:  # what is there already
                given = f"'{table}', {_named(key)}, {', '.join(columns)}"
                connection.execute(f"SELECT note({given}) FROM {table}").fetchall()
        self.seal(connection, 0)
        connection.execute("COMMIT")

    def seal(self, connection: sqlite3.Connection, step: int) -> None:
        """Store what was noted, in the transaction that it is about."""
        if self.noted:
            changes: dict[str, dict[Any, int | None]] = {}
            for (table, key), row in self.noted.items():
                changes.setdefault(table, {})[key] = of_row(row) if len(row) > 2 else None
            self.noted.clear()
            told, (_, before) = json.dumps(changes), connection.execute(LAST).fetchone() or (0, "")
            values = (step, next_head(before, step, told), told)
            connection.execute("INSERT INTO digests (step, head, changes) VALUES (?, ?, ?)", values)


def problems(connection: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """Where they are, and sentences."""
    connection.create_function("digest", -1, lambda *values: of_row(values))
    connection.execute("CREATE TEMP TABLE noted (at, named, digested, PRIMARY KEY (at, named)) WITHOUT ROWID")
    before = ""
    for id, step, head, told in connection.execute("SELECT id, step, head, changes FROM digests ORDER BY id"):
        if next_head(before, step, told) != head:
            yield "digests", f"the digests of transaction {id} do not follow from those before it"
        before = head
        with suppress(ValueError, AttributeError, sqlite3.Error):  # changed, which the head tells
            found = [(table, key, digest) for table, keys in json.loads(told).items() for key, digest in keys.items()]
            connection.executemany("INSERT OR REPLACE INTO noted VALUES (?, ?, ?)", found)
    for table, key, columns in tables(connection):
        given = f"'{table}', {_named(key)}, {', '.join(columns)}"
        row, known = f"CAST({_named(key)} AS TEXT)", f"noted WHERE at = '{table}' AND digested IS NOT NULL"
        joined = f"{table} LEFT JOIN noted ON at = '{table}' AND named = {row}"
        other = f"SELECT {row}, digested IS NULL FROM {joined} WHERE digest({given}) IS NOT digested"
        for name, is_new in connection.execute(other):
            yield table, f"row {name} of table {table} {'was added' if is_new else 'was changed'}, and not by the run"
        for (name,) in connection.execute(f"SELECT named FROM {known} AND named NOT IN (SELECT {row} FROM {table})"):
            yield table, f"row {name} of table {table} is gone"


def of_row(values: tuple[Any, ...]) -> int:
    return zlib.crc32(marshal.dumps(values, 2))


def next_head(before: str, step: int, told: str) -> str:
    return hashlib.blake2b(f"{before} {step} {told}".encode(), digest_size=16).hexdigest()


def tables(connection: sqlite3.Connection) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each table with the columns of its key, and all of them."""
    names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT IN ('accounts', 'digests') ORDER BY name"
    for (table,) in connection.execute(names).fetchall():
        columns = connection.execute(f"SELECT name, pk FROM pragma_table_info('{table}')").fetchall()
        keys = sorted((place, name) for name, place in columns if place)
        yield table, [name for _, name in keys], [name for name, _ in columns]


def _named(key: list[str], row: str = "") -> str:
    return " || '/' || ".join(f"{row}{column}" for column in key)
