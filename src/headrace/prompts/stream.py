"""Prompts to train on in a resumable order, and held-out prompts that are never among them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from headrace.config import PromptsSection
from headrace.errors import DataError
from headrace.prompts.render import Renderer, prompt_key
from headrace.prompts.source import default_reward, is_generated, open_source
from headrace.types import Prompt

EVAL_SEED_OFFSET = 1_000_003  # a generated eval_source must not repeat the training problems
NUM_CHECKED_AHEAD = 256  # records that are checked before the run if the task is slow to make them
CURSOR_STATE = ("num_prompts", "seed", "shuffle", "serial")


@dataclass(frozen=True)
class Drawn:
    """The draw number `serial` of a run, which takes the record at `index`."""

    serial: int
    epoch: int
    index: int


@dataclass
class Cursor:
    """Draws every record once per epoch, in an order that follows from `seed` and the epoch.

    Example:
        Cursor(num_prompts=100, seed=0, shuffle=False).next() == Drawn(serial=0, epoch=0, index=0)
    """

    num_prompts: int
    seed: int
    shuffle: bool
    serial: int = 0  # of the next draw
    _order: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, np.int64))  # of an epoch

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError("a cursor needs at least one prompt")

    def next(self) -> Drawn:
        self.serial += 1
        return self.at(self.serial - 1)

    def at(self, serial: int) -> Drawn:
        """What the draw with this serial is or will be; the cursor stays where it is."""
        epoch, position = divmod(serial, self.num_prompts)
        if self.shuffle and self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_prompts)
        return Drawn(serial, epoch, int(self._order[1][position]) if self.shuffle else position)

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in CURSOR_STATE}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        return cls(**{name: state[name] for name in CURSOR_STATE})


class PromptStream:
    """All prompts of a run. Every record is checked before the first is drawn."""

    def __init__(self, section: PromptsSection, tokenizer: Any, seed: int, *, room_tokens: int = 2**31) -> None:
        self._section = section
        self._renderer = Renderer(tokenizer, section, room_tokens)
        self._source = open_source(section.source, count=section.count, seed=seed, prompt_field=section.prompt_field)
        num_train = self._num_train()
        self.default_reward = default_reward(section.source)
        self.held_out = self._hold_out(num_train, seed)
        self._train, self._fingerprint = self._check(num_train)
        self._cursor = Cursor(len(self._train), seed, section.shuffle)

    @property
    def num_train(self) -> int:
        return len(self._train)

    def next(self) -> tuple[int, Prompt]:
        """The next prompt to train on and its serial."""
        draw = self._cursor.next()
        return draw.serial, self._prompt(int(self._train[draw.index]))

    def at(self, serial: int) -> Prompt:
        """The prompt that was or will be drawn with this serial; the stream stays where it is."""
        return self._prompt(int(self._train[self._cursor.at(serial).index]))

    def worked(self, n: int, rng: np.random.Generator) -> list[tuple[Prompt, str]]:
        """`n` training prompts, each with the solution in its field `worked`."""
        examples = []
        for i in rng.integers(len(self._train), size=n):
            prompt = self._prompt(int(self._train[i]))
            solution = prompt.fields.get("worked")
            if not isinstance(solution, str) or not solution:
                raise DataError(
                    f"warmstart.steps needs records with a text field 'worked'; prompt '{prompt.id}' of "
                    f"{self._section.source} has: {', '.join(sorted(prompt.fields)) or 'nothing but its prompt'}"
                )
            examples.append((prompt, solution))
        return examples

    def state(self) -> dict[str, Any]:
        """JSON that `restore` continues from; with another `serial`, the state before that draw."""
        return {**self._cursor.state(), "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken; other prompts or another order are refused."""
        now = self.state()
        changed = [name for name in ("num_prompts", "fingerprint", "seed", "shuffle") if state[name] != now[name]]
        if changed:
            was = ", ".join(f"{name} was {state[name]}, is {now[name]}" for name in changed)
            raise DataError(f"the prompts of {self._section.source} are not those of the checkpoint: {was}")
        self._cursor = Cursor.restore(state)

    def _num_train(self) -> int:
        """Records before the held-out ones at the end of the source."""
        total, held = len(self._source), 0 if self._section.eval_source else self._section.eval_count
        if total <= held:
            raise DataError(
                f"{self._section.source} has {total} records and prompts.eval_count = {held} of them are held "
                "out, which leaves none to train on; lower prompts.eval_count or set prompts.eval_source"
            )
        return total - held

    def _hold_out(self, num_train: int, seed: int) -> list[Prompt]:
        section, held = self._section, self._section.eval_count
        if not section.eval_source:
            # An id of the record's own stays: ids are unique within one source.
            tail = ((i, self._source[i]) for i in range(num_train, num_train + held))
            return [self._renderer.render(record, _id(record, "eval", i)) for i, record in tail]
        seed, name = seed + EVAL_SEED_OFFSET, section.eval_source
        source = open_source(name, count=held, seed=seed, prompt_field=section.prompt_field)
        if len(source) < held:
            raise DataError(
                f"prompts.eval_source = '{name}' has {len(source)} records, fewer than prompts.eval_count = {held}"
            )
        # never the id of a training prompt, though both files may number their records alike
        own = [source[i].get("id") for i in range(held)]
        ids = [f"eval-{i if id is None else id}" for i, id in enumerate(own)]
        return [self._renderer.render(source[i], id) for i, id in enumerate(ids)]

    def _prompt(self, i: int) -> Prompt:
        record = self._source[i]
        return self._renderer.render(record, _id(record, "train", i))

    def _check(self, num_train: int) -> tuple[npt.NDArray[np.int64], str]:
        """Positions to train on, and their checksum. Refuses what `render` would refuse later."""
        source, section = self._source, self._section
        is_builtin = section.source == "arithmetic"
        is_slow = is_generated(section.source) and not is_builtin
        # Small problems come up twice in a random task: one that is held out is not trained on.
        held_texts = {prompt.text for prompt in self.held_out} if is_builtin else set()
        owner = {prompt.id: "a held-out record" for prompt in self.held_out}
        keep, checksum = [], zlib.crc32(section.source.encode()) if is_slow else 0
        for i in range(min(num_train, NUM_CHECKED_AHEAD) if is_slow else num_train):
            record = source[i]
            id = _id(record, "train", i)
            if not self._renderer.surely_fits(record):
                self._renderer.render(record, id)
            if record.get("id") is not None and owner.setdefault(id, f"record {i + 1}") != f"record {i + 1}":
                raise DataError(f"{section.source}: record {i + 1} has the id '{id}', and so has {owner[id]}")
            content = str(record[prompt_key(record, section.prompt_field, f"prompt '{id}'")])
            if content not in held_texts:
                keep.append(i)
            checksum = zlib.crc32(f"{id}\0{content}\0".encode(errors="replace"), checksum)
        if not keep:
            raise DataError(f"{section.source}: every prompt is also held out; raise prompts.count")
        return np.arange(num_train) if is_slow else np.asarray(keep, np.int64), f"{checksum:08x}"


def _id(record: Mapping[str, Any], split: str, i: int) -> str:
    """The record's own id, or its place in the split."""
    id = str(record["id"]) if record.get("id") is not None else f"{split}-{i}"
    if not id.isascii() and id != id.encode(errors="replace").decode():
        raise DataError(f"record {i + 1} has the id {id!r}, which is not valid Unicode text")
    return id
