"""Tool calls in chats, with their states and results."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Final, Literal, get_args

from app.core.translation import tr
from app.tools.server_store import ServerTool
from engine import ChatMessage, ToolCall, ToolCallBegun, ToolCallText

CallState = Literal["writing", "cut", "waiting", "running", "done", "failed", "refused", "stopped"]
"""State of a call: "cut" if the answer stopped inside it, "waiting" if it awaits approval."""

STATES: Final = get_args(CallState)


class CallStep(Enum):
    """A user action on a call."""

    RUN = "run"
    REFUSE = "refuse"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call in an answer.

    Attributes:
        id: id of the call, by which its result refers to it.
        name: name by which models call the tool, unique among all servers.
        server: name of the tool's server; "" if the tool is unknown.
        title: display name of the tool.
        arguments: text of a JSON object, as far as the model has written it.
        result: result of the call, or why there is none.
        extra: unknown entries of a file, written back unchanged.
    """

    id: str
    name: str
    server: str = ""
    title: str = ""
    arguments: str = ""
    state: CallState = "writing"
    result: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ToolUse:
        """Return a call from a chat's JSON; if it was running when stored, it is now stopped.

        Raises:
            TypeError, KeyError, AttributeError: the data is invalid.
        """
        known = [spec.name for spec in fields(cls) if spec.name != "extra"]
        values = {name: data[name] for name in known}
        if not all(isinstance(value, str) for value in values.values()):
            raise TypeError(f"not a call: {values!r}")
        if values["state"] == "running" or values["state"] not in STATES:
            values["state"] = "stopped"
        extra = {name: value for name, value in data.items() if name not in known}
        return cls(**values, extra=extra)

    @property
    def is_open(self) -> bool:
        """Whether the call may still get a result."""
        return self.state in ("waiting", "running")


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return a call's arguments; None if the text is not a JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def with_stopped(calls: Iterable[ToolUse], *states: CallState) -> tuple[ToolUse, ...]:
    """Return the calls, with those in any of the given states stopped."""
    return tuple(replace(call, state="stopped") if call.state in states else call for call in calls)


Calls = tuple[ToolUse, ...]


def with_event(
    calls: Calls, event: ToolCallBegun | ToolCallText, offers: Sequence[ServerTool]
) -> Calls:
    """Return an answer's calls after an event.

    A call with the index of an earlier call replaces that call and all that follow it.

    Args:
        offers: tools that the model may call.
    """
    if isinstance(event, ToolCallBegun):
        return (*calls[: event.index], _begun(event, calls[: event.index], offers))
    if not event.index < len(calls):
        return calls
    call = calls[event.index]
    grown = replace(call, arguments=call.arguments + event.text)
    return (*calls[: event.index], grown, *calls[event.index + 1 :])


def ended(calls: Calls, reason: str, *, is_whole: bool) -> Calls:
    """Return a finished answer's calls.

    Args:
        reason: why the answer stopped.
        is_whole: whether the model itself finished it; otherwise, the last call is incomplete.
    """
    if reason == "failed":  # the answer may be continued within a call
        return calls
    if reason == "cancelled":
        return tuple(replace(c, state="stopped") if c.state == "writing" else c for c in calls)
    found = [_checked(call) if call.state == "writing" else call for call in calls]
    if found and not is_whole and calls[-1].state == "writing":
        text = tr("The answer ended before this call was complete, so it did not run.")
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
    if not call.server:
        text = tr("There is no tool {name}.").format(name=call.name)
        return replace(call, state="failed", result=text)
    if read_arguments(call.arguments) is None:
        return replace(call, state="failed", result=tr("The arguments are not a JSON object."))
    return replace(call, state="waiting")


WITHOUT_RESULT: Final[dict[CallState, str]] = {
    "writing": "This call was cut off before it was complete, so it did not run.",
    "cut": "This call was cut off before it was complete, so it did not run.",
    "waiting": "The user has not approved this call.",
    "running": "This call has no result yet.",
    "done": "This call succeeded without any output.",
    "failed": "This call failed.",
    "refused": "The user refused this call.",
    "stopped": "The user stopped this call before it had a result.",
}
"""Results that the model sees for calls that have none, by state."""


def call_turns(text: str, thought: str, calls: Sequence[ToolUse]) -> list[ChatMessage]:
    """Return the turns for an answer with calls: the answer, then each call's result."""
    tool_calls = tuple(ToolCall(call.name, _arguments(call), call.id) for call in calls)
    results = [
        ChatMessage("tool", _result_text(call), tool_call_id=call.id, name=call.name)
        for call in calls
    ]
    return [ChatMessage("assistant", text.strip(), thought, tool_calls), *results]


def _arguments(call: ToolUse) -> str:
    # templates parse them as JSON
    is_object = bool(call.arguments) and read_arguments(call.arguments) is not None
    return call.arguments if is_object else "{}"


def _result_text(call: ToolUse) -> str:
    has_own = call.state in ("done", "failed") and call.result.strip()
    return call.result if has_own else WITHOUT_RESULT[call.state]
