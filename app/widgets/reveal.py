"""The place of a file, shown in the system's file manager."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QUrl
from PySide6.QtGui import QDesktopServices


def reveal(path: str | Path) -> None:
    """Open the folder of a file in the file manager."""
    QDesktopServices.openUrl(QUrl.fromLocalFile(str(Path(path).parent)))
