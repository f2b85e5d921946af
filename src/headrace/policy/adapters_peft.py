"""Low-rank adapters (LoRA): the model's weights are frozen, and small matrices beside them trained.

Every linear layer but the output head (in a mixture model, those of the attention) becomes
W x + (alpha / rank) B A x, with B at zero to begin with: the first version is the model as it was.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

ADAPTER = "default"


def add_adapters(model: Any, *, rank: int, alpha: float, seed: int) -> None:
    """Freeze the model and add adapters in its precision. `seed` decides their first values."""
    head, kinds = model.get_output_embeddings(), (nn.Linear, Conv1D)
    layers = [name for name, m in model.named_modules() if isinstance(m, kinds) and m is not head]
    if any(hasattr(m, "experts") for m in model.modules()):  # experts are tensors, not layers
        layers = [name for name in layers if "attn" in name or "attention" in name]
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=layers, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)


@torch.no_grad()
def merged_weights(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weights` with the adapters' products added, on the CPU, for a model without adapters."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        layer, _, kind = name.partition(".base_layer.")
        if kind == "weight":
            down, up = (weights[f"{layer}.lora_{side}.{ADAPTER}.weight"].float() for side in "AB")
            added = layers[layer].scaling[ADAPTER] * (up @ down)
            weight = (weight.float() + (added.T if layers[layer].fan_in_fan_out else added)).to(weight.dtype)
        found[name.replace(".base_layer.", ".")] = weight.detach().cpu()
    return found


def save_adapters(model: Any, weights: Mapping[str, Tensor], directory: Path) -> None:
    """The adapters alone, as `peft` and engines load them."""
    model.peft_config[ADAPTER].save_pretrained(directory)
    kept = {name: weight.detach().cpu().contiguous() for name, weight in weights.items() if ".lora_" in name}
    named = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": weight for name, weight in kept.items()}
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
