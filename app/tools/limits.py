"""Limits of what servers of tools may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits for one server.

    Attributes:
        start_s: seconds in which a server must have listed its tools; programs may have to be
            fetched first.
        silence_s: seconds of a call without a sign of progress.
        most_result: size limit of a result, in characters.
        most_tools: number of tools beyond which no more are read.
    """

    start_s: float = 90.0
    silence_s: float = 300.0
    most_result: int = 256 << 10
    most_tools: int = 1000
