"""Turns a record into a Prompt: its text or chat becomes token ids, once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.config import PromptsSection
from headrace.errors import DataError
from headrace.types import Prompt
from headrace.user_code import time_limit

Message = Mapping[str, Any]
TEMPLATE_S = 10.0  # a chat template that takes longer is taken to run for ever


def prompt_key(names: Collection[str], prompt_field: str, where: str) -> str:
    """The field with the prompt: `prompt_field`, or `messages` if that is left at its default."""
    if prompt_field in names:
        return prompt_field
    if prompt_field == "prompt" and "messages" in names:
        return "messages"
    present = ", ".join(sorted(map(str, names))) or "none"
    raise DataError(f"{where}: no field '{prompt_field}' (prompts.prompt_field); the record has: {present}")


class Renderer:
    """Renders records. `room_tokens` is what the model's context leaves for a prompt."""

    def __init__(self, tokenizer: Any, section: PromptsSection, room_tokens: int = 2**31) -> None:
        self._tokenizer, self._section, self._room_tokens = tokenizer, section, room_tokens
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._overhead_tokens: int | None = None
        if section.chat == "always" and not self._has_template:
            raise DataError("prompts.chat = 'always', but the tokenizer has no chat template; use 'auto' or 'never'")

    def render(self, record: Mapping[str, Any], id: str) -> Prompt:
        key = prompt_key(record, self._section.prompt_field, f"prompt '{id}'")
        content = record[key]
        if isinstance(content, str):
            text, token_ids = content, self._text_ids(content, id)
        else:
            messages = _checked_messages(content, key, id)
            text = next(str(m["content"]) for m in reversed(messages) if m["role"] == "user")
            token_ids = self._chat_ids(messages, id)
        if not text.strip() or not token_ids:
            raise DataError(f"prompt '{id}' is empty (field '{key}')")
        has, most = f"prompt '{id}' has {len(token_ids)} tokens", self._section.max_tokens
        if len(token_ids) > most:
            raise DataError(f"{has}, more than prompts.max_tokens = {most}")
        if len(token_ids) > self._room_tokens:
            raise DataError(
                f"{has}, but the model's context has room for {self._room_tokens} beside the answer; "
                "lower rollout.max_new_tokens, or leave the prompt out"
            )
        fields = {name: value for name, value in record.items() if name != key}
        return Prompt(id=id, text=text, token_ids=np.asarray(token_ids, np.int32), fields=fields)

    def surely_fits(self, record: Mapping[str, Any]) -> bool:
        """Whether a text is so short that `render` would accept it: known without tokenising it."""
        content = record.get(self._section.prompt_field)
        if not isinstance(content, str) or not content.strip():
            return False
        if self._overhead_tokens is None:
            self._overhead_tokens = len(self._text_ids("x", "x"))
        try:
            num_bytes = len(content.encode())
        except UnicodeEncodeError:
            return False
        # A token is at least one byte of text; what the template adds is the same for every text.
        return num_bytes + self._overhead_tokens <= min(self._section.max_tokens, self._room_tokens)

    def _text_ids(self, text: str, id: str) -> list[int]:
        if self._section.chat == "always" or (self._section.chat == "auto" and self._has_template):
            return self._chat_ids([{"role": "user", "content": text}], id)
        if self._section.system:
            raise DataError("prompts.system is set, but prompts are plain text here: no chat template is applied")
        try:
            token_ids = self._tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        except (TypeError, UnicodeError) as error:
            raise DataError(f"prompt '{id}' is not valid Unicode text: {error}") from error
        return [int(token) for token in token_ids]

    def _chat_ids(self, messages: Sequence[Message], id: str) -> list[int]:
        if self._section.chat == "never":
            raise DataError(f"prompt '{id}' is a chat, which needs a chat template, but prompts.chat = 'never'")
        if not self._has_template:
            raise DataError(f"prompt '{id}' is a chat, but the tokenizer has no chat template (prompts.chat)")
        if self._section.system:
            if messages[0]["role"] == "system":
                raise DataError(f"prompt '{id}' begins with a system message of its own, and prompts.system is set")
            messages = [{"role": "system", "content": self._section.system}, *messages]
        try:
            with time_limit(TEMPLATE_S):
                # return_dict=False: the template's own token ids; it already holds every special token.
                token_ids = self._tokenizer.apply_chat_template(
                    list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
                )
        except Exception as error:  # a template is a program, and fails in its own ways
            reason = str(error) or type(error).__name__
            raise DataError(f"prompt '{id}': the tokenizer's chat template refuses it: {reason}") from error
        return [int(token) for token in token_ids]


def _checked_messages(content: Any, key: str, id: str) -> list[Message]:
    if not isinstance(content, list | tuple):
        kind = type(content).__name__
        raise DataError(f"prompt '{id}': field '{key}' must be text or a list of messages, not {kind}")
    for number, message in enumerate(content, 1):
        parts = [message.get("role"), message.get("content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(part, str) for part in parts):
            raise DataError(f"prompt '{id}', message {number} of '{key}': needs 'role' and 'content', both text")
    if content and content[-1]["role"] == "assistant":
        raise DataError(f"prompt '{id}' ends with an assistant message: there is nothing to answer")
    if not any(message["role"] == "user" for message in content):
        raise DataError(f"prompt '{id}' has no user message")
    return list(content)
