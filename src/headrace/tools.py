"""Functions as tools: the schema that a model reads, and calls with the arguments that it wrote."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from headrace.errors import ConfigError, ToolArgumentsError

SECTION = re.compile(r"^(args|arguments|parameters|returns?|raises|yields|examples?|notes?):\s*$", re.IGNORECASE)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The tool as OpenAI describes one. The docstring and its `Args:` become descriptions.

    Example:
        schema_of(add) == {"type": "function", "function": {"name": "add", "description": ..., "parameters": ...}}
    """
    description, _ = _docstring(function)
    parameters = _plain(_arguments_of(function).model_json_schema())
    parameters.setdefault("required", [])
    about = {"name": function.__name__, "description": description or function.__name__.replace("_", " ")}
    return {"type": "function", "function": {**about, "parameters": parameters}}


def call(function: Callable[..., Any], arguments: str | Mapping[str, Any]) -> Any:
    """What the function returns for the arguments, which may be JSON text. Wrong ones raise ToolArgumentsError."""
    name = function.__name__
    try:
        given = json.loads(arguments or "{}") if isinstance(arguments, str) else dict(arguments)
    except ValueError as error:
        raise ToolArgumentsError(f"the arguments of '{name}' are not valid JSON: {error}") from error
    model = _arguments_of(function)
    try:
        checked = model.model_validate(given)
    except ValidationError as error:
        raise ToolArgumentsError(f"'{name}' cannot take these arguments: {_reasons(error, model)}") from error
    fields = type(checked).model_fields
    return function(
        **{
            field.alias or key: getattr(checked, key)
            for key, field in fields.items()
            if key in checked.model_fields_set
        }
    )


def _reasons(error: ValidationError, model: type[BaseModel]) -> str:
    takes = ", ".join(field.alias or name for name, field in model.model_fields.items()) or "none"
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(map(str, problem["loc"]))
        unknown = problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1
        said = f"there is no such argument; it takes: {takes}" if unknown else problem["msg"]
        lines.append(f"{where}: {said}" if where else said)
    return "; ".join(lines)


def _arguments_of(function: Callable[..., Any]) -> type[BaseModel]:
    return _model(getattr(function, "__func__", function), inspect.ismethod(function))


@lru_cache(maxsize=1024)
def _model(function: Callable[..., Any], is_bound: bool) -> type[BaseModel]:
    """A pydantic model of the parameters."""
    where, (_, described) = f"the tool '{getattr(function, '__name__', function)}'", _docstring(function)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {}
        for i, parameter in enumerate(list(inspect.signature(function).parameters.values())[is_bound:]):
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ConfigError(f"{where}: a model gives arguments by name, which '{parameter}' does not allow")
            default = ... if parameter.default is parameter.empty else parameter.default
            field = Field(default, alias=parameter.name, description=described.get(parameter.name))
            fields[f"argument_{i}"] = (hints.get(parameter.name, Any), field)  # any name may be an alias
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except (NameError, PydanticUserError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{where}: its parameters cannot be described to a model: {reason}") from error
    return model


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text before the first section, and the descriptions under `Args:`."""
    lines = (inspect.getdoc(function) or "").splitlines()
    starts = [i for i, line in enumerate(lines) if SECTION.match(line)]
    described: dict[str, str] = {}
    for start in starts:
        if lines[start].lower().startswith(("args", "arg", "param")):
            end = next((i for i in starts if i > start), len(lines))
            block = inspect.cleandoc("\n" + "\n".join(lines[start + 1 : end])).splitlines()
            name = ""
            for line in block:
                if match := re.match(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line):
                    name, described[match[1]] = match[1], match[2]
                elif name and line.strip():
                    described[name] = f"{described[name]} {line.strip()}".strip()
    return " ".join("\n".join(lines[: starts[0] if starts else None]).split()), described


def _plain(schema: Any) -> Any:
    """Without pydantic's titles."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _plain(item) for name, item in value.items()} if key in ("properties", "$defs") else _plain(value)
        for key, value in schema.items()
        if key != "title"
    }
