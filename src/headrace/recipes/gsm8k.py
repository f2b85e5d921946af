"""The reward of gsm8k.toml."""

from __future__ import annotations

import re

from headrace.types import Completion

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(completion: Completion) -> float:
    """One if the last number of the answer is that of the solution, which ends with `#### number`."""
    found = NUMBER.findall(completion.text)
    return float(bool(found) and value(found[-1]) == value(completion.fields["answer"].rpartition("####")[2]))


def value(text: str) -> float:
    return float(text.replace(",", ""))
