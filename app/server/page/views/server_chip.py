"""The chip that says that other programs can use the model."""

from __future__ import annotations

from PySide6.QtWidgets import QWidget

from app.core.translation import tr
from app.widgets.buttons import Chip
from app.widgets.text import set_tip


class ServerChip(Chip):
    """Chip that is there while the server runs; a press leads to its page."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        set_tip(self, tr("Other programs can use the model. Click to see the server."))

    def show_running(self, is_running: bool) -> None:
        """Show whether the server runs."""
        self.set_texts((tr("Server on"), tr("Server")) if is_running else ())
