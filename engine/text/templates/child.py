"""The child process that renders templates, as the process that started it sees it."""

from __future__ import annotations

from typing import Any

from engine.text.templates.limits import GRACE_S, MAX_MEMORY
from engine.util.programs import program_command
from engine.util.progress import IsCancelled, never
from engine.util.sandbox.child import ChildEnded, Excess, LimitedChild

COMMAND = program_command("engine.text.templates.program")
"""Command of the child."""

NEEDS_MEMORY = f"it needs more than {MAX_MEMORY >> 20} MiB of memory"


class TemplateChildEnded(Exception):
    """End of the child without an answer; the text says why, where "it" is the template."""


class TemplateChild(LimitedChild):
    """A process that renders one prompt after another, for one thread at a time.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        super().__init__(COMMAND, MAX_MEMORY)  # ready in 20 s, also where a model is being loaded

    def ask(
        self, request: bytes, seconds: float, is_cancelled: IsCancelled = never
    ) -> dict[str, Any]:
        """Return the answer to a request, a line of JSON.

        Args:
            seconds: time for compiling and rendering.
            is_cancelled: returning True ends the child.

        Raises:
            TemplateChildEnded: there is no answer, and the child is gone or going.
        """
        try:
            return super().ask(request, seconds + GRACE_S, is_cancelled)
        except ChildEnded as error:
            raise TemplateChildEnded(_why(error, seconds)) from error


def _why(ended: ChildEnded, seconds: float) -> str:
    if ended.excess is Excess.TIME:
        return f"it runs for more than {seconds:g} seconds"
    if ended.is_out_of_memory:
        return NEEDS_MEMORY
    return f"it ends the program that renders it, with status {ended.status}"
