"""The plan page's form: what can be typed about a run that does not exist yet, and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError, HeadraceError
from headrace.insight.hardware import find_device, sized_shape
from headrace.insight.planner import Question
from headrace.insight.scenario import amount, seconds
from headrace.insight.workload import LogNormal

MOST_ANSWERS = 16_384  # of a step: the more there are, the longer it takes to work a plan out


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Something to type; `value` is what it holds at first."""

    label: str
    says: str
    value: str
    read: Callable[[str], Any]

    def problem(self, text: str | None) -> str | None:
        try:
            self.read(text or "")
        except HeadraceError as error:
            return str(error)
        return None


def _number(low: float, high: float, read: Callable[[str], float] = amount) -> Callable[[str], float]:
    """Reads a number from `low` to `high`; a whole one, if they are."""

    def within(text: str) -> float:
        value = read(text)
        if not low <= value <= high:
            raise ConfigError(f"{text.strip()} is out of range: from {low:,g} to {high:,g}")
        if isinstance(high, int) and value != int(value):
            raise ConfigError(f"{text.strip()} is not a whole number")
        return type(high)(value)

    return within


FIELDS = {
    "num_devices": Field(label="GPUs", says="how many", value="8", read=_number(1, 100_000)),
    "model": Field(label="model size", says="7B, 500M; a mixture: 235B-A22B", value="7B", read=sized_shape),
    "num_prompts": Field(label="prompts", says="per step", value="64", read=_number(1, MOST_ANSWERS)),
    "num_samples": Field(label="answers", says="per prompt", value="16", read=_number(1, 4096)),
    "mean_tokens": Field(label="tokens", says="of an answer, on average: 512, 8k", value="1k", read=_number(1, 1e7)),
    "cv": Field(label="spread of lengths", says="deviation over mean; 0: all alike", value="1", read=_number(0, 10.0)),
    "reward_s": Field(
        label="time of a verdict",
        says="95 in 100 take less: 4s, 200ms",
        value="0s",
        read=_number(0, 86_400.0, seconds),
    ),
    "max_lag": Field(label="largest lag", says="updates behind; 0: on-policy", value="4", read=_number(0, 64)),
}


def question(texts: Mapping[str, str], *, device: str, reference: bool, adapter: bool) -> Question:
    wrong = [field.label for name, field in FIELDS.items() if field.problem(texts[name])]
    if wrong:
        raise ConfigError(f"Put right what is marked above: {', '.join(wrong)}.")
    read = {name: field.read(texts[name]) for name, field in FIELDS.items()}
    lengths = LogNormal(read.pop("mean_tokens"), read.pop("cv"))
    asked = Question(device=find_device(device), lengths=lengths, reference=reference, adapter=adapter, **read)
    if asked.num_answers > MOST_ANSWERS:
        raise ConfigError(f"{asked.num_answers:,} answers in a step are too many to plan: at most {MOST_ANSWERS:,}")
    return asked
