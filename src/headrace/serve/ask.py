"""What a client asks for, read from the bodies of its requests.

What cannot be honoured is refused: a client never gets an answer to another question. Hints
(`user`, `metadata`, `reasoning`, ...) change nothing and are passed over.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, AliasChoices, AliasPath, BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import to_json

from headrace.config import LEAST
from headrace.episode.chat import content_text

ROLES = ("system", "developer", "user", "assistant", "tool")
KEPT = ("role", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
PARTS = ("reasoning_content", "content", "tool_calls")  # of an answer, in their order
MOST_CHOICES = 64
SAMPLING = ("temperature", "top_p", "min_p", "top_k", "seed", "stop", "max_new_tokens")
# fields that would change an answer, and the values that do not
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs", "min_tokens"), (0,)),
    **dict.fromkeys(("logit_bias", "functions", "bad_words", "suffix"), ({}, [], "")),
    **dict.fromkeys(("echo", "background", "ignore_eos"), (False,)),
    **dict.fromkeys(("function_call", "audio", "prediction", "web_search_options", "prompt_logprobs"), ()),
    **dict.fromkeys(("conversation", "prompt_template", "max_tool_calls"), ()),
    **dict.fromkeys(("repetition_penalty", "best_of"), (1,)),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "truncation": ("disabled",),
}


class RefusedError(Exception):
    """A request that gets no answer. `status` is the HTTP status, `param` the field at fault."""

    def __init__(self, text: str, *, status: int = 400, param: str = "", code: str = "", after_s: int = 0) -> None:
        super().__init__(text)
        self.status, self.param, self.code, self.after_s = status, param or None, code or None, after_s


# ---- parts of bodies: each of these raises ValueError if it makes no sense


def _message(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("role") not in ROLES:
        raise ValueError(f"must have a role, one of {', '.join(ROLES)}")
    calls = given.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError("must have tool_calls that call functions by their names")
    if not all(isinstance(given.get(key) or "", str) for key in ("reasoning_content", "reasoning")):
        raise ValueError("must have thinking that is a text")
    return {key: given[key] for key in KEPT if given.get(key) is not None} | {"content": content_text(given)}


def _item(given: dict[str, Any]) -> dict[str, Any]:
    """An item of a response's input: a message, or a part of an answer under the id we gave it."""
    kind, id = given.get("type") or "message", {"id": str(given["id"])} if given.get("id") else {}
    match kind:
        case "message":
            return _message(given) | id
        case "reasoning":
            text = content_text({"content": given.get("content") or given.get("summary")})
            return {"role": "assistant", "content": "", "reasoning_content": text, **id}
        case "function_call":
            function = {"name": given.get("name"), "arguments": given.get("arguments") or "{}"}
            call = {"id": str(given.get("call_id")), "type": "function", "function": function}
            return _message({"role": "assistant", "tool_calls": [call]})
        case "function_call_output":
            text = content_text({"content": given.get("output")})
            return {"role": "tool", "content": text, "tool_call_id": str(given.get("call_id"))}
    raise ValueError(f"is of a type that is not supported: {kind}")


def _joined(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages: thinking, text and calls of one answer belong together."""
    messages: list[dict[str, Any]] = []
    for item in items:
        last = messages[-1] if messages else {"role": ""}
        held, new = ([part for part in PARTS if message.get(part)] for message in (last, item))
        in_order = not held or not new or PARTS.index(held[-1]) <= PARTS.index(new[0])
        if last["role"] == item["role"] == "assistant" and in_order:
            messages[-1] = last | item | {part: last[part] for part in held}
            messages[-1] |= {part: last[part] + item[part] for part in new if part in held}
        else:
            messages.append(item)
    return messages


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    function = given.get("function", given)  # the Responses API writes its fields beside the type
    if given.get("type") != "function" or not isinstance(function, Mapping) or not function.get("name"):
        raise ValueError("must be a function with a name")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise ValueError("must have parameters that are a JSON schema")
    kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    return {"type": "function", "function": kept}


def _must_call(choice: Any, info: Any) -> Any:
    """The tools of which an answer has to call one."""
    if choice in ("auto", "none"):
        return []
    tools: list[Any] = info.data.get("tools", [])
    named = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    found = tools if choice == "required" else [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        raise ValueError("must be auto, none, required (with tools), or name one of the tools")
    return found


def _schema(form: Any) -> Any:
    """The JSON schema of answers; None for any text."""
    kind = "text" if not form else form.get("type", "text") if isinstance(form, Mapping) else ""
    given = form.get("json_schema", form) if kind == "json_schema" else None
    schema = given.get("schema") if isinstance(given, Mapping) else None
    schema = {"type": "object"} if kind == "json_object" else schema
    if kind not in ("text", "json_object", "json_schema") or (kind != "text" and not isinstance(schema, Mapping)):
        raise ValueError("must be text, json_object, or json_schema with a schema")
    return schema


def _prompt(given: Any) -> Any:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    of_tokens = isinstance(given, list) and all(type(id) is int and 0 <= id < 2**31 for id in given)
    if not given or not (of_tokens or isinstance(given, str)):
        raise ValueError("must be a text, or a list of token ids")
    return given


def _temperature(given: float) -> float:
    if 0 < given < LEAST:
        raise ValueError(f"must be 0, or at least {LEAST:g}")
    return given


Item = Annotated[dict[str, Any], AfterValidator(_item)]
OneText = BeforeValidator(lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given)
Schema = Annotated[Any, BeforeValidator(_schema)]
Flag = Annotated[bool, BeforeValidator(bool)]
Listed = BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else (given,))
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
CHOICE = AliasPath("tool_choice")
LIMIT = AliasChoices("max_completion_tokens", "max_tokens", "max_output_tokens")


class Ask(BaseModel, strict=True, frozen=True):
    """A request: a chat (`messages`), or a text or tokens to go on from (`prompt`)."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

    digest: str  # equal for equal requests
    messages: list[Any] = []
    prompt: Any = ""
    instructions: str = ""  # a system message before all others
    previous: str = Field("", alias="previous_response_id")  # the response that `messages` follow
    tools: list[Annotated[dict[str, Any], AfterValidator(_tool)]] = []
    may_call: Annotated[bool, BeforeValidator(lambda choice: choice != "none")] = Field(True, validation_alias=CHOICE)
    must_call: Annotated[list[Any], BeforeValidator(_must_call)] = Field([], validation_alias=CHOICE)
    json_schema: Schema = Field(None, alias="response_format")  # of the answer
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: Flag = False
    agent: Annotated[str, AfterValidator(lambda name: name[:80])] = Field("", alias="model")
    with_usage: Flag = Field(False, validation_alias=AliasPath("stream_options", "include_usage"))
    with_token_ids: Flag = Field(False, alias="return_token_ids")
    with_logprobs: Flag = Field(False, alias="logprobs")
    stop_ids: TokenIds = Field([], alias="stop_token_ids")
    temperature: Annotated[float, Field(ge=0, le=100), AfterValidator(_temperature)] | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    top_k: Annotated[int, Field(ge=-1, le=2**31), AfterValidator(lambda k: max(0, k))] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Listed] = ()
    max_new_tokens: int | None = Field(None, ge=1, le=2**31, validation_alias=LIMIT)

    @property
    def sampling(self) -> dict[str, Any]:
        return {name: value for name in SAMPLING if (value := getattr(self, name)) not in (None, ())}

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        """Raises RefusedError if the body makes no sense, or asks for what cannot be done."""
        given = {name: value for name, value in body.items() if value is not None}
        for name, values in cls.neutral.items():
            if name in given and given[name] not in values:
                raise RefusedError(f"{name} = {json.dumps(given[name])[:80]} is not supported", param=name)
        digest = hashlib.sha256(cls.__name__.encode() + to_json(body)).hexdigest()
        try:
            return cls.model_validate(given | {"digest": digest})
        except ValidationError as error:
            found = error.errors(include_url=False)[0]
            path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"])[1:]
            text = found["msg"].removeprefix("Input ").removeprefix("Value error, ")
            raise RefusedError(f"{path}: {text}"[:400], param=path) from error


class ChatAsk(Ask):
    """A request to /v1/chat/completions."""

    messages: list[Annotated[dict[str, Any], AfterValidator(_message)]] = Field(min_length=1)


class ResponsesAsk(Ask):
    """A request to /v1/responses."""

    neutral = NEUTRAL | {"n": (1,), "logprobs": (False,), "prompt": ()}
    messages: Annotated[list[Item], OneText, AfterValidator(_joined)] = Field(alias="input", min_length=1)
    text: dict[str, Any] = {}
    json_schema: Schema = Field(None, validation_alias=AliasPath("text", "format"))


class CompletionsAsk(Ask):
    """A request to /v1/completions."""

    neutral = NEUTRAL | {"logprobs": (False,), "messages": ()}
    prompt: Annotated[Any, BeforeValidator(_prompt)]
    max_new_tokens: int | None = Field(16, ge=1, le=2**31, validation_alias=LIMIT)


class GenerateAsk(Ask):
    """A request to /inference/v1/generate: token ids in and out."""

    neutral = NEUTRAL | {"stream": (False,), "logprobs": (0, 1), "messages": ()}
    prompt: TokenIds = Field(alias="token_ids", min_length=1)
    with_logprobs: Annotated[bool, BeforeValidator(lambda num_likeliest: True)] = Field(False, alias="logprobs")

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        params = body.get("sampling_params") or {}
        if not isinstance(params, Mapping):
            raise RefusedError("sampling_params: must be an object", param="sampling_params")
        shared = {name: body.get(name) for name in ("token_ids", "stream", "model")}
        return super().read({**params, **shared, "return_token_ids": True})
