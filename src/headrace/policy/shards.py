"""A model whose weights are sharded over several ranks (FSDP): each holds a part of every matrix.

The model is built without memory (torch's meta device), cut, and then filled, by each rank with its
own part. Where a model's files have other names than the model, the first rank loads it whole. A
layer's weights are gathered while it is computed and freed again; embedding and head stay for the
whole pass. Shards of trained weights are the optimizer's master weights, so in float32 whatever the
precision of the model, and are rounded when gathered. Gradients are summed over the ranks in
float32, layer by layer in every backward pass; each rank keeps those of its part.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from headrace.policy.tensor_files import read_tensors, sizes_of_model

R = TypeVar("R", bound=tuple[Any, ...])
LOADING = timedelta(hours=4)
HALF = (torch.bfloat16, torch.float16)


class _Whole(nn.Module):
    """A pass through the model: while it runs, the weights outside the layers are gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        # copies: a view that is written to in place would lose FSDP's backward hook
        return tuple(x.clone() if isinstance(x, Tensor) else x for x in compute())


class Shards:
    """This rank's part of the model that `empty` makes, and passes through all of it."""

    def __init__(
        self, empty: Callable[[], Any], device: torch.device, dtype: torch.dtype, mesh: DeviceMesh, *, frozen: bool
    ) -> None:
        self._empty, self._mesh, self.device, self.dtype = empty, mesh, device, dtype
        with torch.device("meta"):
            self.model = empty()
        if frozen:
            self.model.requires_grad_(False)
        self._whole, body = _Whole(self.model), self.model.get_decoder()
        depth = body.config.get_text_config().num_hidden_layers
        layers = (m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == depth)
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        rounding = mixed if dtype in HALF else MixedPrecisionPolicy()
        for module in (*next(layers, ()), self._whole):
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.dtype in HALF:
                    parameter.data = parameter.data.float()
            self._root = fully_shard(module, mesh=mesh, mp_policy=rounding)
            self._root.set_gradient_divide_factor(1.0)  # sums: the learner divides, once
            self._root.set_force_sum_reduction_for_comms(True)
        self._whole.to_empty(device=device)
        self.weights: dict[str, Any] = dict(self.model.named_parameters())
        assert all(isinstance(weight, DTensor) for weight in self.weights.values()), "not all weights are sharded"
        # gradients go to the parts held here, which are ordinary weights to an optimizer
        self.held = {n: nn.Parameter(p.detach().to_local(), p.requires_grad) for n, p in self.weights.items()}

    @torch.no_grad()
    def read(self, directory: Path) -> bool:
        """Fill the parts from a model's files, if these have just its names and shapes."""
        kept = self.model.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in kept}
        wanted, known = self.weights | buffers, sizes_of_model(directory)
        if any(known.get(name) != tensor.shape for name, tensor in wanted.items()):
            return False
        read_tensors(directory, wanted)
        for tensor in wanted.values():
            tensor._is_hf_initialized = True  # so that what follows leaves it alone
        for part in self.held.values():
            part.copy_(part.to(self.dtype))  # masters begin at what the model can hold
        for module in self.model.modules():
            if next(module.buffers(recurse=False), None) is not None:
                self.model._init_weights(module)  # what is in no file: the frequencies of RoPE
        return True

    @torch.no_grad()
    def fill(self, whole: Mapping[str, Tensor] | None) -> None:
        """Fill the parts from the weights and buffers that the first rank gives, and only it."""
        group = dist.new_group(backend="gloo", timeout=LOADING)  # until the first has loaded them
        for name, into in (self.weights | dict(self.model.named_buffers())).items():
            given = torch.empty(into.shape) if whole is None else whole[name].detach()
            given = given.to("cpu", into.dtype).contiguous()
            dist.broadcast(given, group=group, group_src=0)
            given = given.to(self.device)
            if isinstance(into, DTensor):
                given = distribute_tensor(given, self._mesh, into.placements, src_data_rank=None)
            into.copy_(given)

    @torch.no_grad()
    def frozen_copy(self) -> "Shards":
        other = Shards(self._empty, self.device, self.dtype, self._mesh, frozen=True)
        mine, theirs = ([*x.held.values(), *x.model.buffers()] for x in (self, other))
        for tensor, into in zip(mine, theirs, strict=True):
            into.copy_(tensor)
        return other

    def gathered_for(self, compute: Callable[[], R]) -> R:
        """The result of `compute` with whole weights. Every rank must call this equally often."""
        found: R = self._whole(compute)
        if not torch.is_grad_enabled():
            self._root.reshard()  # no backward pass will, and the next step changes the parts only
        return found

    def hand_over_gradients(self) -> None:
        """The gradients of the backward passes so far become those of `held`."""
        for name, parameter in self.weights.items():
            if parameter.grad is not None:
                self.held[name].grad, parameter.grad = parameter.grad.to_local(), None

    def as_part(self, name: str, part: Tensor) -> Tensor:
        """`part` of the shard of `name` as a DTensor of the whole; a number as it is."""
        if not part.ndim:
            return part
        weight = self.weights[name]
        like = {"shape": weight.shape, "stride": weight.stride()}
        return DTensor.from_local(part.detach(), self._mesh, weight.placements, run_check=False, **like)
