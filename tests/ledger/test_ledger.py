from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import fields

import numpy as np
import pytest
from hand_made import accounts, balances

from headrace.errors import RunError
from headrace.ledger.database import SCHEMA_VERSION, open_database
from headrace.ledger.ledger import Amount, Ledger
from headrace.measured import StageClock, StageSpan, StageTimes
from headrace.runs.audit import audit
from headrace.types import DropReason


@pytest.fixture
def ledger(tmp_path):
    with Ledger.create(tmp_path / "run") as ledger:
        yield ledger


def raw(run_dir):
    return closing(sqlite3.connect(run_dir / "ledger.sqlite", isolation_level=None))


def test_a_trajectorys_life_in_hand_worked_numbers(ledger, make_group):
    group, other = make_group(0, [3, 4]), make_group(1, [5])
    ledger.started(3)
    assert accounts(ledger) == {"generated": (0, -3), "in_flight": (0, 3), "buffered": (0, 0), "trained": (0, 0)}
    ledger.sampled(12)
    ledger.buffered(group)
    assert accounts(ledger) == {"generated": (-12, -3), "in_flight": (5, 1), "buffered": (7, 2), "trained": (0, 0)}
    ledger.buffered(other)
    ledger.trained(group, version=0)
    ledger.dropped(other, [(other.trajectories[0], DropReason.STALE)], was_buffered=True, version=6)
    assert accounts(ledger) == {
        "generated": (-12, -3),
        "in_flight": (0, 0),
        "buffered": (0, 0),
        "trained": (7, 2),
        "dropped:stale": (5, 1),
    }
    totals = ledger.totals()
    assert totals.generated == Amount(tokens=12, trajectories=3)
    assert totals.dropped == {"stale": Amount(tokens=5, trajectories=1)}
    assert balances(totals)
    assert totals.backlog_tokens == 0


def test_what_is_kept_of_a_trajectory(ledger, tmp_path, make_group):
    group = make_group(7, [3, 4], version=2)
    ledger.started(2)
    ledger.sampled(7)
    ledger.buffered(group)
    ledger.step = 5
    ledger.trained(group, version=4)
    with raw(tmp_path / "run") as connection:
        connection.row_factory = sqlite3.Row
        kept = dict(connection.execute("SELECT * FROM trajectories WHERE id = 'p7/1'").fetchone())
        transfer = dict(
            connection.execute("SELECT * FROM transfers WHERE trajectory_id = 'p7/1' AND lag = 2").fetchone()
        )
    assert json.loads(kept.pop("reward_parts")) == {"correct": 1.0}
    assert json.loads(kept.pop("spans")) == [[2, 2, 6]]
    assert kept == {
        "id": "p7/1",
        "prompt_id": "p7",
        "serial": 7,
        "attempt": 1,
        "idx": 1,
        "num_tokens": 4,
        "num_prompt_tokens": 2,
        "reward": 1.0,
        "finish": "eos",
        "oldest_version": 2,
        "submitted_s": 0.5,
        "started_s": 1.0,
        "finished_s": 2.0,
        "scored_s": 2.5,
        "state": "trained",
        "drop_reason": None,
        "lag": 2,
        "trained_step": 5,
    }
    assert (transfer["debit"], transfer["credit"], transfer["tokens"], transfer["step"]) == (
        "buffered",
        "trained",
        4,
        5,
    )


def test_drops_from_flight(ledger, make_trajectory, make_group):
    finished, empty = make_trajectory("p1/0", 6, reward=0.5), make_trajectory("p1/1", 0, reward=None)
    ledger.started(2)
    ledger.sampled(6)
    drops = [(finished, "reward_timeout"), (empty, "filter:mine")]
    ledger.dropped(make_group(1, []), drops, was_buffered=False, version=1)
    found = ledger.read("SELECT trajectory_id, prompt_id, reason, num_tokens, lag, reward FROM drops")
    assert found == [("p1/0", "p1", "reward_timeout", 6, 1, 0.5), ("p1/1", "p1", "filter:mine", 0, 0, None)]
    assert accounts(ledger)["in_flight"] == (0, 0)
    dropped = {reason: amount.tokens for reason, amount in ledger.totals().dropped.items()}
    assert dropped == {"filter:mine": 0, "reward_timeout": 6}


def test_numpy_numbers_are_booked_as_integers(ledger):
    ledger.started(np.int64(2))
    ledger.sampled(np.int32(9))
    assert accounts(ledger)["in_flight"] == (9, 2)


def test_the_database_refuses_what_breaks_the_books(ledger, make_group):
    group = make_group(0, [3, 4])
    ledger.started(2)
    ledger.sampled(6)
    before = accounts(ledger)
    with pytest.raises(sqlite3.IntegrityError, match="more leaves an account"):
        ledger.buffered(group)  # 7 tokens of the 6 in flight: nothing of it is booked
    assert accounts(ledger) == before
    ledger.sampled(1)
    with pytest.raises(sqlite3.IntegrityError, match="more leaves an account"):
        ledger.trained(group, version=0)
    ledger.buffered(group)
    ledger.trained(group, version=0)
    before = accounts(ledger)
    for again in (
        lambda: ledger.trained(group, version=0),
        lambda: ledger.dropped(group, [(group.trajectories[0], "stale")], was_buffered=True),
        lambda: ledger.buffered(group),
        lambda: ledger.sampled(-1),
        lambda: ledger.started(-1),
    ):
        with pytest.raises(sqlite3.IntegrityError):
            again()
        assert accounts(ledger) == before


def test_only_a_buffered_trajectory_leaves_the_buffer_with_its_own_tokens(ledger, make_group, make_trajectory):
    one, two = make_group(0, [3]), make_group(1, [3])
    ledger.started(2)
    ledger.sampled(6)
    ledger.buffered(one)
    with pytest.raises(sqlite3.IntegrityError, match="tokens of its trajectory"):
        ledger.trained(two, version=0)
    short = make_trajectory("p0/0", 2)
    with pytest.raises(sqlite3.IntegrityError, match="tokens of its trajectory"):
        ledger.dropped(one, [(short, "stale")], was_buffered=True)
    ledger.dropped(two, [(two.trajectories[0], "stale")], was_buffered=False)
    with pytest.raises(sqlite3.IntegrityError, match="not in the buffer"):
        ledger.trained(two, version=0)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE transfers SET tokens = 0",
        "DELETE FROM transfers",
        "INSERT OR REPLACE INTO transfers VALUES (1, 0.0, 1, 'generated', 'in_flight', 99, 0, NULL, NULL)",
        "INSERT OR IGNORE INTO transfers VALUES (99, 0.0, 1, 'buffered', 'trained', 99, 1, 'p0/0', 0)",
        "INSERT INTO transfers VALUES (99, 0.0, 1, 'in_flight', 'trained', 1, 1, 'p0/0', 0)",
        "INSERT INTO transfers VALUES (99, 0.0, 1, 'in_flight', 'dropped:', 1, 1, 'p0/0', 0)",
        "INSERT INTO transfers VALUES (99, 0.0, 1, 'generated', 'in_flight', 1.5, 0, NULL, NULL)",
        "INSERT INTO accounts VALUES ('dropped:free', 5, 0)",
        "INSERT INTO accounts VALUES ('pocket', 0, 0)",
        "UPDATE accounts SET tokens = -1 WHERE name = 'buffered'",
        "DELETE FROM accounts",
    ],
)
def test_the_rules_hold_for_any_other_writer_too(played_run, statement):
    with raw(played_run) as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute(statement)


def test_rows_come_back_complete(ledger, make_row):
    plain = make_row(1, dropped_tokens={DropReason.STALE: 3, "filter:mine": 2}, stage_s=StageTimes(reward=0.1))
    odd = make_row(2, loss=math.nan, grad_norm=math.inf, skipped=True, score=0.5, lr=np.float32(0.5))
    ledger.row(plain)
    ledger.row(odd)
    first, second = ledger.rows()
    assert first == plain
    assert math.isnan(second.loss)
    assert second.grad_norm == math.inf
    for field in fields(second):
        if field.name != "loss":
            assert getattr(second, field.name) == getattr(odd, field.name), field.name
    assert [row.step for row in ledger.rows(after_step=1)] == [2]
    with pytest.raises(sqlite3.IntegrityError):
        ledger.row(plain)


def test_what_is_booked_after_a_row_belongs_to_the_next_step(ledger, tmp_path, make_row):
    ledger.sampled(1)
    ledger.row(make_row(1))
    ledger.sampled(2)
    with raw(tmp_path / "run") as connection:
        assert connection.execute("SELECT step, tokens FROM transfers").fetchall() == [(1, 1), (2, 2)]


def test_spans_and_transfer_times_are_on_the_runs_clock(tmp_path):
    clock = StageClock()
    with Ledger.create(tmp_path, clock=clock) as ledger:
        before = clock.now()
        ledger.sampled(1)
        after = clock.now()
        spans = [
            StageSpan(stage="rollout", start_s=0.0, end_s=2.0, version=3, detail="x"),
            StageSpan(stage="train", start_s=2.5, end_s=3.0, worker="w1"),
        ]
        ledger.spans(spans)
        names = [field.name for field in fields(StageSpan)]
        found = ledger.read(f"SELECT {', '.join(names)} FROM spans ORDER BY id")
        assert [StageSpan(**dict(zip(names, values, strict=True))) for values in found] == spans
    with raw(tmp_path) as connection:
        (at_s,) = connection.execute("SELECT at_s FROM transfers").fetchone()
    assert before <= at_s <= after


def test_a_closed_ledger_is_one_plain_file(played_run):
    assert sorted(path.name for path in played_run.iterdir()) == ["ledger.sqlite", "summary.json"]
    with raw(played_run) as connection:
        meta = dict(connection.execute("SELECT key, value FROM meta"))
    assert {key for key in meta if not key.startswith("prompt:")} == {"schema", "headrace", "created"}


def test_closing_under_a_reader_loses_nothing(tmp_path, make_row):
    writer = Ledger.create(tmp_path)
    writer.row(make_row(1))
    with Ledger.open(tmp_path) as reader:
        assert len(reader.rows()) == 1
        writer.row(make_row(2))
        writer.close()
        assert len(reader.rows()) == 2
    with Ledger.open(tmp_path) as reader:
        assert len(reader.rows()) == 2


def test_a_killed_run_keeps_its_books(tmp_path):
    script = (
        "import os, pathlib, sys; from headrace.ledger.ledger import Ledger; "
        "ledger = Ledger.create(pathlib.Path(sys.argv[1])); ledger.started(2); ledger.sampled(9); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 9
    assert audit(tmp_path) == []
    with Ledger.open(tmp_path) as ledger:
        assert ledger.totals().in_flight == Amount(tokens=9, trajectories=2)


DIES = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")  # so that pages of the transaction are in the file before its end
connection.execute("BEGIN IMMEDIATE")
connection.executemany("INSERT INTO meta VALUES (?, 'half')", ((f"key {i}",) for i in range(5000)))
os.kill(os.getpid(), 9)
"""


def test_a_run_that_is_killed_while_it_closes_its_ledger_can_be_read(played_run):
    """The ledger is one file by then, with a rollback journal beside it."""
    ledger = played_run / "ledger.sqlite"
    subprocess.run([sys.executable, "-c", DIES, str(ledger)], check=False)
    assert (played_run / "ledger.sqlite-journal").stat().st_size > 0
    assert audit(played_run) == []
    with closing(open_database(played_run)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM meta WHERE value = 'half'").fetchone() == (0,)


def test_a_second_run_in_the_same_place_is_refused(played_run):
    with pytest.raises(RunError, match=r"already holds a run.*run\.overwrite"):
        Ledger.create(played_run)


def test_a_log_left_by_a_deleted_ledger_is_not_replayed(tmp_path):
    (tmp_path / "ledger.sqlite-wal").write_bytes(b"left over")
    with Ledger.create(tmp_path) as ledger:
        assert balances(ledger.totals())


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Cannot write into"):
        Ledger.create(tmp_path / "file" / "run")
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(RunError, match="Cannot write into"):
            Ledger.create(tmp_path / "locked")


def test_a_full_disk_is_told_in_the_users_words_and_books_nothing(ledger, make_row):
    connection = ledger.connection
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {num_pages}")
    span = StageSpan(stage="train", start_s=0.0, end_s=1.0, detail="x" * 100_000)
    with pytest.raises(RunError, match="disk full"):
        ledger.spans([span])
    connection.execute("PRAGMA max_page_count = 100000")
    assert ledger.read("SELECT * FROM spans") == []
    ledger.spans([span])


def test_a_disk_that_is_full_at_the_start_leaves_no_half_ledger(tmp_path, monkeypatch):
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL

    def refuse(*_args, **_options):
        raise full

    monkeypatch.setattr("headrace.ledger.database.sqlite3.connect", refuse)
    with pytest.raises(RunError, match="disk full"):
        Ledger.create(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_opening_what_is_not_there_or_not_a_ledger(tmp_path, played_run):
    with pytest.raises(RunError, match="holds no run"):
        Ledger.open(tmp_path / "nowhere")
    other = tmp_path / "other"
    other.mkdir()
    (other / "ledger.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(RunError, match="not a Headrace ledger"):
        Ledger.open(other)
    (other / "ledger.sqlite").write_bytes(b"")
    with pytest.raises(RunError, match="just starting"):
        Ledger.open(other)
    with raw(played_run) as connection:
        connection.execute("UPDATE meta SET value = '0' WHERE key = 'schema'")
    with pytest.raises(RunError, match=r"ledger layout 0.*layout 4"):
        Ledger.open(played_run)


def test_a_reader_cannot_write(played_run):
    with Ledger.open(played_run) as reader, pytest.raises(RunError, match="readonly"):
        reader.sampled(1)


def test_the_writer_belongs_to_one_thread(ledger):
    caught = []

    def write():
        try:
            ledger.sampled(1)
        except sqlite3.ProgrammingError as error:
            caught.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_readers_see_whole_transactions_while_the_writer_writes(tmp_path, make_group, make_row):
    writer = Ledger.create(tmp_path)
    done, seen, wrong = threading.Event(), [], []

    def read():
        with Ledger.open(tmp_path) as reader:
            while True:
                last = done.is_set()
                balance = accounts(reader)
                if sum(held[0] for held in balance.values()) or sum(held[1] for held in balance.values()):
                    wrong.append(balance)
                if balance["in_flight"][0] % 7:  # groups of 7 tokens move whole or not at all
                    wrong.append(balance)
                seen.append(len(reader.rows()))
                if last:
                    return

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(1, 101):
        group = make_group(step, [3, 4])
        writer.started(2)
        writer.sampled(7)
        writer.buffered(group)
        writer.trained(group, version=0)
        writer.row(make_row(step, generated_tokens=7, trained_tokens=7))
    done.set()
    thread.join()
    writer.close()
    assert not wrong
    assert seen == sorted(seen)
    assert seen[-1] == 100


def test_ledgers_of_this_layout_pass_the_audit_of_every_version(tmp_path):
    """The audit compares statements as text. Who changes one must raise SCHEMA_VERSION, or old ledgers look damaged."""
    with Ledger.create(tmp_path) as ledger:
        statements = ledger.read("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
    text = "\n".join(sorted(sql for (sql,) in statements))
    assert SCHEMA_VERSION == "4"
    digest = "e7131fbb6b2fbbc6f347e3a261469c1436ef3b62d097bd93e02b25371da0ff5f"
    assert hashlib.sha256(text.encode()).hexdigest() == digest
