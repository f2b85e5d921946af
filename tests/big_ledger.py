"""A ledger as a long run leaves it, made in seconds: the books balance, the times and numbers are plausible.

    PYTHONPATH=src python tests/big_ledger.py RUN [STEPS]

Each step trains on two groups of five answers; one group in ten is dropped besides. Generation fills most of a step,
then the learner works; scoring runs beside both. Rewards rise over the run.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config_file import load_config
from headrace.ledger.database import close_database, create_database
from headrace.ledger.files import save_settings
from headrace.ledger.journal import encode
from headrace.measured import STALL
from headrace.types import FinishReason, Span, Timing, Trajectory

GROUPS, SAMPLES, MAX_LAG, MAX_TOKENS = 2, 5, 2, 512
ENGINE_STEPS = 20  # spans of the engine in a step
JOURNALED = 50  # of the last steps the answers are kept token by token
ROLLOUT_S, TRAIN_S, OPTIMIZER_S, PUBLISH_S = 1.2, 0.6, 0.04, 0.02  # the optimizer's is part of the learner's
STEP_S = ROLLOUT_S + TRAIN_S + PUBLISH_S


def make_big_ledger(run_dir: Path, *, num_steps: int = 10_000, seed: int = 0) -> Path:
    """A run directory whose ledger has so many steps, and eleven answers to each."""
    rng = np.random.default_rng(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    overrides = [
        f"run.dir={run_dir}",
        f"loop.steps={num_steps}",
        f"loop.max_lag={MAX_LAG}",
        f"loop.groups_per_step={GROUPS}",
        f"rollout.samples={SAMPLES}",
        f"rollout.max_new_tokens={MAX_TOKENS}",
        "reward.workers=2",
    ]
    save_settings(load_config(None, overrides), run_dir)
    connection = create_database(run_dir)
    with closing(connection):
        connection.execute("PRAGMA synchronous = OFF")
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        connection.execute("BEGIN")
        for name, _ in triggers:  # they check every transfer, which here would take most of the time
            connection.execute(f"DROP TRIGGER {name}")
        _fill(connection, _answers(rng, num_steps), num_steps, rng)
        for _, sql in triggers:
            connection.execute(sql)
        connection.execute("COMMIT")
        close_database(connection)
    (run_dir / "summary.json").write_text('{"finished": true}')
    return run_dir


def _answers(rng: np.random.Generator, num_steps: int) -> dict[str, np.ndarray]:
    """Columns of all answers, in the order of their groups; `step` is the one they were trained in or dropped in."""
    extra = rng.random(num_steps) < 0.2
    groups_of_step = GROUPS + extra
    step_of_group = np.repeat(np.arange(1, num_steps + 1), groups_of_step)
    first = np.concatenate([[0], np.cumsum(groups_of_step)[:-1]])
    dull = np.zeros(len(step_of_group), bool)
    dull[first[extra]] = True
    lag_of_group = np.minimum(rng.choice(MAX_LAG + 1, len(step_of_group), p=[0.5, 0.35, 0.15]), step_of_group - 1)
    num = len(step_of_group) * SAMPLES
    step, lag = np.repeat(step_of_group, SAMPLES), np.repeat(lag_of_group, SAMPLES)
    tokens = np.clip(rng.lognormal(4.3, 0.8, num), 1, MAX_TOKENS).astype(np.int64)
    begin_s = (step - 1) * STEP_S
    finished_s = begin_s + ROLLOUT_S * np.sqrt(tokens / MAX_TOKENS) * rng.uniform(0.9, 1.0, num)
    reward = (rng.random(num) < 0.2 + 0.6 * step / num_steps).astype(np.float64)
    reward[np.repeat(dull, SAMPLES)] = 0.0
    return {
        "serial": np.repeat(np.arange(len(step_of_group)), SAMPLES),
        "idx": np.tile(np.arange(SAMPLES), len(step_of_group)),
        "step": step,
        "dull": np.repeat(dull, SAMPLES),
        "lag": lag,
        "tokens": tokens,
        "reward": reward,
        "started_s": np.maximum(0.0, begin_s + 0.01 - lag * STEP_S),
        "finished_s": finished_s,
        "scored_s": finished_s + rng.lognormal(-4.0, 0.7, num).clip(max=TRAIN_S / 2),
    }


def _fill(connection: sqlite3.Connection, a: dict[str, np.ndarray], num_steps: int, rng: np.random.Generator) -> None:
    ids = [f"{serial}:train-{serial % 5000}/{idx}" for serial, idx in zip(a["serial"], a["idx"], strict=True)]
    booked_s = (a["step"] - 1) * STEP_S + ROLLOUT_S + TRAIN_S / 2  # all verdicts of the step are there
    _insert(connection, "trajectories", _trajectories(a, ids))
    _insert(connection, "attempts", _attempts(a))
    _insert(connection, "transfers", _transfers(a, ids, booked_s))
    for column, sign in (("credit", 1), ("debit", -1)):
        connection.execute(f"INSERT OR IGNORE INTO accounts SELECT DISTINCT {column}, 0, 0 FROM transfers")
        connection.execute(
            f"UPDATE accounts SET tokens = tokens + {sign} * s.t, trajectories = trajectories + {sign} * s.n FROM "
            f"(SELECT {column} AS name, SUM(tokens) AS t, SUM(trajectories) AS n FROM transfers GROUP BY 1) AS s "
            "WHERE accounts.name = s.name"
        )
    _insert(connection, "spans", _spans(a, num_steps))
    _insert(connection, "rows", _rows(a, num_steps, rng))
    kept = np.flatnonzero((a["step"] > num_steps - JOURNALED) & ~a["dull"])
    _insert(connection, "journal", ((ids[i], encode(_trajectory(a, ids[i], i, rng))) for i in kept))


def _insert(connection: sqlite3.Connection, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
    names = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
    connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", rows)


def _trajectories(a: dict[str, np.ndarray], ids: list[str]) -> Iterable[tuple[Any, ...]]:
    columns = {name: values.tolist() for name, values in a.items()}
    for i, id in enumerate(ids):
        c = {name: values[i] for name, values in columns.items()}
        finish = "length" if c["tokens"] == MAX_TOKENS else "eos"
        oldest = c["step"] - 1 - c["lag"]
        fate = ("dropped", "no_signal", c["lag"], None) if c["dull"] else ("trained", None, c["lag"], c["step"])
        yield (
            *(id, id.split(":")[1].split("/")[0], c["serial"], 1, c["idx"], c["tokens"], 20, c["reward"]),
            *(f'{{"correct": {c["reward"]}}}', finish, f"[[{oldest}, 20, {20 + c['tokens']}]]", oldest),
            *(c["started_s"], c["started_s"], c["finished_s"], c["scored_s"], *fate),
        )


def _attempts(a: dict[str, np.ndarray]) -> Iterable[tuple[Any, ...]]:
    for serial, step, lag in zip(*(a[name][::SAMPLES].tolist() for name in ("serial", "step", "lag")), strict=True):
        yield serial, 1, f"train-{serial % 5000}", step, step - 1 - lag, "closed"


def _transfers(a: dict[str, np.ndarray], ids: list[str], booked_s: np.ndarray) -> Iterable[tuple[Any, ...]]:
    """A group begins, its tokens come, it is buffered or dropped, and trained on at the end of its step."""
    entries: list[tuple[Any, ...]] = []
    num, tokens, step, lag = len(ids), a["tokens"].tolist(), a["step"].tolist(), a["lag"].tolist()
    started_s, finished_s, at_s = a["started_s"].tolist(), a["finished_s"].tolist(), booked_s.tolist()
    dull = a["dull"].tolist()
    for i in range(0, num, SAMPLES):
        entries.append((started_s[i], step[i], "generated", "in_flight", 0, SAMPLES, None, None))
    for i in range(num):
        entries.append((finished_s[i], step[i], "generated", "in_flight", tokens[i], 0, None, None))
        if dull[i]:
            entries.append((at_s[i], step[i], "in_flight", "dropped:no_signal", tokens[i], 1, ids[i], lag[i]))
        else:
            entries.append((at_s[i], step[i], "in_flight", "buffered", tokens[i], 1, ids[i], None))
            end_s = step[i] * STEP_S
            entries.append((end_s, step[i], "buffered", "trained", tokens[i], 1, ids[i], lag[i]))
    entries.sort(key=lambda entry: entry[0])
    return ((number, *entry) for number, entry in enumerate(entries, start=1))


def _spans(a: dict[str, np.ndarray], num_steps: int) -> Iterable[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    slice_s, pass_s = ROLLOUT_S / ENGINE_STEPS, (TRAIN_S - OPTIMIZER_S) / GROUPS
    trained = np.bincount(a["step"], weights=(a["tokens"] + 20) * ~a["dull"], minlength=num_steps + 1)
    for step in range(1, num_steps + 1):
        begin_s, version = (step - 1) * STEP_S, step - 1
        for i in range(ENGINE_STEPS):
            start_s = begin_s + i * slice_s
            found.append(("rollout", "local", version, start_s, start_s + slice_s, ""))
        for i in range(GROUPS):
            start_s = begin_s + ROLLOUT_S + i * pass_s
            found.append(
                ("train", "local", version, start_s, start_s + pass_s, f"{int(trained[step]) // GROUPS} tokens")
            )
        end_s = step * STEP_S
        found.append(("train", "local", version, end_s - PUBLISH_S - OPTIMIZER_S, end_s - PUBLISH_S, ""))
        found.append(("publish", "local", step, end_s - PUBLISH_S, end_s, ""))
        if step % 20 == 0:
            found.append(("checkpoint", "local", step, end_s, end_s + 0.005, STALL))
    steps, finished_s, scored_s = (a[name].tolist() for name in ("step", "finished_s", "scored_s"))
    for step, start_s, end_s in zip(steps, finished_s, scored_s, strict=True):
        found.append(("reward", "local", step - 1, start_s, end_s, ""))
    found.sort(key=lambda span: span[4])
    return ((number, *span) for number, span in enumerate(found, start=1))


def _rows(a: dict[str, np.ndarray], num_steps: int, rng: np.random.Generator) -> Iterable[tuple[Any, ...]]:
    def per_step(values: np.ndarray) -> np.ndarray:
        return np.bincount(a["step"], weights=values, minlength=num_steps + 1)[1:]

    tokens, trained = a["tokens"], ~a["dull"]
    counts, generated = per_step(np.ones(len(tokens))), per_step(tokens).astype(np.int64)
    trained_tokens = per_step(tokens * trained).astype(np.int64)
    reward_mean, length_mean = per_step(a["reward"]) / counts, per_step(tokens) / counts
    lag_mean = per_step(tokens * trained * a["lag"]) / trained_tokens
    cut = per_step(tokens == MAX_TOKENS) / counts
    scored_s = per_step(a["scored_s"] - a["finished_s"])
    longest, lag_max = np.zeros(num_steps + 1, np.int64), np.zeros(num_steps + 1, np.int64)
    np.maximum.at(longest, a["step"], tokens)
    np.maximum.at(lag_max, a["step"], a["lag"] * trained)
    noise = rng.random((num_steps, 3))
    for i in range(num_steps):
        dropped = int(generated[i] - trained_tokens[i])
        row = {
            **{"step": i + 1, "version": i + 1, "wall_s": STEP_S, "num_groups": GROUPS},
            **{"num_trajectories": GROUPS * SAMPLES, "generated_tokens": int(generated[i])},
            **{"trained_tokens": int(trained_tokens[i]), "dropped_tokens": {"no_signal": dropped} if dropped else {}},
            **{"again_tokens": 0, "backlog_tokens": 0, "preemptions": int(noise[i, 0] < 0.01), "parks": 0},
            **{"lag_mean": lag_mean[i], "lag_max": int(lag_max[i + 1]), "reward_mean": reward_mean[i]},
            **{"reward_std": float(np.sqrt(reward_mean[i] * (1 - reward_mean[i]))), "length_mean": length_mean[i]},
            **{"length_max": int(longest[i + 1]), "length_bias": 0.0, "truncated_share": cut[i]},
            **{"loss": noise[i, 1] - 0.5, "grad_norm": 0.5 + noise[i, 2], "lr": 1e-6, "skipped": False},
            **{
                "entropy": 2.0 - i / num_steps,
                "kl_reference": 0.0,
                "mismatch_mean": 0.002,
                "mismatch_k3": 1e-5,
                "ratio_mean": 1.0,
            },
            **{"ratio_p01": 0.97, "ratio_p99": 1.03, "ratio_outside": 0.001 * noise[i, 0]},
            **{"clipped_share": 0.002 * noise[i, 1], "effective_samples": 1.0 - 0.01 * noise[i, 2]},
            **{"value_loss": 0.0, "cached_share": 0.0, "turns_mean": 1.0, "environment_s": 0.0},
            "stage_s": {
                **{"rollout": ROLLOUT_S, "reward": min(STEP_S, scored_s[i]), "reference": 0.0},
                **{"train": TRAIN_S, "publish": PUBLISH_S},
            },
            **{"publish_bytes": 0, "score": reward_mean[i] if (i + 1) % 100 == 0 else None},
        }
        names = ("step", "version", "wall_s", "generated_tokens", "trained_tokens", "backlog_tokens", "reward_mean")
        yield (*(row[name] for name in names), row["lag_max"], row["score"], json.dumps(row))


def _trajectory(a: dict[str, np.ndarray], id: str, i: int, rng: np.random.Generator) -> Trajectory:
    """One answer whole, of made-up tokens."""
    num_tokens, version = int(a["tokens"][i]), int(a["step"][i] - 1 - a["lag"][i])
    num = 20 + num_tokens
    sampled = np.arange(num) >= 20
    return Trajectory(
        id=id,
        prompt_id=id.split(":")[1].split("/")[0],
        index=int(a["idx"][i]),
        token_ids=rng.integers(3, 60, num).astype(np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -rng.exponential(0.5, num), 0.0).astype(np.float32),
        spans=(Span(version=version, start=20, end=num),),
        finish=FinishReason.LENGTH if num_tokens == MAX_TOKENS else FinishReason.EOS,
        text="made up",
        timing=Timing(submitted_s=0.0, started_s=0.0, finished_s=0.0),
    )


if __name__ == "__main__":
    make_big_ledger(Path(sys.argv[1]), num_steps=int(sys.argv[2]) if len(sys.argv) > 2 else 10_000)
