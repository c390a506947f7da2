"""The chip beside the model's name where GPUs are slower than they could be, and its reasons."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Slot
from PySide6.QtWidgets import QWidget

from app.core.translation import tr, tr_later
from app.devices.split.views.remedies import named
from app.widgets.buttons import Chip
from app.widgets.controls import Sheet, line
from app.widgets.text import label, set_tip
from app.widgets.theme import mix, theme, theme_signals
from engine import Fallback

TEXT, SHORT = tr_later("Slower than it could be"), tr_later("Slower")
"""Texts of the chip: the usual one, and one for narrow windows."""


class SlowerChip(Chip):
    """Chip shown while a GPU is slower than it could be; a press opens the reasons."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._fallbacks: tuple[Fallback, ...] = ()
        self.reasons = _Reasons(tr(TEXT), self)
        self.clicked.connect(self._open)
        theme_signals().changed.connect(self.refresh)
        self.refresh()

    def set_fallbacks(self, fallbacks: Sequence[Fallback]) -> None:
        """Show these reasons; without any the chip goes away."""
        if tuple(fallbacks) == self._fallbacks:
            return
        self._fallbacks = tuple(fallbacks)
        self.reasons.set_fallbacks(self._fallbacks)
        titles = "\n".join(named(fallback.title) for fallback in self._fallbacks)
        set_tip(self, tr("{titles}\nClick for the reasons").format(titles=titles))
        self.setAccessibleDescription(" ".join(named(f.sentence) for f in self._fallbacks))
        if not self._fallbacks:
            self.reasons.hide()
        self.set_texts((tr(TEXT), tr(SHORT)) if self._fallbacks else ())

    @Slot()
    def refresh(self) -> None:
        colours = theme()
        self.setStyleSheet(
            f"QPushButton {{ color: {colours.warn};"
            f" border-color: {mix(colours.line, colours.warn, 0.5)}; }}"
            f"QPushButton:focus {{ border-color: {colours.accent}; }}"
        )

    @Slot()
    def _open(self) -> None:
        self.reasons.show_below(self)


class _Reasons(Sheet):
    """Sheet with what is slower, why, and what helps."""

    def set_fallbacks(self, fallbacks: Sequence[Fallback]) -> None:
        """Show these reasons instead of the earlier ones."""
        while (item := self.column.takeAt(0)) is not None:
            if (widget := item.widget()) is not None:
                widget.hide()
                widget.deleteLater()
        for number, fallback in enumerate(fallbacks):
            if number:
                self.column.addSpacing(8)
                self.column.addWidget(line())
                self.column.addSpacing(8)
            self._add(fallback.title, "heading")
            self._add(f"{fallback.why[:1].upper()}{fallback.why[1:]}.")
            self._add(f"{fallback.cost} {fallback.help}", "muted")
        self.column.addStretch()
        if self.isVisible():
            self.fit()

    def _add(self, text: str, role: str | None = None) -> None:
        made = label(named(text), role)
        made.setWordWrap(True)
        made.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.column.addWidget(made)
