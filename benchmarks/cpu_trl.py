"""The peer end to end: TRL's GRPOTrainer with transformers generation, set up for speed.

One optimizer step per generation batch, no reference model, no logs, and its default of recomputing activations is
off: it costs time. `small` trains on a few sequences at a time, with accumulated gradients: what TRL needs when it is
to save memory.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from cpu_job import PROMPTS, SAMPLES, SMALL_SEQUENCES, Job, Record, prompt_texts
from cpu_reward import share_of_digits
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_settings import SAME_STEP


class StepWatch(TrainerCallback):
    """The wall time of each step, from the end of the one before: generation, reward, training, data, all of it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last_s = 0.0

    def on_train_begin(self, *unused: Any, **also_unused: Any) -> None:
        """Start the watch."""
        self._last_s = time.perf_counter()

    def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
        """Take the time."""
        now_s = time.perf_counter()
        self.seconds.append(now_s - self._last_s)
        self._last_s = now_s


def run(job: Job, *, small: bool = False) -> Record:
    torch.set_num_threads(job.threads)
    record, watch = Record(), StepWatch()

    def reward(completions: list[str], completion_ids: list[list[int]], **unused: Any) -> list[float]:
        record.lengths.append([len(ids) for ids in completion_ids])
        return [share_of_digits(text) for text in completions]

    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, attn_implementation="sdpa"),
            processing_class=AutoTokenizer.from_pretrained(job.model),
            reward_funcs=reward,
            args=GRPOConfig(output_dir=directory, **settings(job, SMALL_SEQUENCES if small else PROMPTS * SAMPLES)),
            train_dataset=Dataset.from_dict({"prompt": prompt_texts()}),
            callbacks=[watch],
        )
        trainer.train()
    record.seconds = watch.seconds
    return record


def settings(job: Job, at_once: int) -> dict[str, Any]:
    """The same step as Headrace's, trained on `at_once` sequences at a time, and nothing that costs time besides."""
    passes = PROMPTS * SAMPLES // at_once
    return {
        "num_generations": SAMPLES,
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": passes,
        "steps_per_generation": passes,
        "max_completion_length": job.max_new_tokens,
        "max_steps": job.steps,
        "bf16": False,
        "use_cpu": True,
        "seed": job.seed,
        **SAME_STEP,
    }
