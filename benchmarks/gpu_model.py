"""The models of the GPU benchmarks: shapes of published models, weights made on the spot, nothing downloaded.

`random_model` has weights that say nothing; lengths are then set by each request. `write_stairs` writes a model that
ends its answers by itself, at log-normal lengths or never, so that every trainer meets the same lengths without being
told of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS = "<pad>", "<eos>"
MATCH = 30.0  # logit of a token that may come next; all others lie far below
RANDOM_SHARE = 1e-4  # what is left of the random layers' outputs in a staircase model


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Qwen3 shape; embeddings are tied.

    Example:
        Shape(hidden=1024, layers=28, heads=16, kv_heads=8, head_size=128, intermediate=3072, vocab=151936)
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int

    @property
    def body_weights(self) -> int:
        """Weights of all matrices between embedding and head."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Weights of the output matrix, which is the embedding too."""
        return self.hidden * self.vocab

    def kv_bytes(self, itemsize: int) -> int:
        """Key/value cache of one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * itemsize


QWEN3 = {"heads": 16, "kv_heads": 8, "head_size": 128, "layers": 28, "vocab": 151936}
SHAPES = {
    "0.6b": Shape(hidden=1024, intermediate=3072, **QWEN3),
    "1.7b": Shape(hidden=2048, intermediate=6144, **QWEN3),
    "4b": Shape(hidden=2560, intermediate=9728, **QWEN3 | {"heads": 32, "layers": 36}),
    "8b": Shape(hidden=4096, intermediate=12288, **QWEN3 | {"heads": 32, "layers": 36}),
    "tiny": Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_size=16, vocab=600),
}


def random_model(shape: Shape, device: torch.device, max_context: int = 8192, seed: int = 0) -> Any:
    """Random weights made on the device itself, bfloat16 on a GPU and float32 on a CPU."""
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=max_context,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        dtype=str(dtype_on(device)).removeprefix("torch."),
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype_on(device))
    try:
        with device:
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def word_tokenizer(vocab: int, *, ends: bool) -> PreTrainedTokenizerFast:
    """Token i is the word `w<i>`; the last two are the end and padding. Without `ends` nothing ends an answer."""
    words = [f"w{i}" for i in range(vocab - 2)]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, EOS, PAD])}, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS if ends else None,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Log-normal lengths, cut at `cap`.

    Example:
        Lengths(mean=512, cv=1.0, cap=4096)
    """

    mean: float
    cv: float
    cap: int

    @property
    def _log(self) -> NormalDist:
        variance = math.log(1 + self.cv**2)
        return NormalDist(math.log(self.mean) - variance / 2, math.sqrt(variance))

    def draw(self, count: int, seed: int) -> list[int]:
        """So many lengths."""
        log = self._log
        drawn = np.exp(np.random.default_rng(seed).normal(log.mean, log.stdev, count))
        return np.clip(np.round(drawn), 1, self.cap).astype(int).tolist()

    def end_chances(self) -> list[float]:
        """The chance that an answer ends with its i-th token, given that it came so far; the cap ends what is left."""
        log = self._log
        longer = [1.0] + [1 - log.cdf(math.log(i + 0.5)) for i in range(1, self.cap)]
        return [1 - after / before for before, after in pairwise(longer)] + [1.0]


def write_stairs(directory: Path, shape: Shape, device: torch.device, *, stairs: int, lengths: Lengths | None) -> None:
    """Write a model whose answers climb a staircase of `stairs` steps, and its tokenizer.

    Token i stands on step i mod `stairs`, so several words share a step. After a word of one step comes, by equal
    chances, a word of the next, or the end, whose chance at each step is that of `lengths` (never without). The weights
    are set by hand: a step's embedding is a code of angles, the last layer's gated unit turns each angle by one step,
    and the end's embedding is fitted to the chances. All other layers keep random weights and do their whole work, but
    next to nothing of it reaches the residual stream.
    """
    tokenizer = word_tokenizer(shape.vocab, ends=True)
    model = random_model(shape, device, max_context=max(8192, stairs + 1024))
    frequencies = _frequencies(shape.hidden // 2 - 1, stairs)
    size = MATCH / math.sqrt(shape.hidden)  # of every embedding: its product with itself, after the norm, is MATCH
    codes = _codes(frequencies, stairs, shape.hidden, size)
    variants = (shape.vocab - 2) // stairs
    table = codes[torch.arange(shape.vocab) % stairs]
    table[variants * stairs :] = 0.0  # words that never come: they point away from everything else
    table[variants * stairs :, 0] = -size
    if lengths is not None:
        following = codes.roll(-1, 0) * math.sqrt(shape.hidden) / size  # what the final norm hands to the head
        chances = torch.tensor(lengths.end_chances()[1:], dtype=torch.float64).clamp(1e-9, 0.5)
        chances = torch.nn.functional.pad(chances, (0, stairs - len(chances)), value=0.5)
        wanted = MATCH + math.log(variants) + torch.logit(chances)
        table[tokenizer.eos_token_id] = _fit(following, wanted)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(table)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(RANDOM_SHARE)
            layer.mlp.down_proj.weight.mul_(RANDOM_SHARE)
        _turn(model.model.layers[-1].mlp, frequencies, shape.hidden, size)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.config.update(ids)
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, **ids)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _frequencies(count: int, stairs: int) -> Tensor:
    """Mostly random ones, which tell any two steps apart; some low ones, in which the chance to end is smooth."""
    generator = torch.Generator().manual_seed(0)
    num_low = count // 8
    low = torch.logspace(math.log10(0.25 / stairs), math.log10(16 / stairs), num_low, dtype=torch.float64)
    random = torch.rand(count - num_low, generator=generator, dtype=torch.float64) * math.pi
    return torch.cat([low * 2 * math.pi, random])


def _codes(frequencies: Tensor, stairs: int, hidden: int, size: float) -> Tensor:
    """[stairs, hidden]: a constant, then a cosine and a sine for each frequency; every row has norm `size`."""
    angles = torch.arange(stairs, dtype=torch.float64)[:, None] * frequencies
    codes = torch.zeros(stairs, hidden, dtype=torch.float64)
    codes[:, 0] = 1.0
    codes[:, 2::2], codes[:, 3::2] = angles.cos() / 8, angles.sin() / 8
    return codes * (size / codes[0].norm())


def _turn(mlp: Any, frequencies: Tensor, hidden: int, size: float) -> None:
    """Make the gated unit add what turns a code by one step. The gate is open for all: it reads the constant."""
    weight = mlp.up_proj.weight
    turn = torch.zeros(hidden, hidden, dtype=torch.float64)
    at = torch.arange(2, hidden, 2)
    turn[at, at] = turn[at + 1, at + 1] = frequencies.cos() - 1
    turn[at, at + 1], turn[at + 1, at] = -frequencies.sin(), frequencies.sin()
    scale = size / math.sqrt(hidden)  # the norm before the unit divided by it
    constant = float(_codes(frequencies, 1, hidden, size)[0, 0]) / scale
    open_gate = 8.0
    gain = open_gate / (1 + math.exp(-open_gate))
    mlp.gate_proj.weight[:hidden].zero_()
    mlp.gate_proj.weight[:hidden, 0] = open_gate / constant
    weight[:hidden].copy_(turn * scale)
    mlp.down_proj.weight[:, :hidden].copy_(torch.eye(hidden, dtype=torch.float64) / gain)


def _fit(features: Tensor, wanted: Tensor) -> Tensor:
    """Ridge regression: the row of the head that gives each step its logit, and stays small."""
    ridge = 1e-6 * torch.eye(features.shape[1], dtype=torch.float64) * len(features)
    return torch.linalg.solve(features.T @ features + ridge, features.T @ wanted)
