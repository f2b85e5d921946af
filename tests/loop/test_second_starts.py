"""A start that is killed, and then the start of its resumption, too."""

from __future__ import annotations

import json

import pytest
from tiny_runs import Workshop

from headrace import api
from headrace.ledger.files import SETTINGS, SUMMARY, prepare_run_dir
from headrace.ledger.ledger import Ledger


class Killed(BaseException):
    """In place of a SIGKILL right after the ledger was made."""


def test_a_resumption_that_is_killed_after_it_made_the_ledger_can_be_resumed(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    config = workshop.config("second-start", "loop.steps=2")
    run = prepare_run_dir(config)  # killed before it had a ledger
    create = Ledger.create

    def dies(*arguments: object, **named: object) -> Ledger:
        create(*arguments, **named).close()  # type: ignore[arg-type]
        raise Killed

    monkeypatch.setattr(Ledger, "create", dies)
    with pytest.raises(Killed):
        api.resume(run)
    monkeypatch.undo()
    assert (run / SETTINGS).exists()
    api.resume(run)
    assert json.loads((run / SUMMARY).read_text())["finished"]
