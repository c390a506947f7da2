"""The list of engines that can be installed, of which one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QObject, Qt, Signal, Slot
from PySide6.QtGui import QMouseEvent
from PySide6.QtWidgets import QButtonGroup, QHBoxLayout, QRadioButton, QVBoxLayout, QWidget

from app.core.translation import tr
from app.widgets.text import caption_text, label


@dataclass(frozen=True, slots=True)
class ShownEngine:
    """An engine as the page offers it.

    Attributes:
        key: kind of PyTorch, which names the choice.
        title: its name, in a few words.
        details: what it is for and how large it is.
        problem: why it cannot be chosen here; "" if it can.
        is_recommended: whether it is the best one for the devices here.
    """

    key: str
    title: str
    details: str
    problem: str = ""
    is_recommended: bool = False


class EngineChoiceRow(QWidget):
    """Row of one engine: a radio button and what there is to know."""

    def __init__(self, shown: ShownEngine) -> None:
        super().__init__()
        self.key = shown.key
        self.setProperty("role", "card")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.radio = QRadioButton(caption_text(shown.title))
        self.radio.setEnabled(not shown.problem)
        said = shown.problem or shown.details
        self._details = label(said, "muted")
        self._details.setWordWrap(True)
        self._details.setContentsMargins(24, 0, 0, 0)
        self.radio.setAccessibleName(
            tr("{name}, recommended").format(name=shown.title)
            if shown.is_recommended
            else shown.title
        )
        self.radio.setAccessibleDescription(said)
        head = QHBoxLayout()
        head.addWidget(self.radio)
        head.addStretch(1)
        if shown.is_recommended:
            head.addWidget(label(tr("Recommended"), "ok"))
        layout = QVBoxLayout(self)
        layout.setContentsMargins(12, 8, 12, 8)
        layout.setSpacing(2)
        layout.addLayout(head)
        layout.addWidget(self._details)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if self.radio.isEnabled():
            self.radio.setFocus()
            self.radio.setChecked(True)
        super().mousePressEvent(event)


class EngineChoices(QWidget):
    """List of engines; the arrow keys go from one to the next."""

    chosen = Signal(str)  # key

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(tr("Engines"))
        self.rows: list[EngineChoiceRow] = []
        self._shown: list[ShownEngine] = []
        self._group: QObject | None = None
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.setSpacing(6)

    @property
    def key(self) -> str:
        """Key of the chosen engine; "" for none."""
        return next((row.key for row in self.rows if row.radio.isChecked()), "")

    def show_engines(self, engines: Sequence[ShownEngine], key: str) -> None:
        """Show engines, of which the one with `key` is chosen, unless the same are shown."""
        if list(engines) == self._shown:
            return
        self._shown = list(engines)
        had_focus = any(row.radio.hasFocus() for row in self.rows)
        for old in self.rows:
            old.hide()
            old.deleteLater()
        if self._group is not None:
            self._group.deleteLater()
        group = self._group = QButtonGroup(self)
        self.rows = [EngineChoiceRow(shown) for shown in engines]
        for row in self.rows:
            group.addButton(row.radio)
            self._layout.addWidget(row)
            row.radio.setChecked(row.key == key and row.radio.isEnabled())
            row.radio.toggled.connect(self._on_toggled)
        if had_focus:
            self.focus_choice()

    @Slot(bool)
    def _on_toggled(self, is_on: bool) -> None:
        if is_on:
            self.chosen.emit(self.key)

    def focus_choice(self) -> None:
        """Put the focus on the chosen engine."""
        for row in self.rows:
            if row.radio.isChecked():
                row.radio.setFocus()
