"""Exact mode needs this before the process's first matrix product."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
