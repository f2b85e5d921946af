"""Loading and saving models without the log lines and progress bars of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from headrace.quiet import quiet


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, `transformers` reports errors only; afterwards its settings are as they were."""
    had_bars, had_no_downloads = is_progress_bar_enabled(), are_progress_bars_disabled()
    if had_bars:
        disable_progress_bar()
    try:
        with quiet("transformers"):
            yield
    finally:
        if had_bars:
            enable_progress_bar()
            if had_no_downloads:  # one switch of `transformers` turns on the bars of downloads too
                disable_progress_bars()
