"""File and memory of the encoder of pictures that a model is loaded with."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from engine.gguf.companions import Stamp, stamp_of
from engine.gguf.reader import GGUFFile
from engine.planning.footprint import held_bytes
from engine.towers.file import declare_tower, find_tower
from engine.towers.footprint import STORAGE, work_bytes

if TYPE_CHECKING:
    from engine.config.load import LoadParams

MOST_KEPT = 8
"""Most files whose sizes are remembered: a plan is made for each move of the mouse."""


def tower_path(params: LoadParams, architecture: str, n_embd: int) -> str:
    """Return the path of the mmproj file to load with a model; "" for none.

    Args:
        architecture: value of `general.architecture` of the model.
        n_embd: width of the model.
    """
    if params.mmproj == "off":
        return ""
    if params.mmproj != "auto":
        return params.mmproj
    folder = Path(params.path).parent
    return _beside(params.path, architecture, n_embd, stamp_of(folder))


@lru_cache(MOST_KEPT)
def _beside(path: str, architecture: str, n_embd: int, stamp: Stamp) -> str:
    found = find_tower(Path(path), architecture, n_embd)
    return "" if found is None else str(found)


def tower_bytes(params: LoadParams, architecture: str, n_embd: int) -> int:
    """Return the predicted bytes of an encoder of pictures and of its work; 0 without one.

    Args:
        architecture, n_embd: see `tower_path`.

    Raises:
        EngineError: its file cannot be read, or is not for the model.
    """
    path = tower_path(params, architecture, n_embd)
    return _bytes(path, architecture, n_embd, stamp_of(Path(path))) if path else 0


@lru_cache(MOST_KEPT)
def _bytes(path: str, architecture: str, n_embd: int, stamp: Stamp) -> int:
    with GGUFFile.open(path) as file:
        declaration = declare_tower(file, architecture, n_embd)
        held = sum(held_bytes(slot, 0, STORAGE) for slot in declaration.slots)
    return held + work_bytes(declaration.tower)
