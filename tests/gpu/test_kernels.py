"""Each kernel against the same arithmetic written out in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
if torch.cuda.is_available():
    from headrace.kernels.block import add_norm, gate, rotate_and_store
    from headrace.kernels.decode import decode_attention
    from headrace.kernels.sample import draw_tokens

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def paged(lengths: list[int], heads: int, size: int, page: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and page tables of sequences whose pages lie in no order."""
    most = -(-max(lengths) // page)
    num_pages = most * len(lengths) + 3
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5))[: most * len(lengths)]
    tables = order.view(len(lengths), most).to("cuda", torch.int32)
    return (
        noise(num_pages, heads, page, size, seed=1, dtype=dtype),
        noise(num_pages, heads, page, size, seed=2, dtype=dtype),
        tables,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (16, 8, 128), (14, 2, 64), (9, 3, 80)])
@pytest.mark.parametrize("window", [0, 100])
def test_decode_attention(dtype: torch.dtype, heads: int, kv_heads: int, size: int, window: int) -> None:
    lengths = [1, 2, 63, 64, 65, 511, 512, 513, 700, 1537]
    keys, values, tables = paged(lengths, kv_heads, size, 64, dtype)
    q = noise(len(lengths), heads, size, dtype=dtype)
    counts = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    ours = decode_attention(q, keys, values, tables, counts, scale=size**-0.5, window=window, longest=max(lengths))
    for i, length in enumerate(lengths):
        k, v = (x[tables[i].long()].transpose(0, 1).flatten(1, 2)[:, :length].float() for x in (keys, values))
        scores = q[i].float().view(kv_heads, -1, size) @ k.transpose(1, 2) * size**-0.5
        if window:
            scores[..., : max(0, length - window)] = float("-inf")
        expected = (torch.softmax(scores, -1) @ v).view(heads, size)
        torch.testing.assert_close(ours[i].float(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_decode_attention_does_not_depend_on_the_company() -> None:
    lengths = [700, 40, 1900, 512]
    keys, values, tables = paged(lengths, 8, 128, 64, torch.bfloat16)
    q, counts = noise(4, 16, 128, dtype=torch.bfloat16), torch.tensor(lengths, device="cuda", dtype=torch.int32)
    together = decode_attention(q, keys, values, tables, counts, scale=0.09, window=0, longest=4000)
    for i, length in enumerate(lengths):
        alone = decode_attention(
            q[i : i + 1], keys, values, tables[i : i + 1], counts[i : i + 1], scale=0.09, window=0, longest=length
        )
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [128, 960, 2048])
def test_add_norm(dtype: torch.dtype, width: int) -> None:
    x, update, weight = (
        noise(7, width, dtype=dtype),
        noise(7, width, seed=1, dtype=dtype),
        noise(width, seed=2, dtype=dtype),
    )
    total, normed = add_norm(x, update, weight, 1e-5)
    assert torch.equal(total, x + update)
    expected = torch.nn.functional.rms_norm(total.float(), (width,), weight.float(), 1e-5)
    torch.testing.assert_close(normed.float(), expected, rtol=1e-2, atol=TOLERANCE[dtype])
    same, only = add_norm(x, None, weight, 1e-5)
    assert same is x
    torch.testing.assert_close(
        only.float(),
        torch.nn.functional.rms_norm(x.float(), (width,), weight.float(), 1e-5),
        rtol=1e-2,
        atol=TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gate(dtype: torch.dtype) -> None:
    x = noise(5, 2 * 1536, dtype=dtype)
    g, u = x.float().chunk(2, dim=1)
    torch.testing.assert_close(gate(x).float(), torch.nn.functional.silu(g) * u, rtol=1e-2, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("with_norm", [False, True])
def test_rotate_and_store(with_norm: bool) -> None:
    heads, kv_heads, size, page = 4, 2, 64, 16
    qkv = noise(5, (heads + 2 * kv_heads) * size)
    keys, values = (
        torch.zeros(6, kv_heads, page, size, device="cuda"),
        torch.zeros(6, kv_heads, page, size, device="cuda"),
    )
    slots = torch.tensor([0, 17, 95, 33, 34], device="cuda")
    angle = noise(5, size // 2, seed=3).repeat(1, 2)
    norms = (noise(size, seed=4), noise(size, seed=5)) if with_norm else None
    q = rotate_and_store(qkv, norms, 1e-5, angle.cos(), angle.sin(), keys, values, slots, heads)

    def expected(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.unflatten(1, (-1, size))
        if weight is not None:
            x = torch.nn.functional.rms_norm(x, (size,), weight, 1e-5)
        a, b = x.chunk(2, dim=-1)
        return x * angle.cos()[:, None] + torch.cat([-b, a], -1) * angle.sin()[:, None]

    theirs = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=1)
    torch.testing.assert_close(q, expected(theirs[0], norms and norms[0]), rtol=0, atol=1e-5)
    stored = keys[slots // page, :, slots % page]
    torch.testing.assert_close(stored, expected(theirs[1], norms and norms[1]), rtol=0, atol=1e-5)
    assert torch.equal(values[slots // page, :, slots % page], theirs[2].unflatten(1, (-1, size)))
    assert int((values != 0).any(-1).sum()) == 5 * kv_heads  # and nowhere else


@pytest.mark.parametrize(("vocab", "temperature"), [(97, 1.0), (4096, 0.7), (20_001, 1.3)])
def test_draw_tokens(vocab: int, temperature: float) -> None:
    logits = noise(1, vocab) * 2
    logits[0, vocab // 2 :: 3] = float("-inf")
    uniforms = torch.from_numpy((np.arange(20_000) + 0.5) / 20_000).cuda()
    tokens, logprobs = draw_tokens(
        logits.expand(20_000, -1).contiguous(), uniforms, torch.full((20_000,), temperature, device="cuda")
    )
    expected = torch.log_softmax(logits[0].double() / temperature, -1)
    torch.testing.assert_close(logprobs.double(), expected[tokens], rtol=0, atol=1e-5)
    # evenly spaced numbers hit every token as often as its probability says, give or take one at each end
    counts = torch.bincount(tokens, minlength=vocab)
    assert (counts - 20_000 * expected.exp()).abs().max() < 1.01
