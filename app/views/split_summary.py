"""What the split costs in all: predicted, and after loading measured."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QVBoxLayout, QWidget

from app.units import signed_percent_text, size_text
from app.views.controls import label
from engine import DeviceMemory, ModelLoaded, Plan

STORAGE_TEXTS = {
    "f32": "Weights are held as F32, dequantised from the file.",
    "kernels": "Weights are held as small as they are in the file.",
    "packed": "Weights stay packed as they are in the file.",
}


class SplitSummary(QWidget):
    """A card with the total that is predicted and the speed that was measured."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "card")
        self.total = label(role="figure")
        self.total_note = label("predicted", "muted")
        self.speed = label(role="figure")
        self.speed_note = label("tok/s measured", "muted")
        self.note = label(role="muted")
        self.note.setWordWrap(True)
        self._build()
        self.set_plan(None, has_model=False)
        self.set_speed(0.0)

    def set_plan(self, plan: Plan | None, *, has_model: bool) -> None:
        self.total.setText(size_text(plan.total_bytes) if plan else "")
        for part in (self.total, self.total_note):
            part.setVisible(plan is not None)
        if plan:
            storage = STORAGE_TEXTS.get(plan.storage, "")
            self.note.setText(" ".join((storage, *plan.warnings)).strip())
        else:
            self.note.setText("" if has_model else "Open a model to see what it needs.")
        self.note.setVisible(bool(self.note.text()))

    def set_speed(self, tokens_per_s: float) -> None:
        self.speed.setText(f"{tokens_per_s:.1f}")
        for part in (self.speed, self.speed_note):
            part.setVisible(tokens_per_s > 0)

    def _build(self) -> None:
        totals = QHBoxLayout()
        totals.setSpacing(6)
        for part in (self.total, self.total_note):
            totals.addWidget(part, 0, Qt.AlignmentFlag.AlignBaseline)
        totals.addStretch(1)
        for part in (self.speed, self.speed_note):
            totals.addWidget(part, 0, Qt.AlignmentFlag.AlignBaseline)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(12, 9, 12, 9)
        layout.setSpacing(3)
        layout.addLayout(totals)
        layout.addWidget(self.note)


class MemoryComparison(QWidget):
    """A table of what each rank was predicted to take and what it takes; hidden when empty."""

    HEADINGS = ("Weights and KV", "predicted", "measured", "error")

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._shown: ModelLoaded | None = None
        self._table = QGridLayout(self)
        self._table.setContentsMargins(0, 4, 0, 0)
        self._table.setVerticalSpacing(3)
        self._table.setColumnStretch(0, 1)
        self._table.setHorizontalSpacing(14)
        self.hide()

    def set_loaded(self, loaded: ModelLoaded | None, labels: Sequence[str]) -> None:
        """Show the ranks of a loaded model, named by `labels`."""
        if loaded is self._shown:
            return
        self._shown = loaded
        while (item := self._table.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.deleteLater()
        self.setVisible(loaded is not None)
        if loaded is None:
            return
        for column, heading in enumerate(self.HEADINGS):
            self._add(0, column, heading)
        for row, (name, memory) in enumerate(zip(labels, loaded.memory, strict=False), 1):
            for column, text in enumerate(comparison(name, memory)):
                self._add(row, column, text)

    def _add(self, row: int, column: int, text: str) -> None:
        side = Qt.AlignmentFlag.AlignRight if column else Qt.AlignmentFlag.AlignLeft
        role = "muted" if row == 0 else None
        self._table.addWidget(label(text, role), row, column, side)


def comparison(name: str, memory: DeviceMemory) -> tuple[str, str, str, str]:
    """A line of the table: rank, predicted, measured and how far off the prediction was.

    Working memory is left out: it is only known after an answer.
    """
    predicted = memory.predicted.weights + memory.predicted.kv
    measured = memory.measured.weights + memory.measured.kv
    error = signed_percent_text((predicted - measured) / measured) if measured else "–"
    return name, size_text(predicted), size_text(measured), error
