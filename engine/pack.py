"""The engine's libraries where they do not lie beside Tandem: torch and others in folders apart.

Such a folder comes last on the path of imports, so that it replaces nothing. Child processes find
it by an environment variable, which `import engine` reads.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "TANDEM_ENGINE_PACK"
"""Environment variable with the folders, separated as in PATH."""

LIBRARIES = ("torch", "llvmlite", "tokenizers")
"""Requirements that only the engine imports, and that a pack brings with all that they need."""


def use_pack(folders: Iterable[Path | str]) -> None:
    """Import the engine's libraries from some folders, in this process and in later children.

    Folders of an earlier call are left; what was imported from them stays.
    """
    leave_pack()
    os.environ[VARIABLE] = os.pathsep.join(str(folder) for folder in folders)
    add_pack()


def leave_pack() -> None:
    """Import nothing more from the folders in use."""
    for folder in pack_folders():
        if folder in sys.path:
            sys.path.remove(folder)
    os.environ.pop(VARIABLE, None)
    importlib.invalidate_caches()


def add_pack() -> None:
    """Add the folders that the environment names to the path of imports."""
    for folder in pack_folders():
        if folder not in sys.path:
            sys.path.append(folder)
    importlib.invalidate_caches()


def pack_folders() -> list[str]:
    """Return the folders that the environment names."""
    return [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
