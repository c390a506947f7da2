"""Rules that shape the tree: imports, folders, Protocols and names of types.

When a rule breaks, change the code rather than the limit; ARCHITECTURE.md says where things go.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "app")


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
    found = [f"{len(circle)} modules:{listed(arrows(circle))}" for circle in circles()]
    assert not found, (
        "Modules import each other; give what both need a module of its own, or let one get the"
        f" other as an argument:{listed(found)}"
    )


def arrows(circle: list[str]) -> list[str]:
    """Return the imports between modules of a circle, as "a -> b"."""
    return [f"{a} -> {b}" for a in circle for b in sorted(set(imported(a))) if b in circle]


def test_no_folder_holds_a_single_module() -> None:
    """A module that stands alone belongs into its neighbour, or its folder into a module."""
    held: dict[Path, int] = defaultdict(int)
    for path in modules().values():
        held[path.parent] += path.name != "__init__.py"
        held[path.parent.parent] += path.name == "__init__.py"
    lonely = [str(folder.relative_to(ROOT)) for folder, n in held.items() if n == 1]
    assert not lonely, f"Folders with one module:{listed(lonely)}"


def members(node: ast.ClassDef) -> set[str]:
    """Return the names that a class defines: methods, annotations, and what is set on `self`."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(part.name)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            found.add(part.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            found.add(part.attr)
    return found


def base_names(node: ast.ClassDef) -> list[str]:
    """Return the last part of the name of each base of a class, without its parameters."""
    return [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]


def test_a_protocol_has_several_implementations() -> None:
    """With one, the class itself says more. Protocols of `__call__` alone describe functions."""
    classes = [
        node for path in modules().values() for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    ]  # fmt: skip
    by_name = {node.name: node for node in classes}

    def all_members(node: ast.ClassDef) -> set[str]:
        inherited = (by_name[name] for name in base_names(node) if name in by_name)
        return members(node).union(*map(all_members, inherited))

    protocols = [node for node in classes if "Protocol" in base_names(node)]
    real = {node.name: all_members(node) for node in classes if node not in protocols}
    single = []
    for node in protocols:
        wanted = all_members(node)
        found = [name for name, has in real.items() if wanted <= has]
        if len(found) < 2 and wanted != {"__call__"}:
            single.append(f"{node.name}: {', '.join(found) or 'none'}")
    assert not single, f"Protocols with one implementation at most:{listed(single)}"


def test_a_public_type_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    repeated = [
        f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1
    ]
    assert not repeated, f"Names of public classes in several modules:{listed(repeated)}"


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
