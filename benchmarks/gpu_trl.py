"""The peer end to end: TRL's GRPOTrainer with transformers generation, set up for speed.

One optimizer step per generation batch, no reference model, no logs, no recomputed activations, and bfloat16 weights
that AdamW updates without a float32 copy: less work and memory than Headrace's update.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from gpu_model import dtype_on
from gpu_reward import share_of_low
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_settings import SAME_STEP


class StepWatch(TrainerCallback):
    """When each step ended; a step is generation, reward, training, data, all of it."""

    def __init__(self) -> None:
        self.marks_s: list[float] = []

    def on_train_begin(self, *unused: Any, **also_unused: Any) -> None:
        """Start the watch."""
        self.marks_s.append(time.perf_counter())

    def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
        """Take the time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks_s.append(time.perf_counter())


def run(
    model: str,
    prompts: list[str],
    *,
    steps: int,
    samples: int,
    at_once: int,
    max_new_tokens: int,
    lr: float,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Train `steps` steps on as many prompts each as there are, `at_once` sequences at a time; one record per step."""
    watch = StepWatch()
    lengths: list[list[int]] = []
    generated_s: list[float] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **unused: Any) -> list[float]:
        generated_s.append(time.perf_counter())
        lengths.append([len(ids) for ids in completion_ids])
        return [share_of_low(text) for text in completions]

    passes = len(prompts) * samples // at_once
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype_on(device), attn_implementation="sdpa"),
            processing_class=AutoTokenizer.from_pretrained(model),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=directory,
                num_generations=samples,
                per_device_train_batch_size=at_once,
                gradient_accumulation_steps=passes,
                steps_per_generation=passes,
                max_completion_length=max_new_tokens,
                max_steps=steps,
                bf16=device.type == "cuda",
                use_cpu=device.type == "cpu",
                **(SAME_STEP | {"learning_rate": lr}),
                seed=0,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[watch],
        )
        trainer.train()
    marks = watch.marks_s
    return [
        {"seconds": end - start, "generating_s": generated - start, "lengths": one}
        for start, end, generated, one in zip(marks, marks[1:], generated_s, lengths, strict=False)
    ]
