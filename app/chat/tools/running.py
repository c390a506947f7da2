"""Runs the calls that a person has let run; results come back to the window's thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Qt, Signal, Slot

from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.tools.tool_use import read_arguments

if TYPE_CHECKING:
    from app.chat.tools.source import ToolSource
    from app.tools.hub import RunningCall
    from app.tools.server_store import ToolResult


@dataclass(frozen=True, slots=True)
class RunningUse:
    """A call that runs.

    Attributes:
        call_id: name of the call in its message.
    """

    chat: Conversation
    message: Message
    call_id: str
    handle: RunningCall


class CallRunner(QObject):
    """The calls that run, of all chats."""

    ended = Signal(object, object)  # RunningUse, ToolResult; not of a call that was stopped
    _done = Signal(int, object)  # number of a run, ToolResult; emitted on any thread

    def __init__(self, source: ToolSource, parent: QObject) -> None:
        super().__init__(parent)
        self._source = source
        self._running: dict[int, RunningUse] = {}
        self._numbers = count(1)
        self._done.connect(self._on_done, Qt.ConnectionType.QueuedConnection)

    def __iter__(self) -> Iterator[RunningUse]:
        return iter(list(self._running.values()))

    def of(self, chat: Conversation) -> list[RunningUse]:
        """Return the running calls of a chat."""
        return [run for run in self._running.values() if run.chat is chat]

    def start(self, chat: Conversation, message: Message, call_id: str) -> None:
        """Start a call of a message."""
        call = next(call for call in message.calls if call.id == call_id)
        number = next(self._numbers)
        arguments = read_arguments(call.arguments) or {}

        def on_done(result: ToolResult) -> None:
            self._done.emit(number, result)

        handle = self._source.call(call.name, arguments, on_done)
        self._running[number] = RunningUse(chat, message, call_id, handle)

    def stop(self, run: RunningUse) -> None:
        """End a call, and expect nothing of it any more."""
        for number, one in list(self._running.items()):
            if one is run:
                del self._running[number]
        run.handle.cancel()

    @Slot(int, object)
    def _on_done(self, number: int, result: ToolResult) -> None:
        if (run := self._running.pop(number, None)) is not None:
            self.ended.emit(run, result)
