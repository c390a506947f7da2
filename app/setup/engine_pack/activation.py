"""Choice of the engine's libraries at each start; imports little, as it runs before the window."""

from __future__ import annotations

import os
import threading
from importlib.util import find_spec
from typing import Literal

import engine
from app.core.paths import engines_dir

Origin = Literal["own", "pack", "none"]  # source of torch: installed with Tandem, a pack, or none

_lock = threading.Lock()  # of `activate`


def has_own_engine() -> bool:
    """Return whether torch is installed with Tandem, so that no pack is needed."""
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return False
    return spec is not None and not _is_of_pack(spec.origin or "")


def activate() -> Origin:
    """Use the current pack if torch is not installed with Tandem; return the source of torch.

    Call it at the start, and after a pack was installed, rolled back or removed, for later child
    processes. This process keeps its imports. Thread-safe.
    """
    with _lock:
        if has_own_engine():
            return "own"
        pack = None
        if engines_dir().is_dir():
            from app.setup.engine_pack.store import PackStore  # late: rarely needed

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
