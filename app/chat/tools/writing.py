"""The calls of an answer while a model writes them, and what they are once it has ended."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from app.chat.tools.tool_use import ToolUse, read_arguments
from app.core.translation import tr
from app.tools.states import ServerTool
from engine import ToolCallBegun, ToolCallText

Calls = tuple[ToolUse, ...]


def with_event(
    calls: Calls, event: ToolCallBegun | ToolCallText, offers: Sequence[ServerTool]
) -> Calls:
    """Return the calls of an answer after an event.

    A call with the number of an earlier one is written anew, with all that follow it.

    Args:
        offers: the tools that the model was told of.
    """
    if isinstance(event, ToolCallBegun):
        return (*calls[: event.index], _begun(event, calls[: event.index], offers))
    if not event.index < len(calls):
        return calls
    call = calls[event.index]
    grown = replace(call, arguments=call.arguments + event.text)
    return (*calls[: event.index], grown, *calls[event.index + 1 :])


def ended(calls: Calls, reason: str, *, is_whole: bool) -> Calls:
    """Return the calls of an answer that has ended.

    Those of one that a failure has cut off stay as they are, so that it can go on inside of one.

    Args:
        reason: reason of the end.
        is_whole: whether the model itself has ended it; else the last call is not whole.
    """
    if reason == "failed":
        return calls
    if reason == "cancelled":
        return tuple(replace(c, state="stopped") if c.state == "writing" else c for c in calls)
    found = [_checked(call) if call.state == "writing" else call for call in calls]
    if found and not is_whole and calls[-1].state == "writing":
        text = tr("The answer ended before this call was whole, so it did not run.")
        found[-1] = replace(calls[-1], state="cut", result=text)
    return tuple(found)


def _begun(event: ToolCallBegun, before: Calls, offers: Sequence[ServerTool]) -> ToolUse:
    offer = next((one for one in offers if one.tool.name == event.name), None)
    known = {call.id for call in before}
    number = event.id if event.id and event.id not in known else uuid.uuid4().hex[:9]
    if offer is None:
        return ToolUse(number, event.name, title=event.name)
    return ToolUse(number, event.name, offer.server, offer.title or offer.name)


def _checked(call: ToolUse) -> ToolUse:
    """Return a whole call, which waits for a person if it can run."""
    if not call.server:
        text = tr("There is no tool {name}.").format(name=call.name)
        return replace(call, state="failed", result=text)
    if read_arguments(call.arguments) is None:
        return replace(call, state="failed", result=tr("The arguments are no JSON object."))
    return replace(call, state="waiting")
