"""Triton kernels for what torch has no good operation for. Imported only where there is a CUDA device."""
