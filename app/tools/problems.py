"""Sentences for what goes wrong with servers of tools."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from app.core.translation import tr
from app.tools.tool_server import MAX_MESSAGE, ToolServer
from engine import one_line

MOST_SAID = 300
"""Characters of what a server says that are shown."""


Misuse = Literal["", "flood", "large", "encoded"]
"""What ends a connection: messages without a pause, a message that is too large, compression."""

OnMisuse = Callable[[Misuse], None]


@dataclass(slots=True)
class Ending:
    """How a connection has ended.

    Attributes:
        error: what was raised; None for nothing.
        was_ready: whether it had told its tools.
        is_late: whether it had not done so in time.
        has_closed: whether the other side has closed it.
        has_rubbish: whether it has sent what is no message.
        misuse: what it did that has ended it; "" for nothing.
        status: last HTTP status; 0 for none.
        last_line: last line of a program's standard error.
        unreachable: why nothing gets to an address; None if something does.
    """

    error: Exception | None = None
    was_ready: bool = False
    is_late: bool = False
    has_closed: bool = False
    has_rubbish: bool = False
    misuse: Misuse = ""
    status: int = 0
    last_line: str = ""
    unreachable: str | None = None

    def note_status(self, status: int) -> None:
        """Note the status of an answer, unless an earlier one says more."""
        if self.status < 400 or status in (401, 403):
            self.status = status


def ending_sentence(server: ToolServer, ending: Ending) -> str:
    """Return why a connection has ended, in a sentence or two."""
    sentence = _reason(server, ending)
    if server.command and ending.last_line:
        said = tr("Its last output: {line}").format(line=one_line(ending.last_line, MOST_SAID))
        return f"{sentence} {said}"
    return sentence


def call_sentence(server: ToolServer, error: Exception) -> str:
    """Return why a call has failed."""
    why = one_line(str(error), 2000) or type(error).__name__
    return tr("{name} says: {text}").format(name=server.name, text=why)


def _reason(server: ToolServer, ending: Ending) -> str:
    name = server.name
    if ending.misuse == "flood":
        return tr("{name} sends messages without a pause, so it was ended.").format(name=name)
    if ending.misuse == "large":
        text = tr("{name} sent a message of more than {n} MiB, so it was ended.")
        return text.format(name=name, n=MAX_MESSAGE >> 20)
    if ending.misuse == "encoded":
        text = tr("{name} compresses its answers although it was asked not to.")
        return text.format(name=name)
    if ending.unreachable is not None:
        why = one_line(ending.unreachable, MOST_SAID)
        return tr("{url} cannot be reached: {why}").format(url=server.url, why=why)
    for error in parts_of(ending.error):
        if isinstance(error, OSError) and server.command and not ending.was_ready:
            return _start_sentence(server, error)
    if ending.status in (401, 403):
        text = tr("{name} refuses access ({status}). It may need a header “Authorization”.")
        return text.format(name=name, status=ending.status)
    if ending.status >= 400:
        text = tr("{name} answers with status {status}. Check its address.")
        return text.format(name=name, status=ending.status)
    if ending.is_late and ending.has_rubbish:
        return tr("{name} prints text that is not the protocol of a tool server.").format(name=name)
    if ending.is_late:
        return tr("{name} did not answer in time.").format(name=name)
    if server.command and (ending.has_closed or ending.error is None):
        return tr("The program of {name} has ended.").format(name=name)
    errors = [one_line(str(error), MOST_SAID) for error in parts_of(ending.error)]
    return tr("{name} has failed: {why}").format(name=name, why=", ".join(filter(None, errors)))


def _start_sentence(server: ToolServer, error: OSError) -> str:
    """Return why a program cannot be started."""
    program = server.command[0]
    if server.folder and error.filename == server.folder:
        text = tr("{name} cannot run in {folder}: {why}.")
        return text.format(name=server.name, folder=server.folder, why=error.strerror)
    if error.errno == errno.ENOENT:
        return tr("There is no program {program}.").format(program=program)
    return tr("{program} cannot be started: {why}.").format(program=program, why=error.strerror)


def parts_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error's parts, those of groups one by one."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from parts_of(part)
    elif error is not None:
        yield error
