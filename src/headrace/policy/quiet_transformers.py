"""Loading and saving models without the log lines and progress bars of `transformers`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from headrace.user_code import quiet


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


@quiet_transformers()
def save_model(model: Any, tokenizer: Any, directory: Path, weights: dict[str, Any] | None = None) -> None:
    """Write a model directory. Its files have the mode that the umask gives.

    safetensors writes files that nobody else may read, whatever the umask is.
    """
    model.save_pretrained(directory, state_dict=weights)
    tokenizer.save_pretrained(directory)
    mode = (directory / "config.json").stat().st_mode  # a file that was just opened and written
    for file in directory.glob("*.safetensors"):
        file.chmod(mode)
