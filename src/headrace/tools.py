"""Functions as tools: the schema that a model reads, and calls with the arguments that it wrote."""

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

SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The tool as OpenAI describes one. The docstring and its `Args:` become descriptions.

    Example: {"type": "function", "function": {"name": "add", "description": ..., "parameters": ...}}
    """
    parameters = _untitled(_arguments_of(function).model_json_schema()) | {"additionalProperties": False}
    about = {"name": function.__name__, "description": _docstring(function)[0] or function.__name__}
    return {"type": "function", "function": about | {"parameters": {"properties": {}, "required": []} | parameters}}


def call(function: Callable[..., Any], arguments: str | Mapping[str, Any]) -> Any:
    """What the function returns for arguments, or JSON text. Wrong ones raise ToolArgumentsError."""
    name, model = function.__name__, _arguments_of(function)
    try:
        checked = model.model_validate(json.loads(arguments or "{}") if isinstance(arguments, str) else arguments)
    except ValidationError as error:
        takes = ", ".join(field.alias or "" for field in model.model_fields.values()) or "none"
        extra = f"there is no such argument; it takes: {takes}"
        found = [
            (".".join(map(str, e["loc"])), extra if e["type"] == "extra_forbidden" else e["msg"])
            for e in error.errors()
        ]
        text = "; ".join(f"{where}: {why}" if where else why for where, why in found)
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
