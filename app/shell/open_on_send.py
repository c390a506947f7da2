"""A message that is sent without a model: loads one, then sends it."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QObject, Qt, Signal, Slot

from app.chat.session import ChatSession
from app.chat.views.composer import Composer
from app.engine_client import EngineClient, EngineState
from app.model.session import ModelSession
from app.notice import Notice
from app.remote_models.address import is_remote, short_name
from app.settings import SettingsStore
from app.translation import tr
from engine import one_line


class OpenOnSend(QObject):
    """Offer to load the selected or the last model when a message cannot be sent for want of one.

    The text stays in the composer until it is sent; if another chat is opened, it stays a draft.
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
        self._chat = ""  # id of the chat whose message waits
        session.model_wanted.connect(self._offer)
        # queued, so that all others have seen the model before it is asked
        client.loaded.connect(self._send, Qt.ConnectionType.QueuedConnection)
        client.load_failed.connect(self._forget)

    @Slot(bool)
    def _offer(self, is_loading: bool) -> None:
        """Say why the message cannot be sent, and what would help.

        Args:
            is_loading: whether a model is being loaded already.
        """
        if is_loading:
            text = tr("The model is still loading, so the message stays here as a draft.")
            action = tr("Send when it is loaded")
            self.noticed.emit(Notice(text, action=action, on_action=self._wait))
            return
        if self._models.is_returning:
            text = tr("The engine is being replaced, so the message stays here as a draft.")
            action = tr("Send when the model is back")
            self.noticed.emit(Notice(text, action=action, on_action=self._wait))
            return
        text = tr("No model is loaded yet, so the message stays here as a draft.")
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
        """Return the path of the selected model, else of the last one that is still there."""
        if self._models.info is not None:
            return self._models.info.path
        recent = self._settings.current.recent_models
        return next((path for path in recent if _is_there(path)), "")

    def _load(self, path: str) -> None:
        self._wait()
        info = self._models.info
        if info is not None and info.path == path:
            self._models.load()
        else:
            self._models.open(path)

    def _wait(self) -> None:
        """Send the message once a model is loaded, which it may be by now."""
        self._chat = self._session.current.id
        self._composer.setFocus()
        if self._client.model is not None:
            self._send(None)

    @Slot(object)
    def _forget(self, _: object = None) -> None:
        self._chat = ""

    @Slot(object)
    def _send(self, _: object) -> None:
        """Send what stands in the composer, if it is still that of the chat that waits."""
        client = self._client
        is_leaving = self._models.is_returning or client.is_unloading
        if is_leaving or client.state is EngineState.LOADING:
            return  # another load follows
        chat, self._chat = self._chat, ""
        if chat and chat == self._session.current.id:
            self._composer.submit()


def _is_there(path: str) -> bool:
    """Return whether a model may be opened; nobody asks a server before."""
    return is_remote(path) or Path(path).is_file()
