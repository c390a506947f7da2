"""docs/security-tests.md names tests that exist; what it promises for the whole program holds."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_structure import ROOT, modules, parsed

SECURITY = ROOT / "docs" / "security-tests.md"
TEXT = SECURITY.read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)

CODE_FROM_DATA = {
    "eval", "exec", "__import__", "pickle", "marshal", "shelve", "dill", "yaml", "torch.load",
    "os.system", "os.popen", "jit.load", "dist.all_gather_object", "dist.broadcast_object_list",
    "dist.gather_object", "dist.recv_object_list", "dist.scatter_object_list",
}  # fmt: skip
"""Functions and modules that run what they read."""

NETWORK = {
    "socket", "ssl", "http", "urllib.request", "ftplib", "smtplib", "asyncio", "socketserver",
    "xmlrpc", "requests", "httpx", "httpx2", "huggingface_hub", "aiohttp", "PySide6.QtNetwork",
    "PySide6.QtWebEngineCore",
}  # fmt: skip
"""Modules that can speak to other machines."""

SERVES = ("app.server", "app.cli.server")
"""Packages that answer those who connect to this machine, where `tandem serve` was asked for."""

SERVERS_OWN = {
    "app.server.web.server": {"asyncio", "socket"}, "app.server.web.access": {"socket"},
}  # fmt: skip
"""What modules of these import beside asyncio, which only waits."""

SOCKETS = {
    "app.core.process.single_window": {"socketpair"},
    "engine.hosts.machines.joining": {"gethostname"},
    "app.server.page.choices": {"gethostname", "socket"},  # a datagram's, which sends nothing
}  # fmt: skip
"""What the modules that import `socket` take from it: none of it reaches another machine."""

WAITS = ("app.tools.hub",)
"""Modules whose loop of asyncio waits for what others do."""

LOCAL = {"app.core.process.single_window": {"", ".QLocalServer", ".QLocalSocket"}}
"""What modules take from `PySide6.QtNetwork`: a named socket that only this machine's user has."""

REACHES_OUT = {
    "engine.hosts.machines.gathering", "engine.hosts.machines.interfaces",
    "engine.hosts.machines.lines",
    "app.models.downloads.transfer.source", "app.models.downloads.hub.client",
    "app.remote.client.connection",
    "app.tools.transports", "app.setup.updates.source",
}  # fmt: skip
"""The modules that reach other machines: for models and to servers of models by a click or command,
to servers of tools that a person has added, for releases after consent."""


@pytest.mark.parametrize(("path", "test"), NAMED)
def test_a_test_that_holds_a_promise_exists(path: str, test: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert not test or test in functions


def test_each_promise_names_a_test() -> None:
    paragraphs = re.findall(r"^\*\*.*?(?=\n\n|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert len(paragraphs) > 5
    for paragraph in paragraphs:
        assert "::test_" in paragraph, paragraph


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_page_is_found(page: str) -> None:
    assert "](SECURITY.md)" in (ROOT / page).read_text(encoding="utf-8")


@cache
def imported(path: Path) -> set[str]:
    """Return the modules and names that a file imports."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def dotted(node: ast.expr) -> str:
    """Return a function as it stands in the source; of one that another gives, what is behind."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    names.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(names))


def called(path: Path) -> set[str]:
    """Return the functions that a file calls, as they stand there, and how it asks for shells."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            found.add(dotted(node.func))
            found |= {f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords if k.arg == "shell"}
    return found


def starts(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def test_no_code_is_run_that_came_as_data() -> None:
    for module, path in modules().items():
        names = imported(path) | called(path)
        assert not [n for n in names if any(starts(n, c) for c in CODE_FROM_DATA)], module
        assert not [n for n in names if n.startswith("shell=") and n != "shell=False"], module


def test_nothing_opens_a_connection() -> None:
    """`engine.distributed` speaks through torch, as torchrun's agents have started it."""
    for module, path in modules().items():
        found = {n for n in imported(path) if any(starts(n, known) for known in NETWORK)}
        if module in SOCKETS:
            local = {f"PySide6.QtNetwork{name}" for name in LOCAL.get(module, ())}
            assert found == {"socket"} | local
            calls = {n.partition(".")[2] for n in called(path) if n.startswith("socket.")}
            assert calls == SOCKETS[module]
        elif any(starts(module, package) for package in SERVES):
            assert found <= SERVERS_OWN.get(module, {"asyncio"}), module
        elif module in WAITS:
            assert found == {"asyncio"}
        elif module not in REACHES_OUT:
            assert not found, module
