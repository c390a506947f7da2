"""The choice where the engine's libraries come from, made at each start before anything needs them.

It runs before the window's first picture, so it imports little.
"""

from __future__ import annotations

import os
import threading
from importlib.util import find_spec
from typing import Literal

import engine
from app.core.paths import engines_dir

Origin = Literal["own", "pack", "none"]
"""Where torch comes from: installed with Tandem, from a pack, or from nowhere."""

_lock = threading.Lock()
"""Lock of `activate`, which several threads of a window may call."""


def has_own_engine() -> bool:
    """Return whether torch is installed beside Tandem, so that no pack is needed."""
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return False
    return spec is not None and not _is_of_pack(spec.origin or "")


def activate() -> Origin:
    """Use the current pack, if torch is not installed beside Tandem; return where it comes from.

    To be called at the start, and again after a pack was installed, rolled back or removed: later
    child processes use the new one. This process keeps what it has imported.
    """
    with _lock:
        if has_own_engine():
            return "own"
        pack = None
        if engines_dir().is_dir():
            from app.setup.engine_pack.store import PackStore  # late: most starts do without

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
