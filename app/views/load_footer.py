"""Load, cancel, eject: the buttons under the split, by state."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QPushButton, QVBoxLayout, QWidget

from app.split_model import LoadState

PROGRESS_STEPS = 1000


class LoadFooter(QWidget):
    """Shows the buttons that make sense now."""

    load_requested = Signal()
    cancel_requested = Signal()
    eject_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.progress = QProgressBar()
        self.progress.setRange(0, PROGRESS_STEPS)
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName("Loading the model")
        self.eject = QPushButton("Eject")
        self.cancel = QPushButton("Cancel")
        self.load = QPushButton("Load")
        self.load.setProperty("role", "primary")
        self.eject.clicked.connect(self.eject_requested)
        self.cancel.clicked.connect(self.cancel_requested)
        self.load.clicked.connect(self.load_requested)
        buttons = QHBoxLayout()
        buttons.addWidget(self.eject)
        buttons.addStretch(1)
        buttons.addWidget(self.cancel)
        buttons.addWidget(self.load)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(16, 8, 16, 14)
        layout.setSpacing(10)
        layout.addWidget(self.progress)
        layout.addLayout(buttons)
        self.show_state("empty", can_load=False, has_changed=False)

    def show_state(self, state: LoadState, *, can_load: bool, has_changed: bool) -> None:
        """Offer what can be done.

        Args:
            has_changed: whether the settings differ from those that are loaded.
        """
        is_loading = state == "loading"
        self.progress.setVisible(is_loading)
        self.cancel.setVisible(is_loading)
        self.eject.setVisible(state == "loaded")
        self.load.setVisible(not is_loading)
        if state == "loaded":
            self.load.setText("Reload to apply" if has_changed else "Loaded")
            self.load.setEnabled(has_changed and can_load)
        else:
            self.load.setText("Load")
            self.load.setEnabled(state == "ready" and can_load)

    def set_progress(self, done: float) -> None:
        """Show which part of the load is done, 0 to 1."""
        self.progress.setValue(round(min(1.0, max(0.0, done)) * PROGRESS_STEPS))
