"""What stands between a decoder's matrices, one kernel each: residual and norm, norm and rotation, gate.

T tokens, E hidden size, H query heads, J key/value heads, D head size, F width of the gate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_norm(x_TE: Tensor, update_TE: Tensor | None, weight_E: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + update, and its RMS norm."""
    tokens, width = x_TE.shape
    total = x_TE if update_TE is None else torch.empty_like(x_TE)
    normed = torch.empty_like(x_TE)
    _add_norm[(tokens,)](
        x_TE, x_TE if update_TE is None else update_TE, weight_E, total, normed, epsilon, width,
        ADD=update_TE is not None, WIDTH=triton.next_power_of_2(width), num_warps=4 if width <= 2048 else 8,
    )  # fmt: skip
    return total, normed


@triton.jit
def _add_norm(x, update, weight, total, normed, epsilon, width, ADD: tl.constexpr, WIDTH: tl.constexpr):
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
    scaled = wide * inverse * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + at, scaled.to(x.dtype.element_ty), mask=inside)


def gate(gate_up_T2F: Tensor) -> Tensor:
    """silu(first half) · second half."""
    tokens, double = gate_up_T2F.shape
    out = gate_up_T2F.new_empty(tokens, double // 2)
    _gate[(tokens, triton.cdiv(double // 2, 1024))](gate_up_T2F, out, double // 2, BLOCK=1024)
    return out


@triton.jit
def _gate(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    g = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


def rotate_and_store(
    qkv_TN: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
    cos_TD: Tensor,
    sin_TD: Tensor,
    keys_PJTD: Tensor,
    values_PJTD: Tensor,
    slots_T: Tensor,
    num_heads: int,
) -> Tensor:
    """Norm (if the model has one) and rotation of queries and keys; keys and values go to their `slots` in the cache.

    A slot is page · PAGE + place in the page. Returns the queries `[T, H, D]`.
    """
    tokens = qkv_TN.shape[0]
    num_kv_heads, page, head_size = keys_PJTD.shape[1:]
    queries = qkv_TN.new_empty(tokens, num_heads, head_size)
    q_norm, k_norm = norms if norms is not None else (qkv_TN, qkv_TN)
    _rotate_and_store[(tokens, num_heads + 2 * num_kv_heads)](
        qkv_TN, q_norm, k_norm, cos_TD, sin_TD, slots_T, queries, keys_PJTD, values_PJTD,
        keys_PJTD.stride(0), keys_PJTD.stride(1), epsilon,
        H=num_heads, J=num_kv_heads, HALF=head_size // 2, PAGE=page, NORM=norms is not None, num_warps=1,
    )  # fmt: skip
    return queries


@triton.jit
def _rotate_and_store(
    qkv, q_norm, k_norm, cos, sin, slots, queries, K, V, page_stride, head_stride, epsilon,
    H: tl.constexpr, J: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    D: tl.constexpr = 2 * HALF
    kind = queries.dtype.element_ty
    at = tl.arange(0, HALF)
    source = qkv + token * (H + 2 * J) * D + head * D
    a, b = tl.load(source + at), tl.load(source + HALF + at)
    slot = tl.load(slots + token)
    place = slot // PAGE * page_stride + slot % PAGE * D
    if head < H + J:
        x, y = a.to(tl.float32), b.to(tl.float32)
        if NORM:
            weight = q_norm if head < H else k_norm
            inverse = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / D + epsilon)
            x = (x * inverse * tl.load(weight + at).to(tl.float32)).to(kind).to(tl.float32)
            y = (y * inverse * tl.load(weight + HALF + at).to(tl.float32)).to(kind).to(tl.float32)
        c, s = tl.load(cos + token * D + at).to(tl.float32), tl.load(sin + token * D + at).to(tl.float32)
        a, b = (x * c - y * s).to(kind), (y * c + x * s).to(kind)
        target = queries + (token * H + head) * D if head < H else K + place + (head - H) * head_stride
    else:
        target = V + place + (head - H - J) * head_stride
    tl.store(target + at, a)
    tl.store(target + HALF + at, b)
