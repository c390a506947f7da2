"""Titles that the model generates after a chat's first answer, while the engine is idle.

The request is appended to the chat itself, so that it can reuse the chat's KV cache, as can the
user's next message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.chat.conversation import TITLE_LENGTH, Conversation, ImageFiles, title_from
from app.chat.message import split_thought
from app.core.engine_client import AsideAnswer, EngineClient
from app.tools.server_store import ServerTool
from engine import THINK_CLOSE, THINK_OPEN, AnswerRequest, ChatMessage, SamplingParams

IDLE_MS: Final = 1500
"""Milliseconds to wait after an answer, in case the user sends another message."""

MAX_TOKENS: Final = 24
ROOM: Final = 128
"""Free context tokens required for a title and its request."""

MAX_CHAT: Final = 4096
"""Maximum number of tokens in a chat that gets a title. Recurrent models cannot roll back their
cache, so they compute the whole chat again for the title and for the next answer."""

MAX_MESSAGES: Final = 6
"""Number of messages after which a chat no longer gets a title."""

MAX_WORDS: Final = 10

REQUEST: Final = (
    "Write a title for this conversation in at most six words, in the language of the conversation."
    " Reply with the title only."
)
NO_THOUGHT: Final = f"{THINK_OPEN}\n\n{THINK_CLOSE}\n\n"

_PREFIX = re.compile(r"^(?:title|titel)\s*:\s*", re.IGNORECASE)
_MARKUP = re.compile(r"[<>{}\[\]|*_`#\\]|://")
_AROUND: Final = "\"'“”„«»‘’* "


class ChatTitler(QObject):
    """Generates titles for new chats.

    Args:
        is_wanted: returns whether the setting is enabled.
        offered: returns the tools available in a chat.
        pictures: returns a lookup for a chat's image files; see `Conversation.prompt`.
    """

    titled = Signal(object, str)  # Conversation, its title

    def __init__(
        self,
        client: EngineClient,
        is_wanted: Callable[[], bool],
        offered: Callable[[Conversation], Sequence[ServerTool]],
        pictures: Callable[[Conversation], ImageFiles],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._client, self._is_wanted, self._offered = client, is_wanted, offered
        self._pictures = pictures
        self._waiting: list[Conversation] = []
        self._titled: set[str] = set()
        self._is_closed = False
        self._pause = QTimer(self, singleShot=True, interval=IDLE_MS)
        self._pause.timeout.connect(self._ask)

    @Slot(object)
    def note_answer(self, chat: Conversation) -> None:
        """Queue a chat after an answer, if it needs a title."""
        is_new = chat.id not in self._titled and not any(one is chat for one in self._waiting)
        if is_new and self._is_wanted() and needs_title(chat):
            self._waiting.append(chat)
        if self._waiting:
            self._pause.start()

    @Slot(str)
    def forget(self, chat_id: str) -> None:
        """Remove a deleted chat from the queue."""
        self._waiting = [chat for chat in self._waiting if chat.id != chat_id]

    def close(self) -> None:
        """Stop generating titles."""
        self._is_closed = True
        self._pause.stop()
        self._waiting.clear()

    @Slot()
    def _ask(self) -> None:
        if not self._client.is_idle:
            return  # retry after the next answer
        while self._waiting:
            chat = self._waiting.pop(0)
            if self._may_ask(chat):
                self._ask_for(chat)
                return

    def _may_ask(self, chat: Conversation) -> bool:
        model = self._client.model
        if model is None or not self._is_wanted() or not needs_title(chat):
            return False
        n_ctx = model.n_ctx or MAX_CHAT + ROOM  # 0: a server that does not report it
        return chat.context_tokens <= min(MAX_CHAT, n_ctx - ROOM)

    def _ask_for(self, chat: Conversation) -> None:
        assert self._client.model is not None
        self._titled.add(chat.id)
        title = chat.title
        messages = [*chat.prompt(pictures=self._pictures(chat)), ChatMessage("user", REQUEST)]
        has_thought = any(split_thought(m.content).thought is not None for m in chat.messages)
        cuts_thought = has_thought and not self._client.model.info.can_think
        if cuts_thought:  # the template cannot turn off thinking
            messages.append(ChatMessage("assistant", NO_THOUGHT))
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, on_overflow="stop")
        tools = () if cuts_thought else tuple(offered.tool for offered in self._offered(chat))
        request = AnswerRequest(
            tuple(messages), sampling=params, continue_last=cuts_thought, timed_every=0,
            thinks=False, effort="low", tools=tools, in_parts=bool(tools),
        )  # fmt: skip
        self._client.ask_aside(request, lambda answer: self._take(chat, title, answer))

    def _take(self, chat: Conversation, before: str, answer: AsideAnswer) -> None:
        if answer.is_ending or answer.reason == "cancelled":
            self._titled.discard(chat.id)  # the user sent a message; retry after its answer
            self._waiting.append(chat)
        title = cleaned_title(answer.text) if answer.reason == "stop" else ""
        if title and chat.title == before and needs_title(chat):
            self.titled.emit(chat, title)
        if self._waiting and not self._is_closed:
            self._pause.start()


def needs_title(chat: Conversation) -> bool:
    """Return whether a chat has an answer, but its title is still its first words."""
    first, *others = [message for message in chat.messages if not message.calls] or (None,)
    is_waiting = any(message.waits_for_calls for message in chat.messages)
    if first is None or chat.has_own_title or is_waiting or len(others) >= MAX_MESSAGES:
        return False
    is_answered = any(
        m.role == "assistant" and m.stats is not None and m.stats.reason in ("stop", "length")
        for m in others
    )
    return is_answered and chat.title == title_from(first.content)


def cleaned_title(text: str) -> str:
    """Return a title from a model's answer; "" if the answer is unusable."""
    lines = [line.strip() for line in split_thought(text).answer.strip().splitlines()]
    lines = [line for line in lines if line]
    if len(lines) != 1:
        return ""
    title = _PREFIX.sub("", lines[0].strip(_AROUND)).strip(_AROUND).rstrip(".").strip()
    title = " ".join(title.split())
    if not any(c.isalnum() for c in title) or not title.isprintable():
        return ""
    if len(title) > TITLE_LENGTH or len(title.split()) > MAX_WORDS or _MARKUP.search(title):
        return ""
    return title
