"""One process at a time trains in a directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.errors import RunError
from headrace.ledger.database import claimed


def test_a_second_claim_is_refused_and_names_the_first(tmp_path: Path):
    with claimed(tmp_path):
        with pytest.raises(RunError, match=f"process {os.getpid()} is training there"), claimed(tmp_path):
            pass
        with pytest.raises(RunError, match="in use"), claimed(tmp_path):
            pass
    with claimed(tmp_path):
        pass


def test_an_error_while_training_is_not_taken_for_one_of_the_lock(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="problems"), claimed(tmp_path):
        (tmp_path / "problems.jsonl").read_text()


def test_a_directory_that_is_not_there_cannot_be_claimed(tmp_path: Path):
    with pytest.raises(RunError, match="Cannot write into"), claimed(tmp_path / "nowhere"):
        pass
