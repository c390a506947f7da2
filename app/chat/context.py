"""Token counts for the open chat and its draft, and notices when the context is full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.chat.conversation import Conversation
from app.chat.session import ChatSession
from app.chat.views.composer import Composer, ContextUsage
from app.core.engine_client import EngineClient
from app.core.notice import Notice
from app.core.translation import tr
from engine import ChatMessage, TokensCounted, Tool

WAIT_MS = 120
"""Delay before a change is counted, so that changes in quick succession are counted once."""

_Prompt = tuple[tuple[ChatMessage, ...], tuple[Tool, ...]]


class ContextCounter(QObject):
    """Counts the tokens in the open chat and its draft.

    Args:
        draft: returns the draft's text, including its files.
        n_image_tokens: returns the number of tokens in its images.
    """

    changed = Signal(object)  # ContextUsage

    def __init__(
        self, client: EngineClient, session: ChatSession, draft: Callable[[], str],
        n_image_tokens: Callable[[], int], parent: QObject,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._client, self._session = client, session
        self._draft, self._n_image_tokens = draft, n_image_tokens
        self._messages: _Prompt | None = None  # the prompt that has `n_before` tokens
        self._request: _Prompt | None = None
        self._pending_draft: str | None = None  # the draft being counted, or None
        self._counted_draft: str | None = None
        self._is_stale = True  # whether the messages may have changed
        self.usage = ContextUsage()
        self._timer = QTimer(self, singleShot=True, interval=WAIT_MS)
        self._timer.timeout.connect(self._ask)
        client.counted.connect(self._on_counted)

    @property
    def is_current(self) -> bool:
        """Whether the counts are for the present messages and draft."""
        is_busy = self._is_stale or self._pending_draft is not None
        return self.usage.is_counted and not is_busy and self._draft() == self._counted_draft

    @Slot()
    def forget(self) -> None:
        """Count the messages again, because another chat is open or this one has changed."""
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
        """Schedule a count of the draft."""
        if self._client.model is not None and not self._timer.isActive():
            self._timer.start()

    @Slot()
    def count_answer(self) -> None:
        """Include the tokens in the open chat's running answer."""
        if self._session.answer_here is not None:
            self._show(replace(self.usage, n_answer=self._n_answer))

    @property
    def _n_answer(self) -> int:
        written = self._session.answer_here
        return 0 if written is None else written.running.meter.n_tokens

    @Slot()
    def count_images(self) -> None:
        """Count the draft again, as its images may have changed while its text has not."""
        self._counted_draft = None
        self.look()

    def _prompt(self) -> _Prompt:
        session, chat = self._session, self._session.current
        turns = chat.prompt(
            without_last=session.answer_here is not None, pictures=session.image_files(chat)
        )
        return turns, tuple(offered.tool for offered in session.calls.offered(chat))

    @Slot()
    def _ask(self) -> None:
        if self._client.model is None or self._pending_draft is not None:
            return
        draft, request = self._draft(), self._request
        if self._is_stale:
            request = self._prompt()
        is_new = self._is_stale and (request != self._messages or not self.usage.is_counted)
        self._is_stale = False
        if not is_new and draft == self._counted_draft:
            # an answer may have the same text as the one that it replaced
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
        if counted is None:  # the template refuses the messages; the answer will report that
            self._messages = self._request
            self._show(ContextUsage(model.n_ctx, known))
        else:
            n_before, n_kept = self.usage.n_before, self.usage.n_kept
            if counted.n_before is not None:
                self._messages = self._request
                n_before, n_kept = counted.n_before, counted.n_kept or 0
            n_draft, n_answer = counted.n_draft + self._n_image_tokens(), self._n_answer
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
    """Presenter for the context gauge; it makes room in full contexts."""

    noticed = Signal(object)  # Notice

    def __init__(
        self, session: ChatSession, client: EngineClient, composer: Composer,
        draft: Callable[[], str], n_image_tokens: Callable[[], int], parent: QObject,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._session, self._client, self._composer = session, client, composer
        self.counter = ContextCounter(client, session, draft, n_image_tokens, self)
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
        """Return whether a message fits; if not, show a notice with the counts and a remedy.

        A message that has not been counted yet may be sent, as the engine checks it too.
        """
        usage, chat = self.counter.usage, self._session.current
        if not self.counter.is_current or usage.fits:
            return True
        if chat.drops_oldest and usage.fits_alone:
            return True
        hint = tr("Shorten it, or load the model with a longer context.")
        if not usage.fits_alone:
            text = tr("This message alone has {n} tokens; the context holds {size}.")
            n = usage.n_draft
            if n < usage.size:
                text = tr(
                    "This message and the system prompt have {n} tokens; the context holds {size}."
                )
                hint = tr("Shorten one of them, or load the model with a longer context.")
                n += usage.n_kept
            filled = text.format(n=n, size=usage.size)
            self.noticed.emit(Notice(filled, hint, "warning", chat=chat.id))
            return False
        text_of = tr("With this message, the chat has {n} tokens; the context holds {size}.")
        self.noticed.emit(
            Notice(
                text_of.format(n=usage.used, size=usage.size), hint, "warning",
                tr("Drop the oldest and send"), self._drop_and_send, chat=chat.id,
            )
        )  # fmt: skip
        return False

    @Slot(object, str)
    def _offer_shift(self, chat: Conversation, sentence: str) -> None:
        if chat is not self._session.current:
            sentence = f"“{chat.shown_title}”: {sentence}"

        def drop_and_go_on() -> None:
            chat.drops_oldest = True
            self._session.open_chat(chat.id)  # another chat may be open by now
            if self._session.current is chat:
                self._session.go_on()

        self.noticed.emit(
            Notice(
                sentence,
                tr(
                    "From now on, the oldest messages in this chat are dropped when the context is"
                    " full; the system prompt is kept."
                ),
                "warning",
                tr("Drop the oldest and continue"),
                drop_and_go_on,
                chat=chat.id,
            )
        )

    @Slot()
    def _drop_and_send(self) -> None:
        self._session.current.drops_oldest = True
        self._composer.submit()
