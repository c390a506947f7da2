"""Encoders by the names that files give to their projectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ModelFileError
from engine.formats.gguf.tensors import quote
from engine.vision.encoders.gemma4 import Gemma4Encoder, Gemma4UnifiedEncoder
from engine.vision.encoders.internvl import InternVLEncoder
from engine.vision.encoders.pixtral import PixtralEncoder
from engine.vision.encoders.qwen3vl import Qwen3VLEncoder
from engine.vision.encoders.qwen25vl import Qwen25VLEncoder
from engine.vision.encoders.siglip import Gemma3Encoder, Idefics3Encoder

if TYPE_CHECKING:
    from engine.formats.gguf.metadata import Metadata
    from engine.vision.encoders.base import VisionEncoder

ENCODERS: dict[str, type[VisionEncoder]] = {
    "gemma3": Gemma3Encoder,
    "gemma4uv": Gemma4UnifiedEncoder,
    "gemma4v": Gemma4Encoder,
    "idefics3": Idefics3Encoder,
    "internvl": InternVLEncoder,
    "pixtral": PixtralEncoder,
    "qwen2.5vl_merger": Qwen25VLEncoder,
    "qwen3vl_merger": Qwen3VLEncoder,
}
"""Class of each projector type."""


def vision_encoder_class(meta: Metadata) -> type[VisionEncoder]:
    """Return the class of the encoder in a file.

    Raises:
        ModelFileError: the file holds no vision encoder, or an unknown one; it is named.
    """
    if meta.architecture != "clip" or not meta.bool("clip.has_vision_encoder", True):
        raise ModelFileError(
            meta.path,
            f"{meta.path.name} holds no encoder of pictures.",
            "Choose the file whose name has mmproj in it.",
        )
    # files that hear as well have a type for each sense
    name = meta.str("clip.projector_type", "") or meta.str("clip.vision.projector_type", "")
    found = ENCODERS.get(name)
    if found is None:
        raise ModelFileError(
            meta.path,
            f"{meta.path.name} has a projector of the type {quote(name)}, which Tandem cannot run"
            " yet.",
            f"It can run: {', '.join(sorted(ENCODERS))}. Without the file, the model reads text.",
        )
    return found
