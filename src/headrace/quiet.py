"""Keep a library quiet during a call of ours, and restore its settings afterwards."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(logger_name: str, warning: str = "") -> Iterator[None]:
    """Inside, the logger reports errors only; warnings that begin with `warning` are ignored."""
    logger = logging.getLogger(logger_name)
    before = logger.level
    with warnings.catch_warnings():
        if warning:
            warnings.filterwarnings("ignore", message=warning)
        # A level this high may have been set here by another thread, which will restore it.
        if before < logging.ERROR:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            if before < logging.ERROR:
                logger.setLevel(before)
