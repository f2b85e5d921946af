"""The experts of each token of a mixture-of-experts model: recorded in rollout, forced in training.

Whatever its architecture, a mixture layer of `transformers` is a module with `experts` in it, and
between its start and the call of its experts there is one top-k over their scores. That top-k is
recorded, and answered with other indices when a choice is forced. The scores stay the model's own:
gate weights are computed from them, and gradients reach the router.

T tokens in one row, L mixture layers, K experts per token. Nothing here waits for the device.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.errors import ModelError
from headrace.types import RouteArray

TOPK: tuple[Any, ...] = (torch.topk, Tensor.topk)
NAMES = ("Experts", "Router", "Gating", "Moe", "MoE")  # last parts of class names in mixture layers


class Routes:
    """The experts of one forward pass, recorded.

    Tokens in `known` (all, if it is None) go to the experts in `forced`; for the others, or without
    `forced`, the model chooses.
    """

    def __init__(self, forced_TLK: Tensor | None = None, known_T: Tensor | None = None) -> None:
        self._forced, self._known = forced_TLK, known_T
        self.noted: dict[int, Tensor] = {}  # layer -> [T, K]
        self.num_choices = 0

    @property
    def chosen(self) -> Tensor | None:
        """The experts of all tokens, `[T, L, K]`; None if the model has no mixture layers."""
        in_order = [self.noted[layer] for layer in sorted(self.noted)]
        return torch.stack(in_order, dim=1) if in_order else None

    def choose(self, layer: int, own: Tensor, group_size: int) -> Tensor:
        """Not `own` but the forced experts, or their groups of `group_size`, one perhaps twice."""
        if self._forced is None:
            return own
        forced = self._forced[:, layer].long() // group_size
        if self._known is None:
            return forced
        if group_size > 1:  # the two may differ in number: repeat the first of each
            num_forced, num_own = forced.shape[1], own.shape[1]
            own = torch.cat([own, own[:, :1].expand(-1, num_forced)], dim=1)
            forced = torch.cat([forced, forced[:, :1].expand(-1, num_own)], dim=1)
        return torch.where(self._known[:, None], forced, own)


class _Choice(TorchFunctionMode):
    """Watches for the top-k from a mixture layer's start until its experts are called."""

    def __init__(self, routes: Routes, layer: int, num_experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._routes, self._layer, self._num_experts, self._dtype = routes, layer, num_experts, dtype
        self._inside = ExitStack()

    def begin(self, *unused: Any) -> None:
        self._inside.enter_context(self)

    def end(self, *unused: Any) -> None:
        self._inside.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return result
        scores: Tensor = args[0] if args else kwargs["input"]
        if scores.ndim != 2 or self._num_experts % scores.shape[1]:
            return result
        group_size = self._num_experts // scores.shape[1]
        indices = self._routes.choose(self._layer, result[1], group_size)
        if group_size == 1:
            self._routes.noted[self._layer] = indices.to(self._dtype)
            self._routes.num_choices += 1
        if indices is result[1]:
            return result
        return torch.return_types.topk((scores.gather(1, indices), indices))


class Routers:
    """The mixture layers of a model, in order. A dense model has none."""

    def __init__(self, body: nn.Module) -> None:
        self._layers: list[Any] = [m for m in body.modules() if _num_experts(m)]
        self.num_layers = len(self._layers)
        self.num_experts = max([_num_experts(m) for m in self._layers], default=0)
        few = self.num_experts <= 256
        self.dtype: np.dtype[Any] = np.dtype(np.uint8 if few else np.uint16)  # for indices
        self.device_dtype = torch.uint8 if few else torch.int16  # for torch's few uint16 operations
        self.shape = (self.num_layers, 0)  # and experts per token, known after the first pass
        self._current: Routes | None = None
        found = {m for layer in self._layers for m in layer.modules()}
        if strays := [name for m in body.modules() if m not in found and (name := type(m).__name__).endswith(NAMES)]:
            told = f"{strays[0]}, in a form that Headrace does not know: it could not be recorded"
            raise ModelError(f"{type(body).__name__} seems to choose experts in {told}")

    def to_device(self, routes: RouteArray, device: torch.device) -> Tensor:
        return torch.from_numpy(routes if self.num_experts <= 256 else routes.astype(np.int16)).to(device)

    def to_host(self, routes: Routes, num_tokens: int) -> RouteArray:
        if (chosen := routes.chosen) is None:
            return np.empty((num_tokens, 0, 0), self.dtype)
        return chosen.cpu().numpy().astype(self.dtype, copy=False)

    def check(self, routes: Routes) -> None:
        """Learn `shape` from a first pass; refuse if not all choices were seen."""
        sizes = {noted.shape[1] for noted in routes.noted.values()}
        if not len(routes.noted) == routes.num_choices == self.num_layers or len(sizes) > 1:
            told = f"the experts that {type(self._layers[0]).__name__} chooses cannot be recorded"
            looks = "looks for one top-k over all experts in each mixture layer, of one size"
            saw = f"{routes.num_choices} in {self.num_layers} layers, of sizes {sorted(sizes)}"
            raise ModelError(f"{told}: Headrace {looks}, and saw {saw}")
        self.shape = (self.num_layers, sizes.pop() if sizes else 0)

    @contextmanager
    def follow(self, routes: Routes | None) -> Iterator[None]:
        """Passes inside use and record the experts of `routes`."""
        with ExitStack() as undo:
            undo.callback(setattr, self, "_current", self._current)
            self._current = routes
            for index, layer in enumerate(self._layers):
                if routes is None:
                    break
                choice = _Choice(routes, index, _num_experts(layer), self.device_dtype)
                undo.enter_context(layer.register_forward_pre_hook(choice.begin))
                undo.enter_context(layer.experts.register_forward_pre_hook(choice.end))
                # always: the recomputation of a layer may end by an exception
                undo.enter_context(layer.register_forward_hook(choice.end, always_call=True))
            yield

    def follow_again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For activation checkpointing: the recomputation of a layer uses the same experts."""
        return nullcontext(), self.follow(self._current)


def _num_experts(module: nn.Module) -> int:
    """0 if the module is not a mixture layer."""
    count = getattr(getattr(module, "experts", None), "num_experts", 0)
    return count if isinstance(count, int) else 0
