"""AdamW that keeps float32 master weights when the policy itself is in a lower precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headrace import kernels
from headrace.config import LearnerSection

if kernels.AVAILABLE or TYPE_CHECKING:
    from headrace.kernels.adamw import FusedAdamW


class Optimizer:
    """One optimizer step, in place, on the weights that the engine decodes with.

    A bfloat16 weight cannot hold an RL-sized update (less than 1/256 of it), so the sum is kept in float32.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        section: LearnerSection,
        add_up: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`add_up` sums over the processes that have the other parts of the same weights: the norm is that of all."""
        trained = {name: p for name, p in named if p.requires_grad}
        self._names, self.parameters = list(trained), list(trained.values())
        self.masters: list[Tensor] = [
            p if p.dtype in (torch.float32, torch.float64) else _master(p) for p in self.parameters
        ]
        self._on_gpu = _fits_kernel(self.parameters)
        self._several = False  # backward passes since the last step
        self._add_up = add_up
        betas, decay = (section.beta1, section.beta2), section.weight_decay
        kind = FusedAdamW if self._on_gpu else torch.optim.AdamW
        self.adamw = kind(self.masters, lr=section.lr, betas=betas, weight_decay=decay, fused=True)

    def tensors(self) -> dict[str, Tensor]:
        """All that a restart needs, by name; whoever writes to them calls `loaded` next."""
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
        """The masters were written to: the weights follow."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    def make_room(self) -> None:
        """Call it before each backward pass: the gradients of earlier ones are added up in the masters' precision."""
        pairs = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if p.grad is not None]
        for parameter, master in pairs:
            if master is not parameter:
                self._several = True
                more = _gradient(parameter).to(master.dtype)
                master.grad = more if master.grad is None else master.grad.add_(more)
                parameter.grad = None

    def step(self, *, lr: float, scale: float, clip: float) -> float:
        """Multiply the gradients by `scale`, clip their norm, update. Returns the norm before clipping.

        A norm that is not finite leaves weights and moments as they were.
        """
        for group in self.adamw.param_groups:
            group["lr"] = lr
        norm = self._step_on_gpu(scale, clip) if self._on_gpu else self._step(scale, clip)
        self.zero_grad()
        return norm

    def not_finite(self) -> str | None:
        """The name of a weight that holds something else than finite numbers."""
        for name, master in zip(self._names, self.masters, strict=True):
            if not bool(torch.isfinite(master).all()):
                return name
        return None

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        self._several = False
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None

    def _step_on_gpu(self, scale: float, clip: float) -> float:
        assert isinstance(self.adamw, FusedAdamW)
        gradients = [p.grad for p in self.parameters]  # those of a single pass serve just as they are
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


def _fits_kernel(parameters: list[nn.Parameter]) -> bool:
    """Whether one kernel can go through all of them: on a GPU, and of one precision."""
    dtypes = {p.dtype for p in parameters}
    return kernels.AVAILABLE and parameters[0].is_cuda and len(dtypes) == 1 and torch.float64 not in dtypes


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _master(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().to(torch.float32, copy=True)
