"""Fused kernels of a decoder: residual + RMSNorm, QK-norm + RoPE, SwiGLU; and matmuls of few rows.

Each has its own backward. All are batch-invariant: the bits of a row depend on that row alone. T
tokens, E hidden size, H query heads, J key/value heads, D head size, F width of the gate, N = (H +
2 J) D.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FEW, SMALL = 16, 2**23  # rows, and numbers of the weight, of a matmul with a kernel of its own
MOST_EARLY = 64  # rows for which a kernel starts early
PROGRAMS = 512  # of a backward pass; each sums the weight's gradient over its share of the rows


def early(rows: int) -> dict[str, bool]:
    """For few rows a kernel starts before the last one ends (programmatic dependent launch)."""
    able = rows <= MOST_EARLY and torch.version.cuda and torch.cuda.is_available()
    able = able and torch.cuda.get_device_capability() >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


@triton.jit
def await_last(EARLY: constexpr):
    """Let the next kernel start, and wait for what the last one writes."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def linear(matrix: Any, x_TE: Tensor, gated: bool = False) -> Tensor:
    """The product of a `JoinedLinear`; with `gated`, the gate of that."""
    if matrix.adapters is None:
        return product(matrix.weight, matrix.bias, x_TE, gated)
    found = matrix.adapted(product(matrix.weight, matrix.bias, x_TE), product(matrix.adapters, None, x_TE))
    return gate(found) if gated else found


def product(weight: Tensor, bias: Tensor | None, x_TE: Tensor, gated: bool = False) -> Tensor:
    """`F.linear`; with `gated`, the gate of that.

    cuBLAS takes longer to launch than to read a small matrix, and so few rows have a kernel of
    their own. Its sums have the order of cuBLASLt's without split-K, bit for bit.
    """
    rows, width = x_TE.shape
    if rows > FEW or weight.numel() > SMALL or x_TE.dtype.itemsize != 2 or torch.is_grad_enabled():
        found = F.linear(x_TE, weight, bias)
        return gate(found) if gated else found
    columns = len(weight) // 2 if gated else len(weight)
    out = x_TE.new_empty(rows, columns)
    _few_rows[(triton.cdiv(columns, 8),)](
        x_TE, weight, weight if bias is None else bias, out, rows, columns, width,
        GATED=gated, BIASED=bias is not None, ROWS=FEW, N=8, K=256,
        num_warps=1, num_stages=5, **early(rows),
    )  # fmt: skip
    return out


@triton.jit
def _few_rows(
    x, weight, bias, out, rows, columns, width, GATED: constexpr, BIASED: constexpr,
    ROWS: constexpr, N: constexpr, K: constexpr, EARLY: constexpr,
):  # fmt: skip
    row, column, k = tl.arange(0, ROWS), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, K)
    own = weight + column[:, None].to(tl.int64) * width
    acc, more = tl.zeros([ROWS, N], tl.float32), tl.zeros([ROWS, N], tl.float32)
    await_last(EARLY)
    for s in range(0, width, K):
        inside = (s + k < width)[None, :]
        a = tl.load(x + row[:, None] * width + (s + k)[None, :], mask=(row < rows)[:, None] & inside, other=0.0)
        inside &= (column < columns)[:, None]
        acc = tl.dot(a, tl.trans(tl.load(own + (s + k)[None, :], mask=inside, other=0.0)), acc)
        if GATED:
            upper = own + columns.to(tl.int64) * width + (s + k)[None, :]
            more = tl.dot(a, tl.trans(tl.load(upper, mask=inside, other=0.0)), more)
    kind = out.dtype.element_ty
    if BIASED:
        acc += _load(bias + column, column < columns)[None, :]
        if GATED:
            more += _load(bias + columns + column, column < columns)[None, :]
    if GATED:
        g = acc.to(kind).to(tl.float32)
        acc = g * tl.sigmoid(g) * more.to(kind).to(tl.float32)
    at = row[:, None] * columns + column[None, :]
    tl.store(out + at, acc.to(kind), mask=(row < rows)[:, None] & (column < columns)[None, :])


def add_norm(x_TE: Tensor, update_TE: Tensor | None, weight_E: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + update, and its RMSNorm."""
    if torch.is_grad_enabled():
        return _AddNorm.apply(x_TE, update_TE, weight_E, epsilon)  # type: ignore[no-untyped-call, no-any-return]
    tokens, width = x_TE.shape
    total = x_TE if update_TE is None else torch.empty_like(x_TE)
    normed = torch.empty_like(x_TE)
    _add_norm_forward[(tokens,)](
        x_TE, x_TE if update_TE is None else update_TE.contiguous(), weight_E, total, normed,
        epsilon, width, ADD=update_TE is not None, WIDTH=triton.next_power_of_2(width),
        num_warps=4 if width <= 2048 else 8, **early(tokens),
    )  # fmt: skip
    return total, normed


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        total, normed = add_norm(x, update, weight, epsilon)  # gradients are off in here
        ctx.save_for_backward(total, weight)
        ctx.epsilon = epsilon
        return total if update is not None else total.view_as(total), normed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_normed: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        total, weight = ctx.saved_tensors
        tokens, width = total.shape
        grad = torch.empty_like(total)
        rows = triton.cdiv(tokens, PROGRAMS)
        partial = total.new_empty(triton.cdiv(tokens, rows), width, dtype=torch.float32)
        _add_norm_backward[(len(partial),)](
            total, weight, grad_total.contiguous(), grad_normed.contiguous(), grad, partial,
            ctx.epsilon, tokens, rows, width, WIDTH=triton.next_power_of_2(width),
            num_warps=4 if width <= 2048 else 8,
        )  # fmt: skip
        grad_update = grad if ctx.needs_input_grad[1] else None
        return grad, grad_update, _sum_rows(partial).to(weight.dtype), None


@triton.jit
def _load(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _add_norm_forward(
    x, update, weight, total, normed, epsilon, width, ADD: constexpr, WIDTH: constexpr, EARLY: constexpr
):  # fmt: skip
    await_last(EARLY)
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, WIDTH)
    inside = at < width
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if ADD:
        change = tl.load(update + row + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + change.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + row + at, value, mask=inside)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    scaled = wide * inverse * _load(weight + at, inside)
    tl.store(normed + row + at, scaled.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_backward(
    total, weight, grad_total, grad_normed, grad, partial, epsilon, tokens, rows, width, WIDTH: constexpr
):
    at = tl.arange(0, WIDTH)
    inside = at < width
    w = _load(weight + at, inside)
    first = tl.program_id(0) * rows
    of_weight = tl.zeros([WIDTH], tl.float32)
    for token in range(first, tl.minimum(first + rows, tokens)):
        row = tl.cast(token, tl.int64) * width
        x = _load(total + row + at, inside)
        g = _load(grad_normed + row + at, inside)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
        unit = x * inverse
        of_weight += g * unit
        pull = g * w
        change = (pull - unit * (tl.sum(pull * unit, 0) / width)) * inverse
        change += _load(grad_total + row + at, inside)
        tl.store(grad + row + at, change.to(grad.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * width + at, of_weight, mask=inside)


def _sum_rows(partial: Tensor) -> Tensor:
    """The sum over the first dimension, faster than torch's for few rows."""
    rows, width = partial.shape
    total = torch.empty(width, dtype=partial.dtype, device=partial.device)
    _sum_columns[(triton.cdiv(width, 32),)](partial, total, rows, width, ROWS=triton.next_power_of_2(rows), num_warps=4)
    return total


@triton.jit
def _sum_columns(partial, total, rows, width, ROWS: constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.program_id(0) * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(partial + row * width + column, mask=(row < rows) & (column < width), other=0.0)
    at = tl.program_id(0) * 32 + tl.arange(0, 32)
    tl.store(total + at, tl.sum(values, 0), mask=at < width)


def gate(gate_up_T2F: Tensor) -> Tensor:
    """SwiGLU: silu(first half) * second half."""
    if torch.is_grad_enabled():
        return _Gate.apply(gate_up_T2F)  # type: ignore[no-untyped-call, no-any-return]
    tokens, width = len(gate_up_T2F), gate_up_T2F.shape[1] // 2
    out = gate_up_T2F.new_empty(tokens, width)
    programs = tokens, triton.cdiv(width, 1024)
    _gate[programs](gate_up_T2F, out, out, width, BACKWARD=False, BLOCK=1024)
    return out


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return gate(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        found, width = torch.empty_like(gate_up), grad.shape[1]
        programs = len(grad), triton.cdiv(width, 1024)
        _gate[programs](gate_up, grad.contiguous(), found, width, BACKWARD=True, BLOCK=1024)
        return found


@triton.jit
def _gate(gate_up, grad, found, width, BACKWARD: constexpr, BLOCK: constexpr):
    """The gate's result, or with BACKWARD, from its gradient, that of both halves."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    kind = found.dtype.element_ty
    g = _load(gate_up + row * 2 * width + at, inside)
    u = _load(gate_up + row * 2 * width + width + at, inside)
    s = tl.sigmoid(g)
    if BACKWARD:
        pull = _load(grad + row * width + at, inside)
        of_gate = pull * u * s * (1 + g * (1 - s))
        tl.store(found + row * 2 * width + at, of_gate.to(kind), mask=inside)
        tl.store(found + row * 2 * width + width + at, (pull * g * s).to(kind), mask=inside)
    else:
        tl.store(found + row * width + at, (g * s * u).to(kind), mask=inside)


@dataclass(frozen=True, slots=True)
class Heads:
    """The layout of queries, keys and values in a row of N numbers, and the QK-norm, if any."""

    num: int
    num_kv: int
    size: int
    norms: tuple[Tensor, Tensor] | None  # weights for queries and keys
    epsilon: float

    @property
    def sizes(self) -> dict[str, int]:
        """Constants of the kernels."""
        padded = triton.next_power_of_2(self.num + 2 * self.num_kv)
        sizes = {"H": self.num, "J": self.num_kv, "HALF": self.size // 2, "HP": padded}
        return sizes | {"NORM": self.norms is not None}


def rotate_and_store(
    qkv_TN: Tensor, heads: Heads, cos_TD: Tensor, sin_TD: Tensor, keys: Tensor, values: Tensor, slots_T: Tensor
) -> Tensor:
    """QK-norm and RoPE. Writes keys and values into pages `[P, J, PAGE, D]`; returns the queries.

    `slots_T` are page * PAGE + offset in the page.
    """
    q_norm, k_norm = heads.norms or (qkv_TN, qkv_TN)
    queries = qkv_TN.new_empty(len(qkv_TN), heads.num, heads.size)
    strides = keys.stride(0), keys.stride(2), keys.stride(1)
    _rotate[(len(qkv_TN),)](
        qkv_TN, q_norm, k_norm, cos_TD, sin_TD, slots_T, queries, keys, values, *strides,
        heads.epsilon, PAGE=keys.shape[2], **heads.sizes, num_warps=4, enable_fp_fusion=False, **early(len(qkv_TN)),
    )  # fmt: skip
    return queries


def rotate_heads(qkv_TN: Tensor, heads: Heads, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[T, H, D]` and keys `[T, J, D]` after QK-norm and RoPE, and values `[T, J, D]`."""
    if torch.is_grad_enabled():
        norms = heads.norms or (None, None)
        return _RotateHeads.apply(qkv_TN, *norms, heads, cos_TD, sin_TD)  # type: ignore[no-untyped-call, no-any-return]
    k, v = (qkv_TN.new_empty(len(qkv_TN), heads.num_kv, heads.size) for _ in range(2))
    pages = k[:, :, None], v[:, :, None]  # of one token
    slots = torch.arange(len(qkv_TN), device=qkv_TN.device)
    return rotate_and_store(qkv_TN, heads, cos_TD, sin_TD, *pages, slots), k, v


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, heads: Heads, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv, cos, sin)
        ctx.heads = heads
        return rotate_heads(qkv, heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin = ctx.saved_tensors
        heads, tokens = ctx.heads, len(qkv)
        grad = torch.empty_like(qkv)
        q_norm, k_norm = heads.norms or (qkv, qkv)
        rows = triton.cdiv(tokens, PROGRAMS)
        partial = qkv.new_empty(triton.cdiv(tokens, rows), 2, heads.size, dtype=torch.float32)
        _rotate_backward[(len(partial),)](
            qkv, q_norm, k_norm, cos, sin, grad_q.contiguous(), grad_k.contiguous(),
            grad_v.contiguous(), grad, partial, heads.epsilon, tokens, rows, **heads.sizes, num_warps=8,
        )  # fmt: skip
        of_norms = _sum_rows(partial.flatten(1)).view(2, -1).to(q_norm.dtype) if heads.norms else (None, None)
        return grad, *of_norms, None, None, None


@triton.jit
def _rotate(
    qkv, q_norm, k_norm, cos, sin, slots, queries, K, V, page_stride, token_stride, head_stride, epsilon,
    H: constexpr, J: constexpr, HALF: constexpr, HP: constexpr, PAGE: constexpr, NORM: constexpr,
    EARLY: constexpr,
):  # fmt: skip
    await_last(EARLY)
    token = tl.program_id(0).to(tl.int64)
    D: tl.constexpr = 2 * HALF
    kind = queries.dtype.element_ty
    at, head = tl.arange(0, HALF)[None, :], tl.arange(0, HP)[:, None]
    of_query, of_key, of_value = head < H, (head >= H) & (head < H + J), (head >= H + J) & (head < H + 2 * J)
    source = qkv + (token * (H + 2 * J) + head) * D + at
    a = tl.load(source, mask=head < H + 2 * J, other=0.0)
    b = tl.load(source + HALF, mask=head < H + 2 * J, other=0.0)
    slot = tl.load(slots + token)
    place = slot // PAGE * page_stride + slot % PAGE * token_stride
    tl.store(V + place + (head - H - J) * head_stride + at, a, mask=of_value)
    tl.store(V + place + (head - H - J) * head_stride + HALF + at, b, mask=of_value)
    x, y = a.to(tl.float32), b.to(tl.float32)
    if NORM:
        w = _norm_weight(q_norm, k_norm, at + 0 * head, of_query, of_key)
        z = _norm_weight(q_norm, k_norm, at + 0 * head + HALF, of_query, of_key)
        inverse = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + epsilon)[:, None]
        x = (x * inverse * w).to(kind).to(tl.float32)
        y = (y * inverse * z).to(kind).to(tl.float32)
    c, s = tl.load(cos + token * D + at).to(tl.float32), tl.load(sin + token * D + at).to(tl.float32)
    a, b = (x * c - y * s).to(kind), (y * c + x * s).to(kind)
    tl.store(queries + (token * H + head) * D + at, a, mask=of_query)
    tl.store(queries + (token * H + head) * D + HALF + at, b, mask=of_query)
    tl.store(K + place + (head - H) * head_stride + at, a, mask=of_key)
    tl.store(K + place + (head - H) * head_stride + HALF + at, b, mask=of_key)


@triton.jit
def _norm_weight(q_norm, k_norm, at, of_query, of_key):
    """The norm's weight at the numbers `at` of each head."""
    return _load(q_norm + at, of_query) + _load(k_norm + at, of_key)


@triton.jit
def _rotate_backward(
    qkv, q_norm, k_norm, cos, sin, grad_q, grad_k, grad_v, grad, partial, epsilon, tokens, rows,
    H: constexpr, J: constexpr, HALF: constexpr, HP: constexpr, NORM: constexpr,
):  # fmt: skip
    D: tl.constexpr = 2 * HALF
    kind = grad.dtype.element_ty
    at, head = tl.arange(0, HALF)[None, :], tl.arange(0, HP)[:, None]
    queries, keys, values = head < H, (head >= H) & (head < H + J), (head >= H + J) & (head < H + 2 * J)
    lower, upper = tl.zeros([HP, HALF], tl.float32), tl.zeros([HP, HALF], tl.float32)
    if NORM:
        w = _norm_weight(q_norm, k_norm, at + 0 * head, queries, keys)
        z = _norm_weight(q_norm, k_norm, at + 0 * head + HALF, queries, keys)
    first = tl.program_id(0) * rows
    for token in range(first, tl.minimum(first + rows, tokens)):
        token = tl.cast(token, tl.int64)
        q, k, v = (token * H + head) * D + at, (token * J + head - H) * D + at, (token * J + head - H - J) * D + at
        f = tl.load(grad_q + q, mask=queries, other=0.0) + tl.load(grad_k + k, mask=keys, other=0.0)
        g = tl.load(grad_q + q + HALF, mask=queries, other=0.0) + tl.load(grad_k + k + HALF, mask=keys, other=0.0)
        f, g = f.to(tl.float32), g.to(tl.float32)
        c, s = tl.load(cos + token * D + at).to(tl.float32), tl.load(sin + token * D + at).to(tl.float32)
        f, g = f * c + g * s, g * c - f * s
        row = (token * (H + 2 * J) + head) * D + at
        if NORM:
            x = _load(qkv + row, queries | keys)
            y = _load(qkv + row + HALF, queries | keys)
            inverse = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + epsilon)[:, None]
            x, y = x * inverse, y * inverse
            lower += f * x
            upper += g * y
            f, g = f * w, g * z
            along = ((tl.sum(f * x, 1) + tl.sum(g * y, 1)) / D)[:, None]
            f, g = (f - x * along) * inverse, (g - y * along) * inverse
        f += _load(grad_v + v, values)
        g += _load(grad_v + v + HALF, values)
        tl.store(grad + row, f.to(kind), mask=head < H + 2 * J)
        tl.store(grad + row + HALF, g.to(kind), mask=head < H + 2 * J)
    if NORM:
        place = partial + tl.program_id(0) * 2 * D + tl.arange(0, HALF)
        tl.store(place, tl.sum(tl.where(queries, lower, 0.0), 0))
        tl.store(place + HALF, tl.sum(tl.where(queries, upper, 0.0), 0))
        tl.store(place + D, tl.sum(tl.where(keys, lower, 0.0), 0))
        tl.store(place + D + HALF, tl.sum(tl.where(keys, upper, 0.0), 0))
