"""The window's engine: start, installation and replacement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from PySide6.QtCore import QObject, Qt, Signal, Slot

from app.chat.session import ChatSession
from app.core.background import LatestJob
from app.core.engine_client import EngineClient, EngineState
from app.core.notice import Notice
from app.core.translation import tr, tr_n
from app.models.current.model_session import ModelSession
from app.setup.page.engine_session import EngineFacts
from app.setup.page.page import EnginePage
from app.window.start_up import StartUp
from engine import EngineError, ModelInfo, ModelLoaded

if TYPE_CHECKING:
    from app.setup.engine_pack.activation import Origin
    from app.setup.engine_pack.installation import Installed

CLOSE_S = 5.0


class EngineReplacement(QObject):
    """Replaces the engine after the running answers have finished."""

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
        self._then: Callable[[], None] | None = None  # called once the engine has stopped
        self._is_unloading = self._is_starting = False
        self._lost: ModelLoaded | None = None  # model to reload
        self._closing = LatestJob("tandem-engine-end", self)
        self._closing.done.connect(self._on_closed)
        # queued, so that all other receivers handle the change first
        queued = Qt.ConnectionType.QueuedConnection
        client.state_changed.connect(self._go_on, queued)
        chats.answers_changed.connect(self._go_on, queued)
        start_up.devices_found.connect(self._on_devices, queued)

    @property
    def is_under_way(self) -> bool:
        """Whether an engine is stopping or its successor is waiting for the devices."""
        return self._then is not None or self._is_starting

    def end(self, then: Callable[[], None]) -> None:
        """Stop the engine after the running answers have finished, and call `then`."""
        self._then = then
        if n := len(self._chats.answers):
            text = tr_n(
                "The engine will be replaced when this answer is finished.",
                "The engine will be replaced when {n} answers are finished.",
                n,
            )
            action = tr_n("Stop the answer now", "Stop the answers now", n)
            self.noticed.emit(Notice(text, "", "warning", action, self._chats.stop_all))
        self._go_on()

    def start(self) -> None:
        """Start the new engine, and reload the model."""
        self._is_starting = True
        self._start_up.search_again("pack")

    def close(self) -> None:
        """Wait until an engine that is stopping has stopped."""
        self._then, self._is_starting = None, False
        self._closing.close()

    @Slot()
    def _go_on(self) -> None:
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


class EngineSetup(QObject):
    """Starts the engine, and reacts if it is missing, new or broken.

    Args:
        leave: shows the chat instead of the installation page.
    """

    noticed = Signal(object)  # Notice
    missing_changed = Signal(bool)  # whether the engine is now missing

    def __init__(
        self,
        client: EngineClient,
        models: ModelSession,
        chats: ChatSession,
        start_up: StartUp,
        page: EnginePage,
        leave: Callable[[], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._client, self._models, self.page, self._leave = client, models, page, leave
        self._start_up = start_up
        self._origin: Origin = "own"
        self._is_ready = self._closes_page = self._is_closed = False
        self._replacement = EngineReplacement(client, models, chats, start_up, self)
        self._replacement.noticed.connect(self.noticed)
        client.ready.connect(self._on_ready)
        client.load_failed.connect(self._on_failed)
        models.blocked.connect(self._on_blocked)
        chats.model_wanted.connect(self._on_wanted)
        start_up.devices_found.connect(page.show_devices)
        page.left.connect(leave)
        page.covered.connect(self._on_covered)
        page.remove_requested.connect(self._remove)
        session = page.session
        session.known.connect(self._on_facts)
        session.installed.connect(self._on_installed)
        session.broken.connect(self._on_broken)
        session.rolled_back.connect(self._replace)
        session.removed.connect(self._on_removed)
        session.failed.connect(self._on_change_failed)

    @property
    def is_missing(self) -> bool:
        """Whether the engine is missing."""
        return self._origin == "none"

    def begin(self, origin: Origin) -> None:
        """Start the engine, or offer to install one."""
        self._set_origin(origin)
        if not self.is_missing:
            self._client.start()
            if self.page.go_on(is_shown=False):
                text = tr("The engine installation was not completed.")
                self._offer(Notice(text, "", "info"), tr("Show"))
            return
        self._models.block()
        if not self.page.go_on(is_shown=True):
            self.page.open()

    def _set_origin(self, origin: Origin) -> None:
        self._origin = origin
        self.missing_changed.emit(self.is_missing)

    def close(self) -> None:
        """Stop an installation; a later window can continue it."""
        self._is_closed = True
        self.page.close()
        self._replacement.close()

    def _offer(self, notice: Notice, action: str) -> None:
        self.noticed.emit(replace(notice, action=action, on_action=self.page.open))

    @Slot()
    def _on_covered(self) -> None:
        if self._is_closed:
            return
        if self.page.session.state == "running":
            self._offer(Notice(tr("The engine is being installed.")), tr("Show"))
        elif self.is_missing:
            text = tr("No engine is installed.")
            hint = tr("Splits can be planned, but models cannot be loaded.")
            self._offer(Notice(text, hint, "warning"), tr("Install an engine…"))

    @Slot(object)
    def _on_blocked(self, info: ModelInfo) -> None:
        if self.is_missing and not self._replacement.is_under_way:
            self.page.open()
            text = tr("{name} will be loaded when an engine is installed.").format(name=info.name)
            self.noticed.emit(Notice(text))

    @Slot()
    def _on_wanted(self) -> None:
        if self.is_missing:
            text = tr("No engine is installed; the message is kept as a draft.")
            self._offer(Notice(text, "", "warning"), tr("Install an engine…"))

    @Slot(object)
    def _on_facts(self, facts: EngineFacts) -> None:
        is_new = self.is_missing and facts.origin == "pack"
        if is_new and self.page.session.state != "running":
            self._replace()

    @Slot(object)
    def _on_installed(self, installed: Installed) -> None:
        problem = "" if installed.pack.backend == "cpu" else installed.gpu_problem
        text = tr("The engine is installed: PyTorch {version}.")
        text = text.format(version=installed.pack.version)
        kind: Literal["info", "warning"] = "warning" if problem else "info"
        self.noticed.emit(Notice(text, problem, kind, is_news=True))
        self._replace()

    @Slot(object)
    def _on_broken(self, error: EngineError) -> None:
        if not self.page.is_open:
            notice = replace(Notice.of(error), is_of_engine=False, is_news=True)
            self._offer(notice, tr("Show"))

    @Slot()
    def _replace(self) -> None:
        self._set_origin("pack")
        self._is_ready, self._closes_page = False, True
        self._replacement.end(self._replacement.start)

    @Slot()
    def _remove(self) -> None:
        self._replacement.end(self.page.session.remove)

    @Slot()
    def _on_removed(self) -> None:
        self._set_origin("none")
        self._start_up.search_again("none")
        self.page.open()

    @Slot(object)
    def _on_change_failed(self, error: EngineError) -> None:
        self.noticed.emit(Notice.of(error))
        if not self.is_missing and self._client.model is None:
            self._replacement.start()

    @Slot()
    def _on_ready(self) -> None:
        self._is_ready = True
        if self._closes_page and self.page.is_open and self.page.session.state == "idle":
            self._leave()
        self._closes_page = False

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        if self._is_ready or self._origin != "pack":
            return
        facts = self.page.session.facts
        previous = facts.previous if facts is not None else None
        if self._closes_page and previous is not None and previous.is_usable:
            back = self.page.session.roll_back
            self.noticed.emit(Notice.of(error, "", tr("Use the previous engine"), back))
        else:
            self._offer(Notice.of(error), tr("Install an engine…"))
