"""The commands, and what they print."""

# isort: off
from headrace.cli import train, runs, insight  # each adds its commands; the help has them in this order
from headrace.cli.app import app

__all__ = ["app", "insight", "runs", "train"]
