"""Limits on code that is not ours."""

import sys

import pytest

from headrace.user_code import TooLongError, time_limit


def endless() -> None:
    while True:
        pass


class EndsNever:
    def __del__(self) -> None:
        endless()


def test_a_time_limit_holds_where_a_destructor_took_the_exception(monkeypatch: pytest.MonkeyPatch):
    """Python only reports an exception that leaves a destructor."""

    def both() -> None:
        EndsNever()
        endless()

    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_type))
    with pytest.raises(TooLongError, match=r"it did not come to an end in 0\.05 s"), time_limit(0.05):
        both()
    assert reported == [TooLongError]
