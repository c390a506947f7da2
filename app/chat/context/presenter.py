"""The presenter of the context's gauge: when to count, and what to say of a message too long."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.context.counter import ContextCounter, Draft
from app.chat.conversation import Conversation
from app.chat.session import ChatSession
from app.chat.views.composer import Composer
from app.core.engine_client import EngineClient
from app.core.notice import Notice
from app.core.translation import tr


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
