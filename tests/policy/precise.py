"""`transformers`' own models in full float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor


def precise_norms(model: Any) -> None:
    """Their norms compute in float32 whatever the model; make them as fine as the rest of it."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(_norm, module)


def _norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
