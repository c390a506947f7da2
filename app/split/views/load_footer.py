"""Load, apply, undo, cancel: the buttons under the split, by state."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QPushButton, QVBoxLayout, QWidget

from app.split.state import LoadState
from app.split.picture import SplitPicture

PROGRESS_STEPS = 1000


class LoadFooter(QWidget):
    """Shows the buttons that make sense now."""

    load_requested = Signal()
    apply_requested = Signal()
    undo_requested = Signal()
    cancel_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.progress = QProgressBar()
        self.progress.setRange(0, PROGRESS_STEPS)
        self.progress.setTextVisible(False)
        self.undo = QPushButton("Undo")
        self.undo.setToolTip("Take the last change of the split back (Ctrl+Z)")
        self.cancel = QPushButton("Cancel")
        self.load = QPushButton("Load")
        self.load.setProperty("role", "primary")
        self._can_apply = False
        self.undo.clicked.connect(self.undo_requested)
        self.cancel.clicked.connect(self.cancel_requested)
        self.load.clicked.connect(self._on_load)
        self.buttons = QHBoxLayout()
        self.buttons.addStretch(1)
        for button in (self.undo, self.cancel, self.load):
            self.buttons.addWidget(button)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(16, 8, 16, 14)
        layout.setSpacing(10)
        layout.addWidget(self.progress)
        layout.addLayout(self.buttons)
        self.show_state("empty", None)

    def show_state(self, state: LoadState, picture: SplitPicture | None) -> None:
        """Offer what can be done; without a picture nothing can."""
        is_busy = state in ("loading", "applying")
        self.progress.setVisible(is_busy)
        doing = "Splitting the model anew" if state == "applying" else "Loading the model"
        self.progress.setAccessibleName(doing)
        self.cancel.setVisible(is_busy)
        self.undo.setVisible(not is_busy)
        self.undo.setEnabled(picture is not None and picture.can_undo)
        self.load.setVisible(not is_busy)
        can_load = picture is not None and picture.can_load
        has_changed = picture is not None and picture.has_changed
        self._can_apply = state == "loaded" and picture is not None and picture.can_apply
        if state != "loaded":
            self.load.setText("Load")
            self.load.setToolTip("")
            self.load.setEnabled(state == "ready" and can_load)
            return
        texts = ("Apply live", "The chat goes on with the new split")
        if not self._can_apply and has_changed:
            texts = ("Reload to apply", "The model is loaded again; the chat is computed anew")
        self.load.setText(texts[0])
        self.load.setToolTip(texts[1])
        self.load.setEnabled(has_changed and can_load)

    def set_progress(self, done: float) -> None:
        """Show which part of the load is done, 0 to 1."""
        self.progress.setValue(round(min(1.0, max(0.0, done)) * PROGRESS_STEPS))

    def _on_load(self) -> None:
        if self._can_apply:
            self.apply_requested.emit()
        else:
            self.load_requested.emit()
