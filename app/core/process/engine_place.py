"""The choice where the window's engine runs: in a process of its own, or on a thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import engine
from engine import EngineError

if TYPE_CHECKING:
    from engine import EngineHost, HostEvent

VARIABLE = "TANDEM_ENGINE"
"""Environment variable with the choice: "process", as without it, or "thread"."""

MakeHost = Callable[[Callable[["HostEvent"], None]], "EngineHost"]

PLACES = ("process", "thread")


def engine_place() -> str:
    """Return one of `PLACES`, as the environment variable says.

    Raises:
        EngineError: the variable has another value.
    """
    choice = os.environ.get(VARIABLE, "") or "process"
    if choice not in PLACES:
        raise EngineError(f"{VARIABLE} is '{choice[:60]}'.", f"Set it to {' or '.join(PLACES)}.")
    return choice


def chosen_host() -> MakeHost:
    """Return what starts the engine there; imports it, which takes a moment.

    Raises:
        EngineError: see `engine_place`.
    """
    return engine.ProcessHost if engine_place() == "process" else engine.ThreadHost


def start_host(on_event: Callable[[HostEvent], None]) -> EngineHost:
    """Start the chosen engine, which sends its events to `on_event`.

    Raises:
        EngineError: see `engine_place`.
    """
    return chosen_host()(on_event)
