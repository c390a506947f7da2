"""The sentences that the engine's errors are made of, read from its source.

    python -m tests.helpers.engine_errors   # writes the list of those without a form in the window

What is filled in stands in braces, as in an f-string. Names that are filled in where the error is
made, and are assigned in the same function, are followed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = ROOT / "tests" / "app" / "core" / "engine_sentences" / "english.txt"
PROBLEM_MAKERS = frozenset(("InvalidGGUF", "HeaderEndsEarly", "invalid", "error"))
"""Calls whose sentence continues "… is not a usable GGUF file: "."""


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence of an error.

    Attributes:
        is_problem: whether it only continues the sentence about a GGUF file.
    """

    text: str
    is_problem: bool = False


@cache
def sentences() -> frozenset[Said]:
    """Return all sentences of errors that stand in the engine's source."""
    trees = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "engine").rglob("*.py")]
    errors = _errors(trees)
    return frozenset(
        said
        for tree in trees
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for said in _said_in(function, errors)
    )


@cache
def all_texts() -> frozenset[str]:
    """Return all texts in the engine's source, with "{}" for what is filled in."""
    trees = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "engine").rglob("*.py")]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr))
    return frozenset(text for text in map(_template, nodes) if " " in text)


def _errors(trees: list[ast.Module]) -> set[str]:
    """Return the names of `EngineError` and of all classes below it."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found, n_before = {"EngineError"}, 0
    while len(found) > n_before:
        n_before = len(found)
        found |= {c.name for c in classes if {ast.unparse(base) for base in c.bases} & found}
    return found


def _said_in(function: ast.FunctionDef, errors: set[str]) -> Iterator[Said]:
    """Yield the sentences of the errors that a function makes."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            is_super = name == "__init__" and ast.unparse(node.func) == "super().__init__"
            if name in errors | PROBLEM_MAKERS or is_super:
                texts = (text for part in node.args for text in _texts(part, assigned))
                for text in texts:
                    if " " in text.strip():
                        continues = text[:1].islower() or text[:1] in "'{"
                        yield Said(text, is_problem=continues and name in PROBLEM_MAKERS)


def _texts(node: ast.expr, assigned: dict[str, list[ast.expr]]) -> Iterator[str]:
    """Yield the texts that an argument may be, with braces for what is not known."""
    if isinstance(node, ast.Name):
        for value in assigned.get(node.id, []):
            if not isinstance(value, ast.Name):
                yield from _texts(value, assigned)
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body, assigned)
        yield from _texts(node.orelse, assigned)
    elif isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp):
        text = _template(node)
        if text:
            yield text


def _template(node: ast.expr) -> str:
    """Return a text with "{}" for each part that is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(v) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_template(node.left) or "{}") + (_template(node.right) or "{}")
    return ""


def untranslated() -> list[str]:
    """Return the sentences that have no form, so that they stay English in every window."""
    from app.core.engine_sentences.forms import PROBLEM_FORMS
    from app.core.engine_sentences.translating import FORMS, SENTENCE_END, pattern

    def has_form(said: Said) -> bool:
        forms = PROBLEM_FORMS if said.is_problem else FORMS
        wholes = [said.text.replace("{}", value) for value in ("7", "cpu", "")]
        return any(
            all(any(pattern(form).fullmatch(text) for form in forms) for text in texts)
            for whole in wholes
            for texts in ([whole], SENTENCE_END.split(whole))
        )

    return sorted(said.text.replace("\n", " ") for said in sentences() if not has_form(said))


if __name__ == "__main__":
    LISTED.write_text("\n".join(untranslated()) + "\n", "utf-8")
