"""The few numbers of a model that its speed and memory depend on, from a name such as 70B or from its config.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense model, or a mixture of experts.

    Example:
        ModelShape(name="7B", num_params=7.62e9, num_active_params=7.62e9, num_layers=28, hidden_size=3584,
                   attention_size=3584, kv_size=1024)
    """

    name: str
    num_params: float
    num_active_params: float  # those that one token uses
    num_layers: int
    hidden_size: int
    attention_size: int  # query heads x head size
    kv_size: int  # numbers cached per token and layer: 2 x key/value heads x head size
    num_experts: int = 0  # per layer, those that tokens are sent to
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        if self.num_experts and not 0 < self.experts_per_token < self.num_experts:
            raise ModelError(
                f"{self.name}: a token is sent to {self.experts_per_token} of {self.num_experts} experts; "
                "it must be at least 1, and fewer than there are"
            )
        if not 0 < self.num_active_params <= self.num_params:
            raise ModelError(
                f"{self.name}: {self.num_active_params:g} of {self.num_params:g} weights are active; "
                "it must be more than none and at most all"
            )

    def weight_bytes(self, number_bytes: int = 2) -> float:
        """All weights: 2N in bfloat16."""
        return number_bytes * self.num_params

    def kv_bytes_per_token(self, number_bytes: int = 2) -> float:
        """The cache of one token."""
        return number_bytes * self.num_layers * self.kv_size

    def params_read(self, num_tokens: float) -> float:
        """Weights that a forward pass of so many tokens reads at least once.

        A dense model's are all read. Of E experts, a token that picks k leaves out each with probability 1 - k/E, so
        n tokens read E·(1 - (1 - k/E)^n) of them, if they pick evenly.
        """
        if not self.num_experts:
            return self.num_params
        E, k = self.num_experts, self.experts_per_token
        per_expert = (self.num_params - self.num_active_params) / (E - k)
        return self.num_params - per_expert * E * math.pow(1 - k / E, num_tokens)


def _known(
    name: str, params: float, layers: int, hidden: int, attention: int, kv: int, active: float = 0, experts: int = 0
) -> ModelShape:
    return ModelShape(
        name=name,
        num_params=params,
        num_active_params=active or params,
        num_layers=layers,
        hidden_size=hidden,
        attention_size=attention,
        kv_size=kv,
        num_experts=experts,
        experts_per_token=8 if experts else 0,
    )


# Published shapes: Qwen2.5 0.5B, 1.5B, 3B and 7B; Qwen3 0.6B, 1.7B, 4B, 14B and 32B; Llama 3.1 8B, 70B and 405B.
DENSE = (
    _known("0.5B", 0.494e9, 24, 896, 896, 256),
    _known("0.6B", 0.596e9, 28, 1024, 2048, 2048),
    _known("1.5B", 1.54e9, 28, 1536, 1536, 512),
    _known("1.7B", 1.72e9, 28, 2048, 2048, 2048),
    _known("3B", 3.09e9, 36, 2048, 2048, 512),
    _known("4B", 4.02e9, 36, 2560, 4096, 2048),
    _known("7B", 7.62e9, 28, 3584, 3584, 1024),
    _known("8B", 8.03e9, 32, 4096, 4096, 2048),
    _known("14B", 14.8e9, 40, 5120, 5120, 2048),
    _known("32B", 32.8e9, 64, 5120, 8192, 2048),
    _known("70B", 70.6e9, 80, 8192, 8192, 2048),
    _known("405B", 405.9e9, 126, 16384, 16384, 2048),
)

# Qwen3-30B-A3B and 235B-A22B; DeepSeek-V3 and Kimi-K2, whose cache holds a compressed vector of 512 + 64 numbers.
MIXTURES = (
    _known("30B-A3B", 30.5e9, 48, 2048, 4096, 1024, 3.35e9, 128),
    _known("235B-A22B", 235e9, 94, 4096, 8192, 1024, 22e9, 128),
    _known("671B-A37B", 671e9, 61, 7168, 20480, 576, 37e9, 256),
    _known("1T-A32B", 1e12, 61, 7168, 10240, 576, 32e9, 384),
)

MOST_PARAMS = 1e15
UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
SIZE = re.compile(r"(\d+(?:\.\d+)?)([mbt])(?:-?a(\d+(?:\.\d+)?)([mbt]))?", re.IGNORECASE)


def model_shape(text: str) -> ModelShape:
    """The shape that is meant by a size, or that a config.json or its directory has."""
    if SIZE.fullmatch(text.strip()):
        return sized_shape(text)
    if not Path(text).exists():
        raise ModelError(f"{text!r} is neither a size, such as 7B or 235B-A22B, nor a model's directory or config.json")
    return read_config(Path(text))


def sized_shape(text: str) -> ModelShape:
    """The shape that is meant by 7B, 70B, 500M or 235B-A22B."""
    size = SIZE.fullmatch(text.strip())
    if size is None:
        raise ModelError(f"{text!r} is not a size, such as 7B or 235B-A22B")
    number, unit, active, active_unit = size.groups()
    num_params = float(number) * UNITS[unit.lower()]
    if num_params == 0.0:
        raise ModelError(f"{text!r} is a model without weights")
    if num_params > MOST_PARAMS:
        raise ModelError(f"{text!r} is more weights than any model has")
    num_active = float(active) * UNITS[active_unit.lower()] if active else num_params
    shape = _stretched(MIXTURES if active else DENSE, num_params)
    return replace(shape, name=text.strip(), num_params=num_params, num_active_params=num_active)


def _stretched(known: tuple[ModelShape, ...], num_params: float) -> ModelShape:
    """The nearest known shape; if its size is another, as much deeper and wider (weights go with depth x width²)."""
    near = min(known, key=lambda shape: abs(math.log(shape.num_params / num_params)))
    factor = (num_params / near.num_params) ** (1 / 3)
    if abs(math.log(num_params / near.num_params)) < 0.1:  # the name is rounded: Qwen2.5-7B has 7.62B
        return near
    return replace(
        near,
        num_layers=max(1, round(near.num_layers * factor)),
        hidden_size=max(1, round(near.hidden_size * factor)),
        attention_size=max(1, round(near.attention_size * factor)),
    )


def read_config(path: Path) -> ModelShape:
    """The shape in a model's config.json, its weights counted."""
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"there is no config.json in {path}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a model's configuration")
    try:
        return from_config(content.get("text_config", content), name=file.resolve().parent.name)
    except KeyError as error:
        raise ModelError(f"{file} does not say {error.args[0]}; name a size instead, such as 7B") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{file} has a number that cannot be ({error}); name a size instead, such as 7B") from error


def from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shape that the fields of `transformers`' configuration describe; norms and biases are not counted."""
    hidden, num_layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    num_experts = int(_first(config, "num_experts", "num_local_experts", "n_routed_experts") or 0)
    per_token = int(_first(config, "num_experts_per_tok") or 0) if num_experts else 0
    attention, attention_size, kv_size = _attention(config, hidden)
    num_dense = int(_first(config, "first_k_dense_replace") or 0) if num_experts else num_layers
    expert = 3 * hidden * int(_first(config, "moe_intermediate_size") or config["intermediate_size"])
    shared = expert * int(_first(config, "n_shared_experts") or 0) + hidden * num_experts  # and the router
    outside = num_layers * attention + num_dense * 3 * hidden * int(_first(config, "intermediate_size") or 0)
    outside += (num_layers - num_dense) * shared
    outside += (1 if config.get("tie_word_embeddings") else 2) * hidden * int(config["vocab_size"])
    return ModelShape(
        name=name,
        num_params=outside + (num_layers - num_dense) * num_experts * expert,
        num_active_params=outside + (num_layers - num_dense) * per_token * expert,
        num_layers=num_layers,
        hidden_size=hidden,
        attention_size=attention_size,
        kv_size=kv_size,
        num_experts=num_experts,
        experts_per_token=per_token,
    )


def _attention(config: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Weights of one layer's attention, its queries' size, and the numbers that it caches per token."""
    heads = int(config["num_attention_heads"])
    if config.get("kv_lora_rank"):  # a compressed cache
        rope, plain, value = (int(config[key]) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        cached, rank = int(config["kv_lora_rank"]), int(_first(config, "q_lora_rank") or 0)
        query = heads * (plain + rope)
        weights = hidden * rank + rank * query if rank else hidden * query
        weights += hidden * (cached + rope) + cached * heads * (plain + value) + heads * value * hidden
        return weights, heads * (plain + rope + value) // 2, cached + rope
    head = int(_first(config, "head_dim") or hidden // heads)
    kv_heads = int(_first(config, "num_key_value_heads") or heads)
    return 2 * hidden * heads * head + 2 * hidden * kv_heads * head, heads * head, 2 * kv_heads * head


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)
