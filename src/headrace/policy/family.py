"""The decoder of the Llama family: the weights of `transformers`, and a forward pass of our own.

A decode step of a small model spends most of its time between the GEMMs, in module calls, views and
elementwise chains. This forward pass has few of them; on a GPU there is one kernel between two
GEMMs. Mixture layers, and other architectures, run through the modules of `transformers`. Either
way the policy is compared with `transformers` when it is loaded (probe.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace import kernels
from headrace.policy.functions import gated, rms_norm, rotate
from headrace.roles import AttentionPlan, PagedPlan

if kernels.AVAILABLE or TYPE_CHECKING:
    from headrace.kernels.block import Heads, add_norm, gate, rotate_heads

MOST_ANGLES = 2**17  # positions whose angles are kept in a table
BEYOND = 64  # positions after the model's last: the engine computes some before it throws them away
FAMILY = {"LlamaModel", "MistralModel", "MixtralModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel"}


def in_family(body: Any) -> bool:
    return type(body).__name__ in FAMILY and body.config.hidden_act in ("silu", "swish")


class FamilyBody:
    """Embedding, layers and final norm. Called for the final hidden states `[T, E]`."""

    def __init__(self, body: Any, *, recomputing: Any = None) -> None:
        self._body = body
        self.checkpoint_activations = False
        self._recomputing = recomputing  # contexts of a checkpointed layer and its recomputation
        self._through_modules = False
        self._table: tuple[Tensor, Tensor] | None = None
        self.head_size: int = body.layers[0].self_attn.head_dim
        self.fits_kernels = kernels.AVAILABLE and self.head_size & (self.head_size - 1) == 0

    def __call__(self, token_ids_T: Tensor, positions_1T: Tensor, plan: AttentionPlan) -> Tensor:
        body = self._body
        x = body.embed_tokens(token_ids_T)
        cos, sin = self._angles(x, positions_1T)
        if x.is_cuda and self.fits_kernels:
            return self._fused(x, cos, sin, plan)
        cos, sin = cos[:, None], sin[:, None]
        for layer in body.layers:
            one = layer if self._through_modules else partial(self._run, self._layer, layer)
            x = one(x, cos, sin, plan)
        return self._norm(body.norm, x)

    def go_through_modules(self) -> None:
        """From now on call each layer as a module: in its hooks FSDP gathers the weights.

        This rules out kernels that join the weights of several matrices.
        """
        self.fits_kernels = False
        self.__dict__.pop("_joined", None)
        for layer in self._body.layers:
            layer.forward = partial(self._run, self._layer, layer)
        self._through_modules = True

    def _run(self, layer_function: Any, *args: Any) -> Any:
        if self.checkpoint_activations and torch.is_grad_enabled():
            contexts = {} if self._recomputing is None else {"context_fn": self._recomputing}
            return checkpoint(layer_function, *args, use_reentrant=False, **contexts)
        return layer_function(*args)

    def _layer(self, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, plan: Any) -> Tensor:
        attention, mlp, linear, norm = layer.self_attn, layer.mlp, self._linear, self._norm
        h = norm(layer.input_layernorm, x)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (linear(p, h).unflatten(1, (-1, attention.head_dim)) for p in projections)
        if hasattr(attention, "q_norm"):
            q, k = norm(attention.q_norm, q), norm(attention.k_norm, k)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        where = attention.layer_idx, q, k, v, attention.scaling, self._window(attention)
        x = x + linear(attention.o_proj, self._attend(plan, *where).flatten(1))
        h = norm(layer.post_attention_layernorm, x)
        if hasattr(mlp, "experts"):
            return x + self._mixture(mlp, h)
        return x + linear(mlp.down_proj, self._gated(linear(mlp.gate_proj, h), linear(mlp.up_proj, h)))

    # the arithmetic of a layer, for ExactBody to replace
    _rotate, _gated = staticmethod(rotate), staticmethod(gated)

    def _linear(self, module: Any, x: Tensor) -> Tensor:
        return module(x)  # type: ignore[no-any-return]

    def _norm(self, module: Any, x: Tensor) -> Tensor:
        return rms_norm(x, module.weight, module.variance_epsilon)

    def _attend(self, plan: Any, *where: Any) -> Tensor:
        return plan.attend(*where)  # type: ignore[no-any-return]

    def _mixture(self, mlp: Any, x: Tensor) -> Tensor:
        return mlp(x[None])[0]  # type: ignore[no-any-return]

    def _fused(self, x: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan) -> Tensor:
        """On a GPU: the next norm's kernel adds a layer's `update` to the residual stream `x`."""
        update = None
        for layer, joined in zip(self._body.layers, self._joined, strict=True):
            x, update = self._run(self._fused_layer, layer, joined, x, update, cos, sin, plan)
        norm = self._body.norm
        return add_norm(x, update, norm.weight, norm.variance_epsilon)[1]

    def _fused_layer(
        self, layer: Any, joined: _Joined, x: Tensor, update: Tensor | None, cos: Tensor, sin: Tensor, plan: Any
    ) -> tuple[Tensor, Tensor]:
        attention, before, after = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
        where = attention.layer_idx, attention.scaling, self._window(attention)
        x, h = add_norm(x, update, before.weight, before.variance_epsilon)
        qkv = joined.qkv(h)
        if isinstance(plan, PagedPlan):
            out = plan.rotate_and_attend(where[0], qkv, joined.heads, cos, sin, *where[1:])
        else:
            out = plan.attend(where[0], *rotate_heads(qkv, joined.heads, cos, sin), *where[1:])
        x, h = add_norm(x, attention.o_proj(out.flatten(1)), after.weight, after.variance_epsilon)
        if joined.gate_up is None:
            return x, self._mixture(layer.mlp, h)
        return x, layer.mlp.down_proj(gate(joined.gate_up(h)))

    def _angles(self, x: Tensor, positions_1T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[T, D]` of the positions (RoPE); on a GPU looked up in a table."""
        if not x.is_cuda or self._body.config.max_position_embeddings > MOST_ANGLES:
            cos, sin = self._body.rotary_emb(x[None], positions_1T)
            return cos[0], sin[0]
        if self._table is None:
            with torch.inference_mode(False), torch.no_grad():
                most = self._body.config.max_position_embeddings + BEYOND
                cos, sin = self._body.rotary_emb(x[None], torch.arange(most, device=x.device)[None])
                self._table = cos[0].contiguous(), sin[0].contiguous()
        cos, sin = self._table
        return cos[positions_1T[0]], sin[positions_1T[0]]

    @cached_property
    def _joined(self) -> list[_Joined]:
        return [_Joined(layer) for layer in self._body.layers]

    def products(self) -> dict[str, tuple[Callable[[Tensor], Tensor], int]]:
        """Every GEMM of the layers, one of each shape: name -> function, width of its input."""
        found: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {}
        for layer, joined in zip(self._body.layers, self._joined, strict=True):
            linears: dict[str, Any] = {"the attention's input": joined.qkv}
            linears["the attention's output"] = layer.self_attn.o_proj
            if joined.gate_up is None:
                found["the experts"] = partial(self._mixture, layer.mlp), joined.qkv.weight.shape[1]
            else:
                linears |= {"the gate": joined.gate_up, "the layer's output": layer.mlp.down_proj}
            for name, linear in linears.items():
                rows, width = linear.weight.shape
                found[f"{name}, {rows} x {width}"] = linear, width
        return found

    def _window(self, attention: Any) -> int:
        """The layer's sliding window (0: none). Qwen has one per layer, Mistral and Mixtral one."""
        once = type(self._body).__name__ in ("MistralModel", "MixtralModel")
        everywhere = self._body.config.sliding_window if once else None
        return getattr(attention, "sliding_window", everywhere) or 0


class _Joined:
    """The matrices of a layer that read the same input, joined."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = JoinedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = None if hasattr(mlp, "experts") else JoinedLinear([mlp.gate_proj, mlp.up_proj])
        norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.heads = Heads(
            num=attention.q_proj.out_features // attention.head_dim,
            num_kv=attention.k_proj.out_features // attention.head_dim,
            size=attention.head_dim,
            norms=(norms[0].weight, norms[1].weight) if norms else None,
            epsilon=norms[0].variance_epsilon if norms else 0.0,
        )


class JoinedLinear:
    """Several linear maps of one input as one GEMM: their weights end to end.

    The model's own weights become views into the joined ones: an update in place reaches both.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._parts = [linear.weight for linear in linears]
        self.weight = _join(self._parts)
        self._bias_parts = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = _join(self._bias_parts) if self._bias_parts else None

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            product: Any = _JoinedProduct.apply
            return product(x, self.weight, self.bias, *self._parts, *self._bias_parts)  # type: ignore[no-any-return]
        return F.linear(x, self.weight, self.bias)


class _JoinedProduct(torch.autograd.Function):
    """Gives each part of the joined weight (and bias) its own rows of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = [len(part) for part in (parts if bias is None else parts[: len(parts) // 2])]
        ctx.biased = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        of_parts: list[Tensor | None] = [None] * len(ctx.needs_input_grad[3:])
        if any(ctx.needs_input_grad[3:]):
            of_parts[: len(ctx.sizes)] = (grad.t() @ x).split(ctx.sizes)
            of_parts[len(ctx.sizes) :] = grad.sum(0).split(ctx.sizes) if ctx.biased else []
        return of_x, None, None, *of_parts


def _join(parts: list[Any]) -> Tensor:
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole
