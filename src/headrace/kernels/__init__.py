"""Triton kernels: batch-invariant (one fixed order of sums), or faster than torch's operations.

Triton is installed with torch on machines with a GPU. Elsewhere the modules here are None.
"""

import importlib.util
from typing import TYPE_CHECKING

AVAILABLE = importlib.util.find_spec("triton") is not None
if AVAILABLE or TYPE_CHECKING:
    from headrace.kernels import adamw, attention, block, softmax
else:
    adamw = attention = block = softmax = None

__all__ = ["AVAILABLE", "adamw", "attention", "block", "softmax"]
