"""The dependencies between the application's parts."""

import ast
import inspect
import textwrap

from app.main import Shell
from app.window.parts import Part, part, parts_of


def reads_of(one: Part[object]) -> set[str]:
    """Return the attributes of the shell read by a part's method, without its lambdas."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(one.make)))
    found: set[str] = set()
    waiting: list[ast.AST] = [*tree.body[0].body]  # type: ignore[attr-defined]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Lambda | ast.FunctionDef):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id == "self" else set()
        waiting += ast.iter_child_nodes(node)
    return found


def test_parts_name_what_they_need() -> None:
    """In creation order: dependencies come first."""
    names = [one.name for one in parts_of(Shell)]
    for at, one in enumerate(parts_of(Shell)):
        read = reads_of(one) & set(names)
        assert read <= set(one.needs), f"{one.name} reads {sorted(read - set(one.needs))}"
        assert set(one.needs) <= set(names[:at]), f"{one.name} stands before what it needs"


def test_a_late_part_is_made_when_it_is_first_used() -> None:
    made: list[str] = []

    class Small:
        @part(is_late=True)
        def first(self) -> str:
            made.append("first")
            return "one"

        @part(needs=["first"], is_late=True)
        def second(self) -> str:
            made.append("second")
            return f"{self.first} two"

    small = Small()
    assert made == []
    assert small.second == "one two"
    assert (small.second, made) == ("one two", ["first", "second"])
