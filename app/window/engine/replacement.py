"""Another engine in place of the one that runs: answers end first, the model comes back."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Qt, Signal, Slot

from app.chat.session import ChatSession
from app.core.background import LatestJob
from app.core.engine_client import EngineClient, EngineState
from app.core.notice import Notice
from app.core.translation import tr_n
from app.models.current.session import ModelSession
from app.window.start_up import StartUp
from engine import ModelLoaded

CLOSE_S = 5.0


class EngineReplacement(QObject):
    """The way from one engine to the next; running answers may finish before."""

    noticed = Signal(object)  # Notice

    def __init__(
        self,
        client: EngineClient,
        models: ModelSession,
        chats: ChatSession,
        start_up: StartUp,
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._client, self._models = client, models
        self._chats, self._start_up = chats, start_up
        self._then: Callable[[], None] | None = None  # called once the engine has ended
        self._is_unloading = self._is_starting = False
        self._lost: ModelLoaded | None = None  # to be loaded again
        self._closing = LatestJob("tandem-engine-end", self)
        self._closing.done.connect(self._on_closed)
        # queued, so that all others have seen what has changed
        queued = Qt.ConnectionType.QueuedConnection
        client.state_changed.connect(self._go_on, queued)
        chats.answers_changed.connect(self._go_on, queued)
        start_up.devices_found.connect(self._on_devices, queued)

    @property
    def is_under_way(self) -> bool:
        """Whether an engine ends, or the next one waits for the devices."""
        return self._then is not None or self._is_starting

    def end(self, then: Callable[[], None]) -> None:
        """End the engine, once the answers are finished that are being written; call `then`."""
        self._then = then
        if n := len(self._chats.answers):
            text = tr_n(
                "The engine is replaced when this answer is finished.",
                "The engine is replaced when {n} answers are finished.",
                n,
            )
            action = tr_n("Stop the answer now", "Stop the answers now", n)
            self.noticed.emit(Notice(text, "", "warning", action, self._chats.stop_all))
        self._go_on()

    def start(self) -> None:
        """Start the engine that is to be used from now on, and load the model again."""
        self._is_starting = True
        self._start_up.search_again("pack")

    def close(self) -> None:
        """Wait for an engine that ends."""
        self._then, self._is_starting = None, False
        self._closing.close()

    @Slot()
    def _go_on(self) -> None:
        """Do the next step towards the end of the engine, unless something has to end before."""
        client = self._client
        if self._then is None or self._chats.is_busy or self._closing.is_busy:
            return
        has_model = self._lost is not None or client.model is not None
        self._models.block(is_returning=has_model and self._then == self.start)
        if client.state is EngineState.LOADING:
            client.cancel()
        elif client.model is None:
            self._is_unloading = False
            host = client.release()
            self._closing.run(lambda: host is None or host.close(CLOSE_S))
        elif not self._is_unloading:
            self._is_unloading, self._lost = True, client.model
            self._models.eject()

    @Slot()
    def _on_closed(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()

    @Slot()
    def _on_devices(self) -> None:
        """Start the next engine, now that it is known which devices it can use."""
        if not self._is_starting:
            return
        self._is_starting = False
        lost, self._lost = self._lost, None
        self._client.start()
        if self._models.unblock() or lost is None:
            return
        usable = {device.id for device in self._start_up.devices if device.usable}
        if usable.issuperset(lost.params.all_devices):
            self._models.load_again(lost)
        else:
            self._models.open(lost.info.path)
