"""A start that is killed, and then the start of its resumption, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import Workshop

from headrace import api
from headrace.errors import RunError
from headrace.ledger.files import SETTINGS, SUMMARY, prepare_run_dir
from headrace.ledger.ledger import Ledger
from headrace.runs.audit import audit


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


def test_a_start_that_was_to_replace_a_run_and_was_killed_gives_it_back_whole(workshop: Workshop):
    run = Path(workshop.config("replaced", "loop.steps=2").run.dir)
    api.train(workshop.config("replaced", "loop.steps=2"))
    known = {name: (run / name).read_text() for name in (SETTINGS, SUMMARY)}
    prepare_run_dir(workshop.config("replaced", "loop.steps=3", "run.overwrite=true"))  # killed before it had a ledger
    with pytest.raises(RunError, match="already holds a run"):
        api.resume(run)
    assert {name: (run / name).read_text() for name in known} == known
    assert audit(run) == []
