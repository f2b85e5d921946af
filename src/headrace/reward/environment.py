"""Environments of the user's class, alive in a worker process: one for each episode.

`start(prompt)` gives the first message; every public method that is not in PROTOCOL is a tool. What
a tool cannot do with its arguments (TOLD) is told to the policy; any other exception fails, and the
episode is dropped. The guide "agents and environments" has the whole protocol.
"""

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MethodType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from headrace.errors import ConfigError, ToolArgumentsError
from headrace.reward.function import RewardFunction, failure
from headrace.types import Command, Score
from headrace.user_code import load_function

PROTOCOL = ("start", "reply", "reward", "state", "snapshot", "restore", "close")
LIMITS = ("max_turns", "max_tokens", "max_s")
SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
TOLD = (ToolArgumentsError, ValueError, LookupError, ArithmeticError)  # to the policy


class Done(Exception):
    """Raised by an environment: the episode is over. Example: raise Done("right", reward=1.0)."""

    def __init__(self, text: str = "", reward: float | None = None) -> None:
        super().__init__(text)
        self.text, self.reward = text, reward


class Observation(str):
    """A reply with a reward for the turn. Example: return Observation("warmer", reward=0.1)."""

    reward: float

    def __new__(cls, text: str, reward: float) -> "Observation":
        reply = super().__new__(cls, text)
        reply.reward = reward
        return reply


def _read(answer: Any) -> Score:
    """What the environment says, as the score's `value`."""
    try:
        json.dumps(answer, allow_nan=False)
    except (TypeError, ValueError) as error:
        return failure(f"the environment returned something that JSON has no form for: {error}")
    return Score(reward=0.0, value=answer)


def environment_function(spec: str) -> RewardFunction:
    """Imports the user's code: the class that `episode.environment = spec` names, to be called with a `Command`."""
    make = load_function(spec, "episode.environment", ConfigError)
    if not inspect.isclass(make) or not callable(getattr(make, "start", None)):
        raise ConfigError(f"episode.environment = '{spec}' must be a class with a method start(self, prompt)")
    host = LiveEnvironments(make)
    if not host.tools and not hasattr(make, "reply"):
        why = "no method reply(self, text): there is nothing that the policy could do"
        raise ConfigError(f"episode.environment = '{spec}' has no tools (public methods) and {why}")
    methods = [getattr(make, name) for name in (*host.tools, *PROTOCOL) if hasattr(make, name)]
    if any(map(inspect.iscoroutinefunction, methods)):
        return RewardFunction(name=make.__name__, call=host.answer, mode="async", read=_read)

    def without_waiting(command: Command) -> Any:  # no event loop runs: user code may start one
        try:
            host.answer(command).send(None)
        except StopIteration as end:
            return end.value
        raise TypeError("a method that is no coroutine returned something to wait for")

    return RewardFunction(name=make.__name__, call=without_waiting, read=_read)


class LiveEnvironments:
    """The live environments of one class, by episode."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        names = [name for name in dir(make) if not name.startswith("_") and name not in PROTOCOL]
        functions = [getattr(make, name) for name in names if inspect.isfunction(getattr(make, name))]
        self.tools = {function.__name__: schema_of(MethodType(function, make)) for function in functions}
        self._live: dict[str, Any] = {}

    async def answer(self, command: Command) -> dict[str, Any]:
        if command.do == "describe":
            limits = {name: getattr(self._make, name) for name in LIMITS if hasattr(self._make, name)}
            takes_text, scores = hasattr(self._make, "reply"), hasattr(self._make, "reward")
            return {"tools": list(self.tools.values()), "takes_text": takes_text, "scores": scores, **limits}
        if command.do in ("start", "restore"):
            if (old := self._live.pop(command.episode, None)) is not None:
                await _maybe(old, "close")
            environment = self._make()
            given = json.loads(command.given) if command.do == "restore" else command.given
            said = await _maybe(environment, command.do, given)
            self._live[command.episode] = environment
            return {"said": said if command.do == "start" else None, "state": await self._state(environment)}
        if (environment := self._live.get(command.episode)) is None:  # its process was replaced
            return {"lost": True}
        if command.do == "turn":
            return await self._turn(environment, **command.given)
        if command.do == "score":
            return {"reward": await _maybe(environment, "reward")}
        del self._live[command.episode]
        await _maybe(environment, "close")
        return {}

    async def _turn(self, environment: Any, calls: list[Any] | None = None, text: str = "") -> dict[str, Any]:
        replies, rewards, done = list[str](), list[float](), False
        try:
            if calls is None:
                replies.append(await _maybe(environment, "reply", text))
            for name, arguments in calls or []:
                try:
                    if name not in self.tools:
                        raise ToolArgumentsError(f"there is no tool '{name}'; the tools are: {', '.join(self.tools)}")
                    found = call(getattr(environment, name), arguments)
                    replies.append(await found if inspect.isawaitable(found) else found)
                except TOLD as error:
                    replies.append(f"error: {error}")
        except Done as end:
            done = True
            replies.append(end.text)
            rewards += [] if end.reward is None else [end.reward]
        rewards += [reply.reward for reply in replies if isinstance(reply, Observation)]
        answer = {"replies": ["" if reply is None else str(reply) for reply in replies], "done": done}
        answer["reward"] = sum(rewards) if rewards else None
        if not done:
            answer["state"] = await self._state(environment)
            snapshot = await _maybe(environment, "snapshot")
            answer["snapshot"] = "" if snapshot is None else json.dumps(snapshot)
        return answer

    async def _state(self, environment: Any) -> str:
        state = await _maybe(environment, "state")
        return "" if state is None else str(state)


async def _maybe(environment: Any, name: str, *given: Any) -> Any:
    """The result of a method that an environment may lack."""
    method = getattr(environment, name, None)
    found = None if method is None else method(*given)
    return await found if inspect.isawaitable(found) else found


# ---- functions as tools: the schema that a model reads, and calls with the arguments that it wrote


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The tool as OpenAI describes one. The docstring and its `Args:` become descriptions.

    Example: {"type": "function", "function": {"name": "add", "description": ..., "parameters": ...}}
    """
    parameters = _untitled(_arguments_of(function).model_json_schema())
    about = {"name": function.__name__, "description": _docstring(function)[0] or function.__name__}
    return {"type": "function", "function": about | {"parameters": {"properties": {}, "required": []} | parameters}}


def call(function: Callable[..., Any], arguments: str | Mapping[str, Any]) -> Any:
    """What the function returns for arguments, or JSON text. Wrong ones raise."""
    name, model = function.__name__, _arguments_of(function)
    try:
        checked = model.model_validate(json.loads(arguments or "{}") if isinstance(arguments, str) else arguments)
    except ValidationError as error:
        takes = ", ".join(field.alias or "" for field in model.model_fields.values()) or "none"
        own = {"extra_forbidden": f"there is no such argument; it takes: {takes}"}
        bad = [(".".join(map(str, e["loc"])), own.get(e["type"], e["msg"])) for e in error.errors()]
        text = "; ".join(f"{where}: {why}" if where else why for where, why in bad)
        raise ToolArgumentsError(f"'{name}' cannot take these arguments: {text}") from error
    except ValueError as error:
        raise ToolArgumentsError(f"the arguments of '{name}' are not valid JSON: {error}") from error
    return function(**{str(model.model_fields[key].alias): getattr(checked, key) for key in checked.model_fields_set})


def _arguments_of(function: Callable[..., Any]) -> type[BaseModel]:
    return _model(getattr(function, "__func__", function), inspect.ismethod(function))


@lru_cache(maxsize=1024)
def _model(function: Callable[..., Any], is_bound: bool) -> type[BaseModel]:
    """A pydantic model of the parameters, with names of its own: a parameter may have any."""
    where, described = f"the tool '{getattr(function, '__name__', function)}'", _docstring(function)[1]
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {}
        for i, parameter in enumerate(list(inspect.signature(function).parameters.values())[is_bound:]):
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(f"{where}: a model gives arguments by name, which '{parameter}' does not allow")
            name, default = parameter.name, ... if parameter.default is parameter.empty else parameter.default
            about: dict[str, Any] = {"description": described[name]} if name in described else {}
            fields[f"argument_{i}"] = (hints.get(name, Any), Field(default, alias=name, **about))
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except (NameError, PydanticUserError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{where}: its parameters cannot be described to a model: {reason}") from error
    return model


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text before the first section, and the descriptions under `Args:`."""
    text, *sections = SECTION.split(inspect.getdoc(function) or "")
    described: dict[str, str] = {}
    for title, block in zip(sections[::2], sections[1::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            entries = re.split(r"^(\w+)\s*(?:\([^)\n]*\))?:", inspect.cleandoc("\n" + block), flags=re.MULTILINE)[1:]
            described |= {name: " ".join(said.split()) for name, said in zip(entries[::2], entries[1::2], strict=True)}
    return " ".join(text.split()), described


def _untitled(schema: Any, is_names: bool = False) -> Any:
    """Without pydantic's titles; an argument may have that name."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if is_names or key != "title"}
    return {key: _untitled(value, key in ("properties", "$defs") and not is_names) for key, value in kept.items()}
