"""Automatic unloading of idle models, and loading of models for waiting messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject, Qt, QTimer, Signal, Slot

from app.chat.conversation import Conversation
from app.chat.session import ChatSession
from app.chat.views.composer import Composer
from app.core.engine_client import EngineClient, EngineState
from app.core.notice import Notice
from app.core.settings import SettingsStore
from app.core.translation import tr, tr_n
from app.models.current.model_session import ModelSession
from app.remote.client.address import is_remote, short_name
from engine import one_line

MINUTE_MS = 60_000


class IdleUnloader(QObject):
    """Unloads the model after some time without an answer, a load or typing.

    Args:
        minutes: returns that time, or 0 to never unload.
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
        """Restart the timer, after activity or a changed setting."""
        minutes = self._minutes()
        if minutes and self._client.state is EngineState.READY:
            self._timer.start(minutes * MINUTE_MS)
        else:
            self._timer.stop()

    def stop(self) -> None:
        """Stop the timer."""
        self._timer.stop()

    def wake(self) -> None:
        """Reload the unloaded model, as a message is about to be sent."""
        if self._has_left and self._client.state is EngineState.EMPTY:
            self._models.load()

    @Slot()
    def _unload(self) -> None:
        model = self._client.model
        if model is None or self._client.state is not EngineState.READY:
            return
        if is_remote(model.info.path):  # uses no memory on this machine
            return
        if left_ms := self._shared_left_ms():
            self._timer.start(left_ms)
            return
        self._is_leaving = True
        self._models.eject()
        text = tr_n(
            "{name} was unloaded after {n} minute without use.",
            "{name} was unloaded after {n} minutes without use.",
            self._minutes(), name=model.info.name,
        )  # fmt: skip
        self.noticed.emit(Notice(text, tr("Your next message reloads it.")))

    def _shared_left_ms(self) -> int:
        sharing, whole_ms = self._client.sharing, self._minutes() * MINUTE_MS
        if sharing.n_running:
            return whole_ms
        return max(0, whole_ms - round(1000 * (time.monotonic() - sharing.used_at)))

    @Slot()
    def _on_unloaded(self) -> None:
        self._has_left, self._is_leaving = self._is_leaving, False

    @Slot()
    def _on_loaded(self) -> None:
        self._has_left = False


class OpenOnSend(QObject):
    """Queue of messages to send once the model is ready, at most one per chat.

    A queued message is its chat's draft, so it survives a failed load or a closed window. Editing
    it removes it from the queue. If no model is loading, a notice offers to load the selected one
    or the last one.
    """

    noticed = Signal(object)  # Notice

    def __init__(
        self,
        client: EngineClient,
        models: ModelSession,
        session: ChatSession,
        composer: Composer,
        settings: SettingsStore,
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._client, self._models, self._session = client, models, session
        self._composer, self._settings = composer, settings
        self._queued: dict[str, str] = {}  # texts by chat id
        session.model_wanted.connect(self._on_wanted)
        session.opened.connect(self._show_queued)
        composer.wait_cancelled.connect(self._cancel)
        composer.edit.textChanged.connect(self._on_edited)
        client.load_failed.connect(self._give_up)
        # queued, so that all other receivers handle the change first
        for change in (client.state_changed, models.noticed, models.blocked):
            change.connect(self._go_on, Qt.ConnectionType.QueuedConnection)

    @property
    def _is_loading(self) -> bool:
        return self._client.state is EngineState.LOADING or self._models.is_opening

    @Slot()
    def _on_wanted(self) -> None:
        if self._is_loading:
            self._queued[self._session.current.id] = self._composer.text
            self._show_queued()
            return
        text = tr("No model is loaded; the message is kept as a draft.")
        path = self._last()
        if not path:
            self.noticed.emit(Notice(text, tr("Open a model first.")))
            return
        if is_remote(path):
            action = tr("Connect to {name} and send").format(name=short_name(path))
        else:
            action = tr("Load {name} and send").format(name=one_line(Path(path).stem, 40))
        self.noticed.emit(Notice(text, "", "warning", action, lambda: self._load(path)))

    def _last(self) -> str:
        if self._models.info is not None:
            return self._models.info.path
        recent = self._settings.current.recent_models
        return next((path for path in recent if _is_there(path)), "")

    def _load(self, path: str) -> None:
        info, client = self._models.info, self._client
        is_there = client.model is not None and not client.is_unloading
        if not is_there and not self._is_loading:
            if info is not None and info.path == path:
                self._models.load()
            else:
                self._models.open(path)
        self._composer.setFocus()
        if is_there or self._is_loading:  # otherwise, a notice says why it cannot be loaded
            self._composer.submit()

    @Slot()
    def _show_queued(self) -> None:
        is_queued = self._session.current.id in self._queued
        text = tr("Will be sent when the model is ready") if is_queued else ""
        self._composer.show_wait(text, can_cancel=is_queued)

    @Slot()
    def _on_edited(self) -> None:
        chat = self._session.current.id
        if self._queued.get(chat) != self._composer.text:
            self._queued.pop(chat, None)
            self._show_queued()

    @Slot()
    def _cancel(self) -> None:
        self._queued.pop(self._session.current.id, None)
        self._show_queued()
        self._composer.setFocus()

    @Slot()
    def _give_up(self) -> None:
        is_queued = self._session.current.id in self._queued
        self._queued.clear()
        if is_queued:
            self._composer.show_wait(tr("Not sent: the model was not loaded."), can_cancel=False)

    @Slot()
    def _go_on(self) -> None:
        client = self._client
        if not self._queued or self._is_loading or client.is_unloading:
            return
        if client.state is EngineState.CLOSED:
            return
        if client.model is None:
            self._give_up()
            return
        queued, self._queued = self._queued, {}
        self._show_queued()
        for chat_id in queued:
            if chat_id == self._session.current.id:
                self._composer.submit()
            elif (chat := self._session.find(chat_id)) is not None:
                self._send_in(chat)

    def _send_in(self, chat: Conversation) -> None:
        if not (chat.draft_files or chat.draft_pictures):
            self._session.send(chat.draft, chat=chat)
            return
        text = tr("The message in “{title}” was not sent because it has files.")
        text = text.format(title=chat.shown_title)
        self.noticed.emit(
            Notice(
                text, "", "warning", tr("Open the chat"), lambda: self._session.open_chat(chat.id)
            )
        )


def _is_there(path: str) -> bool:
    # whether the model exists, without contacting a server
    return is_remote(path) or Path(path).is_file()
