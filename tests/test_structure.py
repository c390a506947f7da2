"""Rules that keep the tree easy to navigate: imports, functions and type names.

When a rule breaks, change the code rather than the limit; ARCHITECTURE.md says where things go.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "app")

LARGEST_CIRCLE = 1
"""Largest number of modules that import each other; 1 is a module by itself: no circle."""

MOST_LINES = 120
"""Largest number of lines of a function, its decorators not counted."""

MOST_REPEATED_TYPES = 0
"""Largest number of public classes whose name another module uses for a class of its own."""


@cache
def modules() -> dict[str, Path]:
    """Return the file of each module of the product, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def listed(lines: list[str]) -> str:
    """Return lines for a failure message, one below the other."""
    return "".join(f"\n  {line}" for line in lines)


def imported(name: str) -> Iterator[str]:
    """Yield the modules of the product that a module imports.

    Imports inside functions count, and so do those for type checking alone. What a package's
    `__init__` takes from its own modules does not count.
    """
    for node in ast.walk(parsed(modules()[name])):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{name} has a relative import; name the module in full"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append(inner if inner in modules() else node.module)
        for target in found:
            if target in modules() and target != name and not target.startswith(f"{name}."):
                yield target


def reachable(name: str, imports: dict[str, list[str]]) -> set[str]:
    """Return the modules that a module imports, and those that they import in turn."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for target in imports[waiting.pop()]:
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found


def circles() -> list[list[str]]:
    """Return the sets of modules that import each other, directly or through others."""
    imports = {name: sorted(set(imported(name))) for name in modules()}
    reach = {name: reachable(name, imports) for name in imports}
    found = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in imports
        if name in reach[name]
    }
    return sorted((list(names) for names in found), key=len, reverse=True)


def test_no_modules_import_each_other() -> None:
    """Imports for type checking and inside functions count: they are needs, too."""
    found = [
        f"{len(circle)} modules:{listed(arrows(circle))}"
        for circle in circles()
        if len(circle) > LARGEST_CIRCLE
    ]
    assert not found, (
        "Modules import each other; give what both need a module of its own, or let one get the"
        f" other as an argument:{listed(found)}"
    )


def arrows(circle: list[str]) -> list[str]:
    """Return the imports between modules of a circle, as "a -> b"."""
    return [f"{a} -> {b}" for a in circle for b in sorted(set(imported(a))) if b in circle]


def test_functions_are_short() -> None:
    """Those that write kernels may be longer, as their language has no functions to call."""
    long = []
    for path in modules().values():
        if "kernels" in path.parts:
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                n_lines = node.end_lineno - node.lineno + 1
                if n_lines > MOST_LINES:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    long.append(f"{where}: {node.name} has {n_lines} lines")
    assert not long, f"Functions of more than {MOST_LINES} lines; divide them:{listed(long)}"


def test_a_public_type_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    repeated = [
        f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1
    ]
    assert len(repeated) <= MOST_REPEATED_TYPES, (
        f"{len(repeated)} names of public classes are used in several modules, at most"
        f" {MOST_REPEATED_TYPES} may be; rename some:{listed(repeated)}"
    )


TEXT_MODULE = "app.widgets.text"
"""Module of all widgets and tool tips that show words."""

READS_HTML = {
    "QLabel", "QMessageBox", "QErrorMessage", "QSystemTrayIcon", "QStatusBar", "QWhatsThis",
    "QStandardItem", "QListWidgetItem", "QTableWidgetItem", "QTreeWidgetItem",
    "TextItem", "LabelItem", "RichText", "AutoText", "MarkdownText", "setTextFormat",
    "setToolTip", "setStatusTip", "setWhatsThis", "showText", "showMessage", "setHtml",
    "insertHtml", "appendHtml", "setMarkdown", "insertMarkdown",
}  # fmt: skip
"""Names in Qt and pyqtgraph of what takes text that looks like HTML for HTML, in the window itself
or in a tool tip."""


def html_readers(tree: ast.Module) -> Iterator[str]:
    """Yield the uses in a module of what may read a text as HTML, with their lines."""
    for node in ast.walk(tree):
        used = [node.func] if isinstance(node, ast.Call) else []
        used += node.bases if isinstance(node, ast.ClassDef) else []
        used += [node] if isinstance(node, ast.Attribute) else []
        for part in used:
            name = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
            if name in READS_HTML:
                yield f"{part.lineno}: {name}"


def bare_tips(tree: ast.Module) -> Iterator[str]:
    """Yield the functions that give items tool tips without `plain_tip`, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = {getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node)}
            if "ToolTipRole" in names and "plain_tip" not in names:
                yield f"{node.lineno}: {node.name}"


def test_words_of_files_and_models_are_plain_text() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{use}"
        for name, path in modules().items()
        if name.startswith("app") and name != TEXT_MODULE
        for use in sorted({*html_readers(parsed(path)), *bare_tips(parsed(path))})
    ]
    assert not found, f"What may read a text as HTML; use {TEXT_MODULE} instead:{listed(found)}"


def test_what_reads_html_is_found() -> None:
    source = (
        "QLabel('x')\nw.setToolTip(t)\nclass A(QtWidgets.QLabel): ...\n"
        "l.setTextFormat(Qt.TextFormat.AutoText)\ndef tip(): return Qt.ToolTipRole\n"
    )
    tree = ast.parse(source)
    assert set(html_readers(tree)) == {
        "1: QLabel", "2: setToolTip", "3: QLabel", "4: AutoText", "4: setTextFormat",
    }  # fmt: skip
    assert list(bare_tips(tree)) == ["5: tip"]


def test_packages_of_the_engine_import_nothing_themselves() -> None:
    """Threads that import a package and a module of it at once would wait for each other."""
    wrong = [
        name
        for name, path in modules().items()
        if path.name == "__init__.py" and name.startswith("engine.")
        if any(isinstance(node, ast.Import | ast.ImportFrom) for node in parsed(path).body)
    ]
    assert not wrong, listed(wrong)
