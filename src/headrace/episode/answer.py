"""An answer as a message: its thinking, its text and its tool calls.

How a model writes tool calls is known from its chat template, which shows them to the model.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

Calls = list[tuple[str, dict[str, Any]]]
Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it. Example: ToolCall("add", '{"a": 1, "b": 2}')."""

    name: str
    arguments: str  # JSON
    id: str = ""  # by which a client knows it


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer. `error` tells the model what is wrong with its tool calls.

    A call that cannot be read stays in `content`; one with wrong arguments is in `tool_calls`.

    Example:
        ParsedAnswer(content="I add.", reasoning="1 and 2?", tool_calls=(ToolCall("add", '{"a": 1, "b": 2}'),))
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    error: str = ""

    def message(self) -> dict[str, Any]:
        """As an OpenAI message. A tool call without an id is called by its number."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        for i, call in enumerate(self.tool_calls):
            function = {"name": call.name, "arguments": call.arguments}
            named = {"id": call.id or f"call_{i}", "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(named)
        return message


def _call(name: Any, arguments: Any) -> tuple[str, dict[str, Any]]:
    arguments = _json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        raise ValueError("not valid: it needs a name, and arguments that are a JSON object")
    return name.removeprefix("functions."), arguments or {}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error


def read_json(text: str) -> Calls:
    value = _json(text)
    items = [item if isinstance(item, dict) else {} for item in (value if isinstance(value, list) else [value])]
    return [_call(x.get("name", x.get("tool_name")), x.get("arguments", x.get("parameters"))) for x in items]


def _tagged_calls(text: str, whole: str, pair: str, expected: str) -> Calls:
    match = re.fullmatch(whole, text, re.DOTALL)
    if not match or re.sub(pair, "", match[2], flags=re.DOTALL).strip():
        raise ValueError(f"not valid: expected {expected}")
    return [(match[1], {key.strip(): value for key, value in re.findall(pair, match[2], re.DOTALL)})]


def _separated_calls(text: str) -> Calls:
    """NAME or a word is before the separator; after it JSON, or NAME and JSON in a code block."""
    found = re.findall(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", text, re.DOTALL)
    if not found:
        raise ValueError("not valid: expected a name, <｜tool▁sep｜> and its arguments in JSON")
    blocks = [re.fullmatch(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", body, re.DOTALL) for _, body in found]
    pairs = zip(blocks, found, strict=True)
    return [_call(*block.groups()) if block else _call(head.strip(), body) for block, (head, body) in pairs]


def _listed_calls(text: str) -> Calls:
    parts = [re.split(r"(?:\[CALL_ID\][^\[]*)?\[ARGS\]", part, maxsplit=1) for part in text.split("[TOOL_CALLS]")]
    return [call for part in parts for call in ([_call(part[0].strip(), part[1])] if part[1:] else read_json(*part))]


def _channel_calls(text: str) -> Calls:
    head, _, body = text.partition("<|message|>")
    return [_call(head.partition("to=")[2].split("<")[0].split()[0], body)]


_key_value_calls = partial(
    _tagged_calls,
    whole=r"\s*([\w.\-]+)\s*((?:<arg_key>.*)?)",
    pair=r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    expected="the name, then <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value> for each argument",
)
_parameter_calls = partial(
    _tagged_calls,
    whole=r"\s*<function=([^>\s]+)>(.*)</function>\s*",
    pair=r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>",
    expected="<function=NAME>, <parameter=KEY>VALUE</parameter> for each argument, and </function>",
)


@dataclass(frozen=True)
class Family:
    """How a model writes answers: `sign` stands in its chat template. What opens a block is a pattern."""

    sign: str
    open: str = ""  # of a tool call
    close: str = ""  # of it; without one it ends with the answer
    read: Callable[[str], Calls] = read_json
    noise: str = ""  # a pattern: markup around the text
    thinking: tuple[str, str] = ("<think>", "</think>")


FAMILIES = (  # the first whose sign is in the template
    Family("<arg_key>", r"\s*<tool_call>", "</tool_call>", _key_value_calls),
    Family("<function=", r"\s*<tool_call>", "</tool_call>", _parameter_calls),
    Family("<tool_call>", r"\s*<tool_call>", "</tool_call>"),
    Family("<TOOLCALL>", r"<TOOLCALL>", "</TOOLCALL>"),
    Family("<|tool_call|>", r"<\|tool_call\|>", "<|/tool_call|>"),
    Family("<｜tool▁calls▁begin｜>", r"\s*<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _separated_calls),
    Family("[TOOL_CALLS]", r"\[TOOL_CALLS\]", "", _listed_calls, "", (r"\[THINK\]", "[/THINK]")),
    Family(
        "<|START_RESPONSE|>",
        r"<\|START_ACTION\|>",
        "<|END_ACTION|>",
        noise=r"<\|(?:START|END)_RESPONSE\|>",
        thinking=(r"<\|START_THINKING\|>", "<|END_THINKING|>"),
    ),
    Family(
        "<|channel|>",
        r"(?:<\|start\|>assistant|<\|channel\|>\w+|\A)\s*to=[^\s<]+[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*<\|message\|>",
        read=_channel_calls,
        noise=r"<\|start\|>assistant|<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>|<\|end\|>",
        thinking=(r"<\|channel\|>(?:analysis|commentary)<\|message\|>", "<|end|>"),
    ),
    Family('"parameters": dictionary', r'\A\s*(?:<\|python_tag\|>)?\s*(?=\{\s*"name"\s*:)'),
    Family(""),
)


class Grammar:
    """Reads the answers of one model, whose prompts end with `header`."""

    def __init__(self, tokenizer: Any, template: str, header: str) -> None:
        self.family = next(family for family in FAMILIES if family.sign in template)
        # a description of answers by the model's makers, for what is not known here
        self._own = getattr(tokenizer, "response_template", None) if not self.family.sign else None
        opens, closes = self.family.thinking
        self._header = re.split(opens, header)[0]
        joined = {"repeats": True, "join": "", "content_args": {"strip": False}}
        fields = {"content": joined | ({"close_pattern": self.family.noise} if self.family.noise else {})}
        if closes in template:
            fields["reasoning_content"] = joined | {"open_pattern": opens, "close": closes}
        if self.family.open:
            call = {"open_pattern": f"(?P<open>{self.family.open})", "repeats": True, "content_args": {"strip": False}}
            call |= {"close": self.family.close} if self.family.close else {}
            fields["tool_calls"] = call | {"transform": {"open": "{open}", "body": "{content}"}}
        self._spec = load_response_template(self._own or {"start_anchor": self._header or "\0", "fields": fields})

    def read(self, text: str, prompt: str, tools: Tools, *, is_cut: bool) -> ParsedAnswer:
        """An answer to `prompt`, which may have opened a block of thinking."""
        if self._own:
            return self._by_own_description(text, prompt, tools)
        begun = prompt.rpartition(self._header)[2] if self._header and self._header in prompt else ""
        parser = ResponseParser(self._spec, prefix=begun)
        events = [(event, False) for event in parser.feed(text)]
        events += [(event, True) for event in parser.finalize()[1]]
        said, calls, errors = {"content": "", "reasoning_content": ""}, list[ToolCall](), list[str]()
        for event, is_open in events:
            if event["field"] == "tool_calls" and event["type"] == "region_close":
                opening, body = event["value"]["open"], event["value"]["body"]
                try:
                    calls += self._calls(opening, body, tools, is_open=is_open, is_cut=is_cut)
                except (ValueError, RecursionError, MemoryError) as error:
                    deep = not isinstance(error, ValueError)
                    errors.append(f"the tool call is {'not valid: it is nested too deeply' if deep else error}")
                    said["content"] += opening + body + ("" if is_open else self.family.close)
            elif event["field"] != "tool_calls" and event["type"] == "region_chunk":
                said[event["field"]] += event["text"]
        return _answer(text, said["content"], said["reasoning_content"], calls, "; ".join(errors))

    def _calls(self, opening: str, body: str, tools: Tools, *, is_open: bool, is_cut: bool) -> list[ToolCall]:
        close, read = self.family.close, self.family.read
        if is_open and is_cut:
            raise ValueError("not complete: the answer was cut")
        if is_open and close:
            raise ValueError(f"not complete: {close} is missing")
        found = read(opening + body if read is _channel_calls else body)
        if read in (_parameter_calls, _key_value_calls):  # every value is text there
            functions = [tool.get("function", tool) for tool in tools or ()]
            wanted = {str(each["name"]): (each.get("parameters") or {}).get("properties", {}) for each in functions}
            found = [(name, _typed(arguments, wanted.get(name, {}))) for name, arguments in found]
        return _tool_calls(found)

    def _by_own_description(self, text: str, prompt: str, tools: Tools) -> ParsedAnswer:
        parser = ResponseParser(self._spec, prefix=prompt, tools=tools)
        try:
            parser.feed(text)
            message, _ = parser.finalize()
            calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
            found = _tool_calls([_call(call.get("name"), call.get("arguments")) for call in calls])
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            return ParsedAnswer(text.strip(), error=f"the answer cannot be read: {str(error).splitlines()[0]}")
        thinking = message.get("reasoning_content") or message.get("thinking") or ""
        return _answer(text, message.get("content") or "", thinking, found)


def _typed(arguments: Mapping[str, str], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Values that were written as text: JSON, unless the tool wants a text."""
    typed: dict[str, Any] = dict(arguments)
    for key, value in arguments.items():
        with suppress(ValueError, RecursionError):
            typed[key] = value if "string" in json.dumps(wanted.get(key, {})) else json.loads(value)
    return typed


def _tool_calls(calls: Calls) -> list[ToolCall]:
    try:
        as_json = partial(json.dumps, allow_nan=False, ensure_ascii=False)
        found = [ToolCall(name, as_json(arguments)) for name, arguments in calls]
        "".join(call.name + call.arguments for call in found).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"not valid JSON: {error}") from error
    return found


def _answer(text: str, content: str, reasoning: str, calls: Sequence[ToolCall], error: str = "") -> ParsedAnswer:
    content = content if content or reasoning or calls else text
    return ParsedAnswer(content.strip(), reasoning.strip(), tuple(calls), error)
