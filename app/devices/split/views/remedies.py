"""Buttons for remedies where the model does not fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QPushButton, QWidget

from app.core.translation import tr, tr_n
from app.core.units import tokens_text
from app.widgets.flow import FlowBox
from app.widgets.text import caption_text, set_tip

if TYPE_CHECKING:
    from engine import Remedy

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
