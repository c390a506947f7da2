"""Field of the draft model: none, the one that is chosen, or another file."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QSignalBlocker, Qt, Signal, Slot
from PySide6.QtWidgets import QComboBox, QFileDialog, QWidget

from app.split.settings import DRAFT_SUFFIX
from app.translation import tr
from app.widgets.text import plain_tip


class DraftField(QComboBox):
    """Choice of a draft model's file."""

    chosen = Signal(str)  # path, "" for none

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._path = ""
        self.set_path("")
        self.activated.connect(self._on_activated)

    def set_path(self, path: str) -> None:
        """Show a file as the chosen one; "" for none."""
        self._path = path
        with QSignalBlocker(self):
            self.clear()
            self.addItem(tr("No model"), "")
            if path:
                self.addItem(Path(path).name, path)
                self.setItemData(1, plain_tip(path), Qt.ItemDataRole.ToolTipRole)
            self.addItem(tr("Choose…"))
            self.setCurrentIndex(1 if path else 0)

    @Slot(int)
    def _on_activated(self, index: int) -> None:
        path = self.itemData(index)
        if path is None:
            files = tr("GGUF models (*{suffix})").format(suffix=DRAFT_SUFFIX)
            path, _ = QFileDialog.getOpenFileName(self, tr("Draft model"), "", files)
            if not path.lower().endswith(DRAFT_SUFFIX):
                self.set_path(self._path)
                return
        self.chosen.emit(path)
