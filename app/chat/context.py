"""How many tokens the open chat and its draft take, and what to say if they are too many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.chat.conversation import Conversation
from app.chat.session import ChatSession
from app.chat.views.composer import Composer, ContextUsage
from app.core.engine_client import EngineClient
from app.core.notice import Notice
from app.core.translation import tr
from engine import ChatMessage, TokensCounted, Tool

WAIT_MS = 120
"""Milliseconds after a change until it is counted: what changes together is counted once."""


_Prompt = tuple[tuple[ChatMessage, ...], tuple[Tool, ...]]
"""Messages of a prompt, and the tools that it describes."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What is known of the next message of the open chat.

    Attributes:
        text: returns its text, that of its files as well.
        n_seen: returns the number of tokens of its pictures.
    """

    text: Callable[[], str]
    n_seen: Callable[[], int]


class ContextCounter(QObject):
    """Counter of the tokens of one chat at a time.

    Args:
        session: session of the chats, of which the open one counts.
        draft: its next message.

    Attributes:
        usage: the present numbers.
    """

    changed = Signal(object)  # ContextUsage

    def __init__(
        self, client: EngineClient, session: ChatSession, draft: Draft, parent: QObject
    ) -> None:
        super().__init__(parent)
        self._client, self._session = client, session
        self._draft, self._n_seen = draft.text, draft.n_seen
        self._messages: _Prompt | None = None  # what `n_before` is of
        self._request: _Prompt | None = None
        self._pending_draft: str | None = None  # draft that is being counted; None while none is
        self._counted_draft: str | None = None
        self._is_stale = True  # whether the messages may have changed
        self.usage = ContextUsage()
        self._timer = QTimer(self, singleShot=True, interval=WAIT_MS)
        self._timer.timeout.connect(self._ask)
        client.counted.connect(self._on_counted)

    @property
    def is_current(self) -> bool:
        """Whether the numbers are those of the messages and the draft as they are now."""
        is_busy = self._is_stale or self._pending_draft is not None
        return self.usage.is_counted and not is_busy and self._draft() == self._counted_draft

    @Slot()
    def forget(self) -> None:
        """Count the messages again: another chat is open, or this one has changed."""
        self._is_stale = True
        model = self._client.model
        if model is None:
            self._timer.stop()
            self._messages = None
            self._show(ContextUsage())
            return
        if not self.usage.is_counted or self.usage.size != model.n_ctx:
            known = self._session.current.context_tokens
            self._show(ContextUsage(model.n_ctx, known))
        self._timer.start()

    @Slot()
    def look(self) -> None:
        """Count the draft, if it has changed."""
        if self._client.model is not None and not self._timer.isActive():
            self._timer.start()

    @Slot()
    def count_answer(self) -> None:
        """Add the tokens of the answer that is being written here."""
        if self._session.answer_here is not None:
            self._show(replace(self.usage, n_answer=self._n_answer))

    @property
    def _n_answer(self) -> int:
        written = self._session.answer_here
        return 0 if written is None else written.running.meter.n_tokens

    @Slot()
    def count_pictures(self) -> None:
        """Count the draft again, as its pictures may have changed, and not its text."""
        self._counted_draft = None
        self.look()

    def _prompt(self) -> _Prompt:
        """Return what the next prompt of the open chat has, without the answer being written."""
        session, chat = self._session, self._session.current
        turns = chat.prompt(
            without_last=session.answer_here is not None, pictures=session.picture_files(chat)
        )
        return turns, tuple(offered.tool for offered in session.calls.offered(chat))

    @Slot()
    def _ask(self) -> None:
        """Ask the engine for what is not known, unless it is counting."""
        if self._client.model is None or self._pending_draft is not None:
            return
        draft, request = self._draft(), self._request
        if self._is_stale:
            request = self._prompt()
        is_new = self._is_stale and (request != self._messages or not self.usage.is_counted)
        self._is_stale = False
        if not is_new and draft == self._counted_draft:
            # an answer may have ended meanwhile in the same words as the one that it replaces
            self._show(replace(self.usage, n_answer=self._n_answer))
            return
        self._request, self._pending_draft = request, draft
        messages, tools = request if is_new and request is not None else (None, ())
        self._client.count(messages, draft, tools)

    @Slot(object)
    def _on_counted(self, counted: TokensCounted | None) -> None:
        draft, self._pending_draft = self._pending_draft, None
        model = self._client.model
        if model is None:
            return
        self._counted_draft, known = draft, self._session.current.context_tokens
        if counted is None:  # the template refuses them, as the answer will say
            self._messages = self._request
            self._show(ContextUsage(model.n_ctx, known))
        else:
            n_before, n_kept = self.usage.n_before, self.usage.n_kept
            if counted.n_before is not None:
                self._messages = self._request
                n_before, n_kept = counted.n_before, counted.n_kept or 0
            n_draft, n_answer = counted.n_draft + self._n_seen(), self._n_answer
            self._show(
                ContextUsage(model.n_ctx, n_before, n_draft, n_answer, n_kept, is_counted=True)
            )
        if self._is_stale or self._draft() != draft:
            self._timer.start()

    def _show(self, usage: ContextUsage) -> None:
        if usage != self.usage:
            self.usage = usage
            self.changed.emit(usage)


class ContextPresenter(QObject):
    """Connection of the open chat and the composer with the gauge of the context.

    Args:
        draft: the next message.

    Attributes:
        counter: counts the tokens of both.
    """

    noticed = Signal(object)  # Notice

    def __init__(
        self, session: ChatSession, client: EngineClient, composer: Composer,
        draft: Draft, parent: QObject,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._session, self._client, self._composer = session, client, composer
        self.counter = ContextCounter(client, session, draft, self)
        self.counter.changed.connect(composer.gauge.show_usage)
        composer.draft_changed.connect(self.counter.look)
        session.draft_restored.connect(self.counter.look)
        changes = (
            session.opened, session.path_changed, session.message_changed, session.answer_closed,
            session.prompt_changed, session.calls_changed, session.tools_changed, client.loaded,
            client.unloaded, client.lost,
        )  # fmt: skip
        for change in changes:
            change.connect(self.counter.forget)
        client.rate.connect(self.counter.count_answer)
        session.filled.connect(self._offer_shift)

    def may_send(self, text: str) -> bool:
        """Return whether a message fits; if not, say by how much, and offer what helps.

        A message that was not counted yet may be sent: the engine refuses it, too.
        """
        usage, chat = self.counter.usage, self._session.current
        if not self.counter.is_current or usage.fits:
            return True
        if chat.drops_oldest and usage.fits_alone:
            return True
        hint = tr("Shorten it, or load the model with a longer context.")
        if not usage.fits_alone:
            text = tr("This message alone has {n} tokens, the context {size}.")
            n = usage.n_draft
            if n < usage.size:
                text = tr("This message and the system prompt have {n} tokens, the context {size}.")
                hint = tr("Shorten one of them, or load the model with a longer context.")
                n += usage.n_kept
            filled = text.format(n=n, size=usage.size)
            self.noticed.emit(Notice(filled, hint, "warning", chat=chat.id))
            return False
        text_of = tr("With this message the chat has {n} tokens, the context {size}.")
        self.noticed.emit(
            Notice(
                text_of.format(n=usage.used, size=usage.size), hint, "warning",
                tr("Drop the oldest and send"), self._drop_and_send, chat=chat.id,
            )
        )  # fmt: skip
        return False

    @Slot(object, str)
    def _offer_shift(self, chat: Conversation, sentence: str) -> None:
        """Say that an answer has filled the context, and offer to make room and go on."""
        if chat is not self._session.current:
            sentence = f"“{chat.shown_title}”: {sentence}"

        def drop_and_go_on() -> None:
            chat.drops_oldest = True
            self._session.open_chat(chat.id)  # a person may look at another one by now
            if self._session.current is chat:
                self._session.go_on()

        self.noticed.emit(
            Notice(
                sentence,
                tr(
                    "From now on, the oldest messages of this chat can make room; the system prompt"
                    " stays."
                ),
                "warning",
                tr("Drop the oldest and go on"),
                drop_and_go_on,
                chat=chat.id,
            )
        )

    @Slot()
    def _drop_and_send(self) -> None:
        """Let the oldest messages of the open chat make room, now and later, and send the draft."""
        self._session.current.drops_oldest = True
        self._composer.submit()
