"""The budgets of the code base, as tests: raise one only in a change that does nothing else and says why."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from headrace.config_file import explain

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "headrace"
FILES = sorted(SRC.rglob("*.py"))

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500
MAX_SRC_LINES = 28_000
MAX_SETTINGS = 100
MAX_README_LINES = 150
CORE_DEPENDENCIES = {"torch", "transformers", "numpy", "safetensors", "pydantic", "typer", "rich"}

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path.relative_to(ROOT), node


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_functions_are_short():
    long = [
        f"{path}:{node.lineno} {node.name} has {length} lines"
        for path, node in nodes()
        if isinstance(node, FUNCTION) and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not long, f"functions over {MAX_FUNCTION_LINES} lines: {long}"


def test_files_are_short():
    long = [f"{path.relative_to(ROOT)} has {num_lines(path)}" for path in FILES if num_lines(path) > MAX_FILE_LINES]
    assert not long, f"files over {MAX_FILE_LINES} lines: {long}"


def test_source_is_small():
    total = sum(map(num_lines, FILES))
    assert total <= MAX_SRC_LINES, f"src has {total} lines, over {MAX_SRC_LINES}"


def test_settings_are_few():
    settings = explain(None)
    assert len(settings) <= MAX_SETTINGS, f"{len(settings)} settings, over {MAX_SETTINGS}: remove one to add one"


def test_settings_are_documented():
    silent = [setting.key for setting in explain(None) if not setting.doc]
    assert not silent, f"settings without a line of documentation: {silent}"


def test_module_names_say_what_is_inside():
    vague = [
        str(path.relative_to(ROOT))
        for path in FILES
        if re.search(r"(^|_)(utils?|common|misc|helpers?)($|_)", path.stem)
    ]
    vague += [
        str(path.relative_to(ROOT)) for path in FILES if path.parent.name in {"utils", "common", "misc", "helpers"}
    ]
    assert not vague, f"modules named for nothing in particular: {vague}"


def test_class_names_say_what_they_are():
    vague = [
        f"{path}:{node.lineno} {node.name}"
        for path, node in nodes()
        if isinstance(node, ast.ClassDef) and re.search(r"Manager|Helper|Wrapper|Mixin|^Base|Base$", node.name)
    ]
    assert not vague, f"classes named for nothing in particular: {vague}"


def test_no_import_hides_in_a_function():
    # An optional library is loaded by importlib.import_module on the file that bears its name.
    hidden = {
        f"{path}:{inner.lineno} in {node.name}"
        for path, node in nodes()
        if isinstance(node, FUNCTION)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom) or getattr(inner, "id", "") == "__import__"
    }
    assert not hidden, f"imports inside functions: {sorted(hidden)}"


def test_core_dependencies_are_these():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[^A-Za-z0-9_-]", dependency)[0] for dependency in project["dependencies"]}
    assert names == CORE_DEPENDENCIES, f"core dependencies differ: {sorted(names ^ CORE_DEPENDENCIES)}"


def test_every_record_shows_an_example():
    tree = ast.parse((SRC / "types.py").read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    records = [node for node in classes if any("dataclass" in ast.unparse(d) for d in node.decorator_list)]
    silent = [node.name for node in records if "Example:" not in (ast.get_docstring(node) or "")]
    assert records
    assert not silent, f"records of types.py without an Example: {silent}"


def test_readme_is_short():
    lines = num_lines(ROOT / "README.md")
    assert lines <= MAX_README_LINES, f"README.md has {lines} lines, over {MAX_README_LINES}"
