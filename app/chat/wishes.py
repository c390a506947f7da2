"""What a person wishes for one chat: its draft, prompt, sampling, thinking and tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Signal

from app.chat.conversation import Conversation, PictureFiles
from app.chat.pictures.picture import ChatPicture, sees
from engine import ImageFile

if TYPE_CHECKING:
    from app.chat.library import ChatLibrary
    from app.core.engine_client import EngineClient


class ChatWishes(QObject):
    """The wishes for the open chat, which are saved with it; a part of the session.

    Attributes:
        current: the open chat.
        library: all chats.
    """

    prompt_changed = Signal()  # system prompt of the open chat
    tools_changed = Signal()  # which tools may be called in the open chat

    current: Conversation
    library: ChatLibrary
    _client: EngineClient

    def set_draft(self, text: str) -> None:
        self.current.draft = text
        self._save_soon(self.current)

    def set_system_prompt(self, text: str) -> None:
        self.current.system_prompt = text
        self.prompt_changed.emit()
        self._save_soon(self.current)

    def set_sampling(self, chosen: dict[str, Any] | None, chat: Conversation | None = None) -> None:
        """Give the open chat, or another one, values of sampling of its own; None takes them."""
        chat = chat or self.current
        chat.sampling = chosen
        self._save_soon(chat)

    def set_draft_files(self, paths: tuple[str, ...]) -> None:
        """Note the files that shall go with the open chat's next message."""
        if paths != self.current.draft_files:
            self.current.draft_files = paths
            self._save_soon(self.current)

    def set_draft_pictures(
        self, pictures: tuple[ChatPicture, ...], chat: Conversation | None = None
    ) -> None:
        """Note the pictures that shall go with the next message of the open chat, or another."""
        chat = chat or self.current
        chat.draft_pictures = pictures
        self._save_soon(chat)

    def set_thinking(self, thinks: bool) -> None:
        """Set whether models shall think before they answer in the open chat."""
        self.current.thinks = thinks
        self._save_soon(self.current)

    def set_effort(self, effort: str) -> None:
        """Set how much models shall think in the open chat; "" as their templates have it."""
        self.current.effort = effort
        self._save_soon(self.current)

    def set_tools(self, *, used: bool, servers_off: tuple[str, ...]) -> None:
        """Set whether models may call tools in the open chat, and those of which servers not."""
        self.current.uses_tools, self.current.servers_off = used, servers_off
        self.tools_changed.emit()
        self._save_soon(self.current)

    def picture_files(self, chat: Conversation) -> PictureFiles:
        """Return where the pictures of a chat are; none for a model that cannot see."""
        folder, can_see = self.library.pictures, sees(self._client.model)

        def file_of(picture: ChatPicture) -> ImageFile | None:
            path = folder.path(chat, picture)
            return ImageFile(str(path)) if can_see and path.is_file() else None

        return file_of

    def _save_soon(self, chat: Conversation) -> None:
        raise NotImplementedError
