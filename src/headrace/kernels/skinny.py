"""Matrix products for a handful of rows, with what stands before and after them in the same kernel.

With few sequences a decode step is as long as its kernels are many: each takes some microseconds however little it
does. Here the norm or the gate is computed on the way into the product, the residual is added on the way out.
R rows (at most ROWS), I inputs, O outputs of a matrix `[O, I]`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


def norm_linear(x_RI: Tensor, norm_I: Tensor, epsilon: float, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """The product with the RMS norm of x."""
    out = x_RI.new_empty(len(x_RI), len(weight_OI))
    _launch(x_RI, norm_I, epsilon, weight_OI, bias_O, None, out, "norm")
    return out


def linear_add(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, residual_RO: Tensor) -> Tensor:
    """residual + product."""
    out = torch.empty_like(residual_RO)
    _launch(x_RI, None, 0.0, weight_OI, bias_O, residual_RO, out, "plain")
    return out


def gate_linear_add(gate_up_R2I: Tensor, weight_OI: Tensor, bias_O: Tensor | None, residual_RO: Tensor) -> Tensor:
    """residual + product with silu(first half) · second half."""
    out = torch.empty_like(residual_RO)
    _launch(gate_up_R2I, None, 0.0, weight_OI, bias_O, residual_RO, out, "gate")
    return out


def _launch(
    x: Tensor, norm: Tensor | None, epsilon: float, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    out: Tensor, kind: str,
) -> None:  # fmt: skip
    outputs, inputs = weight.shape
    block = 16 if outputs <= 2048 else 32 if outputs <= 4096 else 64
    stages = 4 if weight.dtype.itemsize == 2 else 1  # float32 fills the shared memory
    _product[(triton.cdiv(outputs, block),)](
        x, x if norm is None else norm, weight, x if bias is None else bias, x if residual is None else residual, out,
        len(x), inputs, outputs, epsilon,
        KIND=kind, BIASED=bias is not None, ADDED=residual is not None, ROWS=ROWS,
        BLOCK=block, STRETCH=256 if kind == "norm" else 512, num_warps=4 if kind == "norm" else 2,
        num_stages=stages,
    )  # fmt: skip


@triton.jit
def _product(
    X, norm, W, bias, residual, out, rows, inputs, outputs, epsilon,
    KIND: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    r, i = tl.arange(0, ROWS), tl.arange(0, STRETCH)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    width = 2 * inputs if KIND == "gate" else inputs
    x = X + r[:, None] * width + i[None, :]
    w = W + o[:, None].to(tl.int64) * inputs + i[None, :]
    inverse = tl.zeros([ROWS], tl.float32)
    if KIND == "norm":
        for s in range(0, inputs, STRETCH):
            a = tl.load(x + s, mask=(r < rows)[:, None] & (s + i < inputs)[None, :], other=0.0).to(tl.float32)
            inverse += tl.sum(a * a, 1)
        inverse = tl.rsqrt(inverse / inputs + epsilon)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for s in range(0, inputs, STRETCH):
        there = (s + i < inputs)[None, :]
        b = tl.load(w + s, mask=(o < outputs)[:, None] & there, other=0.0)
        a = tl.load(x + s, mask=(r < rows)[:, None] & there, other=0.0)
        if KIND == "norm":
            scale = tl.load(norm + s + i, mask=s + i < inputs, other=0.0).to(tl.float32)
            a = (a.to(tl.float32) * inverse[:, None] * scale[None, :]).to(b.dtype)
        if KIND == "gate":
            g = a.to(tl.float32)
            u = tl.load(x + inputs + s, mask=(r < rows)[:, None] & there, other=0.0).to(tl.float32)
            a = (g * tl.sigmoid(g) * u).to(b.dtype)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if BIASED:
        acc += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    at = r[:, None] * outputs + o[None, :]
    inside = (r < rows)[:, None] & (o < outputs)[None, :]
    result = acc.to(out.dtype.element_ty)
    if ADDED:
        result = (tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + result.to(tl.float32)).to(
            result.dtype
        )
    tl.store(out + at, result, mask=inside)
