"""The learning rate of each step, and AdamW with float32 master weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from headrace import kernels
from headrace.config import LearnerSection

if kernels.AVAILABLE or TYPE_CHECKING:
    from headrace.kernels.adamw import FusedAdamW

ScheduleKind = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, lr: float, warmup_steps: int, schedule: ScheduleKind, total_steps: int) -> float:
    """The rate of 0-based `step`: warm-up to `lr`, then constant or down to 0 at `total_steps`.

    The last step of a run still learns; a run continued past `total_steps` on a falling schedule
    does not.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    match schedule:
        case "constant":
            return lr
        case "linear":
            return lr * (1 - progress)
        case "cosine":
            return lr * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """One optimizer step, in place, on the weights that the engine decodes with.

    A bfloat16 weight cannot hold an RL-sized update (less than 1/256 of it), so masters are kept in
    float32. `add_up` sums over all ranks, for the norm of the whole gradient.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        section: LearnerSection,
        add_up: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        trained = {name: p for name, p in named if p.requires_grad}
        self._names, self.parameters = list(trained), list(trained.values())
        dtypes, precise = {p.dtype for p in self.parameters}, (torch.float32, torch.float64)
        self.masters: list[Tensor] = [
            p if p.dtype in precise else p.detach().to(torch.float32, copy=True) for p in self.parameters
        ]
        one_dtype = len(dtypes) == 1 and torch.float64 not in dtypes  # what `FusedAdamW` can update
        self._on_gpu = kernels.AVAILABLE and self.parameters[0].is_cuda and one_dtype
        self._several = False  # backward passes since the last step
        self._add_up = add_up
        betas, decay = (section.beta1, section.beta2), section.weight_decay
        kind = FusedAdamW if self._on_gpu else torch.optim.AdamW
        self.adamw = kind(self.masters, lr=section.lr, betas=betas, weight_decay=decay, fused=True)

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments, by name. Call `loaded` after writing to them."""
        found: dict[str, Tensor] = {}
        for name, master in zip(self._names, self.masters, strict=True):
            state = self.adamw.state[master]
            if "exp_avg" not in state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device if self._on_gpu else "cpu")
            kinds = ("master", master), ("mean", state["exp_avg"]), ("square", state["exp_avg_sq"])
            found |= {f"{kind}.{name}": tensor for kind, tensor in kinds}
            found[f"count.{name}"] = state["step"]
        return found

    @torch.no_grad()
    def loaded(self) -> None:
        """Copy the masters into the weights."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    def make_room(self) -> None:
        """Call before each backward pass: adds earlier gradients to those of the masters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                self._several = True
                more = parameter.grad.to(master.dtype)
                master.grad = more if master.grad is None else master.grad.add_(more)
                parameter.grad = None

    def step(self, *, lr: float, scale: float, clip: float) -> float:
        """Scale the gradients, clip their norm to `clip`, update. Returns the norm before clipping.

        A norm that is not finite leaves weights and moments unchanged.
        """
        for group in self.adamw.param_groups:
            group["lr"] = lr
        norm = self._step_on_gpu(scale, clip) if self._on_gpu else self._step(scale, clip)
        self._several = False
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None
        return norm

    def not_finite(self) -> str | None:
        """The name of a weight with an infinity or NaN in it."""
        named = zip(self._names, self.masters, strict=True)
        return next((name for name, master in named if not bool(torch.isfinite(master).all())), None)

    def _step_on_gpu(self, scale: float, clip: float) -> float:
        assert isinstance(self.adamw, FusedAdamW)
        gradients = [p.grad for p in self.parameters]  # of a single pass
        if self._several:
            self.make_room()
            gradients = [m.grad for m in self.masters]
        return float(self.adamw.step_fused(self.parameters, gradients, scale, clip, self._add_up))

    def _step(self, scale: float, clip: float) -> float:
        self.make_room()
        gradients = [m.grad for m in self.masters if m.grad is not None]
        total = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).norm()
        if self._add_up is not None:
            total = self._add_up(total.square()).sqrt()
        norm = scale * float(total)
        if not math.isfinite(norm):
            return norm
        torch._foreach_mul_(gradients, scale)
        if clip and norm > clip:
            torch._foreach_mul_(gradients, clip / norm)
        self.adamw.step()
        self.loaded()
        return norm
