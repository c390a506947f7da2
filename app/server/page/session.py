"""The window's server: its state, address, key and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from PySide6.QtCore import QObject, Signal, Slot

from app.core import paths
from app.core.background import LatestJob
from app.core.engine_client import EngineClient
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr, translated
from app.server.page.choices import ServerChoices, choices_of
from engine import EngineError

if TYPE_CHECKING:
    from app.server.page.running import RunningServer


KEY_NAME: Final = "server of this window"  # name of the server's key in the key store
KEY_BYTES = 24

KEY_CLOSE_S = 0.5
"""Timeout in seconds for the keyring when closing, as it may be waiting for the user."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result of starting or stopping the server.

    Attributes:
        number: id of the change.
        address: URL of the server, or "" if none is running.
        error: why the server could not be started, if it failed.
    """

    number: int
    address: str = ""
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class _KeptKey:
    key: str
    is_kept: bool


class ServerSession(QObject):
    """Starts, restarts and stops the server on a thread, according to the settings.

    Args:
        keep: saves settings.

    Attributes:
        is_wanted: whether the server is switched on.
        address: its URL while it is running, such as "http://127.0.0.1:11435"; otherwise "".
        problem: why it could not be started, or "".
        key: its API key; "" until it is known.
        key_problem: a warning if the key could not be saved, otherwise "".
    """

    changed = Signal()
    viewed = Signal(object)  # LogView

    def __init__(
        self, client: EngineClient, settings: SettingsStore, keep: Callable[[Settings], None],
        parent: QObject,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._sharing, self._settings, self._keep = client.sharing, settings, keep
        self.is_wanted = self._has_begun = self._is_closed = False
        self.address = self.problem = self.key = self.key_problem = ""
        self._running: RunningServer | None = None  # changed only by jobs
        self._n_asked = self._n_done = 0
        self._job = LatestJob("tandem-serving", self)
        self._job.done.connect(self._on_done)
        self._key_job = LatestJob("tandem-server-key", self)
        self._key_job.done.connect(self._on_key)

    @property
    def settings(self) -> Settings:
        """The window's settings."""
        return self._settings.current

    @property
    def choices(self) -> ServerChoices:
        """The server's settings."""
        return choices_of(self._settings.current)

    @property
    def is_changing(self) -> bool:
        """Whether the server is starting or stopping."""
        return self._n_asked != self._n_done or (self.is_wanted and not self.address)

    @Slot()
    def begin(self) -> None:
        """Start the server if it should start with the window; later calls do nothing."""
        if not self._has_begun and self._settings.current.server_at_start:
            self.switch(True)
        self._has_begun = True

    @Slot(bool)
    def switch(self, on: bool) -> None:
        """Start or stop the server."""
        self.is_wanted, self.problem = on, ""
        self._apply()

    def change(self, **values: Any) -> None:
        """Change settings, restarting the server if necessary."""
        before = self.choices
        self._keep(replace(self._settings.current, **values))
        if self.choices != before:
            if self.choices.needs_key and not self.key:
                self.want_key()
            elif self.is_wanted:
                self._apply()
        self.changed.emit()

    @Slot()
    def want_key(self) -> None:
        """Load the key, or create one if there is none."""
        self._key_job.run(lambda: _kept_key(is_new=False))

    @Slot()
    def renew_key(self) -> None:
        """Create a new key, which invalidates the old one."""
        self._key_job.run(lambda: _kept_key(is_new=True))

    @Slot()
    def look(self) -> None:
        """Request a snapshot of the requests; `viewed` delivers it."""
        if self._running is not None and self.address:
            self._running.view(self.viewed.emit)

    def close(self) -> None:
        """Stop the server and wait for the threads."""
        self._is_closed = True
        self.is_wanted = False
        self._key_job.close(KEY_CLOSE_S)
        self._job.close()
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _apply(self) -> None:
        choices = self.choices if self.is_wanted else None
        if choices is not None and choices.needs_key and not self.key:
            self.want_key()  # calls this method again once the key is known
        else:
            self._n_asked += 1
            number, key = self._n_asked, self.key if choices and choices.needs_key else ""
            self._job.run(lambda: self._replace(number, choices, key))
        self.changed.emit()

    def _replace(self, number: int, choices: ServerChoices | None, key: str) -> _Outcome:
        """Stop the server and, if requested, start a new one; runs on the job's thread."""
        if self._running is not None:
            self._running.stop()
            self._running = None
        if choices is None or self._is_closed:
            return _Outcome(number)
        from app.server.page.running import RunningServer  # imported late: HTTP is slow to import

        server = RunningServer(self._sharing, choices, key)
        try:
            server.start()
        except EngineError as error:
            return _Outcome(number, error=error)
        self._running = server
        return _Outcome(number, server.address)

    @Slot(object)
    def _on_done(self, outcome: _Outcome) -> None:
        if outcome.number != self._n_asked:
            return
        self._n_done, self.address = outcome.number, outcome.address
        if outcome.error is not None:
            self.is_wanted = False
            hint = tr("Choose another port.")  # the error's own hint names command-line options
            self.problem = f"{translated(outcome.error.message)} {hint}"
        self.changed.emit()

    @Slot(object)
    def _on_key(self, found: _KeptKey) -> None:
        is_other, self.key = found.key != self.key, found.key
        self.key_problem = (
            ""
            if found.is_kept
            else tr("The key cannot be saved. It will be lost when Tandem closes.")
        )
        if self.is_wanted and is_other and self.choices.needs_key:
            self._apply()
        self.changed.emit()


def _kept_key(*, is_new: bool) -> _KeptKey:
    """Return the stored key, or create and store a new one; may block on the keyring."""
    import secrets

    from app.core.system_keyring import SecretStore

    store = SecretStore(paths.api_keys_file())
    key = "" if is_new else store.get(KEY_NAME)
    if key:
        return _KeptKey(key, is_kept=True)
    key = secrets.token_urlsafe(KEY_BYTES)
    return _KeptKey(key, store.put(KEY_NAME, key) != "nowhere")
