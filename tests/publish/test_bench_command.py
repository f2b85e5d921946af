"""`headrace bench sync`: every encoding by every transport, for people and for programs."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import app


def bench(*words: str) -> Any:
    return CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(app, ["bench", "sync", *words])


def test_every_encoding_and_transport_is_measured() -> None:
    pytest.importorskip("ray")
    result = bench("--params", "300k", "--receivers", "2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    moved = {(one["transport"], one["encoding"]): one["times"]["transfer_bytes"] for one in found["publications"]}
    assert len(moved) == 9
    for transport in ("disk", "collective", "object_store"):
        assert moved[transport, "full"] == found["full_bytes"]
        assert 0 < moved[transport, "delta"] < 0.05 * found["full_bytes"]
        assert 0 < moved[transport, "adapter"] < found["full_bytes"]
    assert all(one["times"]["apply_bytes"] == one["times"]["transfer_bytes"] for one in found["publications"])
    assert min(found["copy_s"], found["save_and_load_s"]) > 0.0


def test_the_table_fits_a_terminal_and_says_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace.publish.object_store_ray", None)  # as if it were not there
    result = bench("--params", "100k")
    assert result.exit_code == 0, result.output
    assert "The object store was left out: ray is not installed." in result.output
    assert "…" not in result.output
    assert [line.split()[:2] for line in result.output.splitlines()[1:7]] == [
        [transport, encoding] for transport in ("disk", "collective") for encoding in ("full", "delta", "adapter")
    ]


@pytest.mark.parametrize("params", ["0", "9G", "many"])
def test_a_size_that_cannot_be_measured_is_refused(params: str) -> None:
    result = bench("--params", params)
    assert result.exit_code == 2
    assert f"--params {params}" in result.stderr or f"--params '{params}'" in result.stderr
