"""How many threads torch computes with, by measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from headrace.place import threads
from headrace.place.device import DeviceThread
from headrace.place.threads import EVERY_S, ROUNDS, SHARE, ThreadChoice


class Machine:
    """A machine on which an operation takes `seconds[threads]`."""

    def __init__(self, patch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.seconds = {int(count[1:]): s for count, s in seconds.items()}
        self.now_s, self.measured = 0.0, 0
        patch.setattr(threads, "_seconds_per_call", self.measure)
        patch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def measure(self, work: Callable[[], object]) -> float:
        work()
        self.measured += 1
        self.now_s += 0.01
        return self.seconds[torch.get_num_threads()]


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch):
    Machine(monkeypatch, n1=3.0, n2=2.0, n4=2.5)
    choice = ThreadChoice(16)
    assert choice.candidates == [1, 2, 4]
    choice.choose()
    assert torch.get_num_threads() == 2


def test_it_is_chosen_again_when_another_process_takes_a_core(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, n1=3.0, n2=2.0, n4=1.5)
    choice = ThreadChoice(16)
    choice.choose()
    assert torch.get_num_threads() == 4
    machine.seconds = {1: 3.0, 2: 6.0, 4: 20.0}
    choice.choose()
    assert torch.get_num_threads() == 4, "not measured all the time"
    machine.now_s += 3 * ROUNDS * 0.01 / SHARE
    choice.choose()
    assert torch.get_num_threads() == 1


def test_measuring_takes_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, n1=3.0, n2=2.0, n4=1.5)
    choice = ThreadChoice(16)
    end_s, measured_s = 1000.0, 0.0
    while machine.now_s < end_s:
        begun_s = machine.now_s
        choice.choose()
        measured_s += machine.now_s - begun_s
        machine.now_s += 0.05
    assert machine.measured > 2 * len(choice.candidates) * ROUNDS
    assert measured_s / end_s <= SHARE
    assert machine.measured <= len(choice.candidates) * ROUNDS * (end_s / EVERY_S + 1)


def test_one_core_needs_no_measurement(monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    machine = Machine(monkeypatch, n1=1.0)
    ThreadChoice(16).choose()
    assert machine.measured == 0
    assert torch.get_num_threads() == 1


def test_a_real_measurement_sets_one_of_the_candidates_in_the_device_thread():
    device = DeviceThread()
    try:
        choice = device.call(ThreadChoice, 64)
        device.call(choice.choose)
        assert device.call(torch.get_num_threads) in choice.candidates
    finally:
        device.close()


def test_what_is_done_between_two_pieces_of_work():
    device, done = DeviceThread(), []
    device.do_between(lambda: done.append("between"))
    device.call(done.append, "work")
    device.call(done.append, "work")
    device.close()
    assert done == ["work", "between"] * 2
