"""Headrace trains language models by reinforcement learning."""

__version__ = "0.1.0"
