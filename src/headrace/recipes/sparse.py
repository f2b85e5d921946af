"""Prompts and reward of sparse.toml: a cipher that has to be found, with a verdict on whole words only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from headrace.types import Completion

PLAIN, SECRET, LENGTH = "pqrs", "bdac", 5


def words(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Words of five letters. Worked examples have ciphers of their own: who imitates them is hardly ever right."""
    rng = random.Random(seed)
    for _ in range(count):
        word, other = "".join(rng.choices(PLAIN, k=LENGTH)), "".join(rng.sample(SECRET, len(SECRET)))
        yield {"prompt": f"{word}=", "answer": written(word, SECRET), "worked": written(word, other)}


def written(word: str, cipher: str) -> str:
    return word.translate(str.maketrans(PLAIN, cipher))


def score(completion: Completion) -> float:
    return float(completion.text == completion.fields["answer"])
