"""The ledger's SQLite file (WAL mode): its tables, and opening it, with errors in the user's words.

The tables (schema.sql) hold the rules of double-entry bookkeeping as constraints and triggers.
Every amount moves from one account to another, so all accounts always add up to zero: generated =
trained + dropped (by reason) + buffered + in flight, in tokens and in trajectories.

`headrace audit` compares the text of every statement with that in the file. So another text of a
statement, even in a comment inside it, needs another SCHEMA_VERSION.
"""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from headrace import __version__
from headrace.errors import RunError

SCHEMA_VERSION = "4"
SCHEMA = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")
SOURCE, DROPPED = "generated", "dropped:"  # an account, and the beginning of the names of others
FILE_NAME = "ledger.sqlite"
LOCK_NAME = "lock"
LOG_AHEAD = "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL"
LOCK_WAIT_S = 5.0  # another program that reads the file may lock it for a moment
DATABASE = tuple(FILE_NAME + suffix for suffix in ("", "-wal", "-shm", "-journal"))  # its files


def create_database(run_dir: Path) -> sqlite3.Connection:
    """Create the run's database; refuses a directory that already has one."""
    try:  # exclusively, so that two runs cannot start in one directory
        run_dir.mkdir(parents=True, exist_ok=True)
        os.close(os.open(run_dir / FILE_NAME, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        for name in DATABASE[1:]:  # a log left by a deleted ledger would be replayed
            (run_dir / name).unlink(missing_ok=True)
    except OSError as error:
        told = f"Cannot write into {run_dir}: {error.strerror}. Choose another run.dir"
        if isinstance(error, FileExistsError) and error.filename == str(run_dir / FILE_NAME):
            told = f"{run_dir} already holds a run. Choose another run.dir, or set run.overwrite=true to replace it"
        raise RunError(f"{told}.") from error
    try:
        with _connecting(run_dir / FILE_NAME) as connection:
            connection.executescript(f"{LOG_AHEAD}; BEGIN IMMEDIATE; {SCHEMA}")
            created = datetime.now(UTC).isoformat(timespec="seconds")
            meta = [("schema", SCHEMA_VERSION), ("headrace", __version__), ("created", created)]
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta)
            connection.execute("COMMIT")
            return connection
    except RunError:
        for name in DATABASE:
            (run_dir / name).unlink(missing_ok=True)
        raise


def open_database(run_dir: Path) -> sqlite3.Connection:
    """Open a run's database for reading only, also while the run writes it."""
    path = run_dir / FILE_NAME
    if not path.is_file():
        raise RunError(f"{run_dir} holds no run: there is no {FILE_NAME} in it.")
    with _connecting(path, read_only=True) as connection:
        query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'meta'"
        if not connection.execute(query).fetchone():
            raise RunError(f"{path} is not a Headrace ledger, or its run is just starting.")
        meta = dict(connection.execute("SELECT key, value FROM meta WHERE key IN ('schema', 'headrace')"))
        if meta.get("schema") != SCHEMA_VERSION:
            made = f"layout {meta.get('schema', '?')} of headrace {meta.get('headrace', '?')}"
            this = f"this is headrace {__version__} with layout {SCHEMA_VERSION}"
            raise RunError(f"{path} has the ledger {made}; {this}. Use the version that made the run.")
        return connection


def reopen_database(run_dir: Path) -> sqlite3.Connection:
    """Open the database of a run that ended too soon, to continue writing."""
    open_database(run_dir).close()  # refuses a file that is missing or of another layout
    with _connecting(run_dir / FILE_NAME) as connection:
        connection.executescript(LOG_AHEAD)
        return connection


def is_complete(run_dir: Path) -> bool:
    """Whether its creation was complete: a process that died before left an empty file."""
    path = run_dir / FILE_NAME
    if not path.is_file():
        return False
    with _connecting(path, read_only=True) as connection, contextlib.closing(connection):
        try:
            return bool(connection.execute("SELECT 1 FROM sqlite_master").fetchone())
        except sqlite3.Error:
            return True  # damaged: `open_database` will say so


def close_database(connection: sqlite3.Connection) -> None:
    """Close a written database, leaving one file without WAL, for read-only directories."""
    with contextlib.suppress(sqlite3.OperationalError):  # a reader has it open
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()


def rescue_database(connection: sqlite3.Connection, path: Path) -> RunError:
    """Copy a database whose file was deleted while it is open; returns what to tell the user."""
    copy = path.with_name("ledger.rescued.sqlite")
    told = f"What it held is in {copy}: rename that to {path.name}, and `headrace resume {path.parent}` goes on"
    try:
        with contextlib.closing(sqlite3.connect(copy)) as target:
            connection.backup(target)
    except sqlite3.Error as error:
        told = f"What it held could not be copied ({error})"
    return RunError(f"{path} was deleted or replaced while the run was writing it, so the run stops. {told}.")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Errors of the database at `path` in the user's words, except those that are our mistake."""
    try:
        yield
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
        raise
    except sqlite3.Error as error:
        raise explain(error, path) from error


def explain(error: sqlite3.Error, path: Path) -> RunError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return RunError(f"Cannot write {path} ({error}). Is the disk full? Free some space, or choose another run.dir.")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return RunError(f"Cannot open {path} ({error}). Check the permissions of the file and its directory.")
    if code == sqlite3.SQLITE_BUSY:
        used = f"another program has been using it for more than {LOCK_WAIT_S:g} s"
        told = f"End that program; `headrace resume {path.parent}` continues the run"
        return RunError(f"{path} is locked: {used}. {told}.")
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return RunError(f"{path} is damaged, or not a Headrace ledger ({error}).")
    return RunError(f"The ledger {path} cannot be used: {error}.")


def claimed(run_dir: Path) -> IO[str]:
    """The open lock file of `run_dir`: no other process can train there while it is open.

    The operating system closes it with the process.
    """
    try:
        with contextlib.ExitStack() as undo:
            lock = undo.enter_context((run_dir / LOCK_NAME).open("a+"))
            lock.seek(0)
            owner = lock.read().strip() or "?"
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            undo.pop_all()
            return lock
    except BlockingIOError as error:
        raise RunError(f"{run_dir} is in use: process {owner} is training there") from error
    except OSError as error:
        raise RunError(f"Cannot write into {run_dir}: {error.strerror}. Choose another run.dir.") from error


@contextlib.contextmanager
def _connecting(path: Path, *, read_only: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection that is closed if something fails inside, and stays open after it."""
    died = path.with_name(f"{path.name}-journal").exists()  # in `close_database`: even a reader rolls it back
    where = f"{path.resolve().as_uri()}?mode={'ro' if read_only and not died else 'rwc'}"
    with explained(path), contextlib.ExitStack() as undo:
        connection = sqlite3.connect(where, uri=True, isolation_level=None, timeout=LOCK_WAIT_S)
        undo.callback(connection.close)
        yield connection
        undo.pop_all()
