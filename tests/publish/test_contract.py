"""The contract of every encoding and transport: a version arrives bit for bit and in order, or not at all, in time.

And more receivers do not cost the sender more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from egress import tcp_sent_bytes
from small_weights import copied, published, same_bits, stepped, weights
from transports import PATIENCE_S, SHORT_S, Audience, CollectiveFrame, Frame, deliver

from headrace.errors import PublishError
from headrace.publish.encoding import Encoder, Payload
from headrace.publish.publisher import Publisher, Subscriber

START = {name: tensor for name, tensor in weights().items() if tensor.dtype == torch.bfloat16}
KINDS = ["full", "delta", "adapter"]


def audience(frame: Frame, kind: str = "full", count: int = 2) -> Audience:
    return Audience(frame, kind, [copied(START) for _ in range(count)])


@pytest.mark.parametrize("kind", KINDS)
def test_every_receiver_gets_every_version_bit_for_bit(frame: Frame, kind: str) -> None:
    everybody, truth = audience(frame, kind), START
    for version in (1, 2, 5):
        truth = stepped(truth, version, only="lora_" if kind == "adapter" else "")
        everybody.publish(version, truth)
        assert all(same_bits(live, truth) for live in everybody.lives)
        assert [subscriber.version for subscriber in everybody.subscribers] == [version] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_found_by_all_and_the_next_publication_succeeds(frame: Frame, kind: str) -> None:
    everybody = audience(frame, kind)
    everybody.publish(1, START)
    truth = stepped(START, 2, only="lora_" if kind == "adapter" else "")
    payload = everybody.publisher._encoder.encode(2, published(kind, truth).items())
    payload.buckets[0][-1] ^= 1  # after the checksums were taken
    everybody.end.stage(payload)
    problems = everybody.deliver(everybody.end.ticket(2))
    assert len(problems) == 2
    assert all("version 2: bucket 1 of" in problem for problem in problems)
    assert all(same_bits(live, START) for live in everybody.lives)
    everybody.publish(3, truth)
    assert all(same_bits(live, truth) for live in everybody.lives)


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_torn_publication_is_no_publication(frame: Frame, kind: str) -> None:
    everybody = audience(frame, kind)
    everybody.publish(1, START)
    ticket = everybody.publisher.stage(2, stepped(START, 2).items())
    frame.tear(ticket)
    for subscriber, live in zip(everybody.subscribers, everybody.lives, strict=True):
        with pytest.raises(PublishError, match="version 2"):
            subscriber.stage(ticket, SHORT_S)
        assert subscriber.version == 1
        assert same_bits(live, START)


def test_a_version_that_one_receiver_did_not_get_is_taken_back_from_all(frame: Frame) -> None:
    everybody = audience(frame, "delta")
    everybody.publish(1, START)
    assert not everybody.deliver(everybody.publisher.stage(2, stepped(START, 2).items()))
    for subscriber in everybody.subscribers:
        subscriber.abandon(2)
    everybody.publisher.abandon(2)
    with pytest.raises(PublishError, match="version 2 is not the one that is staged"):
        everybody.subscribers[0].commit(2)
    assert all(same_bits(live, START) for live in everybody.lives)
    truth = stepped(START, 3)
    everybody.publish(3, truth)  # a delta from version 1
    assert all(same_bits(live, truth) for live in everybody.lives)


def test_a_slow_receiver_holds_nobody_longer_than_the_timeout_and_gets_the_version_later(frame: Frame) -> None:
    everybody = audience(frame)
    ticket = everybody.publisher.stage(1, START.items())
    prompt = everybody.subscribers[:1]
    problems = deliver(everybody.publisher, ticket, prompt, SHORT_S)
    if isinstance(frame, CollectiveFrame):  # a collective needs everybody: sender and receiver both give up
        assert [("version 1" in problem) for problem in problems] == [True, True]
    else:  # receivers help themselves, each at its own pace
        assert problems == []
    everybody.end.expect(["", ""])
    assert not everybody.deliver(everybody.end.ticket(1))


def receive(say: Callable[[Any], None], frame: Frame, ticket: Any) -> None:
    say("about to fetch")
    frame.receiver().fetch(ticket, PATIENCE_S)
    say("done")
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_a_receiver_that_dies_costs_the_others_a_timeout_at_most(frame: Frame, pause_s: float) -> None:
    big = {"w": torch.randn(3_000_000).bfloat16()}
    end = frame.sender()
    publisher = Publisher(Encoder("full"), end)
    live = {"w": torch.zeros(3_000_000).bfloat16()}
    survivor = Subscriber(frame.receiver(), live)
    end.expect(["", ""])
    ticket = publisher.stage(1, big.items())
    assert ticket.manifest.num_bytes == 6_000_000
    child = frame.elsewhere(receive, ticket)
    assert child.hear() == "about to fetch"
    with ThreadPoolExecutor(1) as pool:
        delivery = pool.submit(deliver, publisher, ticket, [survivor], SHORT_S)
        time.sleep(pause_s)
        child.kill()
        problems = delivery.result()
    if isinstance(frame, CollectiveFrame):  # it may have died before or after its part was done
        assert [problem for problem in problems if "version 1" not in problem] == []
        assert problems or survivor.fetch_s > 0.0, "no problem, and no version either"
    else:
        assert problems == []
    end.expect([""])
    assert not deliver(publisher, end.ticket(1), [survivor])
    survivor.commit(1)
    assert same_bits(live, big)


def send(say: Callable[[Any], None], frame: Frame) -> None:
    end = frame.sender()
    end.expect([""])
    publisher = Publisher(Encoder("full"), end)
    for version in (1, 2):
        ticket = publisher.stage(version, [("w", torch.full((3_000_000,), version))])
        say(ticket)
        publisher.send(ticket, PATIENCE_S)
        publisher.commit(version)
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_a_sender_that_dies_leaves_receivers_with_a_whole_version_or_the_old_one(frame: Frame, pause_s: float) -> None:
    child = frame.elsewhere(send)
    live = {"w": torch.zeros(3_000_000, dtype=torch.int64)}
    receiver = Subscriber(frame.receiver(), live)
    receiver.stage(child.hear(), PATIENCE_S)
    receiver.commit(1)
    ticket = child.hear()
    with ThreadPoolExecutor(1) as pool:
        staging = pool.submit(receiver.stage, ticket, SHORT_S)
        time.sleep(pause_s)
        child.kill()
        with suppress(PublishError):
            staging.result(timeout=SHORT_S + 5.0)
            receiver.commit(2)
    assert receiver.version in (1, 2)
    assert bool((live["w"] == receiver.version).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_receiver_catches_up(frame: Frame, kind: str) -> None:
    everybody, truth = audience(frame, kind, count=1), START
    for version in (1, 2, 3):
        truth = stepped(truth, version, share=0.02, only="lora_" if kind == "adapter" else "")
        everybody.publish(version, truth)
    newcomer = Subscriber(frame.receiver(), live := copied(START))
    everybody.publisher.expect([""])
    tickets = everybody.publisher.catch_up()
    assert [t.manifest.encoding for t in tickets] == (["full", "delta", "delta"] if kind == "delta" else [kind])
    for ticket in tickets:
        assert not deliver(everybody.publisher, ticket, [newcomer])
        newcomer.commit(ticket.version)
    assert (newcomer.version, same_bits(live, truth)) == (3, True)
    everybody.subscribers.append(newcomer)
    everybody.publisher.expect(["", ""])
    truth = stepped(truth, 4, share=0.02, only="lora_" if kind == "adapter" else "")
    everybody.publish(4, truth)
    assert same_bits(live, truth)


def test_versions_out_of_order_are_refused(frame: Frame) -> None:
    everybody = audience(frame, "delta", count=1)
    (live,) = everybody.lives
    everybody.publish(1, START)
    skipped = stepped(START, 2)
    everybody.publisher.stage(2, skipped.items())
    everybody.publisher.commit(2)  # though nobody took it
    assert everybody.deliver(everybody.publisher.stage(3, stepped(skipped, 3).items())) == [
        "version 3 is a delta from version 2, and the receiver holds version 1"
    ]
    with pytest.raises(PublishError, match="version 2 cannot follow version 2"):
        everybody.publisher.stage(2, START.items())
    first = replace(everybody.publisher._encoder.rebase().manifest, version=1)
    everybody.end.stage(Payload(first, everybody.publisher._encoder.rebase().buckets))
    assert everybody.deliver(everybody.end.ticket(1)) == ["version 1 came after version 1, which the receiver holds"]
    assert same_bits(live, START)


NUM_ELEMENTS = 2_000_000


def send_and_count(say: Callable[[Any], None], frame: Frame, num_receivers: int) -> None:
    end, encoder = frame.sender(), Encoder("full")
    end.expect([""] * num_receivers)
    for version in (1, 2):  # the first makes the connections
        end.stage(encoder.encode(version, [("w", torch.arange(NUM_ELEMENTS))]))
        before = all_sent_bytes()
        say(end.ticket(version))
        end.send(end.ticket(version), PATIENCE_S)
    say(all_sent_bytes() - before)
    time.sleep(60)  # until it is killed


def all_sent_bytes() -> int:
    """Once nothing more goes out: a version is given to the kernel before it is on its way."""
    sent, last = tcp_sent_bytes(), -1
    while sent != last:
        time.sleep(0.3)
        sent, last = tcp_sent_bytes(), sent
    return sent


@pytest.mark.parametrize("num_receivers", [1, 8])
def test_the_senders_kernel_counts_every_byte_once_however_many_receive(
    num_receivers: int, collective: CollectiveFrame
) -> None:
    sender = collective.elsewhere(send_and_count, num_receivers)
    receivers = [collective.receiver() for _ in range(num_receivers)]
    with ThreadPoolExecutor(num_receivers) as pool:
        for _ in range(2):
            ticket = sender.hear()
            payloads = list(pool.map(lambda receiver, ticket=ticket: receiver.fetch(ticket, PATIENCE_S), receivers))
    size = payloads[0].manifest.num_bytes
    assert all(torch.equal(payload.buckets[0].view(torch.int64), torch.arange(NUM_ELEMENTS)) for payload in payloads)
    assert size <= sender.hear() < 1.01 * size


@pytest.mark.slow
def test_through_the_object_store_no_node_sends_a_byte_twice(ray_frame: Callable[[], Any]) -> None:
    frame = ray_frame()
    end, before = frame.sender(), frame.sent_bytes_by_node()
    end.stage(payload := Encoder("full").encode(1, [("w", torch.arange(NUM_ELEMENTS))]))
    size = payload.manifest.num_bytes
    assert frame.fetched_by_others(end, 1) == [size, size]
    idle, *busy = sorted(after - b for after, b in zip(frame.sent_bytes_by_node(), before, strict=True))
    assert idle < 0.1 * size  # the last node has nobody to pass it on to
    assert all(size <= sent < 1.1 * size for sent in busy)


def test_a_ticket_is_void_once_other_receivers_are_expected(collective: CollectiveFrame) -> None:
    end = collective.sender()
    end.expect(["a"])
    end.stage(Encoder("full").encode(1, START.items()))
    ticket = end.ticket(1)
    end.expect(["a", "b"])
    with pytest.raises(PublishError, match="version 1: the ticket is void"):
        end.send(ticket, SHORT_S)
