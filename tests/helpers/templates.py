"""Templates of the engine's errors and other sentences, read from its source for the catalogs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

TEXT_ARGUMENTS = frozenset(("message", "hint", "problem", "reason", "why", "doing", "what"))
"""Arguments of errors by name that are templates; all others are values."""

MAKERS = frozenset(("Sentence", "SandboxError", "invalid", "unusable"))
"""Other calls whose first argument is a template."""


@cache
def templates() -> dict[str, str]:
    """Return the file of each template that is written in a call of an error or of `Sentence`."""
    found: dict[str, str] = {}
    for path, function, node in _calls():
        for argument in _arguments(node):
            for text in _texts(argument, function):
                if " " in text.strip():
                    found.setdefault(text, path.relative_to(ROOT).as_posix())
    return found


@cache
def finished_sentences() -> list[str]:
    """Return the places of errors whose sentence is no template, such as an f-string."""
    return [
        f"{path.relative_to(ROOT)}:{argument.lineno}: {ast.unparse(argument)}"
        for path, _, node in _calls()
        for argument in (*node.args, *(w.value for w in node.keywords if w.arg == "hint"))
        if _is_finished(argument)
    ]


def _is_finished(node: ast.expr) -> bool:
    match node:
        case (
            ast.JoinedStr() | ast.BinOp(op=ast.Mod()) | ast.Call(func=ast.Attribute(attr="format"))
        ):
            return True
        case ast.BinOp(left=left, right=right) | ast.IfExp(body=left, orelse=right):
            return _is_finished(left) or _is_finished(right)
    return False


def _calls() -> Iterator[tuple[Path, ast.AST, ast.Call]]:
    """Yield all calls of errors and sentences, with the function that they are in."""
    files = sorted((ROOT / "engine").rglob("*.py"))
    trees = {path: ast.parse(path.read_text("utf-8")) for path in files}
    names = _error_classes(list(trees.values())) | MAKERS
    for path, tree in trees.items():
        owners: dict[ast.AST, ast.AST] = {}
        for owner in ast.walk(tree):  # outer functions first, so inner ones win
            if isinstance(owner, ast.FunctionDef):
                owners |= dict.fromkeys(ast.walk(owner), owner)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                is_super = ast.unparse(node.func) == "super().__init__"
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                name = node.func.id if isinstance(node.func, ast.Name) else name
                if name in names or (is_super and "error" in path.name.lower()):
                    yield path, owners.get(node, tree), node


def _error_classes(trees: list[ast.Module]) -> set[str]:
    """Return the names of `EngineError` and of all classes below it."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found, n_before = {"EngineError"}, 0
    while len(found) > n_before:
        n_before = len(found)
        found |= {c.name for c in classes if {ast.unparse(base) for base in c.bases} & found}
    return found


def _arguments(node: ast.Call) -> Iterator[ast.expr]:
    yield from node.args
    yield from (word.value for word in node.keywords if word.arg in TEXT_ARGUMENTS)


def _texts(node: ast.expr, function: ast.AST) -> Iterator[str]:
    """Yield the texts that an argument may be, also where a name is assigned before."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    values = [
        other.value
        for other in ast.walk(function)
        if isinstance(other, ast.Assign) and ast.unparse(other.targets[0]) in names
    ]
    for value in (node, *values):
        yield from _literals(value)


def _literals(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _literals(node.body)
        yield from _literals(node.orelse)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _literals(value)
