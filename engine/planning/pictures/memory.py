"""File and memory of the encoder of pictures that a model is loaded with."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from engine.formats.gguf.companions import Stamp, stamp_of
from engine.formats.gguf.reader import GGUFFile
from engine.planning.footprint import held_bytes
from engine.vision.encoders.file import declare_tower, find_tower
from engine.vision.encoders.footprint import STORAGE, work_bytes

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.vision.encoders.base import TextModel

MOST_KEPT = 8
"""Most files whose sizes are remembered: a plan is made for each move of the mouse."""

PICTURES_HINT = (
    "Have pictures encoded on another device (--mmproj-device cpu), or load the model without them"
    " (--mmproj off)."
)
"""Remedy where a device has room for the model alone."""


def tower_path(params: LoadParams, text: TextModel) -> str:
    """Return the path of the mmproj file to load with a model; "" for none."""
    if params.mmproj == "off":
        return ""
    if params.mmproj != "auto":
        return params.mmproj
    folder = Path(params.path).parent
    return _beside(params.path, text, stamp_of(folder))


@lru_cache(MOST_KEPT)
def _beside(path: str, text: TextModel, stamp: Stamp) -> str:
    found = find_tower(Path(path), text)
    return "" if found is None else str(found)


def tower_bytes(params: LoadParams, text: TextModel) -> int:
    """Return the predicted bytes of an encoder of pictures and of its work; 0 without one.

    Raises:
        EngineError: its file cannot be read, or is not for the model.
    """
    path = tower_path(params, text)
    return _bytes(path, text, stamp_of(Path(path))) if path else 0


@lru_cache(MOST_KEPT)
def _bytes(path: str, text: TextModel, stamp: Stamp) -> int:
    with GGUFFile.open(path) as file:
        declaration = declare_tower(file, text)
        held = sum(held_bytes(slot, 0, STORAGE) for slot in declaration.slots)
    return held + work_bytes(declaration.tower)
