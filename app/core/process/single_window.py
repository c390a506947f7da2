"""One window for each person: a second start hands its file to the window that is open.

The window that holds a lock listens at a local socket. Both belong to one folder of settings, so
that a portable copy of Tandem has a window of its own. macOS opens files by an event instead.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, QLockFile, QObject, QSocketNotifier, Signal, Slot
from PySide6.QtGui import QFileOpenEvent
from PySide6.QtWidgets import QApplication

from app.core import paths
from app.core.process.interruption import handle, restore

if TYPE_CHECKING:
    from PySide6.QtNetwork import QLocalServer, QLocalSocket

log = logging.getLogger(__name__)

CONNECT_MS = 500
ANSWER_S = 3.0
"""Seconds that a second start waits for the first window, which may just be starting; then it opens
a window of its own."""

QUIT_S = 20.0
"""Seconds that a window may take to save everything and close."""

MAX_BYTES = 1 << 16
DONE = b"done\n"


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The wish of a second start.

    Attributes:
        model: absolute path of the model to open; "" for none.
        demo: whether to open the bundled model.
        activation: token by which Wayland lets a window come to the front; "" without one.
        quit: whether the window is to close instead.
    """

    model: str = ""
    demo: bool = False
    activation: str = ""
    quit: bool = False

    @classmethod
    def parse(cls, line: bytes) -> OpenRequest:
        """Return the request in a line of JSON.

        Raises:
            ValueError: it is none.
        """
        data = json.loads(line)
        if not isinstance(data, dict):
            raise ValueError("no request")
        model, activation = data.get("model"), data.get("activation")
        if not isinstance(model, str) or not isinstance(activation, str):
            raise ValueError("no request")
        return cls(model, data.get("demo") is True, activation, data.get("quit") is True)


class SecondStarts(QObject):
    """The receiver of what later starts hand over, in the first window of a person.

    `claim` comes before the window, and `listen` behind its first picture, as it takes a while to
    import; later starts wait that long.
    """

    requested = Signal(object)  # OpenRequest

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._lock = _lock()
        self._server: QLocalServer | None = None

    def claim(self) -> bool:
        """Claim to be the first window; return whether no other one is."""
        return self._lock.tryLock(0)

    @Slot()
    def listen(self) -> None:
        """Listen, if this is the first window."""
        if not self._lock.isLocked() or self._server is not None:
            return
        from PySide6.QtNetwork import QLocalServer

        self._server = QLocalServer(self)
        self._server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
        self._server.newConnection.connect(self._on_connection)
        QLocalServer.removeServer(_address())  # of a window that was killed
        if not self._server.listen(_address()):
            log.info("later starts open windows of their own: %s", self._server.errorString())
            self.close()

    def close(self) -> None:
        """Leave later starts to another window."""
        if self._server is not None:
            self._server.close()
        self._lock.unlock()

    @Slot()
    def _on_connection(self) -> None:
        assert self._server is not None
        while (client := self._server.nextPendingConnection()) is not None:
            client.disconnected.connect(client.deleteLater)
            client.readyRead.connect(lambda client=client: self._read(client))
            self._read(client)

    def _read(self, client: QLocalSocket) -> None:
        if not client.canReadLine():
            if client.bytesAvailable() > MAX_BYTES:
                client.abort()
            return
        try:
            request = OpenRequest.parse(bytes(client.readLine(MAX_BYTES).data()))
        except (ValueError, RecursionError):
            log.info("another program has sent something that is no request")
            client.abort()
            return
        client.write(DONE)
        client.disconnectFromServer()
        self.requested.emit(request)


def hand_over(model: str | None, *, demo: bool) -> bool:
    """Ask the window that is open to open a model, or to come to the front.

    Args:
        model: path of the model; None for none.

    Returns:
        Whether there is such a window and it has answered.
    """
    request = OpenRequest(
        str(Path(model).absolute()) if model else "",
        demo,
        os.environ.get("XDG_ACTIVATION_TOKEN", ""),
    )
    return _hand(request)


def quit_window() -> bool:
    """Have the window that is open save everything and close.

    Returns:
        Whether no window is open any more.
    """
    _hand(OpenRequest(quit=True))
    until = time.monotonic() + QUIT_S
    while _is_locked():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _hand(request: OpenRequest) -> bool:
    """Give a request to the window that is open, and return whether there is one and it answers."""
    until = time.monotonic() + ANSWER_S
    while _is_locked():
        if _send(request, until):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return False


def _send(request: OpenRequest, until: float) -> bool:
    """Send a request, and return whether the window has taken it."""
    if not _is_own(_address()):
        return False
    from PySide6.QtNetwork import QLocalSocket

    client = QLocalSocket()
    client.connectToServer(_address())
    if not client.waitForConnected(CONNECT_MS):
        return False
    client.write(json.dumps(asdict(request)).encode() + b"\n")
    while not client.canReadLine():
        left_ms = int(1000 * (until - time.monotonic()))
        if left_ms <= 0 or not client.waitForReadyRead(left_ms):
            break
    return client.readAll().data() == DONE


def _is_locked() -> bool:
    lock = _lock()
    if lock.tryLock(0):
        lock.unlock()
        return False
    return lock.error() is QLockFile.LockError.LockFailedError


def _lock() -> QLockFile:
    file = paths.settings_file().with_name("window.lock")
    with suppress(OSError):  # of a home that cannot be written: then nothing is locked
        file.parent.mkdir(parents=True, exist_ok=True)
    lock = QLockFile(str(file))
    lock.setStaleLockTime(0)  # however old: the process that made it tells whether it counts
    return lock


def _address() -> str:
    """Return the name of the socket, which no other person's Tandem has.

    In a Flatpak each start has a folder for such files of its own; one in it belongs to all.
    """
    folder = str(paths.settings_file().parent.absolute())
    name = f"tandem-{hashlib.sha256(folder.encode(errors='surrogateescape')).hexdigest()[:16]}"
    if sys.platform == "win32":
        return name
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    shared = runtime / "app" / os.environ.get("FLATPAK_ID", ".")
    is_shared = "FLATPAK_ID" in os.environ and shared.is_dir()
    return str((shared if is_shared else runtime) / name)


def _is_own(address: str) -> bool:
    """Return whether a socket in a folder that others may write to is this person's."""
    if sys.platform == "win32":
        return True
    try:
        return os.stat(address).st_uid == os.getuid()
    except OSError:
        return False


class Application(QApplication):
    """The application.

    On macOS a double-click on a model, and one that is dropped on the Dock's icon, reaches the
    running program as an event rather than in the arguments of a start.
    """

    opened = Signal(object)  # OpenRequest

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QFileOpenEvent) and event.file():
            self.opened.emit(OpenRequest(event.file()))
            return True
        return super().event(event)


class SignalWatch(QObject):
    """Watch for the signals that end a program, from `install` until `uninstall`."""

    came = Signal()

    def install(self) -> None:
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        self._notifier = QSocketNotifier(self._read_end.fileno(), QSocketNotifier.Type.Read, self)
        self._notifier.activated.connect(self._read)
        self._former_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        self._former = handle(_go_on)

    def uninstall(self) -> None:
        restore(self._former)
        signal.set_wakeup_fd(self._former_fd)
        self._notifier.setEnabled(False)
        self._read_end.close()
        self._write_end.close()

    @Slot()
    def _read(self) -> None:
        names = [signal.Signals(number).name for number in self._read_end.recv(64)]
        log.info("the window closes for %s", ", ".join(names))
        self.came.emit()


def _go_on(number: int, frame: FrameType | None) -> None:
    """Leave a signal to the socket; more of them must not cut the closing short."""
