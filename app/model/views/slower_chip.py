"""The chip beside the model's name where GPUs are slower than they could be, and its reasons."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QPoint, Qt, Signal, Slot
from PySide6.QtWidgets import QFrame, QPushButton, QScrollArea, QVBoxLayout, QWidget

from app.scale import px
from app.split.views.remedies import named
from app.theme import mix, set_role, theme, theme_signals
from app.translation import tr, tr_later
from app.widgets.controls import line
from app.widgets.text import label, set_tip
from engine import Fallback

TEXT, SHORT = tr_later("Slower than it could be"), tr_later("Slower")
"""Texts of the chip: the usual one, and one for narrow windows."""

WIDTH, MOST_HEIGHT, GAP = 420, 480, 6
"""Width and largest height of the reasons, and their distance from the chip, in pixels."""


class SlowerChip(QPushButton):
    """Chip that is there as long as a GPU is slower than it could be; a press opens the reasons."""

    changed = Signal()  # whether it is there

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(tr(TEXT), parent)
        set_role(self, "chip")
        self._fallbacks: tuple[Fallback, ...] = ()
        self.reasons = _Reasons(self)
        self.clicked.connect(self._open)
        theme_signals().changed.connect(self.refresh)
        self.refresh()
        self.hide()

    @property
    def is_wanted(self) -> bool:
        """Whether there is something to say."""
        return bool(self._fallbacks)

    def set_fallbacks(self, fallbacks: Sequence[Fallback]) -> None:
        """Show these reasons; without any the chip goes away."""
        if tuple(fallbacks) == self._fallbacks:
            return
        self._fallbacks = tuple(fallbacks)
        self.reasons.set_fallbacks(self._fallbacks)
        titles = "\n".join(named(fallback.title) for fallback in self._fallbacks)
        set_tip(self, tr("{titles}\nClick for the reasons").format(titles=titles))
        self.setAccessibleName(tr(TEXT))
        self.setAccessibleDescription(" ".join(named(f.sentence) for f in self._fallbacks))
        if not self._fallbacks:
            self.reasons.hide()
        self.changed.emit()

    def fit(self, width: int) -> None:
        """Take the longest text that fits a width; the chip never hides for lack of room."""
        self.ensurePolished()  # or the first width lacks the style's padding
        for text in (TEXT, SHORT):
            self.setText(tr(text))
            if self.sizeHint().width() <= width:
                return

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


class _Reasons(QFrame):
    """Popup with what is slower, why, and what helps."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent, Qt.WindowType.Popup)
        self.setObjectName("reasons")
        self.setAccessibleName(tr(TEXT))
        self._texts = QWidget()
        self._layout = QVBoxLayout(self._texts)
        self._layout.setContentsMargins(16, 14, 16, 14)
        self._layout.setSpacing(4)
        self._scroll = QScrollArea(widgetResizable=True)
        self._scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._scroll.setFrameShape(QFrame.Shape.NoFrame)
        self._scroll.setWidget(self._texts)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)  # the border has its own
        outer.addWidget(self._scroll)

    def set_fallbacks(self, fallbacks: Sequence[Fallback]) -> None:
        """Show these reasons instead of the earlier ones."""
        while (item := self._layout.takeAt(0)) is not None:
            if (widget := item.widget()) is not None:
                widget.hide()
                widget.deleteLater()
        for number, fallback in enumerate(fallbacks):
            if number:
                self._layout.addSpacing(8)
                self._layout.addWidget(line())
                self._layout.addSpacing(8)
            self._add(fallback.title, "heading")
            self._add(f"{fallback.why[:1].upper()}{fallback.why[1:]}.")
            self._add(f"{fallback.cost} {fallback.help}", "muted")
        self._layout.addStretch()
        if self.isVisible():
            self._fit()

    def show_below(self, chip: QWidget) -> None:
        """Open below a widget, within its window's width."""
        colours = theme()
        self.setStyleSheet(
            f"#reasons {{ background: {colours.surface}; border: 1px solid {colours.line};"
            " border-radius: 8px; }"
        )
        self._fit()
        window = chip.window()
        right = window.mapToGlobal(QPoint(window.width(), 0)).x() - self.width() - GAP
        corner = chip.mapToGlobal(QPoint(0, chip.height() + GAP))
        self.move(max(window.mapToGlobal(QPoint(GAP, 0)).x(), min(corner.x(), right)), corner.y())
        self.show()

    def _add(self, text: str, role: str | None = None) -> None:
        made = label(named(text), role)
        made.setWordWrap(True)
        made.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._layout.addWidget(made)

    def _fit(self) -> None:
        """Take the height that the texts need."""
        width = px(WIDTH)
        self.setFixedWidth(width)
        height = self._layout.heightForWidth(width - 2) + 2
        policy = Qt.ScrollBarPolicy
        is_long = height > MOST_HEIGHT
        self._scroll.setVerticalScrollBarPolicy(
            policy.ScrollBarAsNeeded if is_long else policy.ScrollBarAlwaysOff
        )
        self.setFixedHeight(min(MOST_HEIGHT, height))
