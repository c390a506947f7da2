"""Vision encoders by the names that files give to their projectors, and their files (mmproj): found
beside a model, checked against it, and declared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError, InvalidGGUF, ModelFileError
from engine.formats.gguf.companions import files_beside
from engine.formats.gguf.reader import GGUFFile
from engine.formats.gguf.tensors import quote
from engine.model.forward.state import F32_BYTES
from engine.model.layers.keys import Keys
from engine.model.layers.module import Slot, TensorSource
from engine.vision.encoders.gemma4 import Gemma4Encoder, Gemma4UnifiedEncoder
from engine.vision.encoders.internvl import InternVLEncoder
from engine.vision.encoders.pixtral import PixtralEncoder
from engine.vision.encoders.qwen import Qwen3VLEncoder, Qwen25VLEncoder
from engine.vision.encoders.siglip import Gemma3Encoder, Idefics3Encoder
from engine.vision.images.placed import MAX_TOKENS, max_queries

if TYPE_CHECKING:
    from engine.formats.gguf.metadata import Metadata
    from engine.vision.encoders.base import TextModel, VisionEncoder

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


MARK = "mmproj"
"""Part of the names of encoders' files."""

HEARING = ("a.", "mm.a.")
"""Beginnings of the names of tensors that encode sounds, which are not used."""


@dataclass(frozen=True, slots=True)
class VisionDeclaration:
    """An encoder whose tensors are found but not read.

    Attributes:
        encoder: layers of the encoder.
        slots: all of its tensors.
    """

    encoder: VisionEncoder
    slots: tuple[Slot, ...]


def declare_vision_encoder(file: GGUFFile, text: TextModel) -> VisionDeclaration:
    """Declare the encoder in a file for a text model.

    Raises:
        ModelFileError: the file holds no known encoder, a tensor is missing or misshapen, or the
            encoder is for another model.
    """
    cls, keys = vision_encoder_class(file.meta), Keys(file.meta)
    keys.check_bounds()
    width = _n_out(file)
    if text.architecture not in cls.architectures or width not in (None, text.n_embd):
        raise ModelFileError(
            file.path,
            f"{file.path.name} is for another model: it is made for {_listed(cls.architectures)} "
            f"of width {width}, and this one is {text.architecture} of width {text.n_embd}.",
            "Choose the mmproj file that was published with the model.",
        )
    source = TensorSource(str(file.path), file.tensors)
    cls.adapt(source, keys)
    encoder = cls(keys, text)
    if encoder.rule.most_tokens > MAX_TOKENS:
        raise keys.invalid(f"its pictures have more than {MAX_TOKENS} tokens")
    slots = tuple(encoder.bind(source))
    unknown = [n for n in file.tensors if n not in source.used and not n.startswith(HEARING)]
    if unknown:
        raise InvalidGGUF(
            file.path,
            f"it has the tensor {quote(unknown[0])}, which such encoders of pictures do not have",
            "It may be of a newer variant; look for an update of Tandem or another file.",
        )
    return VisionDeclaration(encoder, slots)


def _n_out(file: GGUFFile) -> int | None:
    """Return the width of an encoder's result as its file states it; None if it does not."""
    return file.meta.int("clip.vision.projection_dim", None)


def _listed(names: tuple[str, ...]) -> str:
    return " or ".join(names)


def find_vision_encoder(model: Path, text: TextModel) -> Path | None:
    """Return the file of an encoder beside a model that fits it; None if there is none.

    Of several, the one whose name begins most like the model's comes first.
    """
    for path in files_beside(model, MARK):
        try:
            with GGUFFile.open(path) as file:
                declare_vision_encoder(file, text)
        except EngineError:
            continue
        return path
    return None


STORAGE = "packed"
"""Format of an encoder's matrices, see `DevicePlan.storage`: as in the file, dequantised on each
use, which takes little beside a product with the thousands of patches of an image."""

UNPACK_BYTES = 2 * F32_BYTES * (1 << 22)
"""Bytes that dequantising a packed matrix in chunks takes."""


def work_bytes(encoder: VisionEncoder) -> int:
    """Estimate the working memory of the largest image, in bytes.

    The residual stream, its norm and the largest part count: attention or the FFN.
    """
    sizes = encoder.sizes
    n = encoder.rule.resizing.most_pixels // (sizes.patch * sizes.patch)
    scores = max_queries(n, sizes.n_head) * n * sizes.n_head if sizes.n_head else 0
    attention = n * 5 * sizes.n_embd + 2 * scores
    parts = max(attention, n * 3 * sizes.n_ff)
    return F32_BYTES * (n * 3 * sizes.n_embd + parts) + UNPACK_BYTES
