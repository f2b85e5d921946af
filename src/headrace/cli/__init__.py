"""The commands, and what they print."""

# isort: off
from headrace.cli import train, runs, insight  # each adds its commands, in the order of the help
from headrace.cli.app import app

__all__ = ["app", "insight", "runs", "train"]
