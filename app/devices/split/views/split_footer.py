"""Bottom of the split panel: the split's speed and memory, remedies, load and undo."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QBoxLayout,
    QGridLayout,
    QHBoxLayout,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_later, tr_n, translated
from app.core.units import rate_text, signed_percent_text, size_text, tokens_text
from app.devices.split.figures import SpeedFigures, SplitPicture
from app.widgets.layout import FlowBox, fill
from app.widgets.shortcuts import with_keys
from app.widgets.text import ElidedLabel, caption_text, label, set_tip, unbroken
from engine import DeviceMemory, ModelLoaded

if TYPE_CHECKING:
    from engine import Plan, Remedy

PROGRESS_STEPS = 1000


class LoadFooter(QWidget):
    """The buttons that are currently available, and the load progress."""

    load_requested = Signal()  # load, or apply live
    undo_requested = Signal()
    cancel_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.progress = QProgressBar()
        self.progress.setRange(0, PROGRESS_STEPS)
        self.progress.setTextVisible(False)
        self.undo = QPushButton(tr("Undo"))
        set_tip(self.undo, with_keys(tr("Undo the last change to the split"), "undo-split"))
        self.cancel = QPushButton(tr("Cancel"))
        self.load = QPushButton(tr("Load"))
        self.load.setProperty("role", "primary")
        self.undo.clicked.connect(self.undo_requested)
        self.cancel.clicked.connect(self.cancel_requested)
        self.load.clicked.connect(self.load_requested)
        right = fill(QHBoxLayout(), (None, 1), self.undo, self.cancel, self.load)
        self._buttons = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._buttons.addLayout(right, 1)
        self._others: list[QPushButton] = []
        self._layout = QVBoxLayout(self)
        fill(self._layout, self.progress, self._buttons, margins=(16, 8, 16, 14), spacing=10)
        self.show_state(None)

    def add_button(self, button: QPushButton) -> None:
        """Add a button at the left end."""
        self._buttons.insertWidget(0, button)
        self._others.append(button)
        self._arrange()

    def show_state(self, picture: SplitPicture | None) -> None:
        """Show the buttons that apply to `picture`; None disables all of them."""
        state = picture.load_state if picture else "empty"
        is_busy = state in ("loading", "applying")
        self.progress.setVisible(is_busy)
        doing = tr("Applying the new split") if state == "applying" else tr("Loading the model")
        self.progress.setAccessibleName(doing)
        self.cancel.setVisible(is_busy)
        self.undo.setVisible(not is_busy)
        self.undo.setEnabled(picture is not None and picture.can_undo)
        self.load.setVisible(not is_busy)
        self.load.setEnabled(picture is not None and picture.can_start)
        text, tip = _load_texts(picture)
        self.load.setText(text)
        set_tip(self.load, tip)
        self._arrange()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._arrange()

    def _arrange(self) -> None:
        """Move added buttons to a second row if they do not fit in one."""
        shown = [b for b in (*self._others, self.undo, self.cancel, self.load) if not b.isHidden()]
        gaps = self._buttons.spacing() * (len(shown) - 1)
        margins = self.contentsMargins() + self._layout.contentsMargins()
        room = self.width() - margins.left() - margins.right()
        is_short = sum(button.sizeHint().width() for button in shown) + gaps > room
        direction = QBoxLayout.Direction
        self._buttons.setDirection(direction.TopToBottom if is_short else direction.LeftToRight)

    def set_progress(self, done: float) -> None:
        """Show the completed fraction of the load, 0 to 1."""
        self.progress.setValue(round(min(1.0, max(0.0, done)) * PROGRESS_STEPS))


def _load_texts(picture: SplitPicture | None) -> tuple[str, str]:
    if picture is None or picture.load_state != "loaded":
        return tr("Load"), ""
    if picture.has_changed and not picture.can_apply:
        return tr("Reload to apply"), tr("Reloads the model and recomputes the chat")
    return tr("Apply live"), tr("Changes the split of the loaded model and keeps the chat")


MAX_REMEDIES = 6


class RemedyButtons(FlowBox):
    """One button per remedy."""

    chosen = Signal(object)  # Remedy

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._shown: tuple[Remedy, ...] = ()
        self.buttons: list[QPushButton] = []
        self.hide()

    def set_remedies(self, remedies: Sequence[Remedy], *, is_current: bool) -> None:
        """Offer remedies; they are disabled unless they apply to the current settings."""
        self.setVisible(bool(remedies))
        self.setEnabled(is_current)
        if tuple(remedies) == self._shown:
            return
        self._shown = tuple(remedies)
        self.buttons = []
        for remedy in self._shown[:MAX_REMEDIES]:
            button = QPushButton(caption_text(short_text(remedy)))
            button.setProperty("role", "chip")
            set_tip(button, named(translated(remedy.sentence)))
            button.setAccessibleDescription(named(translated(remedy.sentence)))
            button.clicked.connect(lambda _=False, r=remedy: self.chosen.emit(r))
            self.buttons.append(button)
        self.set_widgets(self.buttons)


def short_text(remedy: Remedy) -> str:
    """Return a remedy's button caption."""
    params = remedy.params
    texts = {
        "split": tr("Shares that fit"),
        "parallel": tr_n("{n} parallel request", "{n} parallel requests", params.parallel),
        "kv_type": tr("{kv_type} KV cache").format(kv_type=params.kv_type),
        "context": tr("Context of {tokens}").format(tokens=tokens_text(params.n_ctx or 0)),
        "experts": tr("Experts of {n} blocks on the CPU").format(n=params.n_cpu_moe),
        "kv_on_host": tr("KV cache in host memory"),
        "blocks": tr("{n} blocks on the CPU").format(n=params.n_cpu_blocks),
    }
    return texts.get(remedy.kind) or named(translated(remedy.sentence)).rstrip(".")


def named(sentence: str) -> str:
    """Return a sentence with "cuda:1" replaced by "GPU 1"."""
    return re.sub(r"\bcuda:(\d+)", r"GPU \1", sentence)


UNMEASURED = tr_later("Estimate. Measure your devices under Links for a better one.")
DEQUANTISED = tr_later("Weights are dequantised to F32 in memory.")


class SplitSummary(QWidget):
    """Card with the predicted speed, the measured speed and the bottleneck."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "card")
        self.predicted = label(role="figure")
        self.predicted_note = ElidedLabel(tr("predicted"))
        self.predicted_note.setProperty("role", "muted")
        self.measured_note = label(tr("measured"), "muted")
        self.measured = label(role="measured")
        self.reason = label(role="muted")
        self.note = label(role="muted")
        for text in (self.reason, self.note):
            text.setWordWrap(True)
        self._build()
        self.show_figures(None, SpeedFigures(), has_model=False)

    def show_figures(
        self, plan: Plan | None, speed: SpeedFigures, *, has_model: bool, chosen: str = "",
        elsewhere: str = "",
    ) -> None:  # fmt: skip
        """Show a plan and its speed.

        Args:
            has_model: whether a model is selected.
            chosen: reason for the suggested split, shown instead of the bottleneck.
            elsewhere: name of the server that runs the model; "" if none does.
        """
        forecast = speed.forecast if plan else None
        rate = rate_text(forecast.decode.tokens_per_s) if forecast else ""
        self.predicted.setText(f"{rate} tok/s" if rate else "")
        at = tr("predicted at token {n}") if speed.n_past else tr("predicted")
        self.predicted_note.set_full_text(at.format(n=speed.n_past))
        for part in (self.predicted, self.predicted_note):
            part.setVisible(forecast is not None)
        self.measured.setText(rate_text(speed.measured))
        for part in (self.measured, self.measured_note):
            part.setVisible(speed.measured > 0)
        limit = translated(forecast.decode.reason) if forecast else ""
        self.reason.setText(unbroken(translated(chosen) or limit))
        set_tip(self.reason, limit if chosen else "")
        self.reason.setVisible(forecast is not None)
        note = " ".join(notes(plan, speed)) if plan else _empty_text(has_model, elsewhere)
        self.note.setText(unbroken(note))
        self.note.setVisible(bool(self.note.text()))
        self.setVisible(forecast is not None or speed.measured > 0 or bool(self.note.text()))

    def _build(self) -> None:
        baseline = Qt.AlignmentFlag.AlignBaseline
        figures = fill(
            QHBoxLayout(), (self.predicted, 0, baseline), (self.predicted_note, 1, baseline),
            (self.measured_note, 0, baseline), (self.measured, 0, baseline), spacing=6,
        )  # fmt: skip
        parts = figures, self.reason, self.note
        fill(QVBoxLayout(self), *parts, margins=(12, 9, 12, 9), spacing=3)


def notes(plan: Plan, speed: SpeedFigures) -> Iterator[str]:
    """Yield sentences about a plan, most important first."""
    yield from map(translated, plan.warnings)
    if speed.error is not None:
        off = signed_percent_text(abs(speed.error)).removeprefix("+")
        expected = rate_text(speed.expected)
        if speed.error >= 0:
            text = tr("Predicted {rate} tok/s for the last answer ({off} too high).")
        else:
            text = tr("Predicted {rate} tok/s for the last answer ({off} too low).")
        yield text.format(rate=expected, off=off)
    if speed.forecast is not None:
        rate = rate_text(speed.forecast.prefill.tokens_per_s)
        yield tr("Prompts: {rate} tok/s.").format(rate=rate)
        if speed.is_simulated:
            yield tr("Simulated: assumes Tandem's kernels.")
        elif not speed.is_measured:
            yield tr(UNMEASURED)
    yield tr("Memory: {size}.").format(size=size_text(plan.total_bytes))
    yield from _rooms(plan)
    if "f32" in plan.storage:
        yield tr(DEQUANTISED)


def _rooms(plan: Plan) -> Iterator[str]:
    texts = [f"{room.n}\u00a0×\u00a0{tokens_text(room.n_tokens)}" for room in plan.rooms]
    if len(texts) > 1:
        yield tr("Parallel requests: {few} or {many}.").format(few=texts[0], many=texts[-1])
    elif texts:
        yield tr("Parallel requests: {rooms}.").format(rooms=texts[0])


def _empty_text(has_model: bool, elsewhere: str) -> str:
    if elsewhere:
        text = tr("{host} runs the selected model, so there is nothing to split here.")
        return text.format(host=elsewhere)
    return "" if has_model else tr("Open a model to see what it needs.")


class MemoryComparison(QWidget):
    """Table of predicted and measured memory per rank; hidden when empty."""

    HEADINGS = (
        tr_later("Weights and KV"), tr_later("predicted"), tr_later("measured"), tr_later("error"),
    )  # fmt: skip

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
        """Show the ranks of the loaded model."""
        if loaded is self._shown:
            return
        self._shown = loaded
        while (item := self._table.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.deleteLater()
        is_known = loaded is not None and bool(loaded.memory)
        self.setVisible(is_known)
        if loaded is None or not is_known:
            return
        for column, heading in enumerate(self.HEADINGS):
            self._add(0, column, tr(heading))
        for row, (name, memory) in enumerate(zip(labels, loaded.memory, strict=False), 1):
            for column, text in enumerate(comparison(name, memory)):
                self._add(row, column, text)

    def _add(self, row: int, column: int, text: str) -> None:
        side = Qt.AlignmentFlag.AlignRight if column else Qt.AlignmentFlag.AlignLeft
        role = "muted" if row == 0 else None
        self._table.addWidget(label(text, role), row, column, side)


def comparison(name: str, memory: DeviceMemory) -> tuple[str, str, str, str]:
    """Return a table row: rank, predicted, measured, relative error.

    Compute buffers are excluded because their size is known only after an answer.
    """
    predicted = memory.predicted.weights + memory.predicted.kv
    measured = memory.measured.weights + memory.measured.kv
    error = signed_percent_text((predicted - measured) / measured) if measured else "–"
    return name, size_text(predicted), size_text(measured), error
