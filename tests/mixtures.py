"""Tiny mixture-of-experts models, and a look at what their experts are given that owes nothing to `Routers`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "DeepseekV3": DEEPSEEK | {"num_hidden_layers": 3, "first_k_dense_replace": 1},
}


class Seen:
    """What reached the experts, layer by layer."""

    def __init__(self) -> None:
        self.indices: list[Tensor] = []  # [T, K] each
        self.weights: list[Tensor] = []

    @property
    def routes(self) -> Tensor:
        """[T, L, K]"""
        return torch.stack(self.indices, dim=1)


@contextmanager
def watched(model: Any) -> Iterator[Seen]:
    """Note the arguments of every module that is called `...Experts`."""
    seen = Seen()

    def note(module: Any, args: tuple[Tensor, ...]) -> None:
        seen.indices.append(args[1].detach().clone())
        seen.weights.append(args[2].detach().clone())

    handles = [m.register_forward_pre_hook(note) for m in model.modules() if type(m).__name__.endswith("Experts")]
    assert handles
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def routers_of(model: Any) -> list[Any]:
    """The modules that score experts."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
