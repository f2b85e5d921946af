"""Runs that a fault breaks off, and what must hold once they are resumed without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Workshop, rows_of, same_bits, weights

from headrace import api
from headrace.ledger.ledger import Amount
from headrace.runs.audit import audit, books

STEPS = 4
SETTINGS = (f"loop.steps={STEPS}", "recovery.every_steps=2")


class Notes(api.Watcher):
    """Keeps what the user is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def break_off(workshop: Workshop, name: str, error: type[Exception], message: str, *settings: str) -> Path:
    """Train in `name` until the error that must come; returns the run, whose books must balance."""
    with pytest.raises(error, match=message):
        api.train(workshop.config(name, *SETTINGS, *settings))
    run = workshop.directory / name
    assert audit(run) == []
    return run


def assert_resumes_to(run: Path, unbroken: Path) -> list[str]:
    """Resumed, the run ends as if nothing had happened; returns what the user was told."""
    notes = Notes()
    assert api.resume(run, notes)["finished"] is True
    assert audit(run) == []
    assert books(run).in_flight == books(run).buffered == Amount()
    assert [row.step for row in rows_of(run)] == list(range(1, STEPS + 1))
    assert [row.loss for row in rows_of(run)] == [row.loss for row in rows_of(unbroken)]
    assert books(run).trained == books(unbroken).trained
    assert same_bits(weights(run), weights(unbroken))
    return notes.texts


def on_call(number: int, original: Callable[..., Any], fault: Callable[..., Any]) -> Callable[..., Any]:
    """The original, but its `number`-th call (from 1) goes to the fault instead, with the original before it."""
    calls = 0

    def called(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        return fault(original, *args, **more) if calls == number else original(*args, **more)

    return called
