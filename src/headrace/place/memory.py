"""Errors about device memory: what needed it, how much is free, which settings need less.

Does not import torch: processes that host reward functions do without it, and start in a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.config import LearnerSection
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.policy.policy import Policy

GIB = 2**30

MODEL = "Take a smaller model (model.path), or model.dtype=bfloat16"
CACHE = "Lower rollout.kv_tokens or rollout.max_running, or take a smaller model"
LEARNER = "Set learner.kl_coef=0 if there is a reference, lower rollout.kv_tokens, or take a smaller model"
STEPS = "Lower learner.micro_batch_tokens or rollout.kv_tokens, or set learner.checkpoint_activations=true"


@contextmanager
def memory_for(what: str, advice: str, *, wanted_bytes: int = 0) -> Iterator[None]:
    """Turn an allocation that fails inside into an error with the numbers and the `advice`."""
    try:
        yield
    except RuntimeError as error:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        wanted = f" ({wanted_bytes / GIB:.1f} GiB in all)" if wanted_bytes else ""
        # what torch says that it tried, without its advice on fragmentation
        said = str(error).removeprefix("CUDA out of memory. ").strip().split(". ")[0].rstrip(".")
        tried = said or type(error).__name__
        raise ConfigError(f"out of memory for {what}{wanted}: {room()}{tried}. {advice}") from error


def training_bytes(policy: Policy, section: LearnerSection) -> int:
    """Bytes of the learner without activations: masters, moments, gradients, reference policy."""
    total = 0
    for parameter in policy.model.parameters():
        masters = 12 if parameter.dtype.itemsize == 2 else 2 * parameter.dtype.itemsize
        trained = masters + parameter.dtype.itemsize if parameter.requires_grad else 0
        reference = parameter.dtype.itemsize if section.kl_coef else 0
        total += parameter.numel() * (trained + reference)
    return total


def room() -> str:
    """How much of the GPU's memory is free; empty without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    return f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free. "
