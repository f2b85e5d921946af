"""Chats as token ids: the first prompt, and what goes after a sampled answer.

Sampled tokens are never rendered again. A chat template renders whole chats only, so `append` takes the
text it writes after the answer, and encodes that alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from headrace.episode.answer import Reader, ToolCall, assistant_message, reader_of
from headrace.errors import ChatError
from headrace.user_code import time_limit

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

TEMPLATE_S = 10.0  # a chat template that takes longer is taken to run for ever
MARKS = range(0x12000, 0x12400)  # cuneiform: rare, and printed as it is by every filter of a template
THINKING, WORDS = "Let me think.", "Here it is."
CALL = ToolCall("probe_tool", '{"probe_key": "probe value"}')
REPLIES = {  # kinds of continuation -> the answers before it, and what follows them
    "a tool result": (("", ""), (WORDS, "")),
    "a tool result after thinking": (("", THINKING), (WORDS, THINKING)),
    "a user message": ((WORDS, ""),),
    "a user message after thinking": ((WORDS, THINKING),),
}


@dataclass(frozen=True)
class Proof:
    """What the template of `model` can do. `rewrites` says why a kind of reply begins a new branch.

    Example:
        Proof(model="Qwen/Qwen3-8B", calls=True, shows_tools=True,
            rewrites={"a user message": "it changes text before the answer"})
    """

    model: str
    calls: bool  # it can show an answer's tool calls
    shows_tools: bool  # it tells the model which tools there are
    rewrites: Mapping[str, str] = field(default_factory=dict)

    def appends(self, kind: str) -> bool:
        return kind in REPLIES and kind not in self.rewrites

    def __str__(self) -> str:
        who = f"the chat template of {self.model}"
        said = [f"{who} rewrites history after {kind} ({why})" for kind, why in self.rewrites.items()]
        if said:
            said.append("each such turn begins a new branch, whose history is read and stored again")
        if not self.calls:
            said.append(
                f"{who} cannot show tool calls: use a model with tools, or an environment that replies as the user"
            )
        elif "a user message" in self.rewrites and "a tool result" not in self.rewrites:
            said.append("replies as tool results instead of user messages would append")
        if self.calls and not self.shows_tools:
            said.append(f"{who} does not name the tools: describe them in the system message")
        return "; ".join(said) or f"{who} appends every kind of reply"


class Chat:
    """Renders and reads chats for one tokenizer. `stops` are the tokens that end an answer.

    `options` go to the template (for example `enable_thinking`).
    """

    def __init__(self, tokenizer: Any, *, stops: Iterable[int] = (), options: Mapping[str, Any] | None = None) -> None:
        self.model = str(getattr(tokenizer, "name_or_path", "") or "this tokenizer")
        if not getattr(tokenizer, "chat_template", None):
            raise ChatError(f"{self.model} has no chat template, so it cannot take messages")
        self._tokenizer, self._options = tokenizer, dict(options or {})
        ends = list(stops) or [tokenizer.eos_token_id]
        self._stops = {int(id): self._decode([int(id)]) for id in ends if id is not None}
        texts = sorted((text for text in self._stops.values() if text), key=len, reverse=True)
        self._any_stop = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        source = str(tokenizer.get_chat_template(tools=[{}]))
        added = [token for token in tokenizer.added_tokens_decoder.values() if len(token.content) > 1]
        special = {token.content for token in added if token.special}
        shown = {token.content for token in added if token.content in source and not token.content.isspace()}
        # An assistant's own markup (<think>, <tool_call>) stays what it is; its special tokens do not.
        self._inert_in_answers, self._inert = _marker(special), _marker(special | shown)
        self._newline = self._ids("\n")
        self._dialect = (dict, "")
        self._calls = self._find_dialect()
        header = self._generation_prompt()
        self._reader: Callable[..., Reader] = reader_of(tokenizer, source, header, self._stops)

    def first(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """The prompt: the chat with the beginning of an answer. Control tokens in messages are plain text."""
        mark = _unused_character(messages, tools)
        return self._encode(self._render(messages, tools, mark), mark)

    def append(
        self,
        history: Sequence[Message],
        sampled: Sequence[int],
        answer: Message,
        new: Sequence[Message],
        tools: Tools = None,
    ) -> list[int]:
        """The tokens to put after `sampled`, the answer to `history`, for the next answer to begin.

        `answer` is the same answer as a message. An answer that was cut gets its end here. Raises
        ChatError if the template would change what stands already: begin a branch with `first`.
        """
        mark = _unused_character([*history, answer, *new], tools)
        prompt = self._render(history, tools, mark)
        whole = self._render([*history, answer, *new], tools, mark)
        if not whole.startswith(prompt):
            raise self._rewrites("it changes text before the answer", answer, new)
        stop = sampled[-1] if len(sampled) and sampled[-1] in self._stops else None
        said, end = self._decode(sampled if stop is None else sampled[:-1]), self._stops.get(stop, "")  # type: ignore[arg-type]
        rest = whole[len(prompt) :]
        if rest.startswith(said + end):
            tail = rest[len(said + end) :]
        else:  # rendered in another way than it was sampled: only what follows its end is used
            found = self._any_stop.search(rest)
            alone = self._render([*history, answer], tools, mark, generation=False)
            if found is None:
                raise self._rewrites("no stop token ends the answer", answer, new)
            if alone[len(prompt) :][: found.start()] != rest[: found.start()] or not alone.startswith(prompt):
                raise self._rewrites("it changes the answer itself", answer, new)
            if stop is not None and found[0] != end:
                raise self._rewrites(f"it ends the answer with {found[0]}, and {end} was sampled", answer, new)
            tail = rest[found.start() if stop is None else found.end() :]
        return self._encode(tail, mark, after=end)

    def reader(self, prompt: Sequence[int] = (), tools: Tools = None) -> Reader:
        """Reads an answer to `prompt` as its tokens come."""
        return self._reader(self._decode(prompt[-64:]), tools)

    def prove(self, tools: Tools = None) -> Proof:
        """Tries every kind of continuation on this template."""
        rewrites = {}
        for kind, answers in REPLIES.items():
            is_tool = "tool" in kind
            reply = {"role": "tool", "content": "42", "name": CALL.name, "tool_call_id": "call_0"}
            new = reply if is_tool else {"role": "user", "content": "Go on."}
            calls = (CALL,) if is_tool else ()
            try:
                if is_tool and not self._calls:
                    raise ChatError("it cannot show tool calls")
                for content, thinking in answers:
                    self._try_reply(assistant_message(content, thinking, calls), new, tools)
            except ChatError as error:
                rewrites[kind] = str(error).rpartition(": ")[2]
        asked = [{"role": "user", "content": "?"}]
        names = [tool.get("function", tool).get("name", "") for tool in tools or [_schema(CALL.name)]]
        text = self._render(asked, tools or [_schema(CALL.name)], "")
        return Proof(self.model, self._calls, all(name in text for name in names), rewrites)

    def _try_reply(self, answer: Message, new: Message, tools: Tools) -> None:
        """Append `new` to `answer` as a model that follows the template would sample it."""
        history = [{"role": "user", "content": "What is it?"}]
        prompt, alone = self._render(history, tools, ""), self._render([*history, answer], tools, "", generation=False)
        if not alone.startswith(prompt):
            at = next((i for i, (a, b) in enumerate(zip(prompt, alone, strict=False)) if a != b), len(alone))
            raise ChatError(f"it writes {prompt[at:]!r} only before a new answer")
        said = alone[len(prompt) :]
        if (found := self._any_stop.search(said)) is None:  # the next message's first token ends the answer
            found = self._any_stop.search(self._render([*history, answer, new], tools, ""), len(alone))
        else:
            said = said[: found.start()]
        self.append(history, self._ids(said + (found[0] if found else "")), answer, [new], tools)

    def _rewrites(self, why: str, answer: Message, new: Sequence[Message]) -> ChatError:
        roles = " and ".join(dict.fromkeys(f"a {message['role']} message" for message in new)) or "nothing"
        thought = " with thinking" if answer.get("reasoning_content") else ""
        return ChatError(
            f"the chat template of {self.model} rewrites history when {roles} follows an answer{thought}: {why}"
        )

    def _find_dialect(self) -> bool:
        """How this template wants tool calls: arguments as a mapping or text, no content as "" or None."""
        chat = [{"role": "user", "content": "?"}, assistant_message("", "", (CALL,))]
        for arguments, empty in product((dict, str), ("", None)):
            self._dialect = (arguments, empty)  # type: ignore[assignment]
            try:
                text = self._render(chat, None, "", generation=False, strict=False)
            except ChatError:
                continue
            if CALL.name in text and "probe value" in text and "None" not in text:
                return True
        self._dialect = (dict, "")
        return False

    def _generation_prompt(self) -> str:
        asked = [{"role": "user", "content": "?"}]
        with_, without = self._render(asked, None, ""), self._render(asked, None, "", generation=False)
        return with_.removeprefix(without) if with_ != without else ""

    def _render(
        self, messages: Sequence[Message], tools: Tools, mark: str, *, generation: bool = True, strict: bool = True
    ) -> str:
        """The chat's text. In control tokens of messages, `mark` stands after the first character."""
        if strict and not self._calls_ok(messages):
            raise ChatError(f"the chat template of {self.model} cannot show tool calls")
        chat = [self._form(message, mark) for message in messages]
        try:
            with time_limit(TEMPLATE_S):
                text = self._tokenizer.apply_chat_template(
                    chat,
                    tools=_each_text(list(tools), self._inert, mark) if tools else None,
                    add_generation_prompt=generation,
                    tokenize=False,
                    **self._options,
                )
        except Exception as error:  # a template is a program, and fails in its own ways
            reason = str(error) or type(error).__name__
            raise ChatError(f"the chat template of {self.model} refuses these messages: {reason}") from error
        return str(text)

    def _calls_ok(self, messages: Sequence[Message]) -> bool:
        return self._calls or not any(message.get("tool_calls") for message in messages)

    def _form(self, message: Message, mark: str) -> dict[str, Any]:
        """The message in this template's dialect, with inert control tokens."""
        form: dict[str, Any] = {**message, "content": content_text(message)}
        is_answer = form["role"] == "assistant"
        if form["role"] == "developer":
            form["role"] = "system"
        thinking = [form[key] for key in ("reasoning_content", "reasoning", "thinking") if form.get(key)]
        if thinking:
            form |= {"reasoning_content": thinking[0], "thinking": thinking[0]}
        calls, (arguments, empty) = form.pop("tool_calls", None), self._dialect
        if calls:
            form["tool_calls"] = [_call_form(call, arguments) for call in calls]
            form["content"] = form["content"] or empty
        return _each_text(form, self._inert_in_answers if is_answer else self._inert, mark)  # type: ignore[no-any-return]

    def _encode(self, text: str, mark: str, after: str | None = None) -> list[int]:
        """Token ids of a rendered text. `after` is the stop token before it, or "" in the middle of a text."""
        begin, *pieces = text.split(mark) if mark else [text]
        if after:  # in its place: some tokenizers take white space or add it after a special token
            ids, stop = self._ids(after + begin), self._ids(after)
            ids = ids[len(stop) :] if ids[: len(stop)] == stop else self._ids(begin)
        else:
            ids = self._ids(begin) if after is None else self._inner_ids(begin)
        return ids + [id for piece in pieces for id in self._inner_ids(piece)]

    def _inner_ids(self, text: str) -> list[int]:
        """Token ids of a text inside another, without the space that some tokenizers put in front."""
        ids = self._ids("\n" + text)
        return ids[len(self._newline) :] if ids[: len(self._newline)] == self._newline else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return [int(id) for id in self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


def content_text(message: Message) -> str:
    """A message's text. OpenAI clients may send it as a list of parts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = [{"text": part} if isinstance(part, str) else part for part in content]
    if strange := [str(part.get("type")) for part in parts if "text" not in part]:
        raise ChatError(f"a message has a part of type {strange[0]}; only text is understood")
    return "".join(str(part["text"]) for part in parts)


def normal(message: Message) -> tuple[Any, ...]:
    """What two messages have in common if one is the other as a client sent it back."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return (
        "system" if message["role"] == "developer" else message["role"],
        content_text(message).strip(),
        tuple((str(call.get("name")), _canonical(call.get("arguments"))) for call in calls),
    )


def _canonical(arguments: Any) -> str:
    return json.dumps(_decoded(arguments), sort_keys=True, separators=(",", ":"), default=str)


def _decoded(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _call_form(call: Mapping[str, Any], kind: type) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = _decoded(function.get("arguments"))
    if kind is str and not isinstance(arguments, str):
        written = function.get("arguments")
        arguments = written if isinstance(written, str) else json.dumps(arguments, ensure_ascii=False)
    ids = {"id": call["id"]} if "id" in call else {}
    return {**ids, "type": "function", "function": {"name": function.get("name"), "arguments": arguments}}


def _schema(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, "required": []}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


def _unused_character(messages: Sequence[Message], tools: Tools) -> str:
    text = json.dumps([list(messages), list(tools or ())], ensure_ascii=False, default=str)
    return next(chr(code) for code in MARKS if chr(code) not in text)


def _marker(tokens: set[str]) -> Callable[[str, str], str]:
    """A function that puts a mark behind the first character of every token in a text."""
    lengths = sorted({len(token) for token in tokens})
    first = re.compile(
        "[" + "".join(map(re.escape, sorted({token[0] for token in tokens}))) + "]" if tokens else "(?!)"
    )

    def mark_tokens(text: str, mark: str) -> str:
        def marked(match: re.Match[str]) -> str:
            at = match.start()
            return match[0] + mark if any(text[at : at + n] in tokens for n in lengths) else match[0]

        return first.sub(marked, text) if mark else text

    return mark_tokens


def _each_text(value: Any, change: Callable[[str, str], str], mark: str) -> Any:
    if isinstance(value, str):
        return change(value, mark)
    if isinstance(value, Mapping):
        return {_each_text(key, change, mark): _each_text(item, change, mark) for key, item in value.items()}
    return [_each_text(item, change, mark) for item in value] if isinstance(value, list | tuple) else value
