"""Headrace as a contender of the CPU benchmark: the engine alone, and the whole loop."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from cpu_job import PROMPTS, SAMPLES, SMALL_SEQUENCES, Job, Record, peak_rss_bytes, prompt_batches
from timed_loop import timed_loop

import headrace  # noqa: F401  (before torch, as the command does it: it says how idle threads wait)
from headrace.config import Config, ModelSection
from headrace.ledger.database import FILE_NAME
from headrace.measured import Row
from headrace.policy.policy import load_policy
from headrace.rollout.engine import Engine, kv_budget
from headrace.rollout.rows import Request, request_seed
from headrace.types import Sampling

PREFILL_TOKENS = 2048  # the setting's default
SMALL_TOKENS = SMALL_SEQUENCES * 40  # a prompt has 6 tokens, an answer 32 on average
REWARD = Path(__file__).with_name("cpu_reward.py")


def run_engine(job: Job) -> Record:
    """Generation alone, with the log-probs that the engine always returns."""
    torch.set_num_threads(job.threads)
    policy = load_policy(ModelSection(path=job.model, device="cpu", dtype="float32"))
    engine = Engine(
        policy,
        max_running=PROMPTS * SAMPLES,
        prefill_tokens=PREFILL_TOKENS,
        kv_tokens=kv_budget(policy, 0),
        on_update="keep",
    )
    sampling = Sampling(max_new_tokens=job.max_new_tokens)
    record = Record()
    for step, texts in enumerate(prompt_batches(job.steps)):
        lengths = []
        started = time.perf_counter()
        for p, ids in enumerate(policy.tokenizer(texts)["input_ids"]):
            seeds = [request_seed(job.seed, step, p, i) for i in range(SAMPLES)]
            requests = [Request(id=f"{p}/{i}", sampling=sampling, seed=seed) for i, seed in enumerate(seeds)]
            engine.submit(np.array(ids, np.int32), requests)
        while engine.has_work:
            lengths += [len(generation.logprobs) for generation in engine.advance()]
        record.seconds.append(time.perf_counter() - started)
        record.lengths.append(lengths)
    return record


def run_loop(job: Job, *, small: bool = False) -> Record:
    """The whole loop, strictly on-policy; every group is trained on. `small` saves memory with small micro-batches."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        record = Record()

        def note_peak() -> None:
            record.peak_rss_bytes = peak_rss_bytes()  # with the reward process, which still lives

        config = settings(job, {"micro_batch_tokens": SMALL_TOKENS} if small else {})
        record.seconds, rows = asyncio.run(timed_loop(config, run_dir, note_peak))
        record.notes = {
            "row_wall_s": [row.wall_s for row in rows],
            "stage_s": [asdict(row.stage_s) for row in rows],
            "mismatch_mean": [row.mismatch_mean for row in rows],
        }
        record.lengths = _lengths(run_dir, job.steps)
    _check(rows, record)
    return record


def settings(job: Job, learner: dict[str, int]) -> Config:
    """Defaults, but for what makes the step the same as the peer's."""
    return Config.model_validate(
        {
            "run": {"seed": job.seed},
            "model": {"path": job.model, "device": "cpu", "dtype": "float32", "threads": job.threads},
            "prompts": {"source": job.prompts, "chat": "never", "eval_count": PROMPTS},
            "rollout": {
                "samples": SAMPLES,
                "max_new_tokens": job.max_new_tokens,
                "max_running": PROMPTS * SAMPLES,
                "prefill_tokens": PREFILL_TOKENS,
            },
            "reward": {"function": f"{REWARD}:score", "cache": False},
            "buffer": {"drop": "nothing"},
            "learner": {"lr": 1e-6, **learner},
            "loop": {"steps": job.steps, "groups_per_step": PROMPTS, "max_lag": 0},
        }
    )


def _lengths(run_dir: Path, steps: int) -> list[list[int]]:
    """Lengths of the answers that each step was trained on, from the ledger."""
    lengths: list[list[int]] = [[] for _ in range(steps)]
    connection = sqlite3.connect(run_dir / FILE_NAME)
    for step, num_tokens in connection.execute("SELECT trained_step, num_tokens FROM trajectories"):
        lengths[step - 1].append(num_tokens)
    connection.close()
    return lengths


def _check(rows: list[Row], record: Record) -> None:
    """What the books say was generated in a step must be what it was trained on, all of it on-policy."""
    for row, lengths in zip(rows, record.lengths, strict=True):
        assert row.generated_tokens == row.trained_tokens == sum(lengths), row
        assert row.num_trajectories == len(lengths) == PROMPTS * SAMPLES, row
        assert row.lag_max == 0, row
