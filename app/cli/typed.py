"""Messages as a person types them in the terminal: with history, and a paste as one message."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.output import note

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT = "> "


class MessageEditor:
    """Line editor of a terminal; a message may have several lines.

    Args:
        history: file of what was typed in earlier chats; None keeps it in memory.
    """

    def __init__(self, history: Path | None) -> None:
        # imported here, since only people at a terminal need it
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        # the terminal shows what is typed, also where answers go to a file
        output = None if sys.stdout.isatty() else create_output(sys.stderr)
        self._session: PromptSession[str] = PromptSession(
            PROMPT, history=_history(history), key_bindings=_bindings(),
            prompt_continuation=" " * len(PROMPT), output=output,
        )  # fmt: skip

    def read(self) -> str | None:
        """Return the next message; None once the person wants to quit, by Ctrl+D."""
        while True:
            try:
                return self._session.prompt()
            except EOFError:
                return None
            except KeyboardInterrupt:  # on an empty line: a half-typed one is only cleared
                note("Ctrl+D quits.")


def _bindings() -> KeyBindings:
    """Return keys beside the usual ones: Alt+Enter for a new line, Ctrl+C for an empty one."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


def _history(path: Path | None) -> History:
    """Return the history in a file that nobody else can read, or one in memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class OwnHistory(FileHistory):
        """History whose file may become unreadable or full without an end of the chat."""

        def load_history_strings(self) -> Iterable[str]:
            with contextlib.suppress(OSError):
                return list(super().load_history_strings())
            return []

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):
                super().store_string(string)

    try:
        if path is None:
            return InMemoryHistory()
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return OwnHistory(str(path))
