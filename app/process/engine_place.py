"""The choice where the window's engine runs: on a thread, or in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable

from engine import EngineError, EngineHost, HostEvent, ProcessHost, ThreadHost

VARIABLE = "TANDEM_ENGINE"
"""Environment variable with the choice: "thread", as without it, or "process"."""

MakeHost = Callable[[Callable[[HostEvent], None]], EngineHost]

_HOSTS: dict[str, MakeHost] = {"thread": ThreadHost, "process": ProcessHost}


def chosen_host() -> MakeHost:
    """Return what starts the engine where the environment variable says.

    Raises:
        EngineError: the variable has another value.
    """
    choice = os.environ.get(VARIABLE, "") or "thread"
    if choice not in _HOSTS:
        raise EngineError(f"{VARIABLE} is '{choice[:60]}'.", f"Set it to {' or '.join(_HOSTS)}.")
    return _HOSTS[choice]
