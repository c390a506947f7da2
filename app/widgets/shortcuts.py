"""All of the window's shortcuts by name; F1 lists them.

Widgets that handle keys call `is_pressed`; `tests/app/widgets/test_shortcuts.py` checks that
exactly the declared names are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QKeyEvent, QKeySequence
from PySide6.QtWidgets import QWidget

from app.core.translation import tr, tr_later


@dataclass(frozen=True, slots=True)
class Shortcut:
    """An action's keys (tooltips show the first); `text` and `group` are to be translated."""

    keys: tuple[str, ...]
    text: str
    group: str


ANYWHERE: Final = tr_later("Anywhere")
MESSAGE: Final = tr_later("In the message")
CONVERSATION: Final = tr_later("In the conversation")
CHATS: Final = tr_later("In the chat list")
PAGES: Final = tr_later("On the pages for models and settings")
ORDER: Final = tr_later("In the list of sampling steps")
SPLIT: Final = tr_later("In the split panel")
MAP: Final = tr_later("In the tensor map")

SHORTCUTS: Final[Mapping[str, Shortcut]] = {
    "new-chat": Shortcut(("Ctrl+N",), tr_later("New chat"), ANYWHERE),
    "search-chats": Shortcut(("Ctrl+K",), tr_later("Search chats"), ANYWHERE),
    "open-model": Shortcut(("Ctrl+O",), tr_later("Open a model file"), ANYWHERE),
    "models": Shortcut(("Ctrl+M",), tr_later("Models on this machine"), ANYWHERE),
    "toggle-chats": Shortcut(("Ctrl+B",), tr_later("Show or hide the chats"), ANYWHERE),
    "regenerate": Shortcut(("Ctrl+R",), tr_later("Regenerate the answer"), ANYWHERE),
    "stop": Shortcut(("Esc",), tr_later("Stop the answer"), ANYWHERE),
    "sampling": Shortcut(("Ctrl+.",), tr_later("Sampling and system prompt"), ANYWHERE),
    "settings": Shortcut(("Ctrl+,",), tr_later("Settings"), ANYWHERE),
    "larger": Shortcut(("Ctrl++", "Ctrl+="), tr_later("Zoom in"), ANYWHERE),
    "smaller": Shortcut(("Ctrl+-",), tr_later("Zoom out"), ANYWHERE),
    "normal-size": Shortcut(("Ctrl+0",), tr_later("Normal size"), ANYWHERE),
    "shortcuts": Shortcut(("F1",), tr_later("This list"), ANYWHERE),
    "quit": Shortcut(("Ctrl+Q",), tr_later("Quit"), ANYWHERE),
    "send": Shortcut(("Return", "Enter", "Ctrl+Return", "Ctrl+Enter"), tr_later("Send"), MESSAGE),
    "new-line": Shortcut(("Shift+Return", "Shift+Enter"), tr_later("New line"), MESSAGE),
    "submit-lines": Shortcut(
        ("Ctrl+Return", "Ctrl+Enter"), tr_later("Save the edited answer"), MESSAGE
    ),
    "leave-edit": Shortcut(("Esc",), tr_later("Cancel editing"), MESSAGE),
    "version-before": Shortcut(("Alt+Left",), tr_later("Previous version"), CONVERSATION),
    "version-after": Shortcut(("Alt+Right",), tr_later("Next version"), CONVERSATION),
    "picture-before": Shortcut(("Left",), tr_later("Previous image"), CONVERSATION),
    "picture-after": Shortcut(("Right",), tr_later("Next image"), CONVERSATION),
    "copy": Shortcut(("Ctrl+C", "Ctrl+Ins"), tr_later("Copy the selection"), CONVERSATION),
    "open-chat": Shortcut(("Return", "Enter"), tr_later("Open the chat"), CHATS),
    "rename-chat": Shortcut(("F2",), tr_later("Rename the chat or folder"), CHATS),
    "open-folder": Shortcut(("Right",), tr_later("Open the folder"), CHATS),
    "close-folder": Shortcut(("Left",), tr_later("Close the folder"), CHATS),
    "previous-hit": Shortcut(("Up",), tr_later("Previous search result"), CHATS),
    "next-hit": Shortcut(("Down",), tr_later("Next search result"), CHATS),
    "hits-back": Shortcut(("PgUp",), tr_later("Five search results back"), CHATS),
    "hits-on": Shortcut(("PgDown",), tr_later("Five search results forward"), CHATS),
    "leave-search": Shortcut(("Esc",), tr_later("Leave the search"), CHATS),
    "delete-chat": Shortcut(("Del",), tr_later("Delete the chat"), CHATS),
    "leave-page": Shortcut(("Esc",), tr_later("Back to the chat"), PAGES),
    "open-selected": Shortcut(("Return", "Enter"), tr_later("Open the selected model"), PAGES),
    "step-up": Shortcut(("Alt+Up",), tr_later("Move a step up"), ORDER),
    "step-down": Shortcut(("Alt+Down",), tr_later("Move a step down"), ORDER),
    "undo-split": Shortcut(("Ctrl+Z",), tr_later("Undo the last change"), SPLIT),
    "redo-split": Shortcut(("Ctrl+Shift+Z",), tr_later("Redo the last change"), SPLIT),
    "handle-right": Shortcut(("Right", "Up"), tr_later("Move a handle right"), SPLIT),
    "handle-left": Shortcut(("Left", "Down"), tr_later("Move a handle left"), SPLIT),
    "handle-far-right": Shortcut(("PgUp",), tr_later("Move it ten steps right"), SPLIT),
    "handle-far-left": Shortcut(("PgDown",), tr_later("Move it ten steps left"), SPLIT),
    "handle-first": Shortcut(("Home",), tr_later("Move it to the left end"), SPLIT),
    "handle-last": Shortcut(("End",), tr_later("Move it to the right end"), SPLIT),
    "pin": Shortcut(
        tuple("123456789"), tr_later("Pin the selection to the device with this number"), MAP
    ),
    "unpin": Shortcut(("Del", "Backspace"), tr_later("Unpin the selection"), MAP),
    "zoom-in": Shortcut(("+", "="), tr_later("Taller rows"), MAP),
    "zoom-out": Shortcut(("-",), tr_later("Shorter rows"), MAP),
    "no-zoom": Shortcut(("0",), tr_later("Fit rows to the view"), MAP),
}  # fmt: skip
"""All shortcuts by name, in the order in which F1 lists them."""


def sequences(name: str) -> list[QKeySequence]:
    """Return a shortcut's keys."""
    return [QKeySequence(keys) for keys in SHORTCUTS[name].keys]


def make_shortcut(name: str, owner: QWidget, target: Callable[[], object]) -> QAction:
    """Add a shortcut that works in the whole window of `owner`; return its action."""
    action = QAction(tr(SHORTCUTS[name].text), owner)
    action.setShortcuts(sequences(name))
    action.triggered.connect(lambda _=False: target())
    owner.addAction(action)
    return action


def make_local_shortcut(name: str, owner: QWidget, target: Callable[[], object]) -> QAction:
    """Add a shortcut that works while the focus is in `owner`; return its action."""
    action = make_shortcut(name, owner, target)
    action.setShortcutContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)
    return action


def is_pressed(name: str, event: QKeyEvent) -> bool:
    """Return whether a key event triggers a shortcut, including from the keypad."""
    pressed = event.keyCombination()
    keypad = Qt.KeyboardModifier.KeypadModifier
    bare = pressed.keyboardModifiers() & ~keypad
    keys = {QKeySequence(pressed.key() | bare)}
    if len(event.text()) == 1 and event.text().isprintable():  # some layouts require Shift
        keys.add(QKeySequence(event.text()))
    return any(sequence in keys for sequence in sequences(name))


def shown_keys(name: str) -> list[str]:
    """Return the keys in the desktop's notation ("Ctrl+N"); both Enter keys are "Enter"."""
    native, enter = QKeySequence.SequenceFormat.NativeText, tr("Enter")
    texts = (keys.toString(native) for keys in sequences(name))
    shown = (text.replace("Return", "Enter").replace("Enter", enter) for text in texts)
    return list(dict.fromkeys(shown))


def with_keys(text: str, name: str) -> str:
    """Return a tooltip that includes the first key: "New chat (Ctrl+N)"."""
    return f"{text} ({shown_keys(name)[0]})"
