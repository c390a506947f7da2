"""Head of the split panel: the mode, the share bar, and buttons that fill it."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QButtonGroup, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from app.core.translation import tr, tr_later
from app.devices.split.figures import RowFigures
from app.devices.split.settings import MODES, Mode
from app.devices.split.views.split_bar import Segment, ShareBar
from app.widgets.text import ElidedLabel, set_tip

MODE_TEXTS: dict[Mode, tuple[str, str]] = {
    "single": (tr_later("One device"), tr_later("The whole model on one device")),
    "tensor": (
        tr_later("Tensor"),
        tr_later("Every layer is split across devices, which all work at the same time"),
    ),
    "layer": (
        tr_later("Layers"),
        tr_later("Each device gets whole layers; the devices work one after the other"),
    ),
    "groups": (
        tr_later("Groups"),
        tr_later("Each group of devices gets whole layers, and splits each of them"),
    ),
}
HINT = tr_later("Drag or arrow keys")


class SplitHeader(QWidget):
    """Shows mode and shares; emits changes that the person makes."""

    mode_chosen = Signal(str)
    even_requested = Signal()
    by_memory_requested = Signal()
    by_speed_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.bar = ShareBar()
        self.hint = ElidedLabel(tr(HINT))
        self._modes = QButtonGroup(self)
        self._below = QWidget()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 2)
        layout.setSpacing(7)
        layout.addWidget(self._make_modes())
        layout.addWidget(self.bar)
        layout.addWidget(self._make_below())

    def mode_button(self, mode: Mode) -> QPushButton:
        """Return the button that chooses `mode`."""
        button = self._modes.button(MODES.index(mode))
        assert isinstance(button, QPushButton)
        return button

    def set_rows(self, mode: Mode, rows: Sequence[RowFigures], groups: Sequence[int] = ()) -> None:
        """Show the ranks.

        Args:
            groups: sizes of the groups of ranks that are on, in mode "groups".
        """
        self.mode_button(mode).setChecked(True)
        for each in MODES:  # Tab stops at the chosen one, the arrow keys lead to the others
            policy = Qt.FocusPolicy.StrongFocus if each == mode else Qt.FocusPolicy.ClickFocus
            self.mode_button(each).setFocusPolicy(policy)
        active = [row for row in rows if row.is_on]
        takers = [row for row in rows if row.is_taker and row.effective]
        is_split = mode != "single" and len(active) > 1
        self.bar.set_segments(
            [
                Segment(row.colour, row.share, row.spoken, row.is_taker, row.is_locked)
                for row in (*active, *takers)
            ]
        )
        labels = [row.label for row in active]
        self.hint.set_full_text(groups_text(labels, groups) if groups else tr(HINT))
        self.bar.setVisible(is_split or bool(takers))
        self._below.setVisible(is_split)

    def _make_modes(self) -> QWidget:
        host = QWidget()
        host.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        host.setProperty("role", "segments")
        layout = QHBoxLayout(host)
        layout.setContentsMargins(1, 1, 1, 1)
        layout.setSpacing(0)
        for number, mode in enumerate(MODES):
            text, help_text = MODE_TEXTS[mode]
            button = QPushButton(tr(text))
            button.setCheckable(True)
            button.setProperty("role", "segment")
            set_tip(button, tr(help_text))
            self._modes.addButton(button, number)
            layout.addWidget(button, 1)
        self._modes.idClicked.connect(lambda number: self.mode_chosen.emit(MODES[number]))
        return host

    def _make_below(self) -> QWidget:
        layout = QHBoxLayout(self._below)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        self.hint.setProperty("role", "muted")
        layout.addWidget(self.hint, 1)
        for text, tip, signal in (
            (tr("Even"), tr("The same share for every device"), self.even_requested),
            (tr("By memory"), tr("Shares in proportion to free memory"), self.by_memory_requested),
            (
                tr("By speed"),
                tr("Shares in proportion to memory bandwidth"),
                self.by_speed_requested,
            ),
        ):
            button = QPushButton(text)
            button.setProperty("role", "link")
            set_tip(button, tip)
            button.clicked.connect(signal)
            layout.addWidget(button)
        return self._below


def groups_text(labels: Sequence[str], groups: Sequence[int]) -> str:
    """Return the groups as "GPU 0 + GPU 1 → GPU 2"."""
    left = list(labels)
    parts = []
    for size in groups:
        parts.append(" + ".join(left[:size]))
        del left[:size]
    return " → ".join(parts)
