from __future__ import annotations

import gc
import sqlite3
from contextlib import closing

import pytest
from hand_made import balances

from headrace.errors import RunError
from headrace.ledger.digests import Digests
from headrace.ledger.journal import row_to_json
from headrace.ledger.ledger import Amount, Ledger
from headrace.runs.audit import audit, books

PLANTED = [
    ("UPDATE accounts SET tokens = 17 WHERE name = 'trained'", "account trained holds 17 tokens"),
    ("UPDATE accounts SET tokens = 17 WHERE name = 'trained'", "add up to 1 tokens and 0 trajectories instead of zero"),
    (
        "UPDATE accounts SET trajectories = 9 WHERE name = 'buffered'",
        "account buffered holds 0 tokens and 9 trajectories",
    ),
    ("UPDATE accounts SET tokens = -3 WHERE name = 'in_flight'", "account in_flight is below zero: -3 tokens"),
    ("DELETE FROM accounts WHERE name = 'dropped:no_signal'", "account dropped:no_signal has transfers but does not"),
    (
        "UPDATE transfers SET tokens = 8 WHERE credit = 'trained' AND tokens = 9",
        "moves 8 tokens of trajectory p1/0, which has 9",
    ),
    ("UPDATE transfers SET credit = 'trained' WHERE credit = 'dropped:run_ended'", "goes from in_flight to trained"),
    ("UPDATE transfers SET tokens = -4 WHERE tokens = 4 AND debit = 'generated'", "is of a negative amount: -4 tokens"),
    (
        "DELETE FROM transfers WHERE credit = 'buffered' AND trajectory_id = 'p0/0'",
        "p0/0 left the buffer for trained without",
    ),
    (
        "INSERT INTO transfers SELECT 900, at_s, step, debit, credit, tokens, trajectories, trajectory_id, lag "
        "FROM transfers WHERE credit = 'trained' AND trajectory_id = 'p0/0'",
        "trajectory p0/0 entered account trained 2 times",
    ),
    (
        "INSERT INTO transfers SELECT 900, at_s, step, debit, 'dropped:stale', tokens, 1, trajectory_id, lag "
        "FROM transfers WHERE credit = 'trained' AND trajectory_id = 'p0/0'",
        "trajectory p0/0 left account buffered 2 times",
    ),
    ("DELETE FROM trajectories WHERE id = 'p0/0'", "names trajectory p0/0, which is not recorded"),
    ("UPDATE trajectories SET num_tokens = 30 WHERE id = 'p0/0'", "moves 3 tokens of trajectory p0/0, which has 30"),
    (
        "UPDATE trajectories SET drop_reason = 'stale' WHERE id = 'p2/0'",
        "p2/0 is recorded as dropped:stale, but its last",
    ),
    ("UPDATE trajectories SET lag = 5 WHERE id = 'p1/0'", "p1/0 is recorded with lag 5, but was booked with lag 1"),
    (
        "INSERT INTO spans VALUES (1, 'train', 'local', 1, 5.0, 4.0, '')",
        "span 1 of stage train ends at 4.0 s, before its start at 5.0 s",
    ),
    ("UPDATE rows SET step = 4 WHERE step = 2", "row 4 follows row 1"),
    ("DELETE FROM rows WHERE step = 1", "the first row is of step 2"),
    ("DELETE FROM rows WHERE step = 2", "rows show 7 of the 16 tokens trained"),
    ("UPDATE rows SET trained_tokens = 8 WHERE step = 1", "row 1 disagrees with its own columns"),
    ("UPDATE rows SET data = '{' WHERE step = 1", "row 1 cannot be read"),
    (
        "UPDATE rows SET data = replace(data, '\"no_signal\": 5', '\"no_signal\": 6')",
        "show 6 tokens dropped:no_signal, more",
    ),
    (
        "UPDATE rows SET data = replace(data, '\"no_signal\": 5', '\"no_signal\": 4')",
        "show 4 of the 5 tokens dropped:no_",
    ),
    (
        "UPDATE rows SET data = replace(data, '\"trained_tokens\": 9', '\"trained_tokens\": 8')",
        "row 2 shows 8 trained tokens",
    ),
    (
        "UPDATE rows SET data = replace(data, 'generated_tokens\": 21', 'generated_tokens\": 20')",
        "show 20 of the 21 tokens",
    ),
    (
        "UPDATE rows SET data = replace(data, 'generated_tokens\": 21', 'generated_tokens\": 26')",
        "26 tokens generated, more",
    ),
    ("SELECT 1", "the trigger transfers_keep of the database is gone"),
]


def damage(run_dir, *statements):
    """Edit the file behind the ledger's back."""
    with closing(sqlite3.connect(run_dir / "ledger.sqlite", isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for name in ("check", "book", "keep", "stay"):
            connection.execute(f"DROP TRIGGER transfers_{name}")
        connection.execute("DROP TRIGGER accounts_stay")
        connection.execute("DROP INDEX transfers_leave_once")
        for statement in statements:
            connection.execute(statement)


def test_a_sound_run_has_no_problems(played_run):
    assert audit(played_run) == []
    assert audit(played_run, finished=False) == []


@pytest.mark.parametrize(("statement", "finding"), PLANTED)
def test_planted_damage_is_named(played_run, statement, finding):
    damage(played_run, statement)
    problems = audit(played_run)
    assert any(finding in problem for problem in problems), problems


def test_rows_may_be_short_only_while_the_run_is_unfinished(played_run, make_row):
    damage(played_run)
    with closing(sqlite3.connect(played_run / "ledger.sqlite", isolation_level=None)) as connection:
        row = make_row(2, trained_tokens=9, dropped_tokens={"no_signal": 1})
        connection.execute("UPDATE rows SET data = ? WHERE step = 2", (row_to_json(row),))
    of_rows = [problem for problem in audit(played_run) if "its rows" in problem]
    assert of_rows == ["the run has finished, but its rows show 1 of the 5 tokens dropped:no_signal"]
    assert not [problem for problem in audit(played_run, finished=False) if "its rows" in problem]
    (played_run / "summary.json").unlink()
    assert not [problem for problem in audit(played_run) if "its rows" in problem]


def test_a_run_that_stopped_in_the_middle_of_a_step_is_sound(tmp_path, make_group, make_row):
    with Ledger.create(tmp_path) as ledger:
        one, two = make_group(0, [3]), make_group(1, [4])
        ledger.started(3)
        ledger.sampled(9)
        ledger.buffered(one)
        ledger.trained(one, version=0)
        ledger.row(make_row(1, generated_tokens=9, trained_tokens=3))
        ledger.buffered(two)
        ledger.trained(two, version=1)
        ledger.sampled(5)
        assert audit(tmp_path) == []  # also while the writer has it open
    assert audit(tmp_path) == []
    assert audit(tmp_path, finished=True) == ["the run has finished, but its rows show 3 of the 7 tokens trained"]


def test_many_problems_of_one_kind_are_cut_short(played_run):
    spans = ", ".join(f"({i}, 'train', '', 0, 2.0, 1.0, '')" for i in range(1, 10))
    damage(played_run, f"INSERT INTO spans VALUES {spans}")
    problems = audit(played_run)
    assert sum("ends at" in problem for problem in problems) == 5
    assert "... and 4 more such" in problems


def test_a_changed_constraint_and_a_torn_file_are_found(played_run):
    damage(played_run, "DROP TABLE spans")
    assert any("no such table: spans" in problem for problem in audit(played_run))
    path = played_run / "ledger.sqlite"
    content = bytearray(path.read_bytes())
    content[4096 * 3 : 4096 * 6] = bytes(4096 * 3)
    path.write_bytes(content)
    assert any("damaged" in problem for problem in audit(played_run))


def test_an_unreadable_summary_is_a_problem(played_run):
    (played_run / "summary.json").write_text("{")
    assert any("summary.json cannot be read" in problem for problem in audit(played_run))


def test_no_run_is_the_users_error(tmp_path):
    with pytest.raises(RunError):
        audit(tmp_path)


def test_the_books_for_printing(played_run):
    found = books(played_run)
    assert balances(found)
    assert found.generated == Amount(tokens=25, trajectories=6)
    assert found.trained == Amount(tokens=16, trajectories=3)
    assert found.dropped == {
        "no_signal": Amount(tokens=5, trajectories=2),
        "run_ended": Amount(tokens=4, trajectories=1),
    }
    assert found.backlog_tokens == 0


def test_a_process_that_dies_before_the_first_digest_leaves_clean_books(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Digests, "seal", die)
        with pytest.raises(KeyboardInterrupt):
            Ledger.create(tmp_path)
    gc.collect()  # the connection that the "process" held
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection:
        assert not connection.execute("SELECT 1 FROM digests").fetchone()
    Ledger.reopen(tmp_path).close()
    with Ledger.open(tmp_path) as ledger:
        assert ledger.read("SELECT COUNT(*) FROM digests") == [(1,)]
    assert audit(tmp_path) == []
