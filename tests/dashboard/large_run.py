"""A ledger as a long run leaves it: ten thousand steps, a hundred thousand trajectories, written in a few seconds."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from headrace.config_file import dump, load_config
from headrace.ledger.database import create_database
from headrace.ledger.schema import SCHEMA

STEPS, PER_STEP = 10_000, 10
_TRIGGERS = ("transfers_check", "transfers_book", "transfers_keep", "accounts_open")
_NUMBERS = f"WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {STEPS * PER_STEP})"
# Every seventh answer is dropped: stale every fourteenth, without signal the others.
_KEPT = "i % 7 <> 0"
_REASON = "CASE i % 14 WHEN 0 THEN 'stale' ELSE 'no_signal' END"


def write_large_run(run_dir: Path) -> Path:
    """Make the run; the books balance, but the rules that would check each entry are off while it is written."""
    create_database(run_dir).close()
    dump(
        load_config(None, ["prompts.source=arithmetic", f"loop.steps={STEPS}", "loop.max_lag=2"]),
        run_dir / "config.toml",
    )
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as connection, connection:
        for trigger in _TRIGGERS:
            connection.execute(f"DROP TRIGGER {trigger}")
        connection.execute(
            f"{_NUMBERS} INSERT INTO trajectories (id, prompt_id, serial, attempt, idx, num_tokens, num_prompt_tokens, "
            "reward, reward_parts, finish, spans, oldest_version, submitted_s, started_s, finished_s, scored_s, state, "
            "drop_reason, lag, trained_step) "
            f"SELECT (i / 5) || ':p' || (i / 5) || '/' || (i % 5), 'p' || (i / 5), i / 5, 1, i % 5, 20 + i % 9, 6, "
            f"(i * 31 % 97) / 97.0, '{{\"score\": 0.5}}', 'eos', '[[' || (i / {PER_STEP}) || ', 6, 26]]', "
            f"i / {PER_STEP}, "
            f"i * 0.1, i * 0.1, i * 0.1 + 1, i * 0.1 + 1.2, CASE WHEN {_KEPT} THEN 'trained' ELSE 'dropped' END, "
            f"CASE WHEN {_KEPT} THEN NULL ELSE {_REASON} END, i % 3, "
            f"CASE WHEN {_KEPT} THEN i / {PER_STEP} + 1 END FROM n"
        )
        for debit, credit in (("generated", "in_flight"), ("in_flight", "buffered"), ("buffered", "")):
            target = f"'{credit}'" if credit else f"CASE WHEN {_KEPT} THEN 'trained' ELSE 'dropped:' || {_REASON} END"
            id = "NULL" if debit == "generated" else "(i / 5) || ':p' || (i / 5) || '/' || (i % 5)"
            connection.execute(
                f"{_NUMBERS} INSERT INTO transfers "
                "(at_s, step, debit, credit, tokens, trajectories, trajectory_id, lag) "
                f"SELECT i * 0.1, i / {PER_STEP} + 1, '{debit}', {target}, 20 + i % 9, 1, {id}, i % 3 FROM n"
            )
        _balance(connection)
        connection.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_row, range(1, STEPS + 1)))
        for stage, start_s, length_s in (
            ("rollout", 0.0, 0.7),
            ("reward", 0.6, 0.1),
            ("train", 0.7, 0.25),
            ("publish", 0.95, 0.01),
        ):
            connection.executemany(
                "INSERT INTO spans (stage, worker, version, start_s, end_s, detail) VALUES (?, 'local', ?, ?, ?, '')",
                [(stage, step, step - 1 + start_s, step - 1 + start_s + length_s) for step in range(1, STEPS + 1)],
            )
        for statement in SCHEMA.split("CREATE TRIGGER ")[1:]:
            if statement.startswith(_TRIGGERS):
                connection.execute(f"CREATE TRIGGER {statement[: statement.rindex('END;')]}END")
    return run_dir


def _balance(connection: sqlite3.Connection) -> None:
    entries = (
        "SELECT credit AS name, tokens, trajectories FROM transfers "
        "UNION ALL SELECT debit, -tokens, -trajectories FROM transfers"
    )
    sums = connection.execute(f"SELECT name, SUM(tokens), SUM(trajectories) FROM ({entries}) GROUP BY name").fetchall()
    connection.executemany("INSERT OR REPLACE INTO accounts VALUES (?, ?, ?)", sums)


def _row(step: int) -> tuple[object, ...]:
    reward = 0.2 + 0.6 * step / STEPS + 0.05 * (step % 7 - 3) / 3
    data = {
        "step": step,
        "version": step,
        "wall_s": 1.0,
        "num_groups": 2,
        "num_trajectories": PER_STEP,
        "generated_tokens": 240,
        "trained_tokens": 205,
        "dropped_tokens": {"no_signal": 20, "stale": 15},
        "backlog_tokens": 0,
        "preemptions": 0,
        "parks": 0,
        "lag_mean": 1.0,
        "lag_max": 2,
        "reward_mean": reward,
        "reward_std": 0.3,
        "length_mean": 24.0,
        "length_max": 28,
        "truncated_share": 0.0,
        "loss": 0.1,
        "grad_norm": 0.5,
        "lr": 1e-6,
        "skipped": False,
        "entropy": 1.0,
        "kl_reference": 0.0,
        "mismatch_mean": 0.01,
        "mismatch_k3": 0.001,
        "ratio_mean": 1.0,
        "ratio_p01": 0.8,
        "ratio_p99": 1.2,
        "ratio_outside": 0.04,
        "clipped_share": 0.01,
        "effective_samples": 0.97,
        "stage_s": {"rollout": 0.7, "reward": 0.1, "reference": 0.0, "train": 0.25, "publish": 0.01},
        "publish_bytes": 0,
        "score": None,
    }
    return step, step, 1.0, 240, 205, 0, reward, 2, None, json.dumps(data)
