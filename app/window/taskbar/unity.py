"""Progress on Linux: a signal on D-Bus, which Ubuntu's dock, KDE and others listen to."""

from __future__ import annotations

from PySide6.QtDBus import QDBusConnection, QDBusMessage
from PySide6.QtGui import QGuiApplication

from app.window.taskbar.painter import Painter

INTERFACE = "com.canonical.Unity.LauncherEntry"
PATH = "/com/canonical/unity/launcherentry/tandem"


def unity_painter() -> Painter:
    """Return what sends the signal; it does nothing where there is no session bus."""
    bus = QDBusConnection.sessionBus()
    entry = f"application://{QGuiApplication.desktopFileName()}.desktop"

    def paint(share: float | None) -> None:
        if not bus.isConnected():
            return
        message = QDBusMessage.createSignal(PATH, INTERFACE, "Update")
        shown = {"progress": float(share or 0.0), "progress-visible": share is not None}
        message.setArguments([entry, shown])
        bus.send(message)

    return paint
