"""The budgets of the code base, as tests: raise one only in a change that does nothing else and says why."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

from headrace.config_file import explain

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "headrace"
FILES = sorted(path for path in SRC.rglob("*.py") if path.parent.name != "recipes")  # those are a user's files

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500
MAX_SETTINGS = 110
MAX_README_LINES = 150
MAX_FRONT_DOORS = 9
MAX_WALKED_FILES = 30
MAX_LONG_LINES = 0.05
MAX_CORE_LINES, MAX_LENS_LINES = 21_332, 6_668  # together 28,000
LENS = ("cli", "dashboard", "insight", "runs")  # looks at what the other rooms, the core, wrote
# Lines of each room.
ROOMS = {
    "(files)": 3_036,
    "buffer": 337,
    "episode": 1_301,
    "kernels": 1_198,
    "learner": 1_515,
    "ledger": 1_269,
    "loop": 1_511,
    "place": 1_722,
    "policy": 2_237,
    "prompts": 631,
    "publish": 827,
    "reward": 1_559,
    "rollout": 2_886,
    "serve": 1_303,
    "cli": 1_140,
    "dashboard": 1_767,
    "insight": 2_761,
    "runs": 998,
}
CORE_DEPENDENCIES = {"torch", "transformers", "numpy", "safetensors", "pydantic", "typer", "rich"}

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    parsed = ((path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))) for path in FILES)
    return [(path, node) for path, tree in parsed for node in ast.walk(tree)]


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


def test_rooms_keep_their_budgets():
    lines: Counter[str] = Counter()
    for path in FILES:
        parts = path.relative_to(SRC).parts
        lines[parts[0] if len(parts) > 1 else "(files)"] += num_lines(path)
    assert lines.keys() == ROOMS.keys(), "a new room needs a budget, a closed one gives its budget back"
    over = {room: f"{lines[room]} of {budget}" for room, budget in ROOMS.items() if lines[room] > budget}
    assert not over, f"rooms over their budgets: {over}"
    lens = sum(lines[room] for room in LENS)
    assert lens <= MAX_LENS_LINES
    assert lines.total() - lens <= MAX_CORE_LINES


def test_lines_are_not_long():
    """Fewer lines come from structure, not from longer lines."""
    lines = [line for path in FILES for line in path.read_text(encoding="utf-8").splitlines()]
    share = sum(len(line) > 100 for line in lines) / len(lines)
    assert share <= MAX_LONG_LINES, f"{share:.1%} of all lines have more than 100 characters"


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


def walked_files(title: str) -> list[str]:
    """The files in the list under `title` of docs/walk.md."""
    walk = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
    listed = walk.split(f"**{title}**\n\n")[1].split("\n\n")[0]
    return re.findall(r"`([a-z_/]+\.py)`", listed)


def test_a_trajectory_passes_few_files():
    doors, files = walked_files("Front doors"), walked_files("All files")
    missing = [name for name in files if not (SRC / name).is_file()]
    assert not missing, f"docs/walk.md lists files that do not exist: {missing}"
    assert len(files) == len(set(files))
    assert len(doors) == len(set(doors))
    assert 0 < len(doors) <= MAX_FRONT_DOORS
    assert set(doors) < set(files)
    assert len(files) <= MAX_WALKED_FILES


def test_front_doors_are_where_the_loop_enters_a_stage():
    """The doors of docs/walk.md are the loop's own, and one of each room that `Stages` names."""
    stages = ast.parse((SRC / "loop" / "stages.py").read_text(encoding="utf-8"))
    imported = [node.module or "" for node in ast.walk(stages) if isinstance(node, ast.ImportFrom)]
    entered = [module.split(".")[1:] for module in imported if module.count(".") == 2]
    doors = [door.removesuffix(".py").split("/") for door in walked_files("Front doors")]
    strange = [door for door in doors if door[0] != "loop" and door not in entered]
    assert not strange, f"the loop does not enter a stage there: {strange}"
    rooms = {room for room, _ in entered} - {"loop"}
    assert sorted(room for room, _ in doors if room != "loop") == sorted(rooms), "one door for each room"


def test_the_walk_names_what_there_is():
    walk = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", walk))
    members: dict[str, set[str]] = {}
    for _, node in nodes():
        if isinstance(node, ast.ClassDef):
            methods = (inner.name for inner in node.body if isinstance(inner, FUNCTION))
            fields = (ast.unparse(inner.target) for inner in node.body if isinstance(inner, ast.AnnAssign))
            members.setdefault(node.name, set()).update(methods, fields)
    assert len(named) > 40
    missing = [f"{name}.{member}" for name, member in named if member not in members.get(name, ())]
    assert not missing, f"docs/walk.md names what does not exist: {missing}"


def test_every_socket_is_in_one_file():
    others = [
        f"{path}:{node.lineno} {node.name}"
        for path, node in nodes()
        if isinstance(node, ast.ClassDef)
        and any(re.search(r"\bProtocol\b", ast.unparse(base)) for base in node.bases)
        and path.name != "roles.py"
    ]
    assert not others, f"Protocols outside roles.py: {others}"


def test_workers_are_asked_by_the_functions_of_a_port():
    asked = [
        (f"{path}:{node.lineno}", node.args[0])
        for path, node in nodes()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "ask" and node.args
    ]
    assert len(asked) > 20
    strings = [place for place, method in asked if not isinstance(method, ast.Attribute)]
    assert not strings, f"asked by something else than Port.method: {strings}"


def test_stages_are_not_assigned_into():
    """Who hears what is given at construction; from there on an object changes itself."""
    wired = [path for path in FILES if path.parent.name in ("loop", "place") or path.name == "api.py"]
    assert len(wired) > 15
    found = []
    for path in wired:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                continue
            for target in [part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])]:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(target)}")
    assert not found, f"attributes assigned from outside: {found}"
