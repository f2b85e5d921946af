"""What devices can do and cost, and the few numbers of a model that its speed and memory depend on.

The devices are in hardware.toml, models in models.toml. What a program reaches of a datasheet is in
`roofline.py`. Prices change often: a file of the same form changes the table and adds to it.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from headrace.config_file import HARDWARE, letters, read_toml
from headrace.errors import ConfigError, ModelError


class Accelerator(BaseModel, frozen=True, extra="forbid", strict=True, allow_inf_nan=False):
    """One accelerator, or one core of a CPU."""

    name: str
    memory_bytes: PositiveFloat
    memory_bytes_per_s: PositiveFloat
    flops_per_s: PositiveFloat
    link_bytes_per_s: PositiveFloat  # to a device of the same node
    network_bytes_per_s: PositiveFloat  # to another node, this device's part of the node's network
    dollars_per_hour: NonNegativeFloat
    num_per_node: PositiveInt = 8
    number_bytes: PositiveInt = 2  # of a weight: 2 is bfloat16, 4 float32


def find_device(name: str, hardware: Mapping[str, Accelerator] | None = None) -> Accelerator:
    """The device of that name, however it is spelt: H100, h100, rtx4090, RTX-4090."""
    known = read_hardware() if hardware is None else hardware
    if (match := _known_as(name, known)) is None:
        listed = f"it has {', '.join(known)}. A hardware file can add one."
        raise ConfigError(f"there is no device {name!r} in the table; {listed}")
    return known[match]


def read_hardware(path: Path | str | None = None) -> dict[str, Accelerator]:
    """The table with the changes and additions of a TOML file; without a file, the table."""
    table: dict[str, Accelerator] = {}
    for file in (HARDWARE, path) if path is not None else (HARDWARE,):
        for name, entry in read_toml(Path(file), "hardware file").items():
            if not isinstance(entry, dict):
                outside = "stands outside of a device; write [H100] or another name above it"
                raise ConfigError(f"{file}: {name} {outside}")
            match = _known_as(name, table) or name
            before = table[match].model_dump() if match in table else {"name": name}
            try:
                table[match] = Accelerator.model_validate(before | entry)
            except ValidationError as error:
                raise ConfigError(f"{file}: [{name}] {_problem(error)}") from error
    return table


def _problem(error: ValidationError) -> str:
    """What is wrong with a device: unknown names first, then missing numbers, then values."""
    found = {str(one["loc"][0]): one for one in error.errors()}
    numbers = list(Accelerator.model_fields)[1:]
    if unknown := [key for key in found if key not in numbers]:
        near = get_close_matches(unknown[0], numbers, n=1)
        hint = f"did you mean {near[0]}?" if near else f"a device has {', '.join(numbers)}"
        return f"has no number {unknown[0]}; {hint}"
    if missing := [key for key, one in found.items() if one["type"] == "missing"]:
        return f"is not in the table, so it needs every number; {', '.join(missing)} missing"
    key, one = next(iter(found.items()))
    whole = "whole " if Accelerator.model_fields[key].annotation is int else ""
    return f"{key} is {one['input']!r}; it must be a {whole}number above 0"


def _known_as(name: str, known: Mapping[str, Accelerator]) -> str | None:
    return {letters(other): other for other in known}.get(letters(name))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense model, or a mixture of experts."""

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
        experts, active = self.num_experts, self.num_active_params
        if experts and not 0 < self.experts_per_token < experts:
            problem = f"a token is sent to {self.experts_per_token} of {experts} experts"
            raise ModelError(f"{self.name}: {problem}; it must be at least 1, and fewer than there are")
        if not 0 < active <= self.num_params:
            problem = f"{active:g} of {self.num_params:g} weights are active"
            raise ModelError(f"{self.name}: {problem}; it must be more than none and at most all")

    def params_read(self, num_tokens: float) -> float:
        """Weights that a forward pass of `num_tokens` tokens reads at least once.

        A dense model's are all read. Of E experts, a token that picks k leaves out each with
        probability 1 - k/E, so n tokens read E·(1 - (1 - k/E)^n) of them, if they pick evenly.
        """
        if not self.num_experts:
            return self.num_params
        E, k = self.num_experts, self.experts_per_token
        per_expert = (self.num_params - self.num_active_params) / (E - k)
        return self.num_params - per_expert * E * math.pow(1 - k / E, num_tokens)


SHAPES = [
    ModelShape(name=name, **{"num_active_params": sizes["num_params"]} | sizes)
    for name, sizes in read_toml(Path(__file__).with_name("models.toml")).items()
]
MOST_PARAMS = 1e15
UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
SIZE = re.compile(r"(\d+(?:\.\d+)?)([mbt])(?:-?a(\d+(?:\.\d+)?)([mbt]))?", re.IGNORECASE)


def model_shape(text: str) -> ModelShape:
    """The shape that is meant by a size, or that a config.json or its directory has."""
    if SIZE.fullmatch(text.strip()):
        return sized_shape(text)
    if not (path := Path(text)).exists():
        either = "neither a size, such as 7B or 235B-A22B, nor a model's directory or config.json"
        raise ModelError(f"{text!r} is {either}")
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
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        unknown = isinstance(error, KeyError)
        problem = f"does not say {error.args[0]}" if unknown else f"has a number that cannot be ({error})"
        raise ModelError(f"{file} {problem}; name a size instead, such as 7B") from error


def sized_shape(text: str) -> ModelShape:
    """The shape that is meant by 7B, 70B, 500M or 235B-A22B: the nearest known one, stretched."""
    size = SIZE.fullmatch(text.strip())
    if size is None:
        raise ModelError(f"{text!r} is not a size, such as 7B or 235B-A22B")
    number, unit, active, active_unit = size.groups()
    num_params = float(number) * UNITS[unit.lower()]
    if not 0.0 < num_params <= MOST_PARAMS:
        problem = "more weights than any model has" if num_params else "a model without weights"
        raise ModelError(f"{text!r} is {problem}")
    num_active = float(active) * UNITS[active_unit.lower()] if active else num_params
    alike = [shape for shape in SHAPES if bool(shape.num_experts) == bool(active)]
    near = min(alike, key=lambda shape: abs(math.log(shape.num_params / num_params)))
    factor = (num_params / near.num_params) ** (1 / 3)  # weights go with depth x width²
    if abs(math.log(num_params / near.num_params)) < 0.1:  # names are rounded: Qwen2.5-7B has 7.62B
        factor = 1.0
    stretched = ("num_layers", "hidden_size", "attention_size")
    sizes: dict[str, Any] = {name: max(1, round(getattr(near, name) * factor)) for name in stretched}
    sizes |= {"num_params": num_params, "num_active_params": num_active}
    return replace(near, name=text.strip(), **sizes)


def from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shape that a `transformers` configuration describes; norms and biases are not counted."""
    hidden, num_layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    num_experts = _number(config, "num_experts", "num_local_experts", "n_routed_experts")
    per_token = _number(config, "num_experts_per_tok") if num_experts else 0
    attention, attention_size, kv_size = _attention(config, hidden)
    num_dense = _number(config, "first_k_dense_replace") if num_experts else num_layers
    num_mixed = num_layers - num_dense
    expert = 3 * hidden * (_number(config, "moe_intermediate_size") or int(config["intermediate_size"]))
    shared = expert * _number(config, "n_shared_experts") + hidden * num_experts  # and the router
    outside = num_layers * attention + num_dense * 3 * hidden * _number(config, "intermediate_size")
    outside += num_mixed * shared
    outside += (1 if config.get("tie_word_embeddings") else 2) * hidden * int(config["vocab_size"])
    num_params = outside + num_mixed * num_experts * expert
    num_active = outside + num_mixed * per_token * expert
    sizes = (num_layers, hidden, attention_size, kv_size, num_experts, per_token)
    return ModelShape(name, num_params, num_active, *sizes)


def _attention(config: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Weights of one layer's attention, its queries' size, and the numbers it caches per token."""
    heads = int(config["num_attention_heads"])
    if config.get("kv_lora_rank"):  # a compressed cache
        sizes = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
        rope, plain, value, cached = (int(config[key]) for key in sizes)
        rank, query = _number(config, "q_lora_rank"), heads * (plain + rope)
        weights = hidden * rank + rank * query if rank else hidden * query
        weights += hidden * (cached + rope + heads * value) + cached * heads * (plain + value)
        return weights, heads * (plain + rope + value) // 2, cached + rope
    head = _number(config, "head_dim") or hidden // heads
    kv_heads = _number(config, "num_key_value_heads") or heads
    return 2 * hidden * head * (heads + kv_heads), heads * head, 2 * kv_heads * head


def _number(config: Mapping[str, Any], *keys: str) -> int:
    """The first of these that the configuration says; 0 if it says none."""
    return int(next((config[key] for key in keys if config.get(key) is not None), 0))
