"""The decoder of the Llama family: `transformers`' weights and matrices, our own path between them.

A decode step of a small model spends most of its time between the matrices, in module calls, views and elementwise
chains. This path has few of them, and serves the engine and the learner alike. Other architectures run through
`transformers`' own modules. Either way the policy compares itself with `transformers` once, when it is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.policy.attention import Plan
from headrace.policy.functions import gated, rms_norm, rotate

FAMILY = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}


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

    def _window(self, attention: Any) -> int:
        """Tokens that the layer sees, 0 for all: Qwen says it per layer, Mistral once, Llama never."""
        body = self._body
        everywhere = body.config.sliding_window if type(body).__name__ == "MistralModel" else None
        return getattr(attention, "sliding_window", everywhere) or 0


def _norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)
