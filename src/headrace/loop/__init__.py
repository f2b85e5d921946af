"""The loop, and evaluation."""
