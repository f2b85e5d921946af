"""The plan page's form: what can be typed about a run of the future, and how it is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError, HeadraceError
from headrace.insight.hardware import find_device, sized_shape
from headrace.insight.planner import Question
from headrace.insight.scenario import amount, seconds
from headrace.insight.workload import LogNormal

MOST_ANSWERS = 16_384  # of a step: the more there are, the longer it takes to work a plan out


@dataclass(frozen=True, slots=True)
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
    "num_devices": Field("GPUs", "how many", "8", _number(1, 100_000)),
    "model": Field("model size", "7B, 500M; a mixture: 235B-A22B", "7B", sized_shape),
    "num_prompts": Field("prompts", "per step", "64", _number(1, MOST_ANSWERS)),
    "num_samples": Field("answers", "per prompt", "16", _number(1, 4096)),
    "mean_tokens": Field("tokens", "of an answer, on average: 512, 8k", "1k", _number(1, 1e7)),
    "cv": Field("spread of lengths", "deviation over mean; 0: all alike", "1", _number(0, 10.0)),
    "reward_s": Field("time of a verdict", "95 in 100 take less: 4s, 200ms", "0s", _number(0, 86_400.0, seconds)),
    "max_lag": Field("largest lag", "updates behind; 0: on-policy", "4", _number(0, 64)),
}


def question(texts: Mapping[str, str], *, device: str, reference: bool, adapter: bool) -> Question:
    wrong = [field.label for name, field in FIELDS.items() if field.problem(texts[name])]
    if wrong:
        raise ConfigError(f"Put right what is marked above: {', '.join(wrong)}.")
    read = {name: field.read(texts[name]) for name, field in FIELDS.items()}
    lengths = LogNormal(read.pop("mean_tokens"), read.pop("cv"))
    asked = Question(device=find_device(device), lengths=lengths, reference=reference, adapter=adapter, **read)
    if asked.num_answers > MOST_ANSWERS:
        many = f"{asked.num_answers:,} answers in a step are too many to plan"
        raise ConfigError(f"{many}: at most {MOST_ANSWERS:,}")
    return asked
