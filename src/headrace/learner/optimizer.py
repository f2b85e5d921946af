"""The optimizer step on weights that an engine decodes with, and the ranks that share it."""

import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headrace.config import LearnerSection
from headrace.kernels import AVAILABLE, adamw
from headrace.network import own_address

Named = Iterable[tuple[str, nn.Parameter]]


class Sharding:
    """This process as one rank of a learner, by FSDP2: each has a part of weights and batch.

    Of a `shape` of replicas and their ranks, those of one are on one node, where they can be.
    Gathering a layer's weights is a collective of all ranks. So every rank must be called equally
    often, with an empty list if there is nothing for it. The caller divides the work (`Ranks`). The
    constructor waits for the others at rank 0's `store`, and sets the default process group.
    """

    def __init__(
        self,
        *,
        rank: int,
        shape: tuple[int, int],
        store: TCPStore,
        device: torch.device,
        timeout_s: float = 600.0,
    ) -> None:
        self.rank, self.num_ranks, self._replicas = rank, math.prod(shape), shape[0]
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"  # small sums without a GPU sync
            torch.cuda.set_device(device.index or 0)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=self.num_ranks, timeout=timeout)
        if shape[0] == 1:
            self.mesh = init_device_mesh(device.type, shape[1:])
        else:
            hosts = self._gathered(own_address())
            near = torch.tensor(sorted(range(self.num_ranks), key=lambda rank: (hosts[rank], rank)))
            self.mesh = DeviceMesh(device.type, near.view(shape), mesh_dim_names=("replicas", "parts"))
        # a checkpoint is written while training goes on, so it needs a process group of its own
        self.writers = dist.new_group(backend="gloo", timeout=timeout)

    def reduced(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """The `values`, in place, over all ranks."""
        dist.all_reduce(values, operation)
        return values

    def of_parts(self, values: Tensor) -> Tensor:
        """The sum over the parts of all weights, which each replica has."""
        return self.reduced(values).div_(self._replicas)

    def joined(self, found: Mapping[str, float]) -> dict[str, float]:
        """What all ranks have found."""
        return {key: value for one in self._gathered(dict(found)) for key, value in one.items()}

    def _gathered(self, own: Any) -> list[Any]:
        known: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(known, own)
        return known


def learning_rate(section: LearnerSection, step: int, total_steps: int) -> float:
    """The rate of 0-based `step`: warm-up to `lr`, then constant or down to 0 at `total_steps`.

    The last step of a run still learns; a run continued past `total_steps` on a falling schedule
    does not.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    progress = min((step - section.warmup_steps) / max(total_steps - section.warmup_steps, 1), 1.0)
    shares = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return section.lr * shares[section.schedule]


class Optimizer:
    """One optimizer step, in place, on the weights that the engine decodes with.

    A bfloat16 weight cannot hold an RL-sized update (less than 1/256 of it), so masters are kept in
    float32. With a `sharding`, gradients are clipped by the norm of all ranks' parts.
    """

    def __init__(self, named: Named, section: LearnerSection, sharding: Sharding | None = None) -> None:
        trained = {name: p for name, p in named if p.requires_grad}
        self._names, self.parameters = list(trained), list(trained.values())
        dtypes, precise = {p.dtype for p in self.parameters}, (torch.float32, torch.float64)
        self.masters = [p if p.dtype in precise else p.detach().to(torch.float32, copy=True) for p in self.parameters]
        one_dtype = len(dtypes) == 1 and torch.float64 not in dtypes  # what `FusedAdamW` can update
        self._on_gpu = AVAILABLE and self.parameters[0].is_cuda and one_dtype
        self._add_up = None if sharding is None else sharding.of_parts
        kind = adamw.FusedAdamW if self._on_gpu else torch.optim.AdamW
        betas, decay = section.betas, section.weight_decay
        self.adamw = kind(self.masters, lr=section.lr, betas=betas, weight_decay=decay, fused=True)
        steps = torch.zeros((), device=self.parameters[0].device)
        for master in self.masters:  # `FusedAdamW` counts its steps once, torch's AdamW for each weight
            moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
            self.adamw.state[master] = moments | {"step": steps if self._on_gpu else steps.clone()}

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments, by name. Call `loaded` after writing to them."""
        found: dict[str, Tensor] = {}
        for name, master in zip(self._names, self.masters, strict=True):
            state = self.adamw.state[master]
            found |= {f"master.{name}": master, f"mean.{name}": state["exp_avg"]}
            found |= {f"square.{name}": state["exp_avg_sq"], f"count.{name}": state["step"]}
        return found

    @torch.no_grad()
    def loaded(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    def make_room(self) -> None:
        """Call before each backward pass: adds earlier gradients to those of the masters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter and parameter.grad is not None:
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
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None
        return norm

    def not_finite(self) -> str | None:
        named = zip(self._names, self.masters, strict=True)
        return next((name for name, master in named if not torch.isfinite(master).all()), None)

    def _step_on_gpu(self, scale: float, clip: float) -> float:
        assert isinstance(self.adamw, adamw.FusedAdamW)
        gradients = [p.grad for p in self.parameters]  # of a single pass
        if any(m.grad is not None for m in self.masters):  # or of several
            self.make_room()
            gradients = [m.grad for m in self.masters]
        return float(self.adamw.step_fused(self.parameters, gradients, scale, clip, self._add_up))

    def _step(self, scale: float, clip: float) -> float:
        self.make_room()
        gradients = [m.grad for m in self.masters if m.grad is not None]
        total = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).norm()
        if self._add_up is not None:
            total = self._add_up(total.square()).sqrt()
        if not math.isfinite(norm := scale * float(total)):
            return norm
        torch._foreach_mul_(gradients, scale)
        if clip and norm > clip:
            torch._foreach_mul_(gradients, clip / norm)
        self.adamw.step()
        self.loaded()
        return norm
