"""What makes TRL's step the same as Headrace's, with nothing that costs time besides. On a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

SAME_STEP: dict[str, Any] = {
    "gradient_checkpointing": False,
    "temperature": 1.0,
    "top_p": 1.0,
    "beta": 0.0,
    "loss_type": "dapo",  # a mean over the step's tokens
    "epsilon_high": 0.28,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.99,
    "disable_dropout": True,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
