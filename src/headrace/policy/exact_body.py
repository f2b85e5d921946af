"""The Llama family's decoder in exact mode on a CPU: the steps of family.py, batch-invariant by exact_cpu.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.policy import exact_cpu
from headrace.policy.exact_cpu import ExactFunctions, gated, linear, rotate
from headrace.policy.family import FamilyBody, is_mixture
from headrace.roles import AttentionPlan, ExactPlan

POSITIONS = 1024  # whose angles are computed at once


class ExactBody(FamilyBody):
    """Embedding, layers and final norm on a CPU, batch-invariant."""

    def __init__(self, body: Any, **options: Any) -> None:
        super().__init__(body, **options)
        self._exact_angles = torch.empty(2, 0, 1, 0)  # cos and sin of all positions so far, [2, positions, 1, D]

    def __call__(self, token_ids_T: Tensor, positions_1T: Tensor, plan: AttentionPlan) -> Tensor:
        assert isinstance(plan, ExactPlan), f"{type(plan).__name__} has no exact attention"
        body = self._body
        x = body.embed_tokens(token_ids_T)
        cos, sin = self._angles_at(positions_1T[0], x)
        for layer in body.layers:
            x = self._one(layer, x, cos, sin, plan)
        return _norm(body.norm, x)

    def _layer(self, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, plan: Any) -> Tensor:
        attention, mlp = layer.self_attn, layer.mlp
        h = _norm(layer.input_layernorm, x)
        q, k, v = (
            _linear(project, h).unflatten(1, (-1, attention.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = _norm(attention.q_norm, q), _norm(attention.k_norm, k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = plan.attend_exact(attention.layer_idx, q, k, v, attention.scaling, self._window(attention))
        x = x + _linear(attention.o_proj, out.flatten(1))
        h = _norm(layer.post_attention_layernorm, x)
        if is_mixture(mlp):
            with ExactFunctions():
                return x + mlp(h[None])[0]  # type: ignore[no-any-return]
        return x + _linear(mlp.down_proj, gated(_linear(mlp.gate_proj, h), _linear(mlp.up_proj, h)))

    def _angles_at(self, positions_T: Tensor, x: Tensor) -> Tensor:
        """cos and sin `[2, T, 1, D]`, from a table: an angle's last bit depends on its place in the call."""
        needed = int(positions_T.max()) + 1
        with torch.inference_mode(False), torch.no_grad():
            while self._exact_angles.shape[1] < needed:
                known = self._exact_angles.shape[1]
                block = torch.arange(known, known + POSITIONS)[None]
                more = torch.stack(self._body.rotary_emb(x.new_empty(1), block))[:, 0, :, None]
                self._exact_angles = torch.cat([self._exact_angles, more], dim=1) if known else more
        return self._exact_angles[:, positions_T]


def _linear(module: Any, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _norm(module: Any, x: Tensor) -> Tensor:
    return exact_cpu.rms_norm(x, module.weight, module.variance_epsilon)
