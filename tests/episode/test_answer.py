"""Answers as messages: what a template shows is read back, and bad calls are told, whole or in a stream."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from chat_templates import SHAPES, TOOLS, Shape, im, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import APPENDING, answer_of, as_shown, chat_of, reply_of

from headrace.episode.answer import ParsedAnswer, ToolCall
from headrace.episode.chat import Chat

QUESTION = [{"role": "user", "content": "x"}]


def parse(name: str, text: str, tools: Any = TOOLS) -> ParsedAnswer:
    """Of an answer that ends with the first stop token, or is cut if it has no end."""
    chat = chat_of(name)
    return chat.parse(chat.encode(text.replace("$", SHAPES[name].stops[0])), chat.first(QUESTION, TOOLS), tools)


@pytest.mark.parametrize(("name", "kind"), APPENDING)
def test_what_the_template_shows_is_read_back(name: str, kind: str):
    chat, answer = chat_of(name), answer_of(kind)
    text = as_shown(chat, SHAPES[name], QUESTION, answer.message(), reply_of(kind, "y"))
    if name == "text arguments":
        text = (answer.reasoning or "Hm.") + "</think>" + text  # it never shows the thinking that it opens
    found = chat.parse(chat.encode(text), chat.first(QUESTION, TOOLS), TOOLS)
    assert (found.content, found.error) == (answer.content, "")
    assert [(c.name, json.loads(c.arguments)) for c in found.tool_calls] == [
        (c.name, json.loads(c.arguments)) for c in answer.tool_calls
    ]
    if "</think>" in text or name in ("channels", "marked text"):
        assert found.reasoning == (answer.reasoning or ("Hm." if name == "text arguments" else ""))


BAD = [
    ("json calls", 'A <tool_call>{"name": "look", }</tool_call> B$', "the tool call is not valid JSON: Expecting"),
    ("json calls", 'A <tool_call>{"name": "look"}$', "the tool call is not complete: </tool_call> is missing"),
    ("json calls", 'A <tool_call>{"name": "lo', "the tool call is not complete: the answer was cut"),
    ("json calls", "<tool_call>[1]</tool_call>$", "the tool call is not valid: it needs a name"),
    ("json calls", '<tool_call>{"name": "look", "arguments": [2]}</tool_call>$', "arguments that are a JSON object"),
    ("opened thinking", "</think><tool_call><function=look>x</tool_call>$", "not valid: expected <function=NAME>"),
    ("opened thinking", "</think><tool_call><function=look>x</function></tool_call>$", "expected <function=NAME>"),
    ("stop opens", "<tool_call>look <arg_key>where</arg_key></tool_call>$", "expected the name, then <arg_key>KEY"),
    ("channels", " to=functions.look<|channel|>commentary json<|message|>{x$", "not valid JSON"),
    ("channels", ' to=functions.look<|channel|>commentary json<|message|>{"where": "x"}', "the answer was cut"),
    ("text arguments", "</think><｜tool▁calls▁begin｜>look<｜tool▁calls▁end｜>$", "expected a name"),
    ("bare call", '{"name": "look", "parameters": {"where": }}$', "not valid JSON"),
    ("listed calls", "[TOOL_CALLS]look[ARGS]{$", "not valid JSON"),
    ("json calls", "<tool_call>" + "[" * 3000 + "</tool_call>$", "not valid: it is nested too deeply"),
    (
        "json calls",
        '<tool_call>{"name": "look", "arguments": {"where": NaN}}</tool_call>$',
        "not valid JSON: Out of range",
    ),
    (
        "json calls",
        '<tool_call>{"name": "look", "arguments": {"where": "\\ud800"}}</tool_call>$',
        "not valid JSON: 'utf",
    ),
]


@pytest.mark.parametrize(("name", "text", "error"), BAD)
def test_a_call_that_cannot_be_read_is_told_and_stays_in_the_text(name: str, text: str, error: str):
    found = parse(name, text)
    assert error in found.error
    assert not found.tool_calls
    assert found.content == text.removeprefix("</think>").removesuffix("$").strip()


def test_text_becomes_what_the_tool_wants():
    schema = {"n": {"type": "integer"}, "s": {"type": "string"}, "b": {"type": "boolean"}, "l": {"type": "array"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": schema}}}]
    values = {"n": "7", "s": "7", "b": "true", "l": '[1, "x"]', "x": "eight"}  # there is no x
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    found = parse("opened thinking", f"</think>\n<tool_call>\n<function=f>\n{pairs}</function>\n</tool_call>$", tools)
    assert json.loads(found.tool_calls[0].arguments) == {"n": 7, "s": "7", "b": True, "l": [1, "x"], "x": "eight"}


def test_several_calls_and_text_around_them():
    call = '<tool_call>\n{"name": "look", "arguments": {"where": "%s"}}\n</tool_call>'
    found = parse("json calls", f"First \n{call % 'a'}\n{call % 'b'}\n then$")
    assert found.content == "First\n then"
    assert [json.loads(each.arguments)["where"] for each in found.tool_calls] == ["a", "b"]
    message = replace(found, tool_calls=(replace(found.tool_calls[0], id="id-a"), found.tool_calls[1])).message()
    assert [each["id"] for each in message["tool_calls"]] == ["id-a", "call_1"]
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
    found = parse("channels", analysis + '<|constrain|>json<|message|>{"where": "a"}$')
    assert found == ParsedAnswer("", "Hm.", (ToolCall("look", '{"where": "a"}'),))
    assert parse("channels", "no channel$") == ParsedAnswer("no channel")


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "look", "arguments": {"where": "é"}}',
    "{",
    " ",
]
PIECES += ["\n", "So", "漢", "<|im_end|>", "<tool", "🙂", "<function=look>", "</function>", "<|im_start|>"]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["json calls", "opened thinking", "empty thinking", "channels", "bare call", "listed calls"]),
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
)
def test_whatever_the_model_wrote_can_be_read(name: str, text: str):
    chat = chat_of(name)
    found = chat.parse(chat.encode(text), chat.first(QUESTION, TOOLS), TOOLS)
    assert all(isinstance(json.loads(call.arguments), dict) for call in found.tool_calls)
    said = text.replace("<think>", "").replace("</think>", "").strip()
    assert found.content or found.reasoning or found.tool_calls or not said or "<|im_" in text


def test_a_models_own_description_of_answers_is_used():
    """For families that are not known here."""
    tokenizer = make_tokenizer(Shape(im("{{ m.content }}")))
    field = {"open": "<<", "close": ">>", "content": "json", "repeats": True, "transform": {"function": "{content}"}}
    fields = {"content": {}, "tool_calls": field}
    tokenizer.response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    chat = Chat(tokenizer)
    prompt = chat.first(QUESTION)
    good = chat.parse(chat.encode('So <<{"name": "look", "arguments": {"where": "x"}}>>'), prompt, TOOLS)
    assert good == ParsedAnswer("So", "", (ToolCall("look", '{"where": "x"}'),))
    bad = chat.parse(chat.encode("So <<{>>"), prompt, TOOLS)
    assert bad.content == "So <<{>>"
    assert bad.error.startswith("the answer cannot be read: ")
