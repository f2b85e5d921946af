"""The decoder of the Llama family: `transformers`' weights and matrices, our own path between them.

A decode step of a small model spends most of its time between the matrices, in module calls, views and elementwise
chains. This path has few of them, and serves the engine and the learner alike. Other architectures run through
`transformers`' own modules. Either way the policy compares itself with `transformers` once, when it is loaded.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace import kernels
from headrace.policy.attention import Plan
from headrace.policy.functions import gated, rms_norm, rotate

if kernels.AVAILABLE:
    from headrace.kernels.block import add_norm, gate

FAMILY = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}


@runtime_checkable
class PagedPlan(Protocol):
    """A decode step over a paged cache."""

    def rotate_and_attend(self, attention: Any, qkv: Tensor, cos_TD: Tensor, sin_TD: Tensor, window: int) -> Tensor:
        """From queries, keys and values side by side to the attention's output `[T, H, D]`."""
        ...


def is_dense(body: Any) -> bool:
    """Whether this path computes what the model does."""
    return type(body).__name__ in FAMILY and body.config.hidden_act in ("silu", "swish")


class DenseBody:
    """Embedding, layers and final norm."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self.checkpoint_activations = False

    def __call__(self, token_ids_T: Tensor, positions_1T: Tensor, plan: Plan) -> Tensor:
        """Final hidden states `[T, E]`."""
        body = self._body
        x = body.embed_tokens(token_ids_T)
        if x.is_cuda and isinstance(plan, PagedPlan):
            return self._decode(x, positions_1T, plan)
        cos, sin = (angles[0, :, None] for angles in body.rotary_emb(x[None], positions_1T))
        for layer in body.layers:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(self._layer, layer, x, cos, sin, plan, use_reentrant=False)
            else:
                x = self._layer(layer, x, cos, sin, plan)
        return _norm(body.norm, x)

    def _layer(self, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, plan: Plan) -> Tensor:
        attention, mlp = layer.self_attn, layer.mlp
        h = _norm(layer.input_layernorm, x)
        q, k, v = (
            project(h).unflatten(1, (-1, attention.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = _norm(attention.q_norm, q), _norm(attention.k_norm, k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = plan.attend(attention.layer_idx, q, k, v, attention.scaling, self._window(attention))
        x = x + attention.o_proj(out.flatten(1))
        h = _norm(layer.post_attention_layernorm, x)
        return x + mlp.down_proj(gated(mlp.gate_proj(h), mlp.up_proj(h)))  # type: ignore[no-any-return]

    def _decode(self, x: Tensor, positions_1T: Tensor, plan: PagedPlan) -> Tensor:
        """The same for one token per sequence on a GPU, with a kernel for each stretch between the matrices."""
        body, update = self._body, None
        cos, sin = (angles[0].contiguous() for angles in body.rotary_emb(x[None], positions_1T))
        for layer, joined in zip(body.layers, self._joined, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            before, after = layer.input_layernorm, layer.post_attention_layernorm
            x, h = add_norm(x, update, before.weight, before.variance_epsilon)
            out = plan.rotate_and_attend(attention, joined.qkv(h), cos, sin, self._window(attention))
            x, h = add_norm(x, attention.o_proj(out.flatten(1)), after.weight, after.variance_epsilon)
            update = mlp.down_proj(gate(joined.gate_up(h)))
        return add_norm(x, update, body.norm.weight, body.norm.variance_epsilon)[1]

    @cached_property
    def _joined(self) -> list[_Joined]:
        return [_Joined(layer) for layer in self._body.layers]

    def _window(self, attention: Any) -> int:
        """Tokens that the layer sees, 0 for all: Qwen says it per layer, Mistral once, Llama never."""
        body = self._body
        everywhere = body.config.sliding_window if type(body).__name__ == "MistralModel" else None
        return getattr(attention, "sliding_window", everywhere) or 0


class _Joined:
    """The matrices of a layer that read the same input, laid end to end so that one product does for all.

    The model's own weights become views into the joined ones: an update in place reaches both.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._qkv = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up = _join([mlp.gate_proj, mlp.up_proj])

    def qkv(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side."""
        return F.linear(x, *self._qkv)

    def gate_up(self, x: Tensor) -> Tensor:
        """Gate and input side by side."""
        return F.linear(x, *self._gate_up)


def _join(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    joined: list[Tensor | None] = []
    for name in ("weight", "bias"):
        parts = [getattr(linear, name) for linear in linears]
        if parts[0] is None:
            joined.append(None)
            continue
        whole = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = view
        joined.append(whole)
    weight, bias = joined
    assert weight is not None
    return weight, bias


def _norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)
