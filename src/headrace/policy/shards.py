"""The weights of a policy sharded over several ranks (FSDP): each holds a part of every matrix.

A layer's weights are gathered while it is computed and freed again; embedding and head stay for the
whole pass. Shards of trained weights are the optimizer's master weights, so in float32 whatever the
precision of the model, and are rounded when gathered. Each rank adds its gradients up in float32;
they are summed over the ranks once per step.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

HALF = (torch.bfloat16, torch.float16)


class _Whole(nn.Module):
    """A pass through the model: while it runs, the weights outside the layers are gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        # copies: a view that is written to in place would lose FSDP's backward hook
        return tuple(result.clone() for result in compute())


class Shards:
    """This rank's part of the weights, and passes through the whole model."""

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module], dtype: torch.dtype, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._whole = _Whole(model)
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        rounding = mixed if dtype in HALF else MixedPrecisionPolicy()
        for module in (*layers, self._whole):
            for parameter in module.parameters():  # all ranks start from the first one's weights
                if not isinstance(parameter, DTensor):
                    dist.broadcast(parameter.detach(), group=mesh.get_group(), group_src=0)
                    if parameter.requires_grad and parameter.dtype in HALF:
                        parameter.data = parameter.data.float()
            self._root = fully_shard(module, mesh=mesh, mp_policy=rounding)
        for module in self._whole.modules():
            if isinstance(module, FSDPModule):  # sums: the learner divides, once
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._root.set_requires_gradient_sync(False)
        self.weights: dict[str, Any] = dict(model.named_parameters())
        assert all(isinstance(weight, DTensor) for weight in self.weights.values()), "not all weights are sharded"
        # gradients go to the parts held here, which are ordinary weights to an optimizer
        self.held = {n: nn.Parameter(p.detach().to_local(), p.requires_grad) for n, p in self.weights.items()}

    def gathered_for(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The result of `compute` with whole weights. Every rank must call this equally often."""
        first, second = self._whole(compute)
        if not torch.is_grad_enabled():
            self._root.reshard()  # no backward pass will, and the next step changes the parts only
        return first, second

    def add_up_gradients(self, take_part: Callable[[], None]) -> None:
        """Sum the ranks' gradients into `held`, by FSDP's hooks in a zero-loss pass `take_part`."""
        self._root.set_requires_gradient_sync(True)
        take_part()
        self._root.set_requires_gradient_sync(False)
        for name, parameter in self.weights.items():
            if parameter.grad is not None:
                self.held[name].grad, parameter.grad = parameter.grad.to_local(), None

    def as_part(self, name: str, part: Tensor) -> Tensor:
        """`part`, of the shard of `name` that is held here, as a DTensor of the whole; a number as it is."""
        if not part.ndim:
            return part
        weight = self.weights[name]
        like = {"shape": weight.shape, "stride": weight.stride()}
        return DTensor.from_local(part.detach(), self._mesh, weight.placements, run_check=False, **like)
