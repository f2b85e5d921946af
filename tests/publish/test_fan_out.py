"""More receivers do not cost the sender more."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transports import PATIENCE_S, CollectiveFrame, Frame

from headrace.publish.egress import tcp_sent_bytes
from headrace.publish.encoding import Encoder

NUM_ELEMENTS = 2_000_000


def send(say: Callable[[Any], None], frame: Frame, num_receivers: int) -> None:
    end, encoder = frame.sender(), Encoder("full")
    end.expect([""] * num_receivers)
    for version in (1, 2):  # the first makes the connections
        end.stage(encoder.encode(version, [("w", torch.arange(NUM_ELEMENTS))]))
        before = tcp_sent_bytes()
        say(end.ticket(version))
        end.send(end.ticket(version), PATIENCE_S)
    after, last = tcp_sent_bytes(), -1
    while after != last:  # what is sent may still be on its way out
        time.sleep(0.3)
        after, last = tcp_sent_bytes(), after
    say(after - before)
    time.sleep(60)  # until it is killed


@pytest.mark.parametrize("num_receivers", [1, 8])
def test_the_senders_kernel_counts_every_byte_once_however_many_receive(
    num_receivers: int, collective: CollectiveFrame
) -> None:
    sender = collective.elsewhere(send, num_receivers)
    receivers = [collective.receiver() for _ in range(num_receivers)]
    with ThreadPoolExecutor(num_receivers) as pool:
        for _ in range(2):
            ticket = sender.hear()
            payloads = list(pool.map(lambda receiver, ticket=ticket: receiver.fetch(ticket, PATIENCE_S), receivers))
    size = payloads[0].manifest.num_bytes
    assert all(torch.equal(payload.buckets[0].view(torch.int64), torch.arange(NUM_ELEMENTS)) for payload in payloads)
    assert size <= sender.hear() < 1.01 * size


def test_through_the_object_store_no_node_sends_a_byte_twice(ray_frame: Callable[[], Any]) -> None:
    frame = ray_frame()
    end, before = frame.sender(), frame.sent_bytes_by_node()
    end.stage(payload := Encoder("full").encode(1, [("w", torch.arange(NUM_ELEMENTS))]))
    size = payload.manifest.num_bytes
    assert frame.fetched_by_others(end, 1) == [size, size]
    idle, *busy = sorted(after - b for after, b in zip(frame.sent_bytes_by_node(), before, strict=True))
    assert idle < 0.1 * size  # the last node has nobody to pass it on to
    assert all(size <= sent < 1.1 * size for sent in busy)
