"""A row of the settings page: title and help, an editor, and a way back to the default."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app.core.settings import ShownSetting
from app.core.translation import tr
from app.widgets.buttons import IconButton
from app.widgets.sizes import scaled
from app.widgets.text import label
from app.window.preferences.views.editors import make_editor

EDITOR_WIDTH = 150
"""Least width of an editor beside its title, in pixels."""


class SettingRow(QWidget):
    """One setting, as its declaration says it.

    Args:
        name: name of the setting in `Settings`.
        default: its value where nobody has changed it.

    Attributes:
        reset: button that sets the default again, shown once the value differs from it.
    """

    changed = Signal(str, object)  # name, value

    def __init__(self, name: str, shown: ShownSetting, default: object) -> None:
        super().__init__()
        self.name, self.shown, self._default = name, shown, default
        self._in_use: object = None  # what takes effect now, where a change does so later
        self.editor = make_editor(shown, default)
        self.reset = IconButton("reset", tr("Reset to default"), self, size=16)
        self.note = label(_note(shown), "warn")
        self._problem = label("", "warn")
        self._problem.hide()
        self._title, self._help = label(tr(shown.title)), label(tr(shown.help), "muted")
        self._build()
        self.editor.changed.connect(self._on_changed)
        self.reset.clicked.connect(self._on_reset)

    def words(self) -> str:
        """Return all that a search may find this setting by, in small letters."""
        shown = self.shown
        texts = (shown.title, shown.help, shown.section, shown.words, *shown.choices.values())
        english = (shown.title, shown.words)  # for those who know the English words
        return " ".join((*map(tr, texts), *english)).casefold()

    def show_value(self, value: Any, in_use: Any) -> None:
        """Show a value, and a note if another one is in use until later."""
        self._in_use = in_use
        self.editor.show_value(value)
        self._mark(value)

    def show_problem(self, problem: str) -> None:
        """Say why the setting has no effect here; "" for no reason."""
        self._problem.setText(problem)
        self._problem.setVisible(bool(problem))

    def _mark(self, value: object) -> None:
        self.reset.setVisible(value != self._default)
        is_later = self.shown.takes != "at once" and value != self._in_use
        self.note.setVisible(is_later)

    @Slot(object)
    def _on_changed(self, value: object) -> None:
        self._mark(value)
        self.changed.emit(self.name, value)

    @Slot()
    def _on_reset(self) -> None:
        self.editor.show_value(self._default)
        self.editor.field.setFocus()
        self._on_changed(self._default)

    def _build(self) -> None:
        title = tr(self.shown.title)
        self._title.setBuddy(self.editor.field)
        self.editor.field.setAccessibleName(title)
        self.editor.field.setAccessibleDescription(tr(self.shown.help))
        self.reset.setAccessibleName(tr("Reset to default: {title}").format(title=title))
        for text in (self._title, self._help, self.note, self._problem):
            text.setWordWrap(True)
        keep = self.reset.sizePolicy()
        keep.setRetainSizeWhenHidden(True)
        self.reset.setSizePolicy(keep)
        texts = QVBoxLayout()
        texts.setSpacing(2)
        for text in (self._title, self._help, self.note, self._problem):
            texts.addWidget(text)
        head = QHBoxLayout()
        head.setSpacing(8)
        head.addLayout(texts, 1)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 6, 0, 6)
        layout.setSpacing(6)
        layout.addLayout(head)
        side = Qt.AlignmentFlag.AlignTop
        if self.editor.is_wide:
            layout.addWidget(self.editor)
        else:
            scaled(self.editor, self.editor.setMinimumWidth, EDITOR_WIDTH)
            head.addWidget(self.editor, 0, side)
        head.addWidget(self.reset, 0, side)


def _note(shown: ShownSetting) -> str:
    if shown.takes == "next load":
        return tr("Takes effect when the model is loaded again.")
    return tr("Takes effect when Tandem starts again.")
