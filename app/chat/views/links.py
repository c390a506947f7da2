"""Web addresses in messages: a click shows where one leads, and asks before a browser opens."""

from __future__ import annotations

from PySide6.QtCore import QPoint, Qt, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QApplication, QMenu, QWidget

from app.core.translation import tr
from app.widgets.text import caption_text

SCHEMES = ("http", "https")
MOST_SHOWN = 120
"""Largest number of characters of an address in the menu."""


def open_link(url: QUrl) -> None:
    """Open an address in the browser, if it is http or https."""
    if url.scheme() in SCHEMES:
        QDesktopServices.openUrl(url)


def ask_to_open(url: QUrl, place: QPoint, parent: QWidget) -> QMenu | None:
    """Show a menu with an address as it really is, which opens or copies it.

    Args:
        place: where on the screen the menu appears.

    Returns:
        the menu; None for an address that is never opened.
    """
    if url.scheme() not in SCHEMES:
        return None
    menu = QMenu(parent)
    menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    menu.setAccessibleName(tr("Web address"))
    address = url.toString(QUrl.ComponentFormattingOption.FullyEncoded)
    menu.addAction(caption_text(address, MOST_SHOWN)).setEnabled(False)
    menu.addSeparator()
    menu.addAction(tr("Open in browser")).triggered.connect(lambda: open_link(url))
    copy = menu.addAction(tr("Copy address"))
    copy.triggered.connect(lambda: QApplication.clipboard().setText(address))
    menu.popup(place)
    return menu
