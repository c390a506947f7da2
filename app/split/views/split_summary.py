"""Summary of the split: predicted and measured speed, and memory in total."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QVBoxLayout, QWidget

from app.split.picture import SpeedFigures
from app.units import rate_text, signed_percent_text, size_text
from app.widgets.text import ElidedLabel, label, set_tip
from engine import DeviceMemory, ModelLoaded

if TYPE_CHECKING:
    from engine import Plan

UNMEASURED = "Estimate. Measure your devices on Links for a better one."
DEQUANTISED = "Weights are dequantised to F32 in memory."


class SplitSummary(QWidget):
    """Card with the predicted speed, the measured speed, and what limits it."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "card")
        self.predicted = label(role="figure")
        self.predicted_note = ElidedLabel("predicted")
        self.predicted_note.setProperty("role", "muted")
        self.measured_note = label("measured", "muted")
        self.measured = label(role="measured")
        self.reason = label(role="muted")
        self.note = label(role="muted")
        for text in (self.reason, self.note):
            text.setWordWrap(True)
        self._build()
        self.show_figures(None, SpeedFigures(), has_model=False)

    def show_figures(
        self, plan: Plan | None, speed: SpeedFigures, *, has_model: bool, chosen: str = ""
    ) -> None:
        """Show a plan and its speed.

        Args:
            has_model: whether a model is selected.
            chosen: sentence on why this plan was suggested; replaces what limits the speed.
        """
        forecast = speed.forecast if plan else None
        rate = rate_text(forecast.decode.tokens_per_s) if forecast else ""
        self.predicted.setText(f"{rate} tok/s" if rate else "")
        where = f" at token {speed.n_past}" if speed.n_past else ""
        self.predicted_note.set_full_text(f"predicted{where}")
        for part in (self.predicted, self.predicted_note):
            part.setVisible(forecast is not None)
        self.measured.setText(rate_text(speed.measured))
        for part in (self.measured, self.measured_note):
            part.setVisible(speed.measured > 0)
        limit = forecast.decode.reason if forecast else ""
        self.reason.setText(chosen or limit)
        set_tip(self.reason, limit if chosen else "")
        self.reason.setVisible(forecast is not None)
        self.note.setText(" ".join(notes(plan, speed)) if plan else _empty_text(has_model))
        self.note.setVisible(bool(self.note.text()))

    def _build(self) -> None:
        figures = QHBoxLayout()
        figures.setSpacing(6)
        baseline = Qt.AlignmentFlag.AlignBaseline
        figures.addWidget(self.predicted, 0, baseline)
        figures.addWidget(self.predicted_note, 1, baseline)
        figures.addWidget(self.measured_note, 0, baseline)
        figures.addWidget(self.measured, 0, baseline)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(12, 9, 12, 9)
        layout.setSpacing(3)
        layout.addLayout(figures)
        layout.addWidget(self.reason)
        layout.addWidget(self.note)


def notes(plan: Plan, speed: SpeedFigures) -> Iterator[str]:
    """Yield sentences on a plan, the most important first."""
    yield from plan.warnings
    if speed.error is not None:
        side = "high" if speed.error >= 0 else "low"
        off = signed_percent_text(abs(speed.error)).removeprefix("+")
        expected = rate_text(speed.expected)
        yield f"Before the last answer, {expected} tok/s were predicted for it, {off} too {side}."
    if speed.forecast is not None:
        yield f"Prompts: {rate_text(speed.forecast.prefill.tokens_per_s)} tok/s."
        if speed.is_simulated:
            yield "Simulated devices."
        elif not speed.is_measured:
            yield UNMEASURED
    yield f"Memory: {size_text(plan.total_bytes)}."
    if "f32" in plan.storage:
        yield DEQUANTISED


def _empty_text(has_model: bool) -> str:
    return "" if has_model else "Open a model to see what it needs."


class MemoryComparison(QWidget):
    """Table of predicted and measured memory per rank; hidden when empty."""

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
    """Return a line of the table: rank, predicted, measured, and relative error of the prediction.

    Compute buffers are left out: they are only known after an answer.
    """
    predicted = memory.predicted.weights + memory.predicted.kv
    measured = memory.measured.weights + memory.measured.kv
    error = signed_percent_text((predicted - measured) / measured) if measured else "–"
    return name, size_text(predicted), size_text(measured), error
