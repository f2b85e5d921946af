"""What a client asks for, read from the bodies of its requests.

What cannot be honoured is refused: a client never gets an answer to another question. Hints
(`user`, `metadata`, `reasoning`, ...) change nothing and are passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.episode.chat import Message, Tools, content_text
from headrace.errors import ChatError

Body = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
KEPT = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
MOST_CHOICES = 64
# fields that would change an answer, and the values that do not
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs", "min_tokens"), (None, 0)),
    **dict.fromkeys(("logit_bias", "functions", "bad_words", "suffix"), (None, {}, [], "")),
    **dict.fromkeys(("echo", "background", "ignore_eos"), (None, False)),
    **dict.fromkeys(("function_call", "audio", "prediction", "web_search_options"), (None,)),
    **dict.fromkeys(("conversation", "prompt_template", "max_tool_calls"), (None,)),
    "repetition_penalty": (None, 1),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True),
    "truncation": (None, "disabled"),
}


class RefusedError(Exception):
    """A request that gets no answer. `status` is the HTTP status, `param` the field at fault."""

    def __init__(
        self, text: str, *, status: int = 400, param: str | None = None, code: str | None = None, after_s: int = 0
    ) -> None:
        super().__init__(text)
        self.status, self.param, self.code, self.after_s = status, param, code, after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request: a chat (`messages`), or a text or tokens to go on from.

    Example:
        Ask(digest="9f...", messages=({"role": "user", "content": "Hi"},), sampling={"temperature": 0.7}, n=2)
    """

    digest: str  # equal for equal requests
    messages: tuple[Message, ...] = ()
    ids: tuple[frozenset[str], ...] = ()  # of each message, those that we may have given it
    instructions: str = ""  # a system message before all others
    previous: str = ""  # the response that `messages` follow
    prompt: str | tuple[int, ...] = ""  # without messages
    stop_ids: tuple[int, ...] = ()
    tools: Tools = None
    may_call: bool = True
    must_call: str | None = None  # the name of a tool; "": any
    schema: Any = None  # JSON schema of the text
    sampling: Mapping[str, Any] = field(default_factory=dict)  # changes to the run's own
    n: int = 1
    stream: bool = False
    agent: str = ""  # what the client calls the model
    with_usage: bool = False
    with_token_ids: bool = False
    with_logprobs: bool = False


def read_chat(body: Body) -> Ask:
    """A request to /v1/chat/completions."""
    messages = _list(body, "messages")
    if not messages:
        raise RefusedError("messages is empty", param="messages")
    read = [_message(message, i) for i, message in enumerate(messages)]
    options = body.get("stream_options") or {}
    return Ask(
        messages=tuple(read),
        ids=tuple(frozenset(str(call.get("id")) for call in message.get("tool_calls") or ()) for message in read),
        with_usage=bool(options.get("include_usage")) if isinstance(options, Mapping) else False,
        **_schema(body.get("response_format") or {}, "response_format"),
        **_tools(body, nested=True),
        **_shared(body, "chat", "max_completion_tokens", "max_tokens"),
    )


def read_responses(body: Body) -> Ask:
    """A request to /v1/responses."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _list(body, "input")
    messages: list[dict[str, Any]] = []
    ids: list[set[str]] = []
    for i, item in enumerate(items):
        _add_item(item, i, messages, ids)
    if not messages:
        raise RefusedError("input is empty", param="input")
    text = body.get("text") or {}
    form = text.get("format") or {} if isinstance(text, Mapping) else None
    return Ask(
        messages=tuple(messages),
        ids=tuple(map(frozenset, ids)),
        instructions=_text(body.get("instructions") or "", "instructions"),
        previous=_text(body.get("previous_response_id") or "", "previous_response_id"),
        **_schema(form, "text.format"),
        **_tools(body, nested=False),
        **_shared(body, "responses", "max_output_tokens"),
    )


def read_completions(body: Body) -> Ask:
    """A request to /v1/completions."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not isinstance(prompt, str):
        prompt = _token_ids(prompt, "prompt")
    if not prompt:
        raise RefusedError("prompt is empty", param="prompt")
    options = body.get("stream_options") or {}
    with_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
    return Ask(prompt=prompt, with_usage=with_usage, **_shared(body, "completions", "max_tokens", or_else=16))


def read_generate(body: Body) -> Ask:
    """A request to /inference/v1/generate: token ids in and out."""
    ids, params = _token_ids(body.get("token_ids"), "token_ids"), body.get("sampling_params") or {}
    if not ids or not isinstance(params, Mapping):
        raise RefusedError("token_ids must be a list of token ids, sampling_params an object", param="token_ids")
    logprobs = params.get("logprobs")
    if logprobs not in (None, 0, 1) or params.get("prompt_logprobs") is not None:
        raise RefusedError("only the log-prob of each sampled token is known: logprobs=1", param="logprobs")
    shared = _shared({**params, "logprobs": None, "stream": body.get("stream")}, f"generate {ids}", "max_tokens")
    stops = _token_ids(params.get("stop_token_ids") or [], "stop_token_ids")
    return Ask(prompt=ids, stop_ids=stops, with_token_ids=True, with_logprobs=logprobs is not None, **shared)


def _shared(body: Body, route: str, *max_names: str, or_else: int | None = None) -> dict[str, Any]:
    """What all routes have in common."""
    for name, values in NEUTRAL.items():
        if name in body and body[name] not in values:
            raise RefusedError(f"{name} = {json.dumps(body[name])[:80]} is not supported", param=name)
    with_logprobs = body.get("logprobs") not in (None, False)
    if with_logprobs and route != "chat":
        raise RefusedError("logprobs is not supported on this route", param="logprobs")
    sampling = {
        "temperature": _number(body, "temperature", 0, 100),
        "top_p": _number(body, "top_p", 0, 1),
        "min_p": _number(body, "min_p", 0, 1),
        "top_k": _whole(body, "top_k", -1, 2**31),
        "seed": _whole(body, "seed", -(2**63), 2**63 - 1),
        "stop": _stop(body),
        "max_new_tokens": next((n for n in (_whole(body, name, 1, 2**31) for name in max_names) if n), or_else),
    }
    if sampling["top_k"] is not None:
        sampling["top_k"] = max(0, sampling["top_k"])
    if sampling["top_p"] == 0:
        raise RefusedError("top_p must be above 0", param="top_p")
    return {
        "digest": hashlib.sha256(f"{route} {json.dumps(body, sort_keys=True, default=str)}".encode()).hexdigest(),
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "n": _whole(body, "n", 1, MOST_CHOICES) or 1,
        "stream": bool(body.get("stream")),
        "agent": str(body.get("model") or "")[:80],
        **({} if route.startswith("generate") else {"with_token_ids": bool(body.get("return_token_ids"))}),
        **({"with_logprobs": with_logprobs} if route == "chat" else {}),
    }


def _message(message: Any, i: int) -> dict[str, Any]:
    where = f"messages[{i}]"
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise RefusedError(f"{where} must be an object with a role, one of {', '.join(ROLES)}", param=where)
    read = {key: message[key] for key in KEPT if message.get(key) is not None}
    calls = read.get("tool_calls", [])
    calls = calls if isinstance(calls, list) else [None]
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in calls]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in functions):
        raise RefusedError(f"{where}.tool_calls must be a list of calls of functions by their names", param=where)
    read["content"] = _content(read, where)
    return read


def _content(message: Message, where: str) -> str:
    if not isinstance(message.get("content"), str | list | None):
        raise RefusedError(f"{where}.content must be a text, or a list of parts", param=where)
    try:
        return content_text(message)
    except ChatError as error:
        raise RefusedError(f"{where}: {error}", param=where) from error


def _add_item(item: Any, i: int, messages: list[dict[str, Any]], ids: list[set[str]]) -> None:
    """One item of a response's input: a message, or a part of one."""
    where = f"input[{i}]"
    kind = item.get("type") or "message" if isinstance(item, Mapping) else None
    if kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else _content({"content": output}, where)
        messages.append({"role": "tool", "content": text, "tool_call_id": str(item.get("call_id"))})
        ids.append(set())
        return
    if kind == "message" and item.get("role") != "assistant":
        messages.append(_message(item, i))
        ids.append(set())
        return
    if kind not in ("message", "reasoning", "function_call"):
        raise RefusedError(f"{where} is of a type that is not supported: {kind}", param=where)
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    begun = last is not None and (last.get("tool_calls") or last["content"])
    if last is None or (begun and kind == "reasoning") or (last.get("tool_calls") and kind == "message"):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
        ids.append(set())
    ids[-1] |= {str(item[key]) for key in ("id", "call_id") if item.get(key)}
    if kind == "message":
        last["content"] += _content(item, where)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        last["reasoning_content"] = last.get("reasoning_content", "") + _content({"content": parts}, where)
    else:
        function = {"name": _text(item.get("name"), where), "arguments": item.get("arguments") or "{}"}
        call = {"id": str(item.get("call_id")), "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)


def _tools(body: Body, *, nested: bool) -> dict[str, Any]:
    tools: list[dict[str, Any]] = []
    for i, tool in enumerate(_list(body, "tools")):
        function = tool.get("function") if nested and isinstance(tool, Mapping) else tool
        if not isinstance(function, Mapping) or tool.get("type") != "function" or not function.get("name"):
            raise RefusedError(f"tools[{i}] must be a function with a name", param=f"tools[{i}]")
        kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        tools.append({"type": "function", "function": kept})
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        choice = (choice.get("function") or choice).get("name")
        if choice not in [tool["function"]["name"] for tool in tools]:
            raise RefusedError(f"tool_choice names a tool that is not among the tools: {choice}", param="tool_choice")
        return {"tools": tools, "must_call": choice}
    if choice not in (None, "auto", "none", "required") or (choice == "required" and not tools):
        raise RefusedError("tool_choice must be auto, none, required (with tools), or name one", param="tool_choice")
    return {"tools": tools or None, "may_call": choice != "none", "must_call": "" if choice == "required" else None}


def _schema(form: Any, name: str) -> dict[str, Any]:
    kind = form.get("type", "text") if isinstance(form, Mapping) else None
    given = form.get("json_schema", form) if isinstance(form, Mapping) else None
    schema = given.get("schema") if kind == "json_schema" and isinstance(given, Mapping) else None
    schema = {"type": "object"} if kind == "json_object" else schema
    if kind not in ("text", "json_object", "json_schema") or (kind != "text" and not isinstance(schema, Mapping)):
        raise RefusedError(f"{name} must be text, json_object, or json_schema with a schema", param=name)
    return {"schema": schema}


def _list(body: Body, name: str) -> list[Any]:
    found = body.get(name) or []
    if not isinstance(found, list):
        raise RefusedError(f"{name} must be a list", param=name)
    return found


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RefusedError(f"{name} must be a text", param=name)
    return value


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(id) is int and 0 <= id < 2**31 for id in value):
        raise RefusedError(f"{name} must be a list of token ids" + " or a text" * (name == "prompt"), param=name)
    return tuple(value)


def _number(body: Body, name: str, least: float, most: float) -> Any:
    value = body.get(name)
    if value is not None and (type(value) not in (int, float) or not least <= value <= most):
        raise RefusedError(f"{name} must be a number from {least} to {most}", param=name)
    return value


def _whole(body: Body, name: str, least: int, most: int) -> Any:
    value = _number(body, name, least, most)
    if value is not None and type(value) is not int:
        raise RefusedError(f"{name} must be a whole number", param=name)
    return value


def _stop(body: Body) -> tuple[str, ...] | None:
    stop: Any = body.get("stop")
    texts: Sequence[Any] = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedError("stop must be a text, or a list of texts", param="stop")
    return tuple(texts) or None
