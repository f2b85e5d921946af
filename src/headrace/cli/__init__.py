"""The commands, and what they print."""

from __future__ import annotations

# isort: off
from headrace.cli import train, runs, insight, bench  # each adds its commands; the help lists them in this order

# isort: on
from headrace.cli.app import app

__all__ = ["app", "bench", "insight", "runs", "train"]
