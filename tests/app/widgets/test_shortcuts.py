"""What the list of shortcuts says is what the keys do."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QEvent, Qt
from PySide6.QtGui import QKeyEvent
from pytestqt.qtbot import QtBot

from app.widgets.shortcuts import ANYWHERE, SHORTCUTS, is_pressed, sequences, shown_keys, with_keys
from tests.helpers.shell_driver import MODEL, MakeShell

ROOT = Path(__file__).parents[3] / "app"
ASKED = ("is_pressed", "make_shortcut", "make_local_shortcut")


def names_in_use() -> Counter[str]:
    """Return how often the code makes or asks for each shortcut, by its literal name."""
    found: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        if path.name == "shortcuts.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not any(isinstance(n, ast.Name) and n.id in ASKED for n in ast.walk(tree)):
            continue
        texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
        found.update(text for text in texts if isinstance(text, str) and text in SHORTCUTS)
    return found


def test_every_declared_shortcut_is_in_use() -> None:
    assert set(names_in_use()) == set(SHORTCUTS)


def test_both_keys_that_end_a_line_have_one_name() -> None:
    assert shown_keys("send") == ["Enter", "Ctrl+Enter"]


def test_no_key_is_bound_past_the_declaration() -> None:
    """So nothing works that the list does not show."""
    bound = {"QShortcut", "setShortcut", "setShortcuts", "QKeySequence"}
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.rglob("*.py")
        if path.name != "shortcuts.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and (name := getattr(node.func, "id", getattr(node.func, "attr", ""))) in bound
    ]
    assert found == []


def test_no_key_is_asked_for_by_its_code() -> None:
    """Widgets ask by the name of a shortcut, nor do Qt's views begin to edit by themselves."""
    by_themselves = {"StandardKey", "EditKeyPressed", "AnyKeyPressed", "AllEditTriggers"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and (node.attr.startswith("Key_") or node.attr in by_themselves)
    ]
    assert found == []


def test_all_keys_are_read_and_none_means_two_things_everywhere() -> None:
    for name in SHORTCUTS:
        assert all(not keys.isEmpty() for keys in sequences(name)), name
    anywhere = Counter(
        keys.toString()
        for name, shortcut in SHORTCUTS.items()
        if shortcut.group == ANYWHERE
        for keys in sequences(name)
    )
    assert [keys for keys, n in anywhere.items() if n > 1] == []


@pytest.mark.parametrize(
    ("key", "modifiers", "text", "name", "expected"),
    [
        (Qt.Key.Key_Return, "No", "\r", "send", True),
        (Qt.Key.Key_Enter, "Keypad", "\r", "send", True),
        (Qt.Key.Key_Return, "Shift", "\r", "send", False),
        (Qt.Key.Key_Return, "Shift", "\r", "new-line", True),
        (Qt.Key.Key_Plus, "Shift", "+", "zoom-in", True),  # as on an American keyboard
        (Qt.Key.Key_3, "Keypad", "3", "pin", True),
        (Qt.Key.Key_0, "No", "0", "pin", False),
        (Qt.Key.Key_Left, "No", "", "handle-left", True),
        (Qt.Key.Key_Left, "Control", "", "handle-left", False),
    ],
)
def test_a_key_is_told_by_its_sign_wherever_it_is_pressed(
    key: Qt.Key, modifiers: str, text: str, name: str, expected: bool
) -> None:
    held = getattr(Qt.KeyboardModifier, f"{modifiers}Modifier")
    assert is_pressed(name, QKeyEvent(QEvent.Type.KeyPress, key, held, text)) is expected


def test_a_tool_tip_names_the_first_key() -> None:
    assert with_keys("New chat", "new-chat") == "New chat (Ctrl+N)"
    assert shown_keys("larger") == ["Ctrl++", "Ctrl+="]


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        (Qt.Key.Key_M, lambda s: s.library.view is not None and s.library.view.isVisible()),
        (Qt.Key.Key_Plus, lambda s: s.settings.current.zoom == 110),
        (Qt.Key.Key_Minus, lambda s: s.settings.current.zoom == 90),
    ],
)
def test_new_shortcuts_work(
    qtbot: QtBot, make_shell: MakeShell, key: Qt.Key, effect: Callable[..., bool]
) -> None:
    shell = make_shell(model=MODEL)
    shell.window.activateWindow()
    qtbot.waitUntil(shell.window.isActiveWindow)
    qtbot.keyClick(shell.window.composer.edit, key, Qt.KeyboardModifier.ControlModifier)
    qtbot.waitUntil(lambda: effect(shell))
