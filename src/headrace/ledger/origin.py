"""What a run computes with: its settings and its users' code, as the ledger knows them.

A restart that finds something else refuses to mix the two, unless the change was asked for by an
override; then the ledger books the change.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from headrace.config import Config
from headrace.config_file import values
from headrace.errors import RunError
from headrace.ledger.ledger import Ledger
from headrace.user_code import source_hash

# where and on how many workers: free to change
WHERE = (
    *("model.threads", "rollout.workers", "reward.workers", "episode.workers", "learner.ranks"),
    *("publish.", "place.", "ledger."),
)
FIXED = ("run.", "warmstart.", "learner.lora_rank")  # the steps so far depend on them for good
_ORIGIN, _CHANGES = "origin", "changes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A setting that a restart changed. Example: Change(step=40, key="learner.lr", before="0.001", after="0.0001")."""

    step: int
    key: str
    before: str
    after: str


def origin_of(config: Config, reward: str = "") -> dict[str, str]:
    """By key, every setting that decides what is computed; of functions also a digest of their file.

    `reward` is the name of a reward function that is a Python object.
    """
    found = {key: text for key, text in values(config).items() if not key.startswith((*WHERE, "run.dir", "run.over"))}
    code_of = {
        "reward.function": [config.reward.function],
        "episode.environment": [config.episode.environment],
        "episode.agent": [config.episode.agent],
        "buffer.filters": config.buffer.filters,
    }
    for key, specs in code_of.items():
        if code := [digest[:16] for spec in specs if (digest := source_hash(spec))]:
            found[key] += f" with code {' '.join(code)}"
    if reward:
        found["reward.function"] = f"{reward}, a Python object"
    return found


def changes(ledger: Ledger) -> list[Change]:
    return [Change(**change) for change in json.loads(ledger.remembered().get(_CHANGES, "[]"))]


def _unbooked(ledger: Ledger, config: Config, reward: str) -> list[Change]:
    known = ledger.remembered().get(_ORIGIN)
    before, after = json.loads(known or "{}"), origin_of(config, reward)
    step = len(ledger.rows())
    return [
        Change(step=step, key=key, before=before.get(key, ""), after=after[key])
        for key in after
        if before.get(key, after[key]) != after[key]  # a setting that is new has its default
    ]


def refuse_unasked(ledger: Ledger, config: Config, overrides: Sequence[str], reward: str = "") -> None:
    asked = {override.partition("=")[0].strip() for override in overrides}
    if silent := [change for change in _unbooked(ledger, config, reward) if change.key not in asked]:
        told = "".join(f"\n  {c.key} was {c.before}, and is {c.after}" for c in silent)
        words = " ".join(f"{c.key}={values(config)[c.key]}" for c in silent)
        raise RunError(
            f"{ledger.run_dir} has changed since step {silent[0].step}:{told}\nTake that back, or ask for it: "
            f"headrace resume {ledger.run_dir} {words}"
        )


def book_origin(ledger: Ledger, config: Config, reward: str = "") -> None:
    """Book what the run computes with from here on, and what of it has changed."""
    with ledger.writing():
        if found := _unbooked(ledger, config, reward):
            ledger.remember(_CHANGES, json.dumps([asdict(change) for change in (*changes(ledger), *found)]))
        ledger.remember(_ORIGIN, json.dumps(origin_of(config, reward)))
