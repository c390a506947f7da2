"""A call of a tool in a chat, with what has come of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Final, Literal, get_args

CallState = Literal["writing", "cut", "waiting", "running", "done", "failed", "refused", "stopped"]
"""State of a call: a model writes it, its answer ended before it was whole, a person is asked
whether it may run, it runs, has ended."""

STATES: Final = get_args(CallState)


class CallStep(Enum):
    """A step that a person can take with a call."""

    RUN = "run"
    REFUSE = "refuse"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call of a tool that a model has asked for.

    Attributes:
        id: name of the call, by which its result refers to it.
        name: name of the tool among those of all servers, as models call it.
        server: name of the tool's server; "" where there is no such tool.
        title: name of the tool as it is shown.
        arguments: text of a JSON object, as far as it is written.
        result: what the tool has returned, or why it has not.
        extra: what else a file said of the call; it is written again as it was.
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
        """Return the call of a chat's file; one that ran when the file was written has stopped.

        Raises:
            TypeError, KeyError, AttributeError: the data is no call.
        """
        known = [spec.name for spec in fields(cls) if spec.name != "extra"]
        values = {name: data[name] for name in known}
        if not all(isinstance(value, str) for value in values.values()):
            raise TypeError(f"no call: {values!r}")
        if values["state"] == "running" or values["state"] not in STATES:
            values["state"] = "stopped"
        extra = {name: value for name, value in data.items() if name not in known}
        return cls(**values, extra=extra)

    @property
    def is_open(self) -> bool:
        """Whether the call may still get a result: it waits or runs."""
        return self.state in ("waiting", "running")


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if the text is no JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def with_stopped(calls: Iterable[ToolUse], *states: CallState) -> tuple[ToolUse, ...]:
    """Return calls of which those in some states have stopped."""
    return tuple(replace(call, state="stopped") if call.state in states else call for call in calls)
