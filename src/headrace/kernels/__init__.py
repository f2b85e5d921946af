"""Triton kernels for what torch has no good operation for. Triton comes with torch where there is a GPU to run it."""

import importlib.util

AVAILABLE = importlib.util.find_spec("triton") is not None
