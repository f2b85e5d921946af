"""What we use of other libraries' private parts, in one place: the first things to look at when one of them changes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "headrace"

ALLOWED = {
    "torch._foreach_mul_": "all gradients in one call; clip_grad_norm_ sums in float32",
    "torch._foreach_norm": "the same: a norm in float64",
    "tensor._is_hf_initialized": "how transformers marks what _init_weights must leave alone",
    "self.model._init_weights": "the only way to buffers that are in no file, of a model that was made without memory",
    "model._is_stateful": "how transformers marks recurrent models, whatever their architecture",
    "distributed.ProcessGroupGloo._Options": "the only way to give gloo an address of its own",
    "options._devices": "the same",
    "options._timeout": "the same",
    "os._exit": "what hangs, or threads of user code, would keep the interpreter from ending",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_in(tree: ast.AST) -> set[str]:
    """Functions, classes and variables of a file, and what its classes assign to `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def private_uses(files: list[str]) -> Iterator[str]:
    """Private names that belong to none of our files."""
    trees = [ast.parse(text) for text in files]
    ours = set().union(*map(defined_in, trees))
    for tree in trees:
        here = defined_in(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                known = ours if ast.unparse(node.value) in ("self", "cls") else here
                if node.attr not in known:
                    yield ast.unparse(node)
            elif isinstance(node, ast.ImportFrom):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                if any(map(is_private, parts)):
                    yield ast.unparse(node)


def test_private_parts_of_libraries_are_used_only_where_there_is_no_public_way():
    files = [path.read_text(encoding="utf-8") for path in SRC.rglob("*.py")]
    assert set(private_uses(files)) == set(ALLOWED)


def test_a_new_private_use_is_found():
    text = (
        "import torch\nfrom torch._inductor import config\nclass A(Loop):\n"
        "    def f(self):\n        self._own = torch._C._x(self._theirs, self._own)\n"
    )
    assert Counter(private_uses([text])) == Counter(
        ["from torch._inductor import config", "torch._C", "torch._C._x", "self._theirs"]
    )
