"""What the publisher keeps for late receivers, and what it books."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from small_weights import Weights, copied, same_bits, stepped, weights
from torch import Tensor

from headrace.publish.disk import DiskReceiver, DiskSender
from headrace.publish.encoding import Encoder
from headrace.publish.publisher import MAX_DELTAS, Publisher, Subscriber

START = {name: tensor for name, tensor in weights().items() if tensor.dtype == torch.bfloat16}
FULL_BYTES = 2 * sum(tensor.numel() for tensor in START.values())


def publisher_of(directory: Path, kind: str) -> Publisher:
    return Publisher(Encoder(kind), DiskSender(directory))


def test_what_is_kept_for_late_receivers_has_a_bound_and_brings_them_to_the_newest(tmp_path: Path) -> None:
    publisher, truth = publisher_of(tmp_path, "delta"), START
    for version in range(1, 2 * MAX_DELTAS):
        truth = stepped(truth, version, share=0.01)
        publisher.stage(version, truth.items())
        publisher.commit(version)
        kept = list(tmp_path.iterdir())
        deltas = [file for path in kept for file in path.glob("*.bin")]
        assert sum(file.stat().st_size for file in deltas) < FULL_BYTES
        assert len(kept) <= MAX_DELTAS + 1
        if version % 20 == 0:
            live = copied(START)
            newcomer = Subscriber(DiskReceiver(), live)
            for ticket in publisher.catch_up():
                newcomer.stage(ticket, 1.0)
                newcomer.commit(ticket.version)
            assert (newcomer.version, same_bits(live, truth)) == (version, True)


def test_a_version_that_is_replaced_before_it_is_committed_leaves_nothing(tmp_path: Path) -> None:
    publisher = publisher_of(tmp_path, "full")
    publisher.stage(1, START.items())
    publisher.stage(2, START.items())
    publisher.commit(2)
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000002"]


def test_bytes_and_seconds_are_booked_by_operation(tmp_path: Path) -> None:
    def gathered(of: Weights) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in of.items():
            time.sleep(0.01)
            yield name, tensor

    publisher, receiver = publisher_of(tmp_path, "delta"), Subscriber(DiskReceiver(), copied(START))
    assert publisher.catch_up() == publisher_of(tmp_path, "full").catch_up() == []  # no version yet
    for version, truth in ((1, START), (2, stepped(START, 2))):
        started = time.perf_counter()
        ticket = publisher.stage(version, gathered(truth))
        wall_s = time.perf_counter() - started
        assert [*publisher.times] == ["gather", "encode", "transfer"]
        seconds, num_bytes = zip(*publisher.times.values(), strict=True)
        assert seconds[0] >= 0.01 * len(START)
        assert min(seconds) > 0.0
        assert sum(seconds) <= wall_s  # nothing counts twice
        sent = ticket.manifest.num_bytes
        assert num_bytes == (FULL_BYTES, sent, sent)
        assert sent == FULL_BYTES if version == 1 else 0 < sent < FULL_BYTES / 2
        started = time.perf_counter()
        receiver.stage(ticket, 1.0)
        assert 0.0 < receiver.fetch_s <= time.perf_counter() - started
        publisher.commit(version)
        receiver.commit(version)
