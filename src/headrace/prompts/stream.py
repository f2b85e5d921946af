"""Prompts to train on in a resumable order, and held-out prompts that are never among them.

`PromptStream` draws a record, `Renderer` makes it a Prompt: its text or chat as token ids.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.config import PromptsSection
from headrace.errors import DataError
from headrace.prompts.select import Selection
from headrace.prompts.source import open_source, prompt_key
from headrace.roles import PromptSource
from headrace.types import Known, Outcomes, Prompt
from headrace.user_code import TEMPLATE_S, names_file, time_limit

Message = Mapping[str, Any]

EVAL_SEED_OFFSET = 1_000_003  # a generated eval_source must not repeat the training problems


class Renderer:
    """Renders records. `room_tokens` is what the model's context leaves for a prompt."""

    def __init__(self, tokenizer: Any, section: PromptsSection, room_tokens: int = 2**31) -> None:
        self._tokenizer, self._section, self._room_tokens = tokenizer, section, room_tokens
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._overhead_tokens: int | None = None
        if section.chat == "always" and not self._has_template:
            raise DataError("prompts.chat = 'always', but the tokenizer has no chat template; use 'auto' or 'never'")

    def render(self, record: Mapping[str, Any], id: str) -> Prompt:
        where, most, room = f"prompt '{id}'", self._section.max_tokens, self._room_tokens
        key = prompt_key(record, self._section.prompt_field, where)
        content, messages = record[key], []
        if isinstance(content, str):
            text, token_ids = content, self._text_ids(content, where)
        else:
            messages = _checked_messages(content, key, where)
            text = next(str(m["content"]) for m in reversed(messages) if m["role"] == "user")
            token_ids = self._chat_ids(messages, where)
        if not text.strip() or not token_ids:
            raise DataError(f"{where} is empty (field '{key}')")
        has = f"{where} has {len(token_ids)} tokens"
        if len(token_ids) > most:
            raise DataError(f"{has}, more than prompts.max_tokens = {most}")
        if len(token_ids) > room:
            told = f"the model's context has room for {room} beside the answer; lower"
            raise DataError(f"{has}, but {told} rollout.max_new_tokens, or leave the prompt out")
        fields = {name: value for name, value in record.items() if name != key}
        ids = np.asarray(token_ids, np.int32)
        return Prompt(id=id, text=text, token_ids=ids, fields=fields, messages=tuple(messages))

    def surely_fits(self, record: Mapping[str, Any]) -> bool:
        """Whether a text is so short that `render` would accept it: known without tokenising it."""
        content = record.get(self._section.prompt_field)
        if not isinstance(content, str) or not content.strip():
            return False
        if self._overhead_tokens is None:
            self._overhead_tokens = len(self._text_ids("x", "prompt 'x'"))
        try:
            num_bytes = len(content.encode())
        except UnicodeEncodeError:
            return False
        # A token is at least one byte of text; what the template adds is the same for every text.
        return num_bytes + self._overhead_tokens <= min(self._section.max_tokens, self._room_tokens)

    def _text_ids(self, text: str, where: str) -> list[int]:
        if self._section.chat == "always" or (self._section.chat == "auto" and self._has_template):
            return self._chat_ids([{"role": "user", "content": text}], where)
        if self._section.system:
            raise DataError("prompts.system is set, but prompts are plain text here: no chat template is applied")
        try:
            return list(self._tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
        except (TypeError, UnicodeError) as error:
            raise DataError(f"{where} is not valid Unicode text: {error}") from error

    def _chat_ids(self, messages: Sequence[Message], where: str) -> list[int]:
        if self._section.chat == "never":
            raise DataError(f"{where} is a chat, which needs a chat template, but prompts.chat = 'never'")
        if not self._has_template:
            raise DataError(f"{where} is a chat, but the tokenizer has no chat template (prompts.chat)")
        if self._section.system:
            if messages[0]["role"] == "system":
                raise DataError(f"{where} begins with a system message of its own, and prompts.system is set")
            messages = [{"role": "system", "content": self._section.system}, *messages]
        try:
            with time_limit(TEMPLATE_S):
                # return_dict=False: the template's own token ids, with every special token
                token_ids = self._tokenizer.apply_chat_template(
                    list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
                )
        except Exception as error:  # a template is a program, and fails in its own ways
            reason = str(error) or type(error).__name__
            raise DataError(f"{where}: the tokenizer's chat template refuses it: {reason}") from error
        return [int(token) for token in token_ids]


class PromptStream:
    """All prompts of a run. Every record is checked before the first is drawn.

    Unless `prompts.select` goes by what is known of them, a record is drawn once per epoch, in an
    order that follows from `seed` and the epoch.
    """

    def __init__(
        self, section: PromptsSection, tokenizer: Any, seed: int, *, room_tokens: int = 2**31, worked_source: str = ""
    ) -> None:
        self._section, self._seed = section, seed
        self._renderer = Renderer(tokenizer, section, room_tokens)
        name, field = section.source, section.prompt_field
        opened = partial(open_source, count=section.count, seed=seed, prompt_field=field)
        self._source = opened(name)
        held, total = 0 if section.eval_source else section.eval_count, len(self._source)
        if total <= held:
            told = f"prompts.eval_count = {held} of them are held out, which leaves none to train on"
            helps = "lower prompts.eval_count or set prompts.eval_source"
            raise DataError(f"{name} has {total} records and {told}; {helps}")
        self.held_out = self._hold_out(total - held, opened)  # at the end of the source
        self._train, self._fingerprint = self._check(total - held)
        self._examples = self._source, self._train
        if worked_source:
            source = opened(worked_source, setting="warmstart.source")
            self._examples = source, np.arange(len(source))
            for record, id, _ in (self._solved(source, i, np.random.default_rng(0)) for i in range(len(source))):
                if not self._renderer.surely_fits(record):
                    self._renderer.render(record, id)
        self.num_train = len(self._train)
        self._serial = 0  # of the next draw
        self._selection: Selection | None = None
        if section.select not in ("uniform", "in-order"):
            order = partial(_order, seed, num=self.num_train)
            self._selection = Selection(section.select, self.num_train, self._known, order)

    def next(self) -> tuple[int, Prompt]:
        serial, self._serial = self._serial, self._serial + 1
        if self._selection is not None:
            self._selection.draw()
        return serial, self.at(serial)

    def at(self, serial: int) -> Prompt:
        """The prompt that was drawn with this serial or, in a fixed order, will be."""
        epoch, position = divmod(serial, self.num_train)
        if self._selection is not None:
            position = self._selection.drawn[serial]
        elif self._section.select == "uniform":
            position = _order(self._seed, epoch, self.num_train)[position]
        return self._prompt(int(self._train[position]))

    def heed(self, outcomes: Callable[[Iterable[int]], Outcomes]) -> None:
        """Let the next draws depend on groups that are over; `outcomes(serials)` tells of them."""
        if self._selection is not None:
            self._selection.heed(outcomes(self._selection.awaited))

    def worked(self, n: int, rng: np.random.Generator) -> list[tuple[Prompt, Any]]:
        """`n` examples for supervised steps, each with its solution: a text, or a chat."""
        source, places = self._examples
        at = places[rng.integers(len(places), size=n)]
        drawn = [self._solved(source, int(i), rng) for i in at]
        return [(self._renderer.render(record, id), solution) for record, id, solution in drawn]

    def _solved(self, source: PromptSource, i: int, rng: np.random.Generator) -> tuple[Mapping[str, Any], str, Any]:
        """A record, its id and the solution: `worked` or `completion`, or any one answer of a chat."""
        record = source[i]
        id = _id(record, "train" if source is self._source else "warmstart", i)
        key = prompt_key(record, self._section.prompt_field, f"prompt '{id}'")
        completion = record.get("completion")
        solution = record.get("worked", None if isinstance(completion, list) else completion)
        if solution is None and isinstance(record[key], list):
            chat = [*record[key], *(completion or ())]
            answers = [at for at, one in enumerate(chat) if isinstance(one, Mapping) and one.get("role") == "assistant"]
            if answers:
                at = answers[rng.integers(len(answers)) if len(answers) > 1 else 0]
                record, solution = {**record, key: chat[:at]}, chat[at].get("content")
        if not isinstance(solution, str | list) or not solution:
            needed = "records with an answer in the field 'worked' or 'completion', or in a chat"
            name = self._section.source if source is self._source else "warmstart.source"
            has = ", ".join(sorted(map(str, record)))
            raise DataError(f"warmstart.steps needs {needed}; prompt '{id}' of {name} has: {has}")
        return record, id, solution

    def state(self) -> dict[str, Any]:
        """JSON that `restore` continues from; with another `serial`, the state before that draw."""
        order = {"seed": self._seed, "select": self._section.select, "serial": self._serial}
        return {"num_prompts": self.num_train, "fingerprint": self._fingerprint, **order}

    def restore(self, state: Mapping[str, Any], drawn: Mapping[int, str]) -> None:
        """Continue where `state` was taken, and `drawn` are the ids by serial; what is new is refused."""
        now = {**self.state(), "serial": state["serial"]}
        if changed := [name for name in now if state[name] != now[name]]:
            was = ", ".join(f"{name} was {state[name]}, is {now[name]}" for name in changed)
            raise DataError(f"the prompts of {self._section.source} are not those of the checkpoint: {was}")
        self._serial = state["serial"]
        if self._selection is not None:
            place = {known.id: i for i, known in enumerate(self._known())}
            self._selection.restore([place[drawn[serial]] for serial in range(self._serial)])

    def _known(self) -> Iterator[Known]:
        """Of each prompt to train on, as long as none was drawn."""
        records = ((i, self._source[i]) for i in map(int, self._train))
        return (Known(id=_id(record, "train", i), fields=record) for i, record in records)

    def _hold_out(self, num_train: int, opened: Callable[..., PromptSource]) -> list[Prompt]:
        held, name = self._section.eval_count, self._section.eval_source
        if not name:
            # An id of the record's own stays: ids are unique within one source.
            return [self._prompt(i, "eval") for i in range(num_train, num_train + held)]
        seed, setting = self._seed + EVAL_SEED_OFFSET, "prompts.eval_source"
        source = opened(name, count=held, seed=seed, setting=setting)
        if len(source) < held:
            told = f"{len(source)} records, fewer than prompts.eval_count = {held}"
            raise DataError(f"{setting} = '{name}' has {told}")
        # never the id of a training prompt, though both files may number their records alike
        records = ((i, source[i]) for i in range(held))
        ids = ((i if record.get("id") is None else record["id"], record) for i, record in records)
        return [self._renderer.render(record, f"eval-{id}") for id, record in ids]

    def _prompt(self, i: int, split: str = "train") -> Prompt:
        record = self._source[i]
        return self._renderer.render(record, _id(record, split, i))

    def _check(self, num_train: int) -> tuple[npt.NDArray[np.int64], str]:
        """Positions to train on, and their checksum. Refuses what `render` would refuse later."""
        source, section = self._source, self._section
        # Small problems come up twice in a random task: one that is held out is not trained on.
        is_made = names_file(section.source.rpartition(":")[0])
        answered = [p for p in self.held_out if is_made and "answer" in p.fields]
        held = {(str(list(p.messages) or p.text), str(p.fields["answer"])) for p in answered}
        owner = {prompt.id: "a held-out record" for prompt in self.held_out}
        keep, checksum = [], 0
        for i in range(num_train):
            record = source[i]
            id = _id(record, "train", i)
            if not self._renderer.surely_fits(record):
                self._renderer.render(record, id)
            this = f"record {i + 1}"
            if record.get("id") is not None and owner.setdefault(id, this) != this:
                raise DataError(f"{section.source}: {this} has the id '{id}', and so has {owner[id]}")
            content = str(record[prompt_key(record, section.prompt_field, f"prompt '{id}'")])
            if (content, str(record.get("answer"))) not in held:
                keep.append(i)
            checksum = zlib.crc32(f"{id}\0{content}\0".encode(errors="replace"), checksum)
        if not keep:
            told = "every prompt is also held out; lower prompts.eval_count"
            raise DataError(f"{section.source}: {told}")
        return np.asarray(keep, np.int64), f"{checksum:08x}"


@lru_cache(2)
def _order(seed: int, epoch: int, num: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num)


def _id(record: Mapping[str, Any], split: str, i: int) -> str:
    id = str(record["id"]) if record.get("id") is not None else f"{split}-{i}"
    if not id.isascii() and id != id.encode(errors="replace").decode():
        raise DataError(f"record {i + 1} has the id {id!r}, which is not valid Unicode text")
    return id


def _checked_messages(content: Any, key: str, where: str) -> list[Message]:
    if not isinstance(content, list | tuple):
        kind = type(content).__name__
        raise DataError(f"{where}: field '{key}' must be text or a list of messages, not {kind}")
    for number, message in enumerate(content, 1):
        known = message if isinstance(message, Mapping) else {}
        if not all(isinstance(known.get(part), str) for part in ("role", "content")):
            raise DataError(f"{where}, message {number} of '{key}': needs 'role' and 'content', both text")
    if content and content[-1]["role"] == "assistant":
        raise DataError(f"{where} ends with an assistant message: there is nothing to answer")
    if not any(message["role"] == "user" for message in content):
        raise DataError(f"{where} has no user message")
    return list(content)
