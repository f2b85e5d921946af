"""Small weights of several precisions, and changes to some of them, as a step of training would make."""

from __future__ import annotations

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def weights(seed: int = 0) -> Weights:
    """A few tensors, none of a round size; two belong to an adapter."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "embed.weight": random(67, 16),
        "layer.norm.weight": random(13, dtype=torch.float32),
        "layer.proj.weight": random(31, 9),
        "layer.proj.lora_A.weight": random(3, 9),
        "layer.proj.lora_B.weight": random(31, 3),
        "scale": random(1)[0],
        "counts": torch.arange(5),
    }


def stepped(before: Weights, seed: int, share: float = 0.05, only: str = "") -> Weights:
    """The weights with a share of their elements replaced, of tensors whose name holds `only`."""
    generator = torch.Generator().manual_seed(seed)
    after = {}
    for name, tensor in before.items():
        hit = torch.rand(tensor.shape, generator=generator) < share
        new = torch.where(hit, torch.randn(tensor.shape, generator=generator).to(tensor.dtype), tensor)
        after[name] = new if only in name else tensor.clone()
    return after


def published(kind: str, of: Weights) -> Weights:
    """What a learner gives its publisher: with adapters those alone."""
    return {name: tensor for name, tensor in of.items() if kind != "adapter" or "lora_" in name}


def same_bits(one: Weights, other: Weights) -> bool:
    """Also of NaNs, and of zeros with a sign."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name in one
    )


def copied(of: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in of.items()}
