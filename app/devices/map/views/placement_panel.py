"""The Map panel: devices to pin to, the map, and details of the cell pointed at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app.core.translation import tr, tr_later
from app.devices.map.grid import Cell, cell_lines, grid_of, parts_text, ranks_text
from app.devices.map.pins import Overrides
from app.devices.map.views.device_chips import DeviceChips, PinTarget
from app.devices.map.views.placement_table import Look
from app.devices.map.views.placement_view import PlacementView
from app.widgets.buttons import button
from app.widgets.text import label, set_tip
from app.widgets.theme import set_role

if TYPE_CHECKING:
    from engine import PlacementMap

EMPTY = tr_later("Open a model to see which device holds each tensor.")
HINT = tr_later("Select cells and drag them to a device, or press its number.")
HINT_TIP = tr_later("The title of a row or column selects all of it")
DETAIL_LINES = 4
"""Number of lines of the details at most."""


class PlacementPanel(QWidget):
    """Shows the map of a model; emits which parts should be pinned."""

    pin_requested = Signal(str, object)  # override target, frozenset[Part]
    unpin_requested = Signal(object)  # frozenset[Part]
    unpin_all_requested = Signal()
    shown = Signal()  # the panel came into view; its content may be old

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "panel")
        self.view = PlacementView()
        self.chips = DeviceChips()
        self.unpin = button(tr("Unpin"), "quiet")
        self.unpin_all = button(tr("Unpin all"), "quiet")
        self.hint = label(tr(EMPTY), "muted")
        set_tip(self.hint, tr(HINT_TIP))
        self.hint.setWordWrap(True)
        self.detail = label(role="muted")
        self.detail.setAccessibleName(tr("Tensor"))
        self.detail.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.detail.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.detail.setWordWrap(True)
        self._labels: tuple[str, ...] = ()
        self._overrides: Overrides = ()
        self._build()
        self._connect()
        self.clear()

    def show_map(
        self, found: PlacementMap, overrides: Overrides, look: Look, targets: Sequence[PinTarget]
    ) -> None:
        """Show a model's map.

        Args:
            look: labels and colours of the ranks of `found`.
            targets: devices and ranks that parts can be pinned to.
        """
        self._labels, self._overrides = look.labels, overrides
        self.chips.set_targets(targets)
        self.view.set_targets(targets)
        self.view.show_grid(grid_of(found, overrides), look)
        self._set_shown(True)
        self._show_selection()

    def show_problem(self, text: str, overrides: Overrides) -> None:
        """Show why there is no map of the settings; pins may be the cause and can be removed."""
        self._overrides = overrides
        self.unpin_all.setVisible(bool(overrides))
        self.unpin_all.setEnabled(bool(overrides))
        set_role(self.hint, "shortage")
        self.hint.setText(text)
        self.hint.show()

    def clear(self) -> None:
        """Show that there is no model."""
        self._set_shown(False)
        set_role(self.hint, "muted")
        self.hint.setText(tr(EMPTY))
        self.hint.show()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.shown.emit()

    def _set_shown(self, shown: bool) -> None:
        for widget in (self.view, self.chips, self.unpin, self.unpin_all, self.detail):
            widget.setVisible(shown)

    def _show_selection(self) -> None:
        parts = self.view.selected_parts
        set_role(self.hint, "muted")
        selected = tr("Selected: {parts}")
        self.hint.setText(selected.format(parts=parts_text(parts)) if parts else tr(HINT))
        self.unpin.setEnabled(bool(parts))
        self.unpin_all.setEnabled(bool(self._overrides))

    def _show_cell(self, cell: Cell | None) -> None:
        lines = [] if cell is None else [*cell_lines(cell), ranks_text(cell, self._labels)]
        if cell is not None and cell.is_shared:
            lines.append(tr("Every rank of the block holds a full copy."))
        self.detail.setText("\n".join(lines))

    def _build(self) -> None:
        below = QHBoxLayout()
        below.addWidget(self.hint, 1)
        below.addWidget(self.unpin)
        below.addWidget(self.unpin_all)
        self.hint.setMinimumHeight(2 * self.hint.fontMetrics().height() + 4)  # so nothing jumps
        self.detail.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.detail.setMinimumHeight((DETAIL_LINES + 1) * self.detail.fontMetrics().height())
        layout = QVBoxLayout(self)
        layout.setContentsMargins(16, 4, 16, 8)
        layout.setSpacing(6)
        layout.addWidget(self.chips)
        layout.addLayout(below)
        layout.addWidget(self.view, 1)
        layout.addWidget(self.detail)
        layout.setAlignment(below, Qt.AlignmentFlag.AlignTop)

    def _connect(self) -> None:
        self.view.pointed.connect(self._show_cell)
        self.view.chosen.connect(self._show_selection)
        self.view.pin_requested.connect(self.pin_requested)
        self.view.unpin_requested.connect(self.unpin_requested)
        self.chips.pressed.connect(self.view.pin)
        self.chips.dropped.connect(self.pin_requested)
        self.unpin.clicked.connect(self.view.unpin)
        self.unpin_all.clicked.connect(self.unpin_all_requested)
