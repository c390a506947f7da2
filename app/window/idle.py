"""Unloads a model that nobody has used for some time; the next message loads it again."""

from __future__ import annotations

import time
from collections.abc import Callable

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.chat.views.composer import Composer
from app.core.engine_client import EngineClient, EngineState
from app.core.notice import Notice
from app.core.translation import tr, tr_n
from app.models.current.session import ModelSession
from app.remote.client.address import is_remote

MINUTE_MS = 60_000


class IdleUnloader(QObject):
    """Watch over the time since the last answer, load, or typed text.

    Args:
        minutes: returns the time after which a model is unloaded; 0 for never.
    """

    noticed = Signal(object)  # Notice

    def __init__(
        self, client: EngineClient, models: ModelSession, composer: Composer,
        minutes: Callable[[], int], parent: QObject,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._client, self._models, self._minutes = client, models, minutes
        self._is_leaving = self._has_left = False
        self._timer = QTimer(self, singleShot=True)
        self._timer.timeout.connect(self._unload)
        client.state_changed.connect(self.restart)
        composer.draft_changed.connect(self.restart)
        client.unloaded.connect(self._on_unloaded)
        models.loaded.connect(self._on_loaded)

    @Slot()
    def restart(self) -> None:
        """Begin to count anew, as something was done or another time was set."""
        minutes = self._minutes()
        if minutes and self._client.state is EngineState.READY:
            self._timer.start(minutes * MINUTE_MS)
        else:
            self._timer.stop()

    def stop(self) -> None:
        """Unload nothing any more."""
        self._timer.stop()

    def wake(self) -> None:
        """Load the model again that was unloaded, for a message that is about to be sent."""
        if self._has_left and self._client.state is EngineState.EMPTY:
            self._models.load()

    @Slot()
    def _unload(self) -> None:
        model = self._client.model
        if model is None or self._client.state is not EngineState.READY:
            return
        if is_remote(model.info.path):  # which takes no memory here
            return
        if left_ms := self._shared_left_ms():
            self._timer.start(left_ms)
            return
        self._is_leaving = True
        self._models.eject()
        text = tr_n(
            "{name} was not used for {n} minute and is unloaded.",
            "{name} was not used for {n} minutes and is unloaded.",
            self._minutes(), name=model.info.name,
        )  # fmt: skip
        self.noticed.emit(Notice(text, tr("Your next message loads it again.")))

    def _shared_left_ms(self) -> int:
        """Return the milliseconds until programs that use the server count as unused, too."""
        sharing, whole_ms = self._client.sharing, self._minutes() * MINUTE_MS
        if sharing.n_running:
            return whole_ms
        return max(0, whole_ms - round(1000 * (time.monotonic() - sharing.used_at)))

    @Slot()
    def _on_unloaded(self) -> None:
        """Note whether the model has left because of this, or a person has unloaded it."""
        self._has_left, self._is_leaving = self._is_leaving, False

    @Slot()
    def _on_loaded(self) -> None:
        self._has_left = False
