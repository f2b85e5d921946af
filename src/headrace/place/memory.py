"""Out of device memory: what it was wanted for, how much there is, and which settings ask for less.

Nothing here imports torch by itself: processes that host reward functions do without it, and start in a second.
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
    """An allocation that fails inside becomes a message with the numbers and the settings to change."""
    try:
        yield
    except RuntimeError as error:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        wanted = f" ({wanted_bytes / GIB:.1f} GiB in all)" if wanted_bytes else ""
        raise ConfigError(f"out of memory for {what}{wanted}: {room()}{_first_sentence(error)}. {advice}") from error


def training_bytes(policy: Policy, section: LearnerSection) -> int:
    """What the learner holds besides activations: masters and moments, one set of gradients, a reference."""
    total = 0
    for parameter in policy.model.parameters():
        masters = 12 if parameter.dtype.itemsize == 2 else 2 * parameter.dtype.itemsize
        trained = masters + parameter.dtype.itemsize if parameter.requires_grad else 0
        reference = parameter.dtype.itemsize if section.kl_coef else 0
        total += parameter.numel() * (trained + reference)
    return total


def room() -> str:
    """How much of the device's memory is free, if there is a device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    return f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free. "


def _first_sentence(error: BaseException) -> str:
    """What torch says it tried, without its advice on fragmentation."""
    text = str(error).removeprefix("CUDA out of memory. ").strip()
    return text.split(". ")[0].rstrip(".") or type(error).__name__
