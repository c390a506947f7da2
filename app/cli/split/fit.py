"""Room that a plan leaves, and remedies if there is none."""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine import Fit, LoadParams, Remedy


@dataclass(frozen=True, slots=True)
class RoomLeft:
    """The longest context that fits, and the ways out if the plan does not fit.

    Attributes:
        max_ctx: longest context that fits with this split, in tokens; 0 if none does.
        remedies: ways to make the plan fit, as JSON-ready dictionaries; empty if it fits.
    """

    max_ctx: int
    remedies: tuple[dict[str, object], ...]


def room_left(fit: Fit, params: LoadParams) -> RoomLeft:
    """Return the room that `params` leave.

    Raises:
        EngineError: the split cannot be made.
    """
    found = tuple(_document(remedy, params) for remedy in fit.remedies(params))
    return RoomLeft(fit.largest_context(params), found)


def _document(remedy: Remedy, asked: LoadParams) -> dict[str, object]:
    """Return a remedy with the options that it changes."""
    pairs = [(f.name, getattr(remedy.params, f.name)) for f in fields(remedy.params)]
    changes = {name: value for name, value in pairs if value != getattr(asked, name)}
    return {"kind": remedy.kind, "sentence": remedy.sentence, "changes": changes}


def room_text(room: RoomLeft) -> str:
    """Return the room as lines for people."""
    longest = f"The longest context that fits is {room.max_ctx:,} tokens."
    lines = [longest if room.max_ctx else "No context fits with this split."]
    if room.remedies:
        lines.append("To make it fit, do one of these:")
        lines += [f"- {remedy['sentence']}" for remedy in room.remedies]
    return "\n".join(lines)
