"""Grammars that answers must follow: which tokens may come next. Needs the library llguidance."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import numpy.typing as npt

from headrace.errors import ChatError

MOST_COMPILED = 256


class Grammars:
    """Grammars (in llguidance's form of Lark) for one tokenizer. `eos_ids` end an answer that is complete."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocab_size = max(vocab_size, len(tokenizer))
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=list(eos_ids))
        self._matcher = lru_cache(MOST_COMPILED)(self._compiled)

    def check(self, grammar: str) -> None:
        self._matcher(grammar)

    def allowed(self, grammar: str, sampled: Sequence[int]) -> npt.NDArray[np.bool_]:
        matcher = self._matcher(grammar).deep_copy()
        if len(sampled) and not matcher.consume_tokens([int(id) for id in sampled]):
            raise ChatError(f"what was sampled does not follow its grammar: {matcher.get_error()}")
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)

    def _compiled(self, grammar: str) -> Any:
        matcher = llguidance.LLMatcher(self._tokenizer, llguidance.grammar_from("lark", grammar), log_level=0)
        if matcher.is_error():
            raise ChatError(f"this schema cannot be followed: {matcher.get_error().splitlines()[0]}")
        return matcher
