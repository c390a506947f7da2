"""The choice where the window's engine runs: in a process of its own, or on a thread."""

from __future__ import annotations

import os
from collections.abc import Callable

from engine import EngineError, EngineHost, HostEvent, ProcessHost, ThreadHost

VARIABLE = "TANDEM_ENGINE"
"""Environment variable with the choice: "process", as without it, or "thread"."""

MakeHost = Callable[[Callable[[HostEvent], None]], EngineHost]

_HOSTS: dict[str, MakeHost] = {"process": ProcessHost, "thread": ThreadHost}


def chosen_host() -> MakeHost:
    """Return what starts the engine where the environment variable says.

    Raises:
        EngineError: the variable has another value.
    """
    choice = os.environ.get(VARIABLE, "") or "process"
    if choice not in _HOSTS:
        raise EngineError(f"{VARIABLE} is '{choice[:60]}'.", f"Set it to {' or '.join(_HOSTS)}.")
    return _HOSTS[choice]
