"""Chooses the engine's libraries at start-up; imports little, to show the window quickly."""

from __future__ import annotations

import os
import threading
from importlib.util import find_spec
from typing import Literal

import engine
from app.core.paths import engines_dir

Origin = Literal["own", "pack", "none"]  # source of torch; "own": installed with Tandem

_lock = threading.Lock()  # serializes `activate`


def has_own_engine() -> bool:
    """Return whether torch is installed with Tandem, so that no pack is needed."""
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return False
    return spec is not None and not _is_of_pack(spec.origin or "")


def activate() -> Origin:
    """Use the current pack unless torch is installed with Tandem; return where torch comes from.

    Call this at start-up and, for the sake of later child processes, after a pack was installed,
    rolled back or removed. This process keeps what it has imported. Thread-safe.
    """
    with _lock:
        if has_own_engine():
            return "own"
        pack = None
        if engines_dir().is_dir():
            from app.setup.engine_pack.store import PackStore  # imported here: rarely needed

            store = PackStore()
            pack = store.current if store.is_private else None
        if pack is None or not pack.is_usable:
            engine.leave_pack()
            return "none"
        if engine.pack_folders() != list(pack.folders):
            engine.use_pack(pack.folders)
        return "pack"


def _is_of_pack(path: str) -> bool:
    return any(path.startswith(f"{folder}{os.sep}") for folder in engine.pack_folders())
