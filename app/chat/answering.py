"""Running answers: how they grow, end, and continue after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.conversation import Conversation, ImageFiles
from app.chat.message import AnswerStats, Message
from app.core.engine_client import EngineClient, RunningAnswer, is_cancelled
from app.core.notice import Notice
from app.core.translation import tr, translated
from engine import (
    THINK_CLOSE,
    AnswerRequest,
    ContextOverflow,
    EngineError,
    Finished,
    SamplingParams,
    ToolCallBegun,
    ToolCallText,
)

if TYPE_CHECKING:
    from app.tools.server_store import ServerTool


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """An answer cut off by a failure.

    Attributes:
        ids: its token ids so far.
        is_lost: whether the failure was the loss of the model.
    """

    chat: Conversation
    message: Message
    ids: tuple[int, ...]
    is_lost: bool

    @property
    def can_go_on(self) -> bool:
        """Whether the answer still exists and is not followed by another message."""
        tree, number = self.chat.tree, self.message.id
        return tree.get(number) is self.message and len(tree.branch(number)) == 1


@dataclass(slots=True)
class WrittenAnswer:
    """An answer being written into `message`, the last message on its branch.

    Attributes:
        offers: tools that the model may call.
        first_text_at: when its first text arrived; None before that.
        goes_on: whether it continues an existing message.
    """

    chat: Conversation
    message: Message
    running: RunningAnswer
    offers: Sequence[ServerTool] = ()
    first_text_at: float | None = None
    goes_on: bool = False

    def add(self, text: str) -> None:
        """Append generated text."""
        message = self.message
        if self.first_text_at is None:
            self.first_text_at = time.perf_counter()
        message.content += text
        recent = message.content[-len(text) - len(THINK_CLOSE) :]
        if message.thought_s is None and THINK_CLOSE in recent:
            message.thought_s = time.perf_counter() - self.first_text_at
            message.thought_tokens = self.running.meter.n_tokens

    def call(self, event: ToolCallBegun | ToolCallText) -> None:
        """Apply the start of a call, or more of its arguments."""
        from app.chat import tool_use

        self.message.calls = tool_use.with_event(self.message.calls, event, self.offers)

    def so_far(self, reason: str) -> AnswerStats:
        """Return the answer's figures as if it stopped now for `reason`."""
        meter = self.running.meter
        return AnswerStats(reason, meter.n_tokens, meter.tokens_per_s, meter.first_token_s, 0)


class AnswerWriter(QObject):
    """Writes answers into their chats, open or not; at most one answer per chat at a time.

    Args:
        sampling: returns a chat's sampling parameters; called at the start of each answer.
        tools: returns the tools that models may call in a chat; also called then.
        pictures: returns a lookup for a chat's image files; see `Conversation.prompt`.

    Attributes:
        cuts: answers cut off by failures, each kept until its chat gets another answer.
    """

    beginning = Signal(str)  # id of the chat, before the engine starts answering
    begun = Signal(object)  # WrittenAnswer
    changed = Signal()  # the set of running answers
    grown = Signal(object, str)  # WrittenAnswer, text added to it
    closed = Signal(object, object)  # Conversation, Message
    filled = Signal(object, str)  # Conversation with a full context, sentence about it
    noticed = Signal(object)  # Notice

    def __init__(
        self, client: EngineClient, sampling: Callable[[Conversation], SamplingParams],
        tools: Callable[[Conversation], Sequence[ServerTool]],
        pictures: Callable[[Conversation], ImageFiles], parent: QObject,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._client, self._sampling, self._tools = client, sampling, tools
        self._pictures = pictures
        self._written: dict[int, WrittenAnswer] = {}  # by the running answer's number
        self.cuts: list[CutAnswer] = []
        client.text.connect(self._on_text)
        client.called.connect(self._on_call)
        client.finished.connect(self._on_finished)
        client.failed.connect(self._on_failed)
        client.lost.connect(self._on_lost)

    def __iter__(self) -> Iterator[WrittenAnswer]:
        return iter(list(self._written.values()))

    def of(self, chat: Conversation) -> WrittenAnswer | None:
        """Return a chat's running answer, if any."""
        return next((one for one in self._written.values() if one.chat is chat), None)

    def at(self, message: Message) -> WrittenAnswer | None:
        """Return the running answer that a message shows, if any."""
        return next((one for one in self._written.values() if one.message is message), None)

    def answer(self, chat: Conversation, question: int) -> None:
        """Answer a question, or continue after call results, as a new version."""
        chat.add(Message("assistant", ""), question)
        self._begin(chat, continue_last=False)

    def answer_again(self, chat: Conversation, old: Message) -> None:
        """Answer a question again.

        Args:
            old: the question, or an answer to it, which stays as a version unless it is empty. An
                answer that follows call results is rewritten after these results.
        """
        self.cut_off(chat)
        row = [*chat.tree.above(old.id), *([] if old.is_answer else [old])]
        asking = (message for message in reversed(row) if message.calls or not message.is_answer)
        question = next(asking, None)
        if question is None:
            self.noticed.emit(Notice(tr("There is no question above this answer.")))
            return
        is_empty = old.is_answer and not (old.content or old.calls)
        if is_empty and len(chat.tree.branch(old.id)) == 1:
            chat.tree.remove(old.id)
        self.answer(chat, question.id)

    def go_on(self, chat: Conversation) -> None:
        """Continue the answer that ends a chat; cut off any running answer in the chat.

        If its calls have finished, the model continues with their results.
        """
        self.cut_off(chat)
        last = chat.messages[-1]
        if last.has_results:
            self.answer(chat, last.id)
        elif last.content or self._cut_of(last):
            self._begin(chat, continue_last=True)
        else:
            self.answer_again(chat, last)

    def _cut_of(self, message: Message) -> CutAnswer | None:
        return next((cut for cut in self.cuts if cut.message is message), None)

    def _begin(self, chat: Conversation, *, continue_last: bool) -> None:
        message, offers = chat.messages[-1], self._tools(chat)
        cut = self._cut_of(message)
        can_resume = continue_last and (offers or not message.calls)
        begun = cut.ids if cut and can_resume else ()
        if not begun:  # if it was cut off inside a call, rewrite it from before the call
            message.calls = ()
        self.cuts = [cut for cut in self.cuts if cut.chat is not chat]
        sampling = self._sampling(chat)
        if chat.drops_oldest:
            sampling = replace(sampling, on_overflow="shift")
        prompt = chat.prompt(continue_last=continue_last, pictures=self._pictures(chat))
        message.problem = ""
        self.beginning.emit(chat.id)
        request = AnswerRequest(
            tuple(prompt), sampling=sampling, continue_last=continue_last, begun=begun,
            thinks=chat.thinks, effort=chat.effort, tools=tuple(offer.tool for offer in offers),
            in_parts=bool(offers),
        )  # fmt: skip
        running = self._client.generate(request)
        written = WrittenAnswer(chat, message, running, offers, goes_on=continue_last)
        self._written[running.number] = written
        self.begun.emit(written)
        self.changed.emit()

    def stop(self, chat: Conversation) -> None:
        """Stop a chat's answer; it closes when the engine has stopped."""
        if (written := self.of(chat)) is not None:
            self._client.stop(written.running)

    def cut_off(self, chat: Conversation) -> None:
        """Stop a chat's answer, and close it immediately with the text so far."""
        if (written := self.of(chat)) is not None:
            self._client.stop(written.running)
            self._close(written, written.so_far("cancelled"))

    def close(self) -> None:
        """Close all answers as stopped, without waiting for the engine, which is shutting down."""
        for written in self:
            self._close(written, written.so_far("cancelled"))

    @Slot(str, object)
    def _on_text(self, text: str, running: RunningAnswer) -> None:
        if (written := self._written.get(running.number)) is not None:
            written.add(text)
            self.grown.emit(written, text)

    @Slot(object, object)
    def _on_call(self, event: ToolCallBegun | ToolCallText, running: RunningAnswer) -> None:
        if (written := self._written.get(running.number)) is not None:
            written.call(event)
            self.grown.emit(written, "")

    @Slot(object, object)
    def _on_finished(self, finished: Finished, running: RunningAnswer) -> None:
        if (written := self._written.get(running.number)) is None:
            return
        is_whole = finished.reason == "stop" and not finished.stop
        self._close(written, AnswerStats.of(finished), is_whole=is_whole)
        if finished.reason == "context" and not written.chat.drops_oldest:
            self.filled.emit(written.chat, tr("The context is full, so the answer ends here."))

    @Slot(object, object)
    def _on_failed(self, error: EngineError, running: RunningAnswer) -> None:
        if (written := self._written.get(running.number)) is None:
            return
        if is_cancelled(error):
            self._close(written, written.so_far("cancelled"))
            return
        chat, message, is_lost = written.chat, written.message, self._client.model is None
        message.problem = translated(error.message)
        self.cuts.append(CutAnswer(chat, message, tuple(running.ids), is_lost))
        self._close(written, written.so_far("failed"))
        is_helped = isinstance(error, ContextOverflow) and not error.is_of_last
        if is_helped and not chat.drops_oldest:
            self.filled.emit(chat, message.problem)
        else:
            self.noticed.emit(replace(Notice.of(error), chat=chat.id))

    @Slot(object)
    def _on_lost(self, error: EngineError) -> None:
        # answers may have failed for the same reason before the loss was known
        problem = translated(error.message)
        self.cuts = [
            replace(cut, is_lost=cut.is_lost or cut.message.problem == problem) for cut in self.cuts
        ]

    def _close(self, written: WrittenAnswer, stats: AnswerStats, *, is_whole: bool = False) -> None:
        del self._written[written.running.number]
        message = written.message
        message.stats = stats
        if message.calls:
            from app.chat import tool_use

            message.calls = tool_use.ended(message.calls, stats.reason, is_whole=is_whole)
        written.chat.updated = time.time()
        self.closed.emit(written.chat, written.message)
        self.changed.emit()
