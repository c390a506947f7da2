"""Where files are: in the system's file manager, and where new ones are saved."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QStandardPaths, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QFileDialog, QWidget

_last_folder: Path | None = None


def reveal(path: str | Path) -> None:
    """Open the folder of a file in the file manager."""
    QDesktopServices.openUrl(QUrl.fromLocalFile(str(Path(path).parent)))


def ask_where_to_save(over: QWidget, title: str, name: str, kinds: str = "") -> tuple[str, str]:
    """Ask for a file to write; return its path and the chosen kind, "" for none.

    Args:
        name: proposed name of the file. It is proposed in the folder of the last file, at first
            among the documents: a program's working folder may be anywhere.
        kinds: kinds of files, as of `QFileDialog`.
    """
    global _last_folder
    place = str(_folder() / name)
    chosen, kind = QFileDialog.getSaveFileName(over, title, place, kinds)
    if chosen:
        _last_folder = Path(chosen).parent
    return chosen, kind


def _folder() -> Path:
    """Return the folder to begin in."""
    documents = QStandardPaths.writableLocation(QStandardPaths.StandardLocation.DocumentsLocation)
    folders = (_last_folder, Path(documents) if documents else None)
    return next((folder for folder in folders if folder and folder.is_dir()), Path.home())
