"""Each kernel against the same arithmetic written out in torch.

With Triton but no GPU, its interpreter runs them: TRITON_INTERPRET=1 pytest -W ignore tests/gpu/test_kernels.py
"""

from __future__ import annotations

import os
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import kernels
from headrace.policy import policy as policy_module
from headrace.policy.attention import PackedPlan

INTERPRETED = kernels.AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INTERPRETED or torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not RUNS, reason="needs a CUDA device")]
if RUNS:
    from headrace.kernels.adamw import FusedAdamW
    from headrace.kernels.attention import (
        QUERIES,
        Blocks,
        attention_gradient,
        block_attention,
        block_tokens,
        decode_attention,
    )
    from headrace.kernels.block import FEW, Heads, add_norm, gate, linear, rotate_and_store, rotate_heads
    from headrace.kernels.softmax import draw_tokens, logits_gradient, token_logprobs, truncated

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-4} if INTERPRETED else {torch.float32: 1e-4, torch.bfloat16: 2e-2}
SHAPES = [(4, 2, 64), (18, 1, 40)] if INTERPRETED else [(16, 8, 128), (14, 2, 64), (9, 3, 80), (71, 1, 64), (4, 2, 8)]
LENGTHS = [1, 65, 513, 700] if INTERPRETED else [1, 2, 63, 64, 65, 511, 512, 513, 700, 1537]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def paged(lengths: list[int], heads: int, size: int, page: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and page tables of sequences whose pages lie in no order."""
    most = -(-max(lengths) // page)
    num_pages = most * len(lengths) + 3
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5))[: most * len(lengths)]
    tables = order.view(len(lengths), most).to(DEVICE, torch.int32)
    return (
        noise(num_pages, heads, page, size, seed=1, dtype=dtype),
        noise(num_pages, heads, page, size, seed=2, dtype=dtype),
        tables,
    )


def contiguous(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """The first tokens of a sequence, `[T, J, D]`."""
    return pages[table.long()].transpose(1, 2).flatten(0, 1)[:length]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize("window", [0, 100])
def test_decode_attention(dtype: torch.dtype, heads: int, kv_heads: int, size: int, window: int) -> None:
    keys, values, tables = paged(LENGTHS, kv_heads, size, 64, dtype)
    q = noise(len(LENGTHS), heads, size, dtype=dtype)
    counts = torch.tensor(LENGTHS, device=DEVICE, dtype=torch.int32)
    ours = decode_attention(q, keys, values, tables, counts, scale=size**-0.5, window=window, longest=max(LENGTHS))
    for i, length in enumerate(LENGTHS):
        k, v = (contiguous(x, tables[i], length).transpose(0, 1).float() for x in (keys, values))
        scores = q[i].float().view(kv_heads, -1, size) @ k.transpose(1, 2) * size**-0.5
        if window:
            scores[..., : max(0, length - window)] = float("-inf")
        expected = (torch.softmax(scores, -1) @ v).view(heads, size)
        torch.testing.assert_close(ours[i].float(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies in another order")
def test_decode_attention_does_not_depend_on_the_company() -> None:
    lengths = [700, 40, 1900, 512]
    keys, values, tables = paged(lengths, 8, 128, 64, torch.bfloat16)
    q, counts = noise(4, 16, 128, dtype=torch.bfloat16), torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
    together = decode_attention(q, keys, values, tables, counts, scale=0.09, window=0, longest=4000)
    for i, length in enumerate(lengths):
        alone = decode_attention(
            q[i : i + 1], keys, values, tables[i : i + 1], counts[i : i + 1], scale=0.09, window=0, longest=length
        )
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize("window", [0, 100])
def test_decode_prefill_and_training_have_the_same_bits(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, window: int
) -> None:
    length = 600 if INTERPRETED else 1537
    keys, values, tables = paged([length], kv_heads, size, 64, dtype)
    k, v = contiguous(keys, tables[0], length), contiguous(values, tables[0], length)
    q = noise(length, heads, size, dtype=dtype)
    group, cut, device = heads // kv_heads, block_tokens(heads, kv_heads, dtype), torch.device(DEVICE)
    options = {"scale": size**-0.5, "window": window}
    whole = Blocks.of([(0, length, 0)], cut, device)
    trained, log_sums = block_attention(q, k.contiguous(), v.contiguous(), None, whole, **options)
    prefilled = torch.cat(
        [
            block_attention(q[a:b], keys, values, tables, Blocks.of([(a, b, 0)], cut, device), **options)[0]
            for a, b in ((0, 37), (37, 512), (512, length))
        ]
    )
    some = torch.tensor([1, 2, 64, 65, 300, 512, 513, 600, length], device=DEVICE, dtype=torch.int32)
    decoded = decode_attention(
        q[some.long() - 1], keys, values, tables.expand(len(some), -1), some, longest=length, **options
    )
    precision = {"rtol": 0, "atol": 1e-5 if INTERPRETED else 0}
    torch.testing.assert_close(trained, prefilled, **precision)
    torch.testing.assert_close(trained[some.long() - 1], decoded, **precision)
    ago = torch.arange(length, device=DEVICE)[:, None] - torch.arange(length, device=DEVICE)
    unseen = (ago < 0) | (ago >= window) if window else ago < 0
    expanded = k.float().repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q.float(), expanded) * size**-0.5
    expected = scores.masked_fill(unseen, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(log_sums, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize("window", [0, 70])
def test_gradient_of_attention(heads: int, kv_heads: int, size: int, window: int) -> None:
    lengths = [1, 65, 150]
    q, k, v = (noise(sum(lengths), h, size, seed=i).requires_grad_() for i, h in enumerate((heads, kv_heads, kv_heads)))
    starts, device, tokens = [0, 1, 66], torch.device(DEVICE), block_tokens(heads, kv_heads, torch.float32)
    parts = list(zip([0, 0, 0], lengths, starts, strict=True))
    cut = {t: Blocks.of(parts, t, device) for t in (tokens, QUERIES)}
    ours, log_sums = block_attention(q.detach(), k.detach(), v.detach(), None, cut[tokens], scale=0.2, window=window)
    outs = []
    for start, length in zip(starts, lengths, strict=True):
        a, b, c = (x[start : start + length].transpose(0, 1) for x in (q, k, v))
        ago = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
        mask = (ago >= 0) & (ago < window) if window else ago >= 0
        out = torch.nn.functional.scaled_dot_product_attention(
            a[None], b[None], c[None], attn_mask=mask, scale=0.2, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    expected = torch.cat(outs)
    torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=1e-4)
    pull = noise(*expected.shape, seed=8)
    theirs = torch.autograd.grad((expected * pull).sum(), (q, k, v))
    inputs = (q.detach(), k.detach(), v.detach(), ours, log_sums)
    found = attention_gradient(pull, inputs, cut[QUERIES], scale=0.2, window=window)
    for f, e in zip(found, theirs, strict=True):
        assert (f - e).norm() < 1e-2 * e.norm()


RUNS_OF_A_TREE = {"lengths": [150, 65, 70, 1, 90, 40], "after": [-1, 120, 160, 63, 63, -1]}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize("window", [0, 70])
def test_attention_in_a_tree_has_the_bits_of_its_sequences(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, window: int
) -> None:
    device, tokens = torch.device(DEVICE), block_tokens(heads, kv_heads, dtype)
    plan = PackedPlan(**RUNS_OF_A_TREE, device=device)
    total = sum(plan.lengths)
    q, k, v = (noise(total, h, size, seed=i, dtype=dtype) for i, h in enumerate((heads, kv_heads, kv_heads)))
    options = {"scale": size**-0.5, "window": window}
    ours, log_sums = block_attention(q, k, v, None, plan.blocks(tokens), **options)
    first = 0
    for length, after in zip(*RUNS_OF_A_TREE.values(), strict=True):
        rows = [*path_to(after), *range(first, first + length)]
        alone = PackedPlan([len(rows)], device).blocks(tokens)
        theirs, sums = block_attention(q[rows], k[rows], v[rows], None, alone, **options)
        precision = {"rtol": 0, "atol": 1e-5 if INTERPRETED else 0}
        torch.testing.assert_close(ours[first : first + length], theirs[-length:], **precision)
        torch.testing.assert_close(log_sums[:, first : first + length], sums[:, -length:], **precision)
        first += length


def path_to(row: int) -> list[int]:
    """The rows from a root of the tree to `row`."""
    ends = np.cumsum(RUNS_OF_A_TREE["lengths"])
    run = int(np.searchsorted(ends, row, side="right"))
    start = int(ends[run]) - RUNS_OF_A_TREE["lengths"][run]
    return [] if row < 0 else [*path_to(RUNS_OF_A_TREE["after"][run]), *range(start, row + 1)]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize("window", [0, 70])
def test_gradient_of_attention_in_a_tree(heads: int, kv_heads: int, size: int, window: int) -> None:
    plan = PackedPlan(**RUNS_OF_A_TREE, device=torch.device(DEVICE))
    total = sum(plan.lengths)
    q, k, v = (noise(total, h, size, seed=i).requires_grad_() for i, h in enumerate((heads, kv_heads, kv_heads)))
    seen = torch.zeros(total, total, dtype=torch.bool, device=DEVICE)
    for row in range(total):
        seen[row, path_to(row)[-window:]] = True
    a, b, c = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(a, b, c, attn_mask=seen, scale=0.2, enable_gqa=True)
    expected = out[0].transpose(0, 1)
    inputs = [x.detach() for x in (q, k, v)]
    cut = plan.blocks(block_tokens(heads, kv_heads, torch.float32))
    ours, log_sums = block_attention(*inputs, None, cut, scale=0.2, window=window)
    torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=1e-4)
    pull = noise(*expected.shape, seed=8)
    theirs = torch.autograd.grad((expected * pull).sum(), (q, k, v))
    saved = (*inputs, ours, log_sums)
    found = attention_gradient(pull, saved, plan.blocks(QUERIES), scale=0.2, window=window)
    for f, e in zip(found, theirs, strict=True):
        assert (f - e).norm() < 1e-2 * e.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [128, 960])
def test_add_norm(dtype: torch.dtype, width: int) -> None:
    x, update, weight = (noise(*s, seed=i, dtype=dtype) for i, s in enumerate([(700, width), (700, width), (width,)]))
    total, normed = add_norm(x, update, weight, 1e-5)
    assert torch.equal(total, x + update)
    expected = torch.nn.functional.rms_norm(total.float(), (width,), weight.float(), 1e-5)
    torch.testing.assert_close(normed.float(), expected, rtol=1e-2, atol=TOLERANCE[dtype])
    with torch.no_grad():
        same, only = add_norm(x, None, weight, 1e-5)
    assert same is x
    expected = torch.nn.functional.rms_norm(x.float(), (width,), weight.float(), 1e-5)
    torch.testing.assert_close(only.float(), expected, rtol=1e-2, atol=TOLERANCE[dtype])


def assert_same_gradients(ours: list[Tensor], theirs: list[Tensor], inputs: list[list[Tensor]]) -> None:
    """Of random mixtures of the outputs, with respect to the inputs."""
    mixtures = [noise(*o.shape, seed=90 + i) for i, o in enumerate(ours)]
    found, expected = (
        torch.autograd.grad(sum((o * m).sum() for o, m in zip(outs, mixtures, strict=True)), given)
        for outs, given in zip((ours, theirs), inputs, strict=True)
    )
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("added", [True, False])
def test_gradient_of_add_norm(added: bool) -> None:
    shapes = [(700, 96), (700, 96), (96,)]
    mine, copy = ([noise(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)] for _ in range(2))
    total = copy[0] + copy[1] if added else copy[0] + 0 * copy[1]
    expected = [total, torch.nn.functional.rms_norm(total, (96,), copy[2], 1e-5)]
    ours = list(add_norm(mine[0], mine[1] if added else None, mine[2], 1e-5))
    keep = [0, 1, 2] if added else [0, 2]
    assert_same_gradients(ours, expected, [[mine[i] for i in keep], [copy[i] for i in keep]])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gate(dtype: torch.dtype) -> None:
    x = noise(5, 2 * 1536, dtype=dtype)
    g, u = x.float().chunk(2, dim=1)
    torch.testing.assert_close(gate(x).float(), torch.nn.functional.silu(g) * u, rtol=1e-2, atol=TOLERANCE[dtype])


def test_gradient_of_gate() -> None:
    mine, copy = (noise(5, 2 * 1100).requires_grad_() for _ in range(2))
    g, u = copy.chunk(2, dim=1)
    assert_same_gradients([gate(mine)], [torch.nn.functional.silu(g) * u], [[mine], [copy]])


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_of_few_rows(rows: int, gated: bool, biased: bool) -> None:
    assert rows <= FEW
    kind = torch.float16 if INTERPRETED else torch.bfloat16
    x, weight = noise(rows, 300, dtype=kind), noise(2 * 52, 300, seed=1, dtype=kind)  # no multiples of a tile
    bias = noise(len(weight), seed=2, dtype=kind) if biased else None
    matrix = SimpleNamespace(weight=weight, bias=bias, adapters=None)
    expected = torch.nn.functional.linear(x.float(), weight.float(), matrix.bias.float() if biased else None)
    if gated:
        g, u = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(g) * u
    with torch.inference_mode():
        found = linear(matrix, x, gated)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=0.2)


def turned(x: Tensor, weight: Tensor | None, angle: Tensor, size: int) -> Tensor:
    x = x.unflatten(1, (-1, size))
    if weight is not None:
        x = torch.nn.functional.rms_norm(x, (size,), weight, 1e-5)
    a, b = x.chunk(2, dim=-1)
    return x * angle.cos()[:, None] + torch.cat([-b, a], -1) * angle.sin()[:, None]


@pytest.mark.parametrize("with_norm", [False, True])
def test_rotate_and_store(with_norm: bool) -> None:
    num, num_kv, size, page = 4, 2, 64, 16
    qkv = noise(5, (num + 2 * num_kv) * size)
    keys, values = (torch.zeros(6, num_kv, page, size, device=DEVICE) for _ in range(2))
    slots = torch.tensor([0, 17, 95, 33, 34], device=DEVICE)
    angle = noise(5, size // 2, seed=3).repeat(1, 2)
    norms = (noise(size, seed=4), noise(size, seed=5)) if with_norm else None
    heads = Heads(num=num, num_kv=num_kv, size=size, norms=norms, epsilon=1e-5)
    q = rotate_and_store(qkv, heads, angle.cos(), angle.sin(), keys, values, slots)
    theirs = qkv.split([num * size, num_kv * size, num_kv * size], dim=1)
    torch.testing.assert_close(q, turned(theirs[0], norms and norms[0], angle, size), rtol=0, atol=1e-5)
    stored = keys[slots // page, :, slots % page]
    torch.testing.assert_close(stored, turned(theirs[1], norms and norms[1], angle, size), rtol=0, atol=1e-5)
    assert torch.equal(values[slots // page, :, slots % page], theirs[2].unflatten(1, (-1, size)))
    assert int((values != 0).any(-1).sum()) == 5 * num_kv  # and nowhere else
    again = rotate_heads(qkv, heads, angle.cos(), angle.sin())
    for mine, same in zip(again, (q, stored, theirs[2].unflatten(1, (-1, size))), strict=True):
        assert torch.equal(mine, same)


@pytest.mark.parametrize("with_norm", [False, True])
def test_gradient_of_rotate_heads(with_norm: bool) -> None:
    num, num_kv, size = 4, 2, 16
    angle = noise(600, size // 2, seed=3).repeat(1, 2)
    shapes = [(600, (num + 2 * num_kv) * size), (size,), (size,)]
    mine, copy = ([noise(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)] for _ in range(2))
    norms = (mine[1], mine[2]) if with_norm else None
    heads = Heads(num=num, num_kv=num_kv, size=size, norms=norms, epsilon=1e-5)
    ours = list(rotate_heads(mine[0], heads, angle.cos(), angle.sin()))
    q, k, v = copy[0].split([num * size, num_kv * size, num_kv * size], dim=1)
    weights = (copy[1], copy[2]) if with_norm else (None, None)
    expected = [turned(q, weights[0], angle, size), turned(k, weights[1], angle, size), v.unflatten(1, (-1, size))]
    keep = slice(3 if with_norm else 1)
    assert_same_gradients(ours, expected, [mine[keep], copy[keep]])


@pytest.mark.parametrize(("vocab", "temperature"), [(97, 1.0), (4096, 0.7), (20_001, 1.3)])
def test_draw_tokens(vocab: int, temperature: float) -> None:
    count = 200 if INTERPRETED else 20_000
    logits = noise(1, vocab) * 2
    logits[0, vocab // 2 :: 3] = float("-inf")
    uniforms = torch.from_numpy((np.arange(count) + 0.5) / count).to(DEVICE)
    temperatures = torch.full((count,), temperature, device=DEVICE)
    rows = logits.expand(count, -1).contiguous()
    tokens, logprobs = draw_tokens(rows, uniforms, temperatures)
    expected = torch.log_softmax(logits[0].double() / temperature, -1)
    torch.testing.assert_close(logprobs.double(), expected[tokens], rtol=0, atol=1e-5)
    # evenly spaced numbers hit every token as often as its probability says, give or take one at each end
    counts = torch.bincount(tokens, minlength=vocab)
    assert (counts - count * expected.exp()).abs().max() < 1.01
    assert torch.equal(token_logprobs(rows, tokens, temperatures)[0], logprobs)  # the same bits


def test_what_is_impossible_is_never_drawn() -> None:
    """Where a block ends or begins with impossible tokens, rounding must not lead to one of them."""
    count, vocab = 64 if INTERPRETED else 4096, 8192
    logits = noise(count, vocab)
    logits[:, 4000:4200] = float("-inf")
    probs = torch.softmax(logits.double(), 1)
    border = probs[:, :4096].sum(1)
    uniforms = border + (torch.arange(count, device=DEVICE) - count // 2) * 1e-9
    tokens, logprobs = draw_tokens(logits, uniforms, torch.ones(count, device=DEVICE))
    assert set(tokens.tolist()) <= {*range(3900, 4000), *range(4200, 4300)}
    assert bool(logprobs.isfinite().all())


def test_a_temperature_of_zero_takes_the_likeliest() -> None:
    logits = noise(5, 9000)
    logits[:, 8000:] = float("-inf")
    tokens, logprobs = draw_tokens(
        logits, torch.full((5,), 0.7, dtype=torch.float64, device=DEVICE), torch.zeros(5, device=DEVICE)
    )
    assert torch.equal(tokens, logits.argmax(1))
    assert torch.equal(logprobs, torch.zeros(5, device=DEVICE))


def test_gradient_of_token_logprobs() -> None:
    logits, tokens, grads = noise(4, 9001), torch.tensor([0, 4095, 4096, 9000], device=DEVICE), noise(4, seed=1)
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0], device=DEVICE)
    copy = logits.clone().requires_grad_()
    expected = torch.log_softmax(copy / temperatures[:, None], -1).gather(1, tokens[:, None]).squeeze(1)
    found, log_sums = token_logprobs(logits, tokens, temperatures)
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)
    (theirs,) = torch.autograd.grad((expected * grads).sum(), copy)
    ours = logits_gradient(logits, tokens, log_sums, grads, temperatures)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_no_chosen_tokens_have_no_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "_row_chunks", lambda *_: [])
    hidden, weight = noise(0, 12).requires_grad_(), noise(99, 12).requires_grad_()
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    (found,) = policy_module._ChosenLogprobs.apply(hidden, weight, none, 1.0, None, torch.nn.functional.linear, True)
    found.sum().backward()
    assert found.shape == (0,)
    assert not weight.grad.any()


def fused_adamw(masters: list[Tensor], **settings: Any) -> FusedAdamW:
    """With the state that the learner's optimizer gives it."""
    optimizer, steps = FusedAdamW(masters, **settings), torch.zeros((), device=DEVICE)
    for master in masters:
        moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[master] = moments | {"step": steps}
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("clip", [0.0, 1.5])
def test_fused_adamw_is_adamw(dtype: torch.dtype, clip: float) -> None:
    sizes = [(5000,), (3, 7), (4096,)]
    masters, copies = ([noise(*s, seed=i) for i, s in enumerate(sizes)] for _ in range(2))
    weights = [m.to(dtype, copy=True) for m in masters]
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3}
    ours, theirs = fused_adamw(masters, **settings), torch.optim.AdamW(copies, **settings)
    for step in range(4):
        gradients = [noise(*s, seed=10 * step + i, dtype=dtype) for i, s in enumerate(sizes)]
        norm = float(ours.step_fused(weights, gradients, 0.5, clip))
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient.float() * 0.5
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(copies, clip or 1e9)), rel=1e-4)
        theirs.step()
        before = [m.clone() for m in masters]
        gradients[1][0] = float("inf")
        assert not np.isfinite(float(ours.step_fused(weights, gradients, 0.5, clip)))
        assert all(torch.equal(m, b) for m, b in zip(masters, before, strict=True))
    for weight, master, copy in zip(weights, masters, copies, strict=True):
        torch.testing.assert_close(master, copy, rtol=0, atol=1e-4)
        assert torch.equal(weight, master.to(dtype))


def test_fused_adamw_goes_on_from_a_saved_state() -> None:
    """Also with weights that begin between two multiples of 16 bytes, and one that has no gradient at first."""
    whole = noise(4000)
    start = [whole[:1000], whole[1001:3001], whole[3001:]]
    settings = {"lr": 0.1, "betas": (0.8, 0.9)}
    unbroken, broken = ([part.clone() for part in start] for _ in range(2))
    views = list(broken[0].new_empty(4000).split([1, 1000, 2000, 999]))[1:]
    for view, part in zip(views, start, strict=True):
        view.copy_(part)
    first, other = fused_adamw(unbroken, **settings), fused_adamw(views, **settings)
    for step in range(6):
        if step == 3:
            state = deepcopy(other.state_dict())
            other = FusedAdamW(views, **settings)
            other.load_state_dict(state)
        gradients = [None if i == 0 and step == 0 else noise(len(p), seed=7 * step + i) for i, p in enumerate(start)]
        for optimizer, weights in ((first, unbroken), (other, views)):
            optimizer.step_fused(weights, gradients, 1.0, 0.0)
    for a, b in zip(unbroken, views, strict=True):
        assert torch.equal(a, b)
    assert {float(s["step"]) for s in other.state.values()} == {6.0}


@pytest.mark.parametrize("size", [2, 5, 100])
@pytest.mark.parametrize("with_support", [False, True])
def test_log_probs_of_chosen_tokens(monkeypatch: pytest.MonkeyPatch, with_support: bool, size: int) -> None:
    """The learner's way to them, in chunks of so many rows, with the gradients of both kinds."""
    num, vocab = 5, 5000
    slices = [slice(start, start + size) for start in range(0, num, size)]
    monkeypatch.setattr(policy_module, "_row_chunks", lambda hidden, weight, share: slices)
    mine, copy = ([noise(num, 16).requires_grad_(), noise(vocab, 16, seed=1).requires_grad_()] for _ in range(2))
    chosen = torch.tensor([0, 4999, 7, 8, 4096], device=DEVICE)
    ids = torch.stack([chosen, (chosen + 3) % vocab], 1).flatten()
    support = policy_module.Support(ids, torch.arange(0, 2 * num + 1, 2, device=DEVICE)) if with_support else None
    linear = torch.nn.functional.linear
    ours = policy_module._ChosenLogprobs.apply(*mine, chosen, 0.7, support, linear, True)
    logits = copy[0] @ copy[1].t() / 0.7
    kinds = [logits]
    if with_support:
        allowed = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids.view(num, 2), True)
        kinds = [logits.masked_fill(~allowed, float("-inf")), logits]
    theirs = torch.stack([kind.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1) for kind in kinds])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert_same_gradients([ours], [theirs], [mine, copy])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 0.8, 0.0), (5, 1.0, 0.0), (0, 1.0, 0.1), (50, 0.5, 0.01), (9001, 1.0, 0.0)]
)
def test_truncation(dtype: torch.dtype, top_k: int, top_p: float, min_p: float) -> None:
    n, vocab = 4, 9001
    logits = (noise(n, vocab) * 3).to(dtype)
    logits[1, 4000:] = float("-inf")
    temperatures = torch.tensor([1.0, 0.5, 2.0, 0.0], device=DEVICE)
    found = truncated(logits, temperatures, *(torch.full((n,), x, device=DEVICE) for x in (top_k, top_p, min_p)))
    for row, own, temperature in zip(found, logits, (1.0, 0.5, 2.0, 1.0), strict=True):
        scaled = own.float() / temperature
        stays = torch.isfinite(scaled)
        if top_k:
            stays &= scaled >= scaled.topk(min(top_k, vocab)).values[-1]
        probs = scaled.masked_fill(~stays, float("-inf")).softmax(0).double()
        likeliest = probs.sort(descending=True).values
        if top_p < 1:
            stays &= probs >= likeliest[int((likeliest.cumsum(0) < top_p).sum())]
        stays &= probs >= min_p * probs.max()
        kept = torch.isfinite(row)
        # at the very edge of the mass a rounding may decide
        assert (kept != stays).sum() <= 2
        assert torch.equal(row[kept], own[kept])
