"""The program's icon in the sizes that desktops ask for, drawn from resources/tandem.svg."""

from __future__ import annotations

from pathlib import Path

SIZES = (16, 22, 24, 32, 48, 64, 128, 256, 512)


def draw_icon(source: Path, size: int) -> bytes:
    """Return the icon as a PNG of a size in pixels."""
    from PySide6.QtCore import QBuffer, QIODevice
    from PySide6.QtGui import QImage, QPainter
    from PySide6.QtSvg import QSvgRenderer

    image = QImage(size, size, QImage.Format.Format_ARGB32)
    image.fill(0)
    painter = QPainter(image)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    QSvgRenderer(str(source)).render(painter)
    painter.end()
    file = QBuffer()
    file.open(QIODevice.OpenModeFlag.WriteOnly)
    image.save(file, "PNG")
    return file.data().data()


def write_icons(source: Path, theme: Path, name: str) -> None:
    """Write the icon into a folder of an icon theme, such as share/icons/hicolor.

    Args:
        name: name by which menu entries and file types call it.
    """
    for size in SIZES:
        folder = theme / f"{size}x{size}" / "apps"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").write_bytes(draw_icon(source, size))
    folder = theme / "scalable" / "apps"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_bytes(source.read_bytes())
