"""The answer that the engine is writing: its text, its end, and how one goes on after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.conversation import Conversation
from app.chat.message import THINK_CLOSE, AnswerStats, Message
from app.engine_client import EngineClient, is_cancelled
from app.notice import Notice
from app.translation import tr
from engine import ContextOverflow, EngineError, Finished, SamplingParams


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """An answer that a failure has cut off.

    Attributes:
        ids: the tokens that it has had.
    """

    chat: Conversation
    message: Message
    ids: tuple[int, ...]


class AnswerWriter(QObject):
    """The writing of one answer at a time into its chat, whichever chat is open.

    Args:
        sampling: returns the sampling parameters of a chat; called at the start of each answer.

    Attributes:
        chat: chat whose answer is being written; None for none.
        message: that answer.
        cut: last answer that a failure has cut off, until another one begins.
    """

    beginning = Signal(str)  # id of the chat, before the engine starts to answer
    begun = Signal()
    grown = Signal(str)  # text added to the answer
    closed = Signal(object, object)  # Conversation, Message
    filled = Signal(object, str)  # Conversation that may drop its oldest, sentence that says why
    noticed = Signal(object)  # Notice

    def __init__(
        self, client: EngineClient, sampling: Callable[[Conversation], SamplingParams],
        parent: QObject,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._client, self._sampling = client, sampling
        self.chat: Conversation | None = None
        self.message: Message | None = None
        self.cut: CutAnswer | None = None
        self._first_text_at: float | None = None
        client.text.connect(self._on_text)
        client.finished.connect(self._on_finished)
        client.failed.connect(self._on_failed)

    def begin(self, chat: Conversation, *, continue_last: bool) -> None:
        """Have the engine write the last message of a chat, or go on with it."""
        cut, message = self.cut, chat.messages[-1]
        begun = cut.ids if continue_last and cut and cut.message is message else ()
        self.chat, self.message, self.cut, self._first_text_at = chat, message, None, None
        sampling = self._sampling(chat)
        if chat.drops_oldest:
            sampling = replace(sampling, on_overflow="shift")
        prompt = chat.prompt(continue_last=continue_last)
        message.problem = ""
        self.beginning.emit(chat.id)
        self._client.generate(
            prompt, sampling, continue_last=continue_last, begun=begun, thinks=chat.thinks,
            effort=chat.effort,
        )  # fmt: skip
        self.begun.emit()

    def stop(self) -> None:
        """Have the engine end the answer, which closes soon."""
        if self.chat is not None:
            self._client.cancel()

    def cut_off(self) -> None:
        """End the answer with what it has now, and close it at once."""
        self.stop()
        self.close()

    def close(self) -> None:
        """Close the answer as a stopped one, while the engine ends by itself."""
        if self.chat is not None:
            self._close(self._so_far("cancelled"))

    @Slot(str)
    def _on_text(self, text: str) -> None:
        message = self.message
        if message is None:
            return
        if self._first_text_at is None:
            self._first_text_at = time.perf_counter()
        message.content += text
        recent = message.content[-len(text) - len(THINK_CLOSE) :]
        if message.thought_s is None and THINK_CLOSE in recent:
            message.thought_s = time.perf_counter() - self._first_text_at
            message.thought_tokens = self._client.answer_meter.n_tokens
        self.grown.emit(text)

    @Slot(object)
    def _on_finished(self, finished: Finished) -> None:
        chat = self.chat
        self._close(AnswerStats.of(finished))
        if finished.reason == "context" and chat is not None and not chat.drops_oldest:
            self.filled.emit(chat, tr("The context is full, so the answer ends here."))

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        chat, message = self.chat, self.message
        if chat is None or message is None:
            return
        if is_cancelled(error):
            self.close()
            return
        message.problem = error.message
        self.cut = CutAnswer(chat, message, self._client.answer_ids)
        self._close(self._so_far("failed"))
        if isinstance(error, ContextOverflow) and not chat.drops_oldest:
            self.filled.emit(chat, error.message)
        else:
            self.noticed.emit(Notice.of(error))

    def _so_far(self, reason: str) -> AnswerStats:
        """Return the figures of the answer that is cut off for a reason."""
        meter = self._client.answer_meter
        return AnswerStats(reason, meter.n_tokens, meter.tokens_per_s, meter.first_token_s, 0)

    def _close(self, stats: AnswerStats) -> None:
        """End the answer, complete or not."""
        chat, message = self.chat, self.message
        self.chat = self.message = None
        if chat is None or message is None:
            return
        message.stats = stats
        chat.updated = time.time()
        self.closed.emit(chat, message)
