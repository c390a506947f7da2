"""Tool calls in chats: the user approves or refuses them; the model continues with the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, Qt, Signal, Slot

from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.tool_use import CallState, read_arguments, with_stopped
from app.core.engine_client import EngineClient
from app.core.notice import Notice
from app.core.translation import tr, tr_n

if TYPE_CHECKING:
    from app.tools.hub import RunningCall
    from app.tools.page.tool_session import ToolSession
    from app.tools.server_store import ServerTool, ToolResult


@dataclass(frozen=True, slots=True)
class RunningUse:
    """A running call from a message."""

    chat: Conversation
    message: Message
    call_id: str
    handle: RunningCall


class CallRunner(QObject):
    """The running calls of all chats."""

    ended = Signal(object, object)  # RunningUse, ToolResult; not emitted for stopped calls
    _done = Signal(int, object)  # a running call's number, ToolResult; emitted on any thread

    def __init__(self, source: ToolSession, parent: QObject) -> None:
        super().__init__(parent)
        self._source = source
        self._running: dict[int, RunningUse] = {}
        self._numbers = count(1)
        self._done.connect(self._on_done, Qt.ConnectionType.QueuedConnection)

    def __iter__(self) -> Iterator[RunningUse]:
        return iter(list(self._running.values()))

    def of(self, chat: Conversation) -> list[RunningUse]:
        """Return a chat's running calls."""
        return [run for run in self._running.values() if run.chat is chat]

    def start(self, chat: Conversation, message: Message, call_id: str) -> None:
        """Start a call from a message."""
        call = next(call for call in message.calls if call.id == call_id)
        number = next(self._numbers)
        arguments = read_arguments(call.arguments) or {}

        def on_done(result: ToolResult) -> None:
            self._done.emit(number, result)

        handle = self._source.call(call.name, arguments, on_done)
        self._running[number] = RunningUse(chat, message, call_id, handle)

    def stop(self, run: RunningUse) -> None:
        """Cancel a call and ignore its result."""
        for number, one in list(self._running.items()):
            if one is run:
                del self._running[number]
        run.handle.cancel()

    @Slot(int, object)
    def _on_done(self, number: int, result: ToolResult) -> None:
        if (run := self._running.pop(number, None)) is not None:
            self.ended.emit(run, result)


MAX_ROUNDS: Final = 25
"""Rounds of calls per question before the window asks whether to continue."""

CHARACTERS_OF_TOKEN: Final = 2
"""Maximum result characters per context token; ordinary text then fills half the context. Longer
results are cut, as the model could not continue otherwise."""


class CallFlow(QObject):
    """The calls in all chats, once the answers that make them have finished.

    Args:
        go_on: continues a chat after call results.
        can_go_on: returns whether a chat still exists and has no running answer.
    """

    changed = Signal(object, object)  # Conversation, Message whose calls have changed
    running_changed = Signal()  # the set of running calls
    noticed = Signal(object)  # Notice
    wanted = Signal(object)  # Conversation whose calls await approval

    def __init__(
        self,
        source: ToolSession,
        client: EngineClient,
        go_on: Callable[[Conversation], None],
        can_go_on: Callable[[Conversation], bool],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._source, self._go_on, self._can_go_on = source, go_on, can_go_on
        self._client = client
        self.runner = CallRunner(source, self)
        self.runner.ended.connect(self._on_ended)

    def offered(self, chat: Conversation) -> list[ServerTool]:
        """Return the tools available in a chat."""
        offered = self._source.offered if chat.uses_tools else ()
        return [tool for tool in offered if tool.server not in chat.servers_off]

    def is_running(self, chat: Conversation) -> bool:
        """Return whether a chat has a running call."""
        return bool(self.runner.of(chat))

    @Slot(object, object)
    def take_answer(self, chat: Conversation, message: Message) -> None:
        """Handle a finished answer, whose calls await approval or have already failed."""
        if message.waits_for_calls:
            self.wanted.emit(chat)
        elif message.has_results and message.stats and message.stats.reason == "stop":
            self._go_on_behind(chat, message)

    def run(self, chat: Conversation, message: Message, call_id: str) -> None:
        """Start a waiting call."""
        if self._set_state(message, call_id, "waiting", "running"):
            self.runner.start(chat, message, call_id)
            self._emit_changed(chat, message)

    def refuse(self, chat: Conversation, message: Message, call_id: str) -> None:
        """Refuse a waiting call; the model sees the refusal."""
        if self._set_state(message, call_id, "waiting", "refused"):
            self._emit_changed(chat, message)
            self._settle(chat, message)

    def stop_call(self, chat: Conversation, message: Message, call_id: str) -> None:
        """Stop a running call; the model continues without the result."""
        runs = [run for run in self.runner.of(chat) if run.call_id == call_id]
        if self._stop([run for run in runs if run.message is message]):
            self._settle(chat, message)

    def stop(self, chat: Conversation, messages: Iterable[Message] | None = None) -> None:
        """Stop the running calls in a chat or in some messages; the model does not continue."""
        runs = self.runner.of(chat)
        if messages is not None:
            wanted = {id(message) for message in messages}
            runs = [run for run in runs if id(run.message) in wanted]
        self._stop(runs)

    def refuse_waiting(self, chat: Conversation) -> None:
        """Refuse the waiting calls at the end of a chat, as the user has written a new message."""
        last = chat.messages[-1] if chat.messages else None
        if last is not None and last.waits_for_calls:
            self.stop(chat, [last])
            for call in last.calls:
                self._set_state(last, call.id, "waiting", "refused")
            self._emit_changed(chat, last)

    def close(self) -> None:
        """Stop all running calls."""
        self._stop(list(self.runner))

    @Slot(object, object)
    def _on_ended(self, run: RunningUse, result: ToolResult) -> None:
        from app.tools.results import limited  # late: most chats have no calls

        n_ctx = self._client.model.n_ctx if self._client.model is not None else 0
        text = limited(result.text, CHARACTERS_OF_TOKEN * n_ctx) if n_ctx else result.text
        for call in run.message.calls:
            if call.id == run.call_id and call.state == "running":
                state: CallState = "failed" if result.is_error else "done"
                run.message.with_call(replace(call, state=state, result=text))
        self._emit_changed(run.chat, run.message)
        self._settle(run.chat, run.message)

    def _settle(self, chat: Conversation, message: Message) -> None:
        if message.has_results:
            self._go_on_behind(chat, message)

    def _go_on_behind(self, chat: Conversation, message: Message) -> None:
        n = rounds(chat)
        if n % MAX_ROUNDS:
            self._go_on_if_last(chat, message)
            return
        text = tr_n(
            "The model has called tools {n} time in a row.",
            "The model has called tools {n} times in a row.", n,
        )  # fmt: skip
        self.noticed.emit(
            Notice(
                f"“{chat.shown_title}”: {text}",
                action=tr("Continue"),
                on_action=lambda: self._go_on_if_last(chat, message),
            )
        )

    def _go_on_if_last(self, chat: Conversation, message: Message) -> None:
        if chat.messages and chat.messages[-1] is message and self._can_go_on(chat):
            self._go_on(chat)

    def _set_state(
        self, message: Message, call_id: str, before: CallState, after: CallState
    ) -> bool:
        for call in message.calls:
            if call.id == call_id and call.state == before:
                message.with_call(replace(call, state=after))
                return True
        return False

    def _stop(self, runs: list[RunningUse]) -> bool:
        for run in runs:
            self.runner.stop(run)
            stopped = [call for call in run.message.calls if call.id == run.call_id]
            for call in with_stopped(stopped, "running"):
                run.message.with_call(call)
            self._emit_changed(run.chat, run.message)
        return bool(runs)

    def _emit_changed(self, chat: Conversation, message: Message) -> None:
        self.changed.emit(chat, message)
        self.running_changed.emit()


def rounds(chat: Conversation) -> int:
    """Return how many answers with calls follow the last question in a chat."""
    answers = takewhile(lambda message: message.is_answer, reversed(chat.messages))
    return sum(bool(message.calls) for message in answers)
