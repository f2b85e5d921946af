"""One class name, one thing: no two classes of src share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"

# Names that still stand twice. Each must be doubled, or its line here must go.
ALLOWED: frozenset[str] = frozenset()


def classes() -> dict[str, list[str]]:
    """The places of every class, by its name without leading underscores."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{path.relative_to(SRC)}:{node.lineno}")
    return found


def test_no_two_classes_share_a_name() -> None:
    found = classes()
    assert len(found) > 100, "the sources were not found"
    doubled = {name: places for name, places in found.items() if len(places) > 1}
    assert {name: doubled[name] for name in doubled.keys() - ALLOWED} == {}


def test_no_name_is_allowed_for_longer_than_needed() -> None:
    found = classes()
    assert [name for name in sorted(ALLOWED) if len(found.get(name, [])) < 2] == []
