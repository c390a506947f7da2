"""Single instance: a second start passes its file to the open window.

The window holds a lock and listens on a local socket. Both are tied to the settings folder, so a
portable copy of Tandem has its own window. On macOS, files to open arrive as events.
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
"""Seconds that a second start waits for a window that is still starting before opening its own."""

QUIT_S = 20.0  # seconds a window has to save everything and close
MAX_BYTES = 1 << 16
DONE = b"done\n"


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What a second start asks the open window to do.

    Attributes:
        model: absolute path of the model to open, or "".
        demo: whether to open the bundled model.
        activation: Wayland activation token for raising the window, or "".
        quit: whether to close the window instead.
    """

    model: str = ""
    demo: bool = False
    activation: str = ""
    quit: bool = False

    @classmethod
    def parse(cls, line: bytes) -> OpenRequest:
        """Parse a line of JSON.

        Raises:
            ValueError: the line is not a request.
        """
        data = json.loads(line)
        if not isinstance(data, dict):
            raise ValueError("no request")
        model, activation = data.get("model"), data.get("activation")
        if not isinstance(model, str) or not isinstance(activation, str):
            raise ValueError("no request")
        return cls(model, data.get("demo") is True, activation, data.get("quit") is True)


class SecondStarts(QObject):
    """Receiver in the first window for requests from second starts.

    Call `claim` before the window opens and `listen` after its first frame, since `listen` has a
    slow import; second starts wait for it.
    """

    requested = Signal(object)  # OpenRequest

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._lock = _lock()
        self._server: QLocalServer | None = None

    def claim(self) -> bool:
        """Try to take the lock; return whether this is the first window."""
        return self._lock.tryLock(0)

    @Slot()
    def listen(self) -> None:
        """Listen for requests if this is the first window."""
        if not self._lock.isLocked() or self._server is not None:
            return
        from PySide6.QtNetwork import QLocalServer

        self._server = QLocalServer(self)
        self._server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
        self._server.newConnection.connect(self._on_connection)
        QLocalServer.removeServer(_address())  # left by a window that was killed
        if not self._server.listen(_address()):
            log.info("cannot listen for second starts: %s", self._server.errorString())
            self.close()

    def close(self) -> None:
        """Let another window take over."""
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
            log.info("ignored an invalid request from another program")
            client.abort()
            return
        client.write(DONE)
        client.disconnectFromServer()
        self.requested.emit(request)


def hand_over(model: str | None, *, demo: bool) -> bool:
    """Ask the open window to open a model or come to the front; return whether it replied."""
    request = OpenRequest(
        str(Path(model).absolute()) if model else "",
        demo,
        os.environ.get("XDG_ACTIVATION_TOKEN", ""),
    )
    return _hand(request)


def quit_window() -> bool:
    """Make the open window save everything and close; return whether no window is left open."""
    _hand(OpenRequest(quit=True))
    until = time.monotonic() + QUIT_S
    while _is_locked():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _hand(request: OpenRequest) -> bool:
    until = time.monotonic() + ANSWER_S
    while _is_locked():
        if _send(request, until):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return False


def _send(request: OpenRequest, until: float) -> bool:
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
    with suppress(OSError):  # if the home is read-only, nothing is locked
        file.parent.mkdir(parents=True, exist_ok=True)
    lock = QLockFile(str(file))
    lock.setStaleLockTime(0)  # age is irrelevant: only a dead process makes the lock stale
    return lock


def _address() -> str:
    """Return the socket's name, which is unique to this user.

    Flatpak gives each start its own runtime folder; only one folder inside it is shared.
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
    if sys.platform == "win32":
        return True
    try:
        return os.stat(address).st_uid == os.getuid()
    except OSError:
        return False


class Application(QApplication):
    """The application; macOS sends it files double-clicked or dropped on the Dock icon."""

    opened = Signal(object)  # OpenRequest

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QFileOpenEvent) and event.file():
            self.opened.emit(OpenRequest(event.file()))
            return True
        return super().event(event)


class SignalWatch(QObject):
    """Signal handler that emits `came` on termination signals between `install` and `uninstall`."""

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
        log.info("closing the window on %s", ", ".join(names))
        self.came.emit()


def _go_on(number: int, frame: FrameType | None) -> None:
    """Do nothing: the socket reports signals, so repeated ones do not interrupt closing."""
