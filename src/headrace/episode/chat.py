"""Chats as token ids: the first prompt, and what goes after a sampled answer.

Sampled tokens are never rendered again. A chat template renders whole chats only, so `append` takes
the text that it writes after the answer, and encodes that alone.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from headrace.episode.answer import Grammar, ParsedAnswer, ToolCall, Tools, read_json
from headrace.errors import ChatError
from headrace.types import Example
from headrace.user_code import TEMPLATE_S, load_optional, time_limit

Message = Mapping[str, Any]
Messages = Sequence[Message]
Ids = Sequence[int]

MARKS = range(0x12000, 0x12400)  # cuneiform: rare, and a template's filters print it as it is
MOST_TAILS = 4096  # that are remembered
HEADER_TOKENS = 64  # at the end of a prompt: what the template writes before an answer
QUESTION = {"role": "user", "content": "What is it?"}
CALL = ToolCall("probe_tool", '{"probe_key": "probe value"}')
RESULT = {"role": "tool", "content": "42", "name": CALL.name, "tool_call_id": "call_0"}
PROBES = {  # kind of reply -> the answers before it, and the reply
    "a tool result": ((ParsedAnswer(tool_calls=(CALL,)), ParsedAnswer("So.", tool_calls=(CALL,))), RESULT),
    "a tool result after thinking": ((ParsedAnswer("", "Hm.", (CALL,)),), RESULT),
    "a user message": ((ParsedAnswer("So."),), QUESTION),
    "a user message after thinking": ((ParsedAnswer("So.", "Hm."),), QUESTION),
}


@dataclass(frozen=True)
class Proof:
    """What the chat template of `model` can do.

    Example:
        Proof("Qwen/Qwen3-8B", calls=True, names_tools=True, rewrites={"a user message": "it changes the answer"})
    """

    model: str
    calls: bool  # it can show an answer's tool calls
    names_tools: bool  # it tells the model which tools there are
    rewrites: Mapping[str, str] = field(default_factory=dict)  # kinds of replies: why

    def __str__(self) -> str:
        this = f"the chat template of {self.model}"
        said = [f"{this} rewrites history after {kind} ({why})" for kind, why in self.rewrites.items()]
        if not self.calls:
            said.append(f"{this} cannot show tool calls: only user messages can follow an answer")
        elif "a user message" in self.rewrites and "a tool result" not in self.rewrites:
            said.append("tool results instead of user messages would append")
        if self.calls and not self.names_tools:
            said.append(f"{this} does not name the tools: describe them in the system message")
        return "; ".join(said) or f"{this} appends every kind of reply"


class Chat:
    """Renders and reads chats for one tokenizer. `stops` are the tokens that end an answer."""

    def __init__(self, tokenizer: Any, *, stops: Ids = ()) -> None:
        self.model = str(getattr(tokenizer, "name_or_path", "") or "this tokenizer")
        if not getattr(tokenizer, "chat_template", None):
            raise ChatError(f"{self.model} has no chat template, so it cannot take messages")
        self._tokenizer = tokenizer
        fast = getattr(tokenizer, "backend_tokenizer", None)  # `transformers` wraps it in much more work
        exactly = partial(tokenizer.decode, clean_up_tokenization_spaces=False) if fast is None else fast.decode
        self._to_text = partial(exactly, skip_special_tokens=False)
        self._stops = {int(id): self._decode([id]) for id in stops or [tokenizer.eos_token_id] if id is not None}
        self.vocab_size, self.stop_ids = len(tokenizer), frozenset(self._stops)
        texts = sorted(self._stops.values(), key=len, reverse=True)
        self._longest = len(texts[0]) if texts else 0
        self._stop = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        source = str(tokenizer.get_chat_template(tools=[{}]))
        added = [t for t in tokenizer.added_tokens_decoder.values() if len(t.content) > 1]
        special = {t.content for t in added if t.special}
        shown = {t.content for t in added if t.content in source and not t.content.isspace()}
        # An answer's own markup (<think>, <tool_call>) stays what it is; special tokens never do.
        self._inert_in_answers, self._inert = _marker(special), _marker(special | shown)
        self._newline = self.encode("\n")
        self._shows_ids = "tool_call_id" in source
        self._proven = False  # what comes after an answer does not depend on what came before it
        self._tails: dict[str, list[int]] = {}  # after answers of one shape
        self._calls = True
        self._dialect: tuple[type, str | None]
        self._calls = self._find_dialect()
        prompt, chat = self._render([QUESTION]), self._render([QUESTION], generation=False)
        self._grammar = Grammar(tokenizer, source, prompt[_num_shared(prompt, chat) :])

    def first(self, messages: Messages, tools: Tools = None) -> list[int]:
        """The prompt: the chat and the beginning of an answer. Control tokens in messages are plain text."""
        mark = _unused_character(messages, tools)
        return self._encode_marked(self._render(messages, tools, mark=mark), mark)

    def append(self, history: Messages, sampled: Ids, answer: Message, new: Messages, tools: Tools = None) -> list[int]:
        """The tokens to put after `sampled`, the answer to `history`, so that the next answer can begin.

        `answer` is what was sampled, as a message. If it was cut, its end is among the tokens.
        Raises ChatError where the template changes what stands before: `first` begins a branch.
        """
        if not self._proven or not len(sampled) or sampled[-1] not in self._stops:
            return self._append([QUESTION] if self._proven else history, sampled, answer, new, tools)
        calls = [_function(call).get("name") for call in answer.get("tool_calls") or ()]
        shape = [calls, *(bool(answer.get(part)) for part in ("content", "reasoning_content"))]
        known = [{key: m[key] for key in m if self._shows_ids or key != "tool_call_id"} for m in new]
        key = json.dumps([int(sampled[-1]), shape, known, len(tools or ())], default=str)
        if key not in self._tails:
            if len(self._tails) >= MOST_TAILS:
                del self._tails[next(iter(self._tails))]
            self._tails[key] = self._append([QUESTION], sampled, answer, new, tools)
        return self._tails[key]

    def _append(self, history: Messages, sampled: Ids, answer: Message, new: Messages, tools: Tools) -> list[int]:
        mark = _unused_character([*history, answer, *new], tools)
        show = partial(self._render, tools=tools, mark=mark)
        end = self._stops.get(sampled[-1], "") if len(sampled) else ""
        said = self._decode(sampled[:-1] if end else sampled) + end
        prompt, whole = show(history), show([*history, answer, *new])
        if whole.startswith(prompt + said):
            return self._encode_marked(whole[len(prompt + said) :], mark, after=end)
        # It is shown in another way than it was sampled: what follows its end is the same,
        # if the template shows the answer here as it does without a reply.
        before, alone = show(history, generation=False), show([*history, answer], generation=False)
        shared = _num_shared(prompt, whole)
        if shared < len(before if prompt.startswith(before) else prompt):
            raise self._rewrites("it changes text before the answer", new)
        # a stop token that ends within what is shared belongs to the generation prompt
        at = next((m.start() for m in self._stop.finditer(whole, shared - self._longest) if m.end() > shared), -1)
        if at < 0 or alone[:at] != whole[:at]:
            raise self._rewrites("it changes the answer", new)
        if not whole.startswith(end, at):
            raise self._rewrites(f"it does not end the answer with {end}, which was sampled", new)
        return self._encode_marked(whole[at + len(end) :], mark, after=end)

    def parse(self, sampled: Ids, prompt: Ids, tools: Tools = None) -> ParsedAnswer:
        is_cut = not len(sampled) or sampled[-1] not in self._stops
        return self._grammar.read(self.text(sampled), self._decode(prompt[-HEADER_TOKENS:]), tools, is_cut=is_cut)

    def encode(self, text: str) -> list[int]:
        try:
            return [int(id) for id in self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
        except (TypeError, UnicodeError) as error:
            raise ChatError(f"a message is not valid Unicode text: {error}") from error

    def text(self, sampled: Ids) -> str:
        """The text of sampled tokens, without the end of the answer."""
        return self._decode([id for id in sampled if id not in self._stops])

    def worked(self, history: Messages, chat: Messages, tools: Tools = None) -> Example:
        """The tokens of a worked chat that follows `history`, and which of them are answers."""
        history, ids, learned = list(history), self.first(history, tools), list[bool]()
        answers = [i for i, message in enumerate(chat) if message.get("role") == "assistant"]
        for i, after in zip(answers, [*answers[1:], len(chat)], strict=True):
            learned += [False] * (len(ids) - len(learned))
            said, replies = self.encode(self._said(history, chat[i], tools)), chat[i + 1 : after]
            ids, learned = ids + said, learned + [True] * len(said)
            if replies:
                ids += self.append(history, said, chat[i], replies, tools)
            history += chat[i:after]
        return np.array(ids[: len(learned)], np.int32), np.array(learned, np.bool_)

    def call_grammar(self, tools: Sequence[Mapping[str, Any]]) -> str:
        family = self._grammar.family
        opens, closes = re.sub(r"\\s\*|\\A.*|\\", "", family.open), family.close
        if not family.open or family.read is not read_json or bool(opens) != bool(closes):
            raise ChatError(f"{self.model} does not write tool calls as JSON, so it cannot be made to call a tool")
        key, closed = "arguments" if opens else "parameters", {"type": "object", "additionalProperties": False}
        calls = []
        for function in map(_function, tools):
            parts = {"name": {"const": function["name"]}, key: {**closed, **(function.get("parameters") or {})}}
            calls.append({**closed, "properties": parts, "required": list(parts)})
        call = f"{self._symbol(opens)} /\\n?/ call /\\n?/ {self._symbol(closes)}" if opens else "call"
        return f"start: {call}\n{json_rule('call', {'anyOf': calls})}"

    @cached_property
    def grammars(self) -> Any:
        """Whose `check` raises ChatError if no answer can be made to follow a grammar."""
        module = load_optional("headrace.policy.grammar_llguidance", "llguidance", "grammar")
        return module.Grammars(self._tokenizer, self.vocab_size, list(self._stops))

    def _symbol(self, text: str) -> str:
        """In a grammar: a token of its own, or a text."""
        ids = self.encode(text)
        return f"<[{ids[0]}]>" if len(ids) == 1 and ids[0] in self._tokenizer.added_tokens_decoder else json.dumps(text)

    def prove(self, tools: Tools = None) -> Proof:
        """Try every kind of reply on this template, after one question and in a longer chat.

        If it makes no difference what came before, `append` does not render whole chats any more.
        """
        rewrites, alike = {}, True
        for kind, (answers, reply) in PROBES.items():
            try:
                for answer in [answer.message() for answer in answers]:
                    tails = []
                    for chat in ([QUESTION], [QUESTION, answer, reply, answer, reply]):
                        said = self.encode(self._said(chat, answer, tools, [reply]))
                        tails.append(self._append(chat, said, answer, [reply], tools))
                    alike = alike and tails[0] == tails[1]
            except ChatError as error:
                rewrites[kind] = str(error).rpartition(": ")[2]
        self._proven = alike
        tools = tools or [{"type": "function", "function": {"name": CALL.name, "description": "?", "parameters": {}}}]
        text = ""
        with suppress(ChatError):
            text = self._render([QUESTION], tools)
        return Proof(self.model, self._calls, all(_function(tool).get("name", "") in text for tool in tools), rewrites)

    def _said(self, history: Messages, answer: Message, tools: Tools, after: Messages = ()) -> str:
        """An answer as the template shows it, with its end, which may be the first token of the message `after` it."""
        alone = self._render([*history, answer], tools, generation=False)
        said = alone[_num_shared(self._render(history, tools), alone) :]
        if found := self._stop.search(said):
            return said[: found.end()]
        found = self._stop.search(self._render([*history, answer, *after], tools), len(alone)) if after else None
        return said + (found[0] if found else "")

    def _rewrites(self, why: str, new: Messages) -> ChatError:
        roles = " and ".join(dict.fromkeys(str(message["role"]) for message in new))
        return ChatError(f"the chat template of {self.model} rewrites history before a {roles} message: {why}")

    def _find_dialect(self) -> bool:
        """Whether the template can show tool calls, with arguments as a mapping or text, content as "" or None."""
        for self._dialect in product((dict, str), ("", None)):
            with suppress(ChatError):
                text = self._render([QUESTION, ParsedAnswer(tool_calls=(CALL,)).message()], generation=False)
                # neither mapping nor None is shown as Python prints it
                if CALL.name in text and "probe value" in text and "'probe_key'" not in text and "None" not in text:
                    return True
        return False

    def _render(self, messages: Messages, tools: Tools = None, *, mark: str = "", generation: bool = True) -> str:
        if not self._calls and any(message.get("tool_calls") for message in messages):
            raise ChatError(f"the chat template of {self.model} refuses these messages: it cannot show tool calls")
        forms = [self._form(message, mark) for message in messages]
        listed = _each_text(list(tools), self._inert, mark) if tools else None
        try:
            with nullcontext() if self._proven else time_limit(TEMPLATE_S):
                text = self._tokenizer.apply_chat_template(
                    forms, tools=listed, add_generation_prompt=generation, tokenize=False
                )
        except Exception as error:  # a template is a program, and fails in its own ways
            reason = str(error) or type(error).__name__
            raise ChatError(f"the chat template of {self.model} refuses these messages: {reason}") from error
        return str(text)

    def _form(self, message: Message, mark: str) -> Any:
        """The message in the template's dialect; control tokens have `mark` behind their first character."""
        form: dict[str, Any] = {**message, "content": content_text(message)}
        form["role"] = "system" if form["role"] == "developer" else form["role"]
        if thinking := next((form[key] for key in ("reasoning_content", "reasoning", "thinking") if form.get(key)), ""):
            form |= {"reasoning_content": thinking, "thinking": thinking}
        calls, (kind, empty) = form.pop("tool_calls", None), self._dialect
        if calls:
            form["content"] = form["content"] or empty
            functions = [{**_function(call), "arguments": _arguments(_function(call), kind)} for call in calls]
            pairs = zip(calls, functions, strict=True)
            form["tool_calls"] = [{"type": "function", **call, "function": function} for call, function in pairs]
        return _each_text(form, self._inert_in_answers if form["role"] == "assistant" else self._inert, mark)

    def _encode_marked(self, text: str, mark: str, after: str | None = None) -> list[int]:
        """Token ids of a text that follows `after`: a stop token, or "" for any other text."""
        begin, *pieces = text.split(mark)
        ids = self._inner_ids(begin) if after == "" else self.encode((after or "") + begin)
        if after:  # encoded with it: some tokenizers take or add white space after a special token
            ids = ids[len(self.encode(after)) :]
        return ids + [id for piece in pieces for id in self._inner_ids(piece)]

    def _inner_ids(self, text: str) -> list[int]:
        """Without the space that some tokenizers put in front of a text."""
        ids = self.encode("\n" + text)
        return ids[len(self._newline) :] if ids[: len(self._newline)] == self._newline else self.encode(text)

    def _decode(self, ids: Ids) -> str:
        return str(self._to_text([int(id) for id in ids]))


def content_text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str | None):
        return content or ""
    if not isinstance(content, list | tuple):
        raise ChatError("a message's content is neither a text nor a list of parts")
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    if strange := [part for part, text in zip(content, texts, strict=True) if not isinstance(text, str)]:
        raise ChatError(f"a message has a part that is not text: {str(strange[0])[:80]}")
    return "".join(map(str, texts))


def json_rule(name: str, schema: Any) -> str:
    """A rule of a grammar: JSON as Python writes it."""
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"{name}: %json {json.dumps({**schema, 'x-guidance': spaces})}\n"


def normal(message: Message) -> tuple[Any, ...]:
    """Equal for a message and what a client makes of it before it sends it back."""
    calls = [_function(call) for call in message.get("tool_calls") or ()]
    written = partial(json.dumps, sort_keys=True, separators=(",", ":"))
    role = "system" if message["role"] == "developer" else message["role"]
    called = tuple((str(call.get("name")), written(_arguments(call, dict))) for call in calls)
    return role, content_text(message).strip(), called


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    return call.get("function") or call


def _arguments(function: Mapping[str, Any], kind: type) -> Any:
    """A call's arguments as a mapping, or as JSON text; what is not JSON stays."""
    arguments = function.get("arguments") or {}
    if kind is str and not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False)
    with suppress(ValueError):
        return json.loads(arguments) if kind is dict and isinstance(arguments, str) else arguments
    return arguments


def _num_shared(a: str, b: str) -> int:
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))


def _unused_character(messages: Messages, tools: Tools) -> str:
    text = json.dumps([list(messages), list(tools or ())], ensure_ascii=False, default=str)
    if mark := next((chr(code) for code in MARKS if chr(code) not in text), ""):
        return mark
    raise ChatError(f"the messages hold all characters from U+{MARKS[0]:X} to U+{MARKS[-1]:X}: one must be free")


def _marker(tokens: set[str]) -> Callable[[str, str], str]:
    """A function that puts a mark behind the first character of each of the tokens in a text."""
    lengths = sorted({len(token) for token in tokens})
    first = re.compile("|".join(map(re.escape, sorted({token[0] for token in tokens}))) or "(?!)")

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
