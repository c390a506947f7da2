"""Counts the tokens of the open chat and of the draft, with the engine's tokenizer.

The messages are counted when they have changed, the draft whenever it has: the engine's process
does both, one request at a time, and the window's thread only asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.chat.session import ChatSession
from app.core.engine_client import EngineClient
from app.core.translation import tr
from engine import ChatMessage, TokensCounted, Tool


@dataclass(frozen=True, slots=True)
class ContextUsage:
    """How many tokens the open chat and the draft take of the context.

    Attributes:
        size: size of the context; 0 while no model is loaded.
        n_before: tokens of the system prompt, the messages, and what the chat template adds.
        n_draft: tokens of the message that is being written.
        n_answer: tokens of the answer that is being written.
        n_kept: tokens of `n_before` that stay once all older messages are dropped.
        is_counted: whether the model's tokenizer has counted them; otherwise they are those of
            the last answer.
    """

    size: int = 0
    n_before: int = 0
    n_draft: int = 0
    n_answer: int = 0
    n_kept: int = 0
    is_counted: bool = False

    @property
    def used(self) -> int:
        """Number of all tokens."""
        return self.n_before + self.n_draft + self.n_answer

    @property
    def share(self) -> float:
        """Part of the context that is used; above 1 where it does not fit."""
        return self.used / self.size if self.size else 0.0

    @property
    def fits(self) -> bool:
        """Whether the draft can be sent: the prompt and one token of the answer have room."""
        return not self.size or not self.n_draft or self.used < self.size

    @property
    def fits_alone(self) -> bool:
        """Whether the draft can be sent once all older messages are dropped."""
        return self.n_kept + self.n_draft < self.size

    def tip(self) -> str:
        """Return what is counted and what is left, in a few lines."""
        lines = [
            tr("{used} of {size} tokens").format(used=_spaced(self.used), size=_spaced(self.size))
        ]
        if not self.is_counted:
            return lines[0]
        before = tr("{n} system prompt, messages and template")
        lines.append(before.format(n=_spaced(self.n_before)))
        if self.n_draft:
            lines.append(tr("{n} this message").format(n=_spaced(self.n_draft)))
        if self.n_answer:
            lines.append(tr("{n} the answer so far").format(n=_spaced(self.n_answer)))
        left = self.size - self.used
        if left > 0:
            lines.append(tr("{n} left for the answer").format(n=_spaced(left)))
        else:
            lines.append(tr("{n} too many").format(n=_spaced(1 - left)))
        return "\n".join(lines)


def _spaced(n: int) -> str:
    return f"{n:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


WAIT_MS = 120
"""Milliseconds after a change until it is counted: what changes together is counted once."""


_Asked = tuple[tuple[ChatMessage, ...], tuple[Tool, ...]]
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
        self._messages: _Asked | None = None  # what `n_before` is of
        self._asked: _Asked | None = None
        self._asked_draft: str | None = None  # draft that is being counted; None while none is
        self._counted_draft: str | None = None
        self._is_stale = True  # whether the messages may have changed
        self.usage = ContextUsage()
        self._timer = QTimer(self, singleShot=True, interval=WAIT_MS)
        self._timer.timeout.connect(self._ask)
        client.counted.connect(self._on_counted)

    @property
    def is_current(self) -> bool:
        """Whether the numbers are those of the messages and the draft as they are now."""
        is_busy = self._is_stale or self._asked_draft is not None
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

    def _prompt(self) -> _Asked:
        """Return what the next prompt of the open chat has, without the answer being written."""
        session, chat = self._session, self._session.current
        turns = chat.prompt(
            without_last=session.answer_here is not None, pictures=session.picture_files(chat)
        )
        return turns, tuple(offered.tool for offered in session.calls.offered(chat))

    @Slot()
    def _ask(self) -> None:
        """Ask the engine for what is not known, unless it is counting."""
        if self._client.model is None or self._asked_draft is not None:
            return
        draft, asked = self._draft(), self._asked
        if self._is_stale:
            asked = self._prompt()
        is_new = self._is_stale and (asked != self._messages or not self.usage.is_counted)
        self._is_stale = False
        if not is_new and draft == self._counted_draft:
            # an answer may have ended meanwhile in the same words as the one that it replaces
            self._show(replace(self.usage, n_answer=self._n_answer))
            return
        self._asked, self._asked_draft = asked, draft
        messages, tools = asked if is_new and asked is not None else (None, ())
        self._client.count(messages, draft, tools)

    @Slot(object)
    def _on_counted(self, counted: TokensCounted | None) -> None:
        draft, self._asked_draft = self._asked_draft, None
        model = self._client.model
        if model is None:
            return
        self._counted_draft, known = draft, self._session.current.context_tokens
        if counted is None:  # the template refuses them, as the answer will say
            self._messages = self._asked
            self._show(ContextUsage(model.n_ctx, known))
        else:
            n_before, n_kept = self.usage.n_before, self.usage.n_kept
            if counted.n_before is not None:
                self._messages = self._asked
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
