"""Keep a library quiet during a call of ours. Its settings are the user's: afterwards they are as they were."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(logger_name: str, warning: str = "") -> Iterator[None]:
    """Inside, the logger reports only errors, and no Python warning whose text begins with `warning` is shown."""
    logger = logging.getLogger(logger_name)
    before = logger.level
    with warnings.catch_warnings():
        if warning:
            warnings.filterwarnings("ignore", message=warning)
        # A level that is high enough already may have been set by this function in another thread, which resets it.
        if before < logging.ERROR:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            if before < logging.ERROR:
                logger.setLevel(before)
