"""The way back after a failure has cost the loaded model: one click loads it and goes on."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.session import ChatSession
from app.core.engine_client import EngineClient, EngineState, is_cancelled
from app.core.notice import Notice
from app.core.translation import tr, tr_n
from app.models.current.session import ModelSession
from app.remote.client.address import is_remote
from engine import EngineCrashed, EngineError, ModelLoaded


class Recovery(QObject):
    """The offer to load a lost model again, and to go on with the answers that were cut off.

    Nothing is loaded without a click. Where the load fails as well, the offer stays.

    Args:
        flush: stores typed text, before another chat is opened.
    """

    noticed = Signal(object)  # Notice

    def __init__(
        self,
        client: EngineClient,
        models: ModelSession,
        chats: ChatSession,
        flush: Callable[[], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._client, self._models, self._chats, self._flush = client, models, chats, flush
        self._lost: ModelLoaded | None = None
        self._is_wanted = False  # a click has started the load
        client.lost.connect(self._on_lost)
        client.loaded.connect(self._on_loaded)
        client.unloaded.connect(self._forget)
        commands = client.load_failed, client.resplit_failed, client.tune_failed
        for failure in (*commands, client.failed):  # of several, the last notice stays
            failure.connect(self._on_failed)
        client.failed.connect(self._on_answer_failed)

    @Slot(object, object)
    def _on_lost(self, error: EngineError, lost: ModelLoaded) -> None:
        self._lost = lost
        self._offer(error)

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        """Offer the lost model again if none is loaded, or a retry after a crash."""
        self._is_wanted = False
        if self._client.model is None and (self._lost or isinstance(error, EngineCrashed)):
            self._offer(error)

    @Slot(object)
    def _on_answer_failed(self, error: EngineError) -> None:
        """Offer again what was offered before the answer found no model, either."""
        if self._lost is not None:
            self._on_failed(error)

    def _offer(self, error: EngineError) -> None:
        if is_cancelled(error) or self._client.state is EngineState.LOADING:
            return
        lost, selected = self._lost, self._models.info
        if lost is None and selected is None:
            return
        is_there = lost is not None and is_remote(lost.info.path)
        is_former = lost is not None and selected is not None and selected.path != lost.info.path
        if lost is not None and self._chats.lost_answers:
            again = tr("Connect again and go on") if is_there else tr("Load again and go on")
            further = tr("Load the former model and go on"), again
        else:
            again = tr("Connect again") if is_there else tr("Load again")
            further = tr("Load the former model"), again
        action = further[0] if is_former else further[1]
        self.noticed.emit(Notice.of(error, action=action, on_action=self._load))

    def _load(self) -> None:
        if self._client.state is EngineState.LOADING:
            return
        if self._client.model is not None:
            self._go_on()
            return
        self._is_wanted = True
        if self._lost is not None:
            self._models.load_again(self._lost)
        else:
            self._models.load()

    @Slot(object)
    def _on_loaded(self, loaded: ModelLoaded) -> None:
        lost, is_wanted = self._lost, self._is_wanted
        self._forget()
        cuts = self._chats.lost_answers
        if lost is None or not cuts:
            return
        if is_wanted:
            self._go_on()
        elif loaded.info.path == lost.info.path:  # loaded by another button
            what = tr("An answer in “{chat}” was cut off.").format(chat=cuts[0].chat.shown_title)
            if len(cuts) > 1:
                what = tr_n("{n} answer was cut off.", "{n} answers were cut off.", len(cuts))
            self.noticed.emit(Notice(what, "", "info", tr("Go on"), self._go_on))

    def _go_on(self) -> None:
        self._flush()
        self._chats.resume()

    @Slot()
    def _forget(self) -> None:
        self._lost, self._is_wanted = None, False
