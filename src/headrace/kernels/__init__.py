"""Triton kernels: batch-invariant (one fixed order of sums), or faster than torch's operations.

Triton is installed with torch on machines with a GPU.
"""

import importlib.util

AVAILABLE = importlib.util.find_spec("triton") is not None
