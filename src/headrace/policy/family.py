"""The decoder of the Llama family: the weights of `transformers`, and a forward pass of our own.

A decode step of a small model spends most of its time between the GEMMs, in module calls, views and
elementwise chains. This forward pass has few of them; on a GPU there is one kernel between two
GEMMs. On a CPU norm, rotary position embedding (RoPE) and gate are functions with a backward of
their own: the same arithmetic in fewer passes over memory. On two cores, the norm of 4,864 tokens
of width 128, forward and backward, went from 6.4 ms to 1.2 ms. Mixture layers, and other
architectures, run through the modules of `transformers`. Either way the policy is compared with
`transformers` when it is loaded (probe.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.kernels import AVAILABLE, block
from headrace.roles import AttentionPlan

MOST_ANGLES = 2**17  # positions whose angles are kept in a table
BEYOND = 64  # positions after the model's last: the engine computes some before it throws them away
FAMILY = {"LlamaModel", "MistralModel", "MixtralModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel"}


def in_family(body: Any) -> bool:
    return type(body).__name__ in FAMILY and body.config.hidden_act in ("silu", "swish")


_NO_CONTEXT = SimpleNamespace(save_for_backward=lambda *tensors: None)  # in place of autograd's


def call(function: Any, *args: Any) -> Tensor:
    """Without a backward pass the forward alone: `apply` costs more than a small GEMM."""
    found: Tensor = function.apply(*args) if torch.is_grad_enabled() else function.forward(_NO_CONTEXT, *args)
    return found


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if x.is_cuda or not torch.is_grad_enabled():
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call, no-any-return]


class RmsNorm(torch.autograd.Function):
    """y = x · r · weight with r = 1 / sqrt(mean(x²) + epsilon)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        # float32 at least, like torch's own: rounded to half precision, r would scale a whole row
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        r.square_().mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        y: Tensor = (x * r).mul_(weight).to(x.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        unit = x * r
        pull = grad * unit
        along = (pull @ weight.to(r.dtype)).unsqueeze(-1).mul_(-1 / x.shape[-1])
        of_x = unit.mul_(along).addcmul_(grad, weight).mul_(r)
        return of_x.to(x.dtype), pull.flatten(0, -2).sum(0).to(weight.dtype), None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-direction)
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:], value=direction)
    return turned


class Rotate(torch.autograd.Function):
    """RoPE of `[T, H, D]`; its backward is the rotation the other way.

    Both halves of `cos [T, 1, D]` hold the same angles, and so do those of `sin`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


rotate = partial(call, Rotate)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return Gated.apply(gate, up)  # type: ignore[no-untyped-call, no-any-return]
    return F.silu(gate, inplace=True).mul_(up)


class Gated(torch.autograd.Function):
    """silu(gate) · up, keeping only the two inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def attend_rectangle(q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int], scale: float, window: int) -> Tensor:
    """Causal attention of `shape` (sequences, longest): causality masks the padding at the end.

    Where there are more keys than queries, the first of them come before all queries.
    """
    mask, num_keys = None, len(k) // shape[0]
    if window or num_keys > shape[1]:
        mask = visible(torch.arange(num_keys - shape[1], num_keys, device=q.device), num_keys, window)
    q, k, v = (x.unflatten(0, (shape[0], -1)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def visible(positions: Tensor, length: int, window: int) -> Tensor:
    """Mask `[.., length]` of the keys that queries at `positions` see. A `window` of 0 is none."""
    ago = positions[..., None] - torch.arange(length, device=positions.device)
    return (ago >= 0) & (ago < window) if window else ago >= 0


def unseen(positions: Tensor, length: int, window: int, dtype: torch.dtype) -> Tensor:
    """The same to be added to scores: 0 for keys that a query sees, -inf for the others."""
    return torch.where(visible(positions, length, window), 0.0, float("-inf")).to(dtype)


class FamilyBody:
    """Embedding, layers and final norm. Called for the final hidden states `[T, E]`."""

    def __init__(self, body: Any, recomputing: Any) -> None:
        self._body = body
        self.checkpoint_activations = False
        self._recomputing = recomputing  # contexts of a checkpointed layer and its recomputation
        self._through_modules = False
        self._table: tuple[Tensor, Tensor] | None = None
        self.head_size: int = body.layers[0].self_attn.head_dim
        self.fits_kernels = AVAILABLE and self.head_size & (self.head_size - 1) == 0

    def __call__(self, token_ids_T: Tensor, positions_1T: Tensor, plan: AttentionPlan) -> Tensor:
        body = self._body
        x = body.embed_tokens(token_ids_T)
        cos, sin = self._angles(x, positions_1T)
        if x.is_cuda and self.fits_kernels:
            update = None  # of a layer: the next norm's kernel adds it to the residual stream
            for layer, joined in zip(body.layers, self._joined, strict=True):
                x, update = self._run(self._fused_layer, layer, joined, x, update, cos, sin, plan)
            return block.add_norm(x, update, body.norm.weight, body.norm.variance_epsilon)[1]
        cos, sin = cos[:, None], sin[:, None]
        for layer in body.layers:
            one = layer if self._through_modules else partial(self._run, self._layer, layer)
            x = one(x, cos, sin, plan)
        return self._norm(body.norm, x)

    def go_through_modules(self) -> None:
        """From now on call each layer as a module: in its hooks FSDP gathers the weights."""
        self.fits_kernels = False  # some join the weights of several matrices
        for layer in self._body.layers:
            layer.forward = partial(self._as_module, layer, layer.forward)
        self._through_modules = True

    def _as_module(self, layer: Any, stock: Any, *args: Any, **named: Any) -> Any:
        """`transformers` calls its layers with names, and we do not."""
        return stock(*args, **named) if named else self._run(self._layer, layer, *args)

    def _run(self, layer_function: Any, *args: Any) -> Any:
        if self.checkpoint_activations and torch.is_grad_enabled():
            return checkpoint(layer_function, *args, use_reentrant=False, context_fn=self._recomputing)
        return layer_function(*args)

    def _layer(self, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, plan: Any) -> Tensor:
        attention, mlp, linear, norm = layer.self_attn, layer.mlp, self._linear, self._norm
        h = norm(layer.input_layernorm, x)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (linear(p, h).unflatten(1, (-1, attention.head_dim)) for p in projections)
        if hasattr(attention, "q_norm"):
            q, k = norm(attention.q_norm, q), norm(attention.k_norm, k)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        how = attention.scaling, self._window(attention), *self._exact
        x = x + linear(attention.o_proj, plan.attend(attention.layer_idx, q, k, v, *how).flatten(1))
        h = norm(layer.post_attention_layernorm, x)
        if hasattr(mlp, "experts"):
            return x + self._mixture(mlp, h)
        return x + linear(mlp.down_proj, self._gated(linear(mlp.gate_proj, h), linear(mlp.up_proj, h)))

    # the arithmetic of a layer, for ExactBody to replace
    _rotate, _gated, _rms_norm = staticmethod(rotate), staticmethod(gated), staticmethod(rms_norm)
    _exact: tuple[bool, ...] = ()  # last argument of a plan's `attend`

    def _linear(self, module: Any, x: Tensor) -> Tensor:
        return module(x)  # type: ignore[no-any-return]

    def _norm(self, module: Any, x: Tensor) -> Tensor:
        return self._rms_norm(x, module.weight, module.variance_epsilon)

    def _mixture(self, mlp: Any, x: Tensor) -> Tensor:
        return mlp(x[None])[0]  # type: ignore[no-any-return]

    def _fused_layer(
        self, layer: Any, joined: _Joined, x: Tensor, update: Tensor | None, cos: Tensor, sin: Tensor, plan: Any
    ) -> tuple[Tensor, Tensor]:
        attention, before, after = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
        where = attention.layer_idx, attention.scaling, self._window(attention)
        x, h = block.add_norm(x, update, before.weight, before.variance_epsilon)
        qkv = block.linear(joined.qkv, h)
        if hasattr(plan, "rotate_and_attend"):
            out = plan.rotate_and_attend(where[0], qkv, joined.heads, cos, sin, *where[1:])
        else:
            out = plan.attend(where[0], *block.rotate_heads(qkv, joined.heads, cos, sin), *where[1:])
        out = block.linear(joined.out, out.flatten(1))
        x, h = block.add_norm(x, out, after.weight, after.variance_epsilon)
        if joined.gate_up is None:
            return x, self._mixture(layer.mlp, h)
        return x, block.linear(joined.down, block.linear(joined.gate_up, h, gated=True))

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
        return self._table[0][positions_1T[0]], self._table[1][positions_1T[0]]

    @cached_property
    def _joined(self) -> list[_Joined]:
        return [_Joined(layer) for layer in self._body.layers]

    def products(self) -> dict[str, tuple[Callable[[Tensor], Tensor], int]]:
        """Every GEMM of the layers, one of each shape: name -> function, width of its input."""
        found: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {}
        for layer, joined in zip(self._body.layers, self._joined, strict=True):
            matrices: dict[str, Any] = {"the attention's input": joined.qkv}
            matrices["the attention's output"] = joined.out
            if joined.gate_up is None:
                found["the experts"] = partial(self._mixture, layer.mlp), joined.qkv.weight.shape[1]
            else:
                matrices |= {"the gate": joined.gate_up, "the layer's output": joined.down}
            for name, matrix in matrices.items():
                rows, width = matrix.weight.shape
                if matrix.adapters is not None:  # what they add is zero to begin with
                    inner = partial(block.product, matrix.adapters, None)
                    found[f"adapters of {name}, {len(matrix.adapters)} x {width}"] = inner, width
                found[f"{name}, {rows} x {width}"] = partial(block.linear, matrix, gated=name == "the gate"), width
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
        self.out = JoinedLinear([attention.o_proj])
        is_mixture = hasattr(mlp, "experts")
        self.gate_up = None if is_mixture else JoinedLinear([mlp.gate_proj, mlp.up_proj])
        self.down = None if is_mixture else JoinedLinear([mlp.down_proj])
        norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.heads = block.Heads(
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
        self.weight = _join([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = _join(biases) if biases else None
        found = [adapter for linear in linears if (adapter := adapter_of(linear))]
        self.adapters = _join([down for down, _, _ in found]) if found else None
        self._ups = [(up, scale) for _, up, scale in found]

    def adapted(self, found_TN: Tensor, low_TR: Tensor) -> Tensor:
        """A product with what adapters add, from their inner states. In place without gradients."""
        parts = found_TN.split([len(up) for up, _ in self._ups], 1)
        every = list(zip(parts, low_TR.chunk(len(parts), 1), self._ups, strict=True))
        if torch.is_grad_enabled():
            return torch.cat([torch.addmm(part, low, up.t(), alpha=scale) for part, low, (up, scale) in every], 1)
        for part, low, (up, scale) in every:
            part.addmm_(low, up.t(), alpha=scale)
        return found_TN


def adapter_of(linear: Any) -> tuple[Tensor, Tensor, float] | None:
    """The two matrices of a layer's adapter, and the scale of their product."""
    for name, scale in getattr(linear, "scaling", {}).items():
        return linear.lora_A[name].weight, linear.lora_B[name].weight, scale
    return None


def _join(parts: list[Any]) -> Tensor:
    """The parts end to end. Each backward pass gives them their own rows of the gradient."""
    if len(parts) == 1:
        return parts[0]  # type: ignore[no-any-return]
    whole, sizes = torch.cat([part.detach() for part in parts]), [len(part) for part in parts]
    for part, view in zip(parts, whole.split(sizes), strict=True):
        part.data = view

    def hand_out(whole: Tensor) -> None:
        assert whole.grad is not None
        for part, grad in zip(parts, whole.grad.split(sizes), strict=True):
            if part.requires_grad:
                part.grad = grad if part.grad is None else part.grad.add_(grad)
        whole.grad = None

    if any(part.requires_grad for part in parts):
        whole.requires_grad_().register_post_accumulate_grad_hook(hand_out)
    return whole
