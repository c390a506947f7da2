"""Buttons below the split: load, apply, undo, cancel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QBoxLayout,
    QHBoxLayout,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_n
from app.core.units import tokens_text
from app.devices.split.picture import SplitPicture
from app.widgets.layout import FlowBox
from app.widgets.shortcuts import with_keys
from app.widgets.text import caption_text, set_tip

if TYPE_CHECKING:
    from engine import Remedy

PROGRESS_STEPS = 1000


class LoadFooter(QWidget):
    """Shows the buttons that can be used now, and the progress of a load."""

    load_requested = Signal()  # to load, or to apply live
    undo_requested = Signal()
    cancel_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.progress = QProgressBar()
        self.progress.setRange(0, PROGRESS_STEPS)
        self.progress.setTextVisible(False)
        self.undo = QPushButton(tr("Undo"))
        set_tip(self.undo, with_keys(tr("Undo the last change of the split"), "undo-split"))
        self.cancel = QPushButton(tr("Cancel"))
        self.load = QPushButton(tr("Load"))
        self.load.setProperty("role", "primary")
        self.undo.clicked.connect(self.undo_requested)
        self.cancel.clicked.connect(self.cancel_requested)
        self.load.clicked.connect(self.load_requested)
        right = QHBoxLayout()
        right.addStretch(1)
        for button in (self.undo, self.cancel, self.load):
            right.addWidget(button)
        self._buttons = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._buttons.addLayout(right, 1)
        self._others: list[QPushButton] = []
        self._layout = layout = QVBoxLayout(self)
        layout.setContentsMargins(16, 8, 16, 14)
        layout.setSpacing(10)
        layout.addWidget(self.progress)
        layout.addLayout(self._buttons)
        self.show_state(None)

    def add_button(self, button: QPushButton) -> None:
        """Put a button of another subject at the left end."""
        self._buttons.insertWidget(0, button)
        self._others.append(button)
        self._arrange()

    def show_state(self, picture: SplitPicture | None) -> None:
        """Show the buttons for a picture; without one, none can be used."""
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
        """Put the buttons of other subjects above the footer's own where a line is too short."""
        shown = [b for b in (*self._others, self.undo, self.cancel, self.load) if not b.isHidden()]
        gaps = self._buttons.spacing() * (len(shown) - 1)
        margins = self.contentsMargins() + self._layout.contentsMargins()
        room = self.width() - margins.left() - margins.right()
        is_short = sum(button.sizeHint().width() for button in shown) + gaps > room
        direction = QBoxLayout.Direction
        self._buttons.setDirection(direction.TopToBottom if is_short else direction.LeftToRight)

    def set_progress(self, done: float) -> None:
        """Show the part of the load that is done, 0 to 1."""
        self.progress.setValue(round(min(1.0, max(0.0, done)) * PROGRESS_STEPS))


def _load_texts(picture: SplitPicture | None) -> tuple[str, str]:
    if picture is None or picture.load_state != "loaded":
        return tr("Load"), ""
    if picture.has_changed and not picture.can_apply:
        return tr("Reload to apply"), tr("Loads the model again and recomputes the chat")
    return tr("Apply live"), tr("Changes the split of the loaded model; the chat goes on")


MOST = 6
"""Number of remedies that are offered at most."""


class RemedyButtons(FlowBox):
    """One button for each remedy."""

    chosen = Signal(object)  # Remedy

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._shown: tuple[Remedy, ...] = ()
        self.buttons: list[QPushButton] = []
        self.hide()

    def set_remedies(self, remedies: Sequence[Remedy], *, is_current: bool) -> None:
        """Offer these remedies; disabled if they are for settings that have changed since."""
        self.setVisible(bool(remedies))
        self.setEnabled(is_current)
        if tuple(remedies) == self._shown:
            return
        self._shown = tuple(remedies)
        self.buttons = []
        for remedy in self._shown[:MOST]:
            button = QPushButton(caption_text(short_text(remedy)))
            button.setProperty("role", "chip")
            set_tip(button, named(remedy.sentence))
            button.setAccessibleDescription(named(remedy.sentence))
            button.clicked.connect(lambda _=False, r=remedy: self.chosen.emit(r))
            self.buttons.append(button)
        self.set_widgets(self.buttons)


def short_text(remedy: Remedy) -> str:
    """Return a remedy in a few words."""
    params = remedy.params
    texts = {
        "split": tr("Shares that fit"),
        "parallel": tr_n("{n} request at once", "{n} requests at once", params.parallel),
        "kv_type": tr("{kv_type} KV cache").format(kv_type=params.kv_type),
        "context": tr("Context of {tokens}").format(tokens=tokens_text(params.n_ctx or 0)),
        "experts": tr("Experts of {n} blocks on the CPU").format(n=params.n_cpu_moe),
        "kv_on_host": tr("KV cache in host memory"),
        "blocks": tr("{n} blocks on the CPU").format(n=params.n_cpu_blocks),
    }
    return texts.get(remedy.kind) or named(remedy.sentence).rstrip(".")


def named(sentence: str) -> str:
    """Return a sentence with devices named as in the rows: "GPU 1" for "cuda:1"."""
    return re.sub(r"\bcuda:(\d+)", r"GPU \1", sentence)
