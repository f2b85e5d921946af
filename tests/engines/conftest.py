from __future__ import annotations

import pytest

from headrace.policy.policy import Policy


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends an answer."""
    monkeypatch.setattr(Policy, "eos_ids", property(lambda self: frozenset()))
