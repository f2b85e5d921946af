"""Tokens as text, for readers. It takes the tokenizer's file alone: no model is loaded, and no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
_BROKEN = "\ufffd"  # stands for bytes that are no whole character


class TokenTexts:
    """What token ids say, by a run's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def find(cls, directories: Iterable[Path]) -> TokenTexts | None:
        """By the first of these directories whose tokenizer loads."""
        for directory in directories:
            file = directory / TOKENIZER_FILE
            if file.is_file():
                try:
                    return cls(Tokenizer.from_file(str(file)))
                except Exception:  # the library raises nothing narrower for a file it cannot read
                    continue
        return None

    def text(self, token_ids: Sequence[int]) -> str:
        """All of them together, end tokens and the like too."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """What each token adds to the text. Of a token that is part of a character, its name in the vocabulary."""
        found, before = [], ""
        for position, token_id in enumerate(token_ids):
            # many tokenizers take the space off the first token of a text, so each is read behind its neighbour
            together = self.text(token_ids[max(0, position - 1) : position + 1])
            if together.startswith(before) and _BROKEN not in together:
                found.append(together[len(before) :])
            else:
                found.append(str(self._tokenizer.id_to_token(token_id) or ""))
            before = self.text([token_id])
        return found
