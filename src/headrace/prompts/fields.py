"""Which field of a record holds the prompt."""

from __future__ import annotations

from collections.abc import Collection

from headrace.errors import DataError


def prompt_key(names: Collection[str], prompt_field: str, where: str) -> str:
    """The field with the prompt: `prompt_field`, or `messages` for a chat when nothing else was asked for."""
    if prompt_field in names:
        return prompt_field
    if prompt_field == "prompt" and "messages" in names:
        return "messages"
    present = ", ".join(sorted(map(str, names))) or "none"
    raise DataError(f"{where}: no field '{prompt_field}' (prompts.prompt_field); the record has: {present}")
