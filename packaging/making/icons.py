"""The program's icon in the sizes that desktops ask for, drawn from resources/tandem.svg."""

from __future__ import annotations

import os
from pathlib import Path

SIZES = (16, 22, 24, 32, 48, 64, 128, 256, 512)


def write_icons(source: Path, theme: Path, name: str) -> None:
    """Write the icon into a folder of an icon theme, such as share/icons/hicolor.

    Args:
        name: name by which menu entries and file types call it.
    """
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    from PySide6.QtGui import QGuiApplication, QImage, QPainter
    from PySide6.QtSvg import QSvgRenderer

    app = QGuiApplication.instance() or QGuiApplication([])
    drawing = QSvgRenderer(str(source))
    for size in SIZES:
        image = QImage(size, size, QImage.Format.Format_ARGB32)
        image.fill(0)
        painter = QPainter(image)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        drawing.render(painter)
        painter.end()
        folder = theme / f"{size}x{size}" / "apps"
        folder.mkdir(parents=True, exist_ok=True)
        image.save(str(folder / f"{name}.png"))
    folder = theme / "scalable" / "apps"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_bytes(source.read_bytes())
    del app
