"""A group of fields of sampling below a heading that opens and closes it."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt, Slot
from PySide6.QtWidgets import QGridLayout, QToolButton, QVBoxLayout, QWidget

from app.chat.sampling.views.field_row import FieldRow
from app.core.translation import tr_n
from app.widgets.text import caption_text
from app.widgets.theme import icon, theme, theme_signals


class FieldGroup(QWidget):
    """Heading and rows of fields that belong together.

    Attributes:
        head: button with the title, which opens and closes the group.
        rows: rows of the group, by the name of their field.
    """

    def __init__(self, title: str, rows: Mapping[str, FieldRow], *, is_open: bool) -> None:
        super().__init__()
        self._title, self._n_changed, self.rows = title, 0, rows
        self.head = QToolButton()
        self.head.setProperty("role", "group")
        self.head.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.head.setCheckable(True)
        self._body = QWidget()
        grid = QGridLayout(self._body)
        grid.setContentsMargins(0, 2, 0, 6)
        grid.setHorizontalSpacing(8)
        grid.setVerticalSpacing(4)
        grid.setColumnStretch(0, 1)
        for row in rows.values():
            row.add_to(grid)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(2)
        layout.addWidget(self.head)
        layout.addWidget(self._body)
        self.head.toggled.connect(self._on_toggled)
        theme_signals().changed.connect(self._refresh)
        self.head.setChecked(is_open)
        self._on_toggled(is_open)

    def set_changed(self, n_changed: int) -> None:
        """Say in the heading how many fields differ from the default."""
        self._n_changed = n_changed
        self._refresh()

    @Slot(bool)
    def _on_toggled(self, is_open: bool) -> None:
        self._body.setVisible(is_open)
        self._refresh()

    @Slot()
    def _refresh(self) -> None:
        n = self._n_changed
        changed = f" · {tr_n('{n} changed', '{n} changed', n)}" if n else ""
        self.head.setText(caption_text(self._title + changed))
        self.head.setAccessibleName(self._title + changed)
        name = "chevron-up" if self.head.isChecked() else "chevron-down"
        self.head.setIcon(icon(name, theme().muted))
