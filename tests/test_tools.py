"""Functions as tools: schemas from signatures, calls with what a model wrote."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from headrace.errors import ConfigError, ToolArgumentsError
from headrace.reward.environment import call, schema_of


class Point(BaseModel):
    x: int
    title: str = "here"


def search(query: str, limit: int = 5, kind: Literal["web", "file"] = "web", near: Point | None = None) -> str:
    """Search for pages.

    Looks at all of them.

    Args:
        query: What to look for,
            in words.
        limit (int): How many
        near: A place: any.

    Returns:
        str: the pages.
    """
    return f"{query} {limit!r} {kind} {near.x if near else near}"


class Shop:
    def __init__(self) -> None:
        self.sold: list[str] = []

    def sell(
        self, item: Annotated[str, Field(description="What", min_length=2)], schema: int = 1, json: Any = None
    ) -> int:
        self.sold.append(item)
        return schema


def test_the_schema_is_made_of_signature_and_docstring():
    function = schema_of(search)["function"]
    assert (function["name"], function["description"]) == ("search", "Search for pages. Looks at all of them.")
    properties = function["parameters"]["properties"]
    assert function["parameters"]["required"] == ["query"]
    assert properties["query"] == {"type": "string", "description": "What to look for, in words."}
    assert properties["limit"] == {"type": "integer", "default": 5, "description": "How many"}
    assert properties["kind"] == {"enum": ["web", "file"], "type": "string", "default": "web"}
    assert properties["near"]["description"] == "A place: any."
    assert function["parameters"]["$defs"]["Point"]["properties"]["title"] == {"type": "string", "default": "here"}


def test_a_method_needs_no_docstring_and_may_name_arguments_as_it_likes():
    shop = Shop()
    function = schema_of(shop.sell)["function"]
    assert function["description"] == "sell"
    assert list(function["parameters"]["properties"]) == ["item", "schema", "json"]
    assert function["parameters"]["properties"]["item"] == {"type": "string", "description": "What", "minLength": 2}
    assert call(shop.sell, '{"item": "tea", "schema": "5"}') == 5
    assert call(shop.sell, {"item": "pot"}) == 1
    assert shop.sold == ["tea", "pot"]
    assert call(Shop().sell, {"item": "cup"}) == 1
    assert shop.sold == ["tea", "pot"]


def test_arguments_are_checked_and_converted():
    assert call(search, '{"query": "q", "limit": "7", "near": {"x": 3}}') == "q 7 web 3"
    assert call(search, {"query": "q"}) == "q 5 web None"
    wrong = {
        '{"query": ': "the arguments of 'search' are not valid JSON",
        "[1]": "'search' cannot take these arguments",
        "{}": "query: Field required",
        '{"query": "q", "limit": "many"}': "limit: Input should be a valid integer",
        '{"query": "q", "size": 1}': "size: there is no such argument; it takes: query, limit, kind, near",
        '{"query": "q", "kind": "mail"}': "kind: Input should be 'web' or 'file'",
        '{"query": "q", "near": {"x": "left"}}': "near.x: Input should be a valid integer",
    }
    for arguments, message in wrong.items():
        with pytest.raises(ToolArgumentsError) as error:
            call(search, arguments)
        assert message in str(error.value)


def test_an_error_of_the_tool_itself_is_not_an_error_of_its_arguments():
    def fail(n: int) -> float:
        return n / 0

    with pytest.raises(ZeroDivisionError):
        call(fail, {"n": 1})


def test_what_cannot_be_described_is_refused():
    def many(*words: str) -> None: ...
    def odd(when: threading.Lock) -> None: ...  # noqa: F821

    class Thing: ...

    def strange(thing: Thing) -> None: ...

    strange.__annotations__["thing"] = Thing
    for function, message in ((many, r"by name, which '\*words"), (odd, "threading"), (strange, "cannot be described")):
        with pytest.raises(ConfigError, match=message):
            schema_of(function)
