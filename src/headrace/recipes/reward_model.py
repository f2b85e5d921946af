"""A reward model as a reward function: a sequence classifier with one output rates the answers, many at a time.

    REWARD_MODEL=DIR headrace train my.toml reward.function=recipes/reward_model.py:score reward.timeout_s=120

It runs in a process of its own (reward.workers), on REWARD_DEVICE, such as cuda:1; the default is the CPU. On Ray,
write below how many GPUs each of these processes gets; it then runs on those.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from headrace.types import Completion

GPUS = 0
PATH = os.environ.get("REWARD_MODEL", "")
DEVICE = os.environ.get("REWARD_DEVICE", "cuda" if GPUS else "cpu")
if not PATH:
    raise ValueError("set REWARD_MODEL to the directory of the reward model")
TOKENIZER: Any = AutoTokenizer.from_pretrained(PATH)
MODEL: Any = AutoModelForSequenceClassification.from_pretrained(PATH, dtype="auto").to(DEVICE).eval()
if TOKENIZER.pad_token is None:
    TOKENIZER.pad_token = TOKENIZER.eos_token
MODEL.config.pad_token_id = TOKENIZER.pad_token_id
if MODEL.config.num_labels != 1:
    raise ValueError(f"{PATH} has {MODEL.config.num_labels} outputs; a reward model has one")


def text(completion: Completion) -> str:
    """The whole conversation in the reward model's own chat template, if it has one."""
    if TOKENIZER.chat_template is None:
        return completion.prompt + completion.text
    asked = completion.fields.get("prompt")
    messages = asked if isinstance(asked, list) else [{"role": "user", "content": completion.prompt}]
    answered = [*messages, {"role": "assistant", "content": completion.text}]
    return str(TOKENIZER.apply_chat_template(answered, tokenize=False))


@torch.inference_mode()
def score(completions: Sequence[Completion]) -> list[float]:
    given = TOKENIZER(list(map(text, completions)), padding=True, padding_side="right", return_tensors="pt").to(DEVICE)
    return MODEL(given["input_ids"], attention_mask=given["attention_mask"]).logits[:, 0].float().tolist()  # type: ignore[no-any-return]
