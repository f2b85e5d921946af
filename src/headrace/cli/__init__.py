"""The commands, and what they print."""

from __future__ import annotations

# isort: off
from headrace.cli import train, runs, insight  # each adds its commands
from headrace.cli.app import app

__all__ = ["app", "insight", "runs", "train"]
