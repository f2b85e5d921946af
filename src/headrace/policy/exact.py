"""Exact mode: batch-invariant, so a token's result does not depend on the rest of its batch.

On a CPU the libraries under torch choose instructions, and with them the order of a sum, by the
shape of the whole call and by an element's place in it. Here every sum has one order: GEMMs run
with numbers of rows that were tried and agree, keys come in tiles that start at position 0, and
elementwise functions never end in a scalar remainder. All else (sums of two numbers, products,
maxima, copies) rounds the same everywhere. B batch, R rows of queries, T tokens, H query heads, J
key/value heads, D head size, L keys (a multiple of TILE).

On a GPU attention, norms, gates and log-probs are our own kernels, each with one order of its sums.
A GEMM is not batch-invariant if its sum is split differently for other numbers of rows (split-K);
cuBLASLt without a workspace does not split it, and our own GEMM of few rows has its order. That is
not promised anywhere, so `check_rows` tries it on the shapes of the model at hand.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.errors import ModelError
from headrace.kernels import block
from headrace.policy.family import FamilyBody, Gated, RmsNorm, Rotate, adapter_of, attend_rectangle, call, unseen

ROWS = 16  # products of fewer rows may use other instructions: this many set the standard
TILE = 64  # keys come in multiples of it
SUMMED = 256  # keys whose values are summed in one product
QUERY_ROWS = (2, 4, 8, 16)
MOST_ROWS = 1024
MOST_ELEMENTS = 2**22  # of the result of one product, unless ROWS rows have more
GRAIN = 2**15  # elements: torch gives a thread at least this many
LANES = 32  # a multiple of what the widest elementwise loop takes at once, on all CPUs
POSITIONS = 1024  # whose angles are computed at once
WORKSPACE = "CUBLASLT_WORKSPACE_SIZE"  # this and the next three are for GPUs
FEW = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 224, 256, 320, 512, 1000, 3000)
MANY = 8192
EVEN = 8  # numbers, 16 bytes: other alignments are multiplied by functions that split sums at times


def not_exact(why: str) -> ModelError:
    return ModelError(f"model.exact = true{why}; set model.exact = false")


class _ExactRotate(Rotate):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # no fused multiply-add: whether there is one depends on how long the loop is
        ctx.save_for_backward(cos, sin)
        first, second = x.chunk(2, dim=-1)
        return (x * cos).add_(torch.cat([-second, first], dim=-1).mul_(sin))


class _ExactGated(Gated):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        flat, start = gate.reshape(-1), 0
        out = torch.empty_like(flat)
        for end in _loops(len(flat), torch.get_num_threads()):
            torch.ops.aten.silu.out(flat[start:end], out=out[start:end])
            start = end
        if rest := len(flat) - start:
            out[start:] = F.silu(F.pad(flat[start:], (0, LANES - rest)))[:rest]
        return out.view(gate.shape).mul_(up)


rms_norm, rotate, gated = (partial(call, kind) for kind in (RmsNorm, _ExactRotate, _ExactGated))


class ExactFunctions(TorchFunctionMode):
    """Inside, routers and experts of `transformers` compute with the functions of this file."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return linear(*args, **(kwargs or {}))
        if func is F.silu:
            return gated(args[0], torch.ones_like(args[0]))
        return func(*args, **(kwargs or {}))


def _loops(num_elements: int, threads: int) -> Iterator[int]:
    """Ends of loops that give each thread whole vectors, of all but the last few elements."""
    grains, rest = num_elements // GRAIN, num_elements % LANES
    ends = [(grains - grains % threads) * GRAIN, grains * GRAIN, num_elements - rest]
    yield from sorted(set(ends) - {0})


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return call(_Linear, x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        x = x.contiguous()
        columns, width = weight.shape
        shape = (columns, width, x.dtype, bias is not None, torch.get_num_threads())
        most = max(ROWS, min(MOST_ROWS, MOST_ELEMENTS // columns) // ROWS * ROWS)
        out, start = x.new_empty(len(x), columns), 0
        while (left := len(x) - start) >= ROWS:
            rows = min(most, left // ROWS * ROWS)
            while not _proven(rows, *shape):
                rows = rows // 2 // ROWS * ROWS
            _product(x[start : start + rows], weight, bias, out[start : start + rows])
            start += rows
        if left:
            rows = next(rows for rows in (2, 4, 8, ROWS) if rows >= left and _proven(rows, *shape))
            last = x.new_empty(rows, columns)
            _product(F.pad(x[start:], (0, 0, 0, rows - left)), weight, bias, last)
            out[start:] = last[:left]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight), wanted = ctx.saved_tensors, ctx.needs_input_grad
        of_x, of_weight = grad @ weight if wanted[0] else None, grad.t() @ x if wanted[1] else None
        return of_x, of_weight, grad.sum(0) if wanted[2] else None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


@cache
def _proven(rows: int, columns: int, width: int, dtype: torch.dtype, biased: bool, threads: int) -> bool:
    """Whether a GEMM of `rows` rows has the bits of one of ROWS rows, tried once on a machine."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        x = torch.randn(max(rows, ROWS), width, generator=generator, dtype=dtype)
        # a few rows of weights, over and over, are made sooner than as many random ones
        weight = torch.randn(min(columns, 512), width, generator=generator, dtype=dtype)
        weight = weight.repeat(-(-columns // len(weight)), 1)[:columns]
        bias = torch.randn(columns, generator=generator, dtype=dtype) if biased else None

        def product(x: Tensor, block: int) -> Tensor:
            out = x.new_empty(len(x), columns)
            for start in range(0, len(x), block):
                _product(x[start : start + block], weight, bias, out[start : start + block])
            return out

        expected = product(x, ROWS)
        if rows != ROWS:
            return torch.equal(product(x, rows), expected)
        # a row's bits must not depend on its place among the ROWS either
        if not torch.equal(product(x.roll(5, 0), ROWS).roll(-5, 0), expected):
            told = f"a [{ROWS}, {width}] by [{width}, {columns}] product differently by their place"
            raise not_exact(f": this machine multiplies the rows of {told}, with {threads} threads")
        return True


def attend(q_BRD: Tensor, keys_BDL: Tensor, values_BLD: Tensor, mask: Tensor, multiple: int = 0) -> Tensor:
    """Attention output `[B, R, D]`. `mask` is added to the scores: -inf for what is masked."""
    rows = q_BRD.shape[1]  # padded to a `multiple`, by default the proven one
    fill = -rows % (multiple or _query_rows(q_BRD.shape[2], q_BRD.dtype, torch.get_num_threads()))
    q_BRD = F.pad(q_BRD, (0, 0, 0, fill)) if fill else q_BRD
    # sums run over one key after the other: the exact zeros of masked keys change none of them
    probs = torch.softmax(torch.bmm(q_BRD, keys_BDL)[:, :rows] + mask, dim=-1)
    probs = F.pad(probs, (0, 0, 0, fill)) if fill else probs
    tiles = zip(probs.split(SUMMED, 2), values_BLD.split(SUMMED, 1), strict=True)
    out = torch.bmm(*next(tiles))
    for tile in tiles:
        out += torch.bmm(*tile)
    return out[:, :rows]


@cache
@torch.inference_mode()
def _query_rows(head_size: int, dtype: torch.dtype, threads: int) -> int:
    """The multiple of query rows for which attention is batch-invariant, found by trial."""
    generator = torch.Generator().manual_seed(0)
    heads, n = 9, SUMMED + 3 * TILE
    q, k, v = (torch.randn(heads, n, head_size, generator=generator, dtype=dtype) for _ in range(3))
    keys = k.transpose(1, 2).contiguous()
    together = attend(q, keys, v, unseen(torch.arange(n), n, 0, dtype), 16)

    def agrees(multiple: int, few: int, first: int, rows: int, seen: int) -> bool:
        at = torch.arange(first, first + rows)
        mask = unseen(at, seen, 0, dtype)
        apart = attend(q[:few, at], keys[:few, :, :seen], v[:few, :seen], mask, multiple)
        return torch.equal(apart, together[:few, at])

    starts = (TILE - 2, 3), (TILE, 1), (SUMMED - 1, 5), (SUMMED, 9), (n - 33, 33), (n - 1, 1)
    cases = [(few, *s, seen) for few in (1, 2, 8) for s in starts for seen in (tiled(sum(s)), n)]
    for multiple in QUERY_ROWS:
        if all(agrees(multiple, *case) for case in cases):
            return multiple
    why = f"depends on what is computed beside it, with {threads} threads"
    raise not_exact(f": on this machine attention with heads of size {head_size} {why}")


def tiled(num_tokens: int, tile: int = TILE) -> int:
    return -(-num_tokens // tile) * tile


class RectangleAttention(torch.autograd.Function):
    """As `attend_rectangle`, batch-invariant. The gradient is that of `attend_rectangle`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.rest = (batch, num_tokens), scale, window = rest
        q, k, v = (x.unflatten(0, (batch, -1)) for x in (q * scale, k, v))
        num_keys, num_heads = k.shape[1:3]
        fill = tiled(num_keys) - num_keys
        keys = F.pad(k.permute(0, 2, 3, 1), (0, fill)).flatten(0, 1).contiguous()
        values = F.pad(v.transpose(1, 2), (0, 0, 0, fill)).flatten(0, 1).contiguous()
        grouped = q.unflatten(2, (num_heads, -1)).transpose(1, 2)  # [B, J, T, H / J, D]
        group, q_BRD = grouped.shape[3], grouped.flatten(2, 3).flatten(0, 1)
        outs, start = [], num_keys - num_tokens
        for first in range(0, num_tokens, TILE):
            last = min(first + TILE, num_tokens)
            length = tiled(start + last)
            mask = unseen(torch.arange(start + first, start + last), length, window, q_BRD.dtype)
            mask, part = mask.repeat_interleave(group, 0), q_BRD[:, first * group : last * group]
            outs.append(attend(part, keys[..., :length], values[:, :length], mask))
        out = torch.cat(outs, dim=1).unflatten(0, (batch, -1)).unflatten(2, (-1, group))
        return out.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            out = attend_rectangle(q, k, v, *ctx.rest)
        return (*torch.autograd.grad(out, (q, k, v), grad), None, None, None)


class ExactBody(FamilyBody):
    """The decoder with the functions of this file."""

    _rotate, _gated, _rms_norm = staticmethod(rotate), staticmethod(gated), staticmethod(rms_norm)
    _exact = (True,)
    _exact_angles = torch.empty(2, 0, 0)  # cos and sin of all positions so far, [2, positions, D]

    def _linear(self, module: Any, x: Tensor) -> Tensor:
        found = linear(x, module.weight, module.bias)
        if adapter := adapter_of(module):
            down, up, scale = adapter
            found = found + linear(linear(x, down), up) * scale
        return found

    def _mixture(self, mlp: Any, x: Tensor) -> Tensor:
        with ExactFunctions():
            return super()._mixture(mlp, x)

    def _angles(self, x: Tensor, positions_1T: Tensor) -> tuple[Tensor, Tensor]:
        """From a table: an angle's last bit depends on its place in the call."""
        needed = int(positions_1T.max()) + 1
        with torch.inference_mode(False), torch.no_grad():
            while (known := self._exact_angles.shape[1]) < needed:
                block = torch.arange(known, known + POSITIONS)[None]
                more = torch.stack(self._body.rotary_emb(x.new_empty(1), block))[:, 0]
                self._exact_angles = torch.cat([self._exact_angles, more], dim=1) if known else more
        cos, sin = self._exact_angles[:, positions_1T[0]]
        return cos, sin


def use_batch_invariant_gemms() -> None:
    """For the rest of the process. Call it before the first GEMM, which makes the workspace."""
    os.environ.setdefault(WORKSPACE, "1")
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@torch.no_grad()
def check_rows(products: Mapping[str, tuple[Callable[[Tensor], Tensor], int]], like: Tensor) -> None:
    """Fail unless all `products` (name -> function, width of its input) are batch-invariant."""
    generator = torch.Generator(like.device).manual_seed(0)
    for name, (work, width) in products.items():
        x = torch.randn(MANY, width, generator=generator, device=like.device).to(like.dtype)
        whole = work(x)
        if width % EVEN or whole.shape[-1] % EVEN:
            made = f"{name} makes {whole.shape[-1]} numbers of {width}"
            raise not_exact(f" on a GPU is for sizes that {EVEN} divides, and {made}")
        for rows in FEW:
            same = torch.equal(work(x[:rows]), whole[:rows])
            if not same and rows <= block.FEW:  # cuBLAS has another order than our kernel
                block.FEW = 0
                same = torch.equal(work(x[:rows]), whole[:rows])
            if not same:
                told = f"here {name} of {rows} tokens differs from that of the same among {MANY}"
                helps = f"{WORKSPACE}=1 in the environment of a new process, or model.exact = false"
                raise ModelError(f"model.exact = true: {told}. Set {helps}")
