"""Towers by the names that files give to their projectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ModelFileError
from engine.formats.gguf.tensors import quote
from engine.vision.encoders.gemma4 import Gemma4Tower, Gemma4UnifiedTower
from engine.vision.encoders.internvl import InternVLTower
from engine.vision.encoders.pixtral import PixtralTower
from engine.vision.encoders.qwen3vl import Qwen3VLTower
from engine.vision.encoders.qwen25vl import Qwen25VLTower
from engine.vision.encoders.siglip import Gemma3Tower, Idefics3Tower

if TYPE_CHECKING:
    from engine.formats.gguf.metadata import Metadata
    from engine.vision.encoders.base import Tower

TOWERS: dict[str, type[Tower]] = {
    "gemma3": Gemma3Tower,
    "gemma4uv": Gemma4UnifiedTower,
    "gemma4v": Gemma4Tower,
    "idefics3": Idefics3Tower,
    "internvl": InternVLTower,
    "pixtral": PixtralTower,
    "qwen2.5vl_merger": Qwen25VLTower,
    "qwen3vl_merger": Qwen3VLTower,
}
"""Class of each projector type."""


def tower_class(meta: Metadata) -> type[Tower]:
    """Return the class of the tower in a file.

    Raises:
        ModelFileError: the file holds no encoder of pictures, or an unknown one; it is named.
    """
    if meta.architecture != "clip" or not meta.bool("clip.has_vision_encoder", True):
        raise ModelFileError(
            meta.path,
            f"{meta.path.name} holds no encoder of pictures.",
            "Choose the file whose name has mmproj in it.",
        )
    # files that hear as well have a type for each sense
    name = meta.str("clip.projector_type", "") or meta.str("clip.vision.projector_type", "")
    found = TOWERS.get(name)
    if found is None:
        raise ModelFileError(
            meta.path,
            f"{meta.path.name} has a projector of the type {quote(name)}, which Tandem cannot run"
            " yet.",
            f"It can run: {', '.join(sorted(TOWERS))}. Without the file, the model reads text.",
        )
    return found
