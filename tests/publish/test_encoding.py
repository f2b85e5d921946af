"""Encodings: what a receiver ends up with is what was encoded, to the bit, or it keeps what it had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_weights import Weights, copied, published, same_bits, stepped, weights

from headrace.errors import PublishError
from headrace.publish.encoding import Encoder, Payload, checksum, code_places, decoded, read_places, verify

BUCKET = 100  # bytes: tensors begin and end anywhere in a bucket


def encoder(kind: str) -> Encoder:
    return Encoder(kind, bucket_bytes=BUCKET)


def encode(maker: Encoder, version: int, tensors: Weights) -> Payload:
    payload = maker.encode(version, tensors.items())
    maker.committed(version)
    return payload


def write(payload: Payload, live: Weights, held: int | None) -> None:
    for call in list(decoded(payload, live, held)):
        call()


@pytest.mark.parametrize("kind", ["full", "delta", "adapter"])
def test_a_chain_of_versions_arrives_bit_for_bit(kind: str) -> None:
    truth, maker = weights(), encoder(kind)
    live, held = copied(truth) if kind == "adapter" else stepped(truth, 99, share=1.0), None
    for version in (3, 4, 7):
        truth = stepped(truth, version, only="lora_" if kind == "adapter" else "")
        payload = encode(maker, version, published(kind, truth))
        verify(payload)
        write(payload, live, held)
        held = version
        assert same_bits(live, truth)
    assert payload.manifest.encoding == kind
    assert payload.manifest.base == (4 if kind == "delta" else None)


def test_signs_of_zeros_and_payloads_of_nans_are_changes_too() -> None:
    before = {"w": torch.tensor([0.0, 1.0, float("nan"), 2.0] * 50, dtype=torch.bfloat16)}
    after = copied(before)
    after["w"][0] = -0.0
    after["w"].view(torch.int16)[2] += 1
    maker, live = encoder("delta"), copied(before)
    write(encode(maker, 1, before), live, None)
    payload = encode(maker, 2, after)
    assert payload.manifest.tensors[0].num_changed == 2
    write(payload, live, 1)
    assert same_bits(live, after)


def test_a_delta_starts_from_the_last_committed_version_not_from_one_that_failed() -> None:
    truth, maker = weights(), encoder("delta")
    live = copied(truth)
    encode(maker, 1, truth)
    maker.encode(2, stepped(truth, 2).items())  # nobody gets this one
    third = stepped(truth, 3)
    payload = encode(maker, 3, third)
    assert payload.manifest.base == 1
    write(payload, live, 1)
    assert same_bits(live, third)


def test_a_delta_that_would_be_larger_than_all_weights_is_not_sent_as_one() -> None:
    truth, maker = weights(), encoder("delta")
    encode(maker, 1, truth)
    after = stepped(truth, 2, share=1.0)
    payload = encode(maker, 2, after)
    assert (payload.manifest.encoding, payload.manifest.base) == ("full", None)
    live = copied(truth)
    write(payload, live, 1)
    assert same_bits(live, after)
    assert encode(maker, 3, stepped(after, 3)).manifest.base == 2  # the next one is a delta from it


def test_a_version_without_a_change_is_an_empty_delta() -> None:
    truth, maker = weights(), encoder("delta")
    encode(maker, 1, truth)
    payload = encode(maker, 2, truth)
    assert payload.manifest.num_bytes == 0
    live = copied(truth)
    write(payload, live, 1)
    assert same_bits(live, truth)


def test_the_committed_version_can_be_had_in_full_from_a_chain_of_deltas() -> None:
    truth, maker = weights(), encoder("delta")
    for version in range(1, 5):
        truth = stepped(truth, version)
        encode(maker, version, truth)
    maker.encode(5, stepped(truth, 5).items())  # not committed
    live, payload = stepped(truth, 9, share=1.0), maker.rebase()
    assert payload.manifest.version == 4
    write(payload, live, None)
    assert same_bits(live, truth)


@pytest.mark.parametrize("share", [0.3, 1e-2, 1e-3, 1e-4, 1e-5])
def test_a_place_takes_less_than_three_bytes(share: float) -> None:
    before = torch.zeros(4_000_000, dtype=torch.bfloat16)
    after = before + (torch.rand(len(before), generator=torch.Generator().manual_seed(0)) < share)
    maker = Encoder("delta")
    encode(maker, 1, {"w": before})
    spec = encode(maker, 2, {"w": after.to(before.dtype)}).manifest.tensors[0]
    assert spec.num_changed == int(after.count_nonzero())
    assert spec.place_bytes < (1.4 if share >= 1e-2 else 3) * spec.num_changed


@given(st.lists(st.integers(0, 300) | st.integers(0, 2**40), max_size=40))
def test_places_are_read_back_however_far_apart(gaps: list[int]) -> None:
    places = (torch.tensor(gaps, dtype=torch.int64) + 1).cumsum(0) - 1
    end = int(places[-1]) + 1 if gaps else 0
    coded = code_places(places)
    assert torch.equal(read_places(coded, len(gaps), end), places)
    if gaps:
        with pytest.raises(PublishError, match="outside"):
            read_places(coded, len(gaps), end - 1)
        with pytest.raises(PublishError, match="in place of"):
            read_places(coded, len(gaps) + 1, end)


def test_weights_that_are_views_of_larger_ones_are_encoded_like_any() -> None:
    whole = torch.randn(3, 41).bfloat16()
    views = {"a": whole[1], "b": whole.T}
    maker, live = encoder("delta"), {"a": torch.zeros(41).bfloat16(), "b": torch.zeros(41, 3).bfloat16()}
    write(encode(maker, 1, views), live, None)
    whole[1, 7] = 9.0
    write(encode(maker, 2, views), live, 1)
    assert same_bits(live, views)


Spoil = Callable[[Weights], object]


@pytest.mark.parametrize(
    ("kind", "held", "spoil", "message"),
    [
        ("delta", 0, lambda live: None, "a delta from version 1, and the receiver holds version 0"),
        ("delta", None, lambda live: None, "receiver holds none"),
        ("full", 2, lambda live: None, "version 2 came after version 2"),
        ("full", 5, lambda live: None, "version 2 came after version 5"),
        ("full", 1, lambda live: live.pop("scale"), "no tensor 'scale'"),
        ("full", 1, lambda live: live.update(more=torch.zeros(2)), "lacks the tensor 'more'"),
        ("adapter", 1, lambda live: live.update({"more.lora_A": torch.zeros(2)}), "lacks the tensor 'more.lora_A'"),
        ("delta", 1, lambda live: live.update({"embed.weight": torch.zeros(16, 67).bfloat16()}), "16, 67"),
        ("delta", 1, lambda live: live.update({"embed.weight": torch.zeros(67, 16)}), "bfloat16 .* float32"),
        ("full", 1, lambda live: live.update({"embed.weight": torch.zeros(16, 67).bfloat16().T}), "not contiguous"),
    ],
)
def test_what_does_not_fit_the_receiver_is_refused_and_changes_nothing(
    kind: str, held: int | None, spoil: Spoil, message: str
) -> None:
    truth, maker = weights(), encoder(kind)
    encode(maker, 1, published(kind, truth))
    payload = encode(maker, 2, published(kind, stepped(truth, 2)))
    live = copied(truth)
    spoil(live)
    before = copied(live)
    with pytest.raises(PublishError, match=message):
        write(payload, live, held)
    assert same_bits(live, before)


def test_the_encoder_refuses_versions_out_of_order_and_weights_that_changed_shape() -> None:
    truth, maker = weights(), encoder("delta")
    encode(maker, 5, truth)
    with pytest.raises(PublishError, match="version 5 cannot follow version 5"):
        maker.encode(5, truth.items())
    with pytest.raises(PublishError, match="'scale' is not a tensor of version 5"):
        maker.encode(6, {**truth, "scale": torch.zeros(2)}.items())
    with pytest.raises(PublishError, match="lacks 'scale'"):
        maker.encode(6, [(name, tensor) for name, tensor in truth.items() if name != "scale"])


@pytest.mark.parametrize("place", [0, 7, 40_000, 65_535, 65_536, 69_998])
def test_one_flipped_bit_anywhere_is_found(place: int) -> None:
    content = torch.randint(0, 256, (69_999,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    payload = Encoder("full").encode(4, [("w", content)])
    payload.buckets[0][place] ^= 1 << (place % 8)
    with pytest.raises(PublishError, match="version 4: bucket 1 of 1 was damaged on the way"):
        verify(payload)


def test_bytes_that_changed_places_or_are_missing_are_found() -> None:
    content = torch.randint(0, 256, (100_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    moved = torch.cat([content[32768:65536], content[:32768], content[65536:]])
    assert len({checksum(content), checksum(content.roll(8)), checksum(moved), checksum(content.flip(0))}) == 4
    assert checksum(torch.zeros(10, dtype=torch.uint8)) != checksum(torch.zeros(11, dtype=torch.uint8))
    payload = Encoder("full", bucket_bytes=1000).encode(4, [("w", content)])
    with pytest.raises(PublishError, match="arrived in 99 buckets in place of 100"):
        verify(Payload(payload.manifest, payload.buckets[1:]))
    with pytest.raises(PublishError, match="bucket 100 of 100 has 999 bytes in place of 1,000"):
        verify(Payload(payload.manifest, (*payload.buckets[:-1], payload.buckets[-1][:-1])))
    damaged = replace(payload.manifest, tensors=(replace(payload.manifest.tensors[0], num_bytes=7),))
    with pytest.raises(PublishError, match="the manifest is damaged"):
        verify(Payload(damaged, payload.buckets))
