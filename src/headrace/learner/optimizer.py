"""AdamW that keeps float32 master weights when the policy itself is in a lower precision."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from headrace.config import LearnerSection


class Optimizer:
    """One optimizer step, in place, on the weights that the engine decodes with.

    A bfloat16 weight cannot hold an RL-sized update (less than 1/256 of it), so the sum is kept in float32.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], section: LearnerSection) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters: list[Tensor] = [
            p if p.dtype in (torch.float32, torch.float64) else _master(p) for p in self.parameters
        ]
        self.adamw = torch.optim.AdamW(
            self.masters,
            lr=section.lr,
            betas=(section.beta1, section.beta2),
            weight_decay=section.weight_decay,
            fused=True,
        )

    def collect(self) -> None:
        """Add the gradients of one backward pass to those of the step, in the precision of the master weights."""
        pairs = [
            (p, m) for p, m in zip(self.parameters, self.masters, strict=True) if m is not p and p.grad is not None
        ]
        first, later = [(p, m) for p, m in pairs if m.grad is None], [(p, m) for p, m in pairs if m.grad is not None]
        for _, master in first:
            master.grad = torch.empty_like(master)
        for combine, chosen in ((torch._foreach_copy_, first), (torch._foreach_add_, later)):
            if chosen:
                combine([_gradient(m) for _, m in chosen], [_gradient(p) for p, _ in chosen])
        for parameter, _ in pairs:
            parameter.grad = None

    def step(self, *, lr: float, scale: float, clip: float) -> float:
        """Multiply the gradients by `scale`, clip their norm, update. Returns the norm before clipping.

        A norm that is not finite leaves weights and moments as they were.
        """
        self.collect()
        gradients = [m.grad for m in self.masters if m.grad is not None]
        norm = scale * float(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).norm())
        if math.isfinite(norm):
            self._update(lr, scale * clip / norm if clip and norm > clip else scale)
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None

    def _update(self, lr: float, scale: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr
        device = self.masters[0].device
        # the fused kernel divides by `grad_scale` as it goes, which saves a pass over all gradients
        self.adamw.grad_scale = torch.tensor(1 / scale, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
        self.adamw.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        self.adamw.step()
        pairs = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if m is not p]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _master(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().to(torch.float32, copy=True)
