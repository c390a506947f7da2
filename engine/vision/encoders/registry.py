"""Registry of vision encoders; finds mmproj files next to models, checks that they fit, and
declares them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError, InvalidGGUF, ModelFileError, either
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
"""Encoder classes by projector type."""


def vision_encoder_class(meta: Metadata) -> type[VisionEncoder]:
    """Return the class of the encoder in a file.

    Raises:
        ModelFileError: there is no vision encoder, or an unknown one.
    """
    if meta.architecture != "clip" or not meta.bool("clip.has_vision_encoder", True):
        raise ModelFileError(
            meta.path,
            "{file} has no vision encoder.",
            "Choose the file with mmproj in its name.",
            file=meta.path.name,
        )
    # files that also have an audio encoder state a type for each
    name = meta.str("clip.projector_type", "") or meta.str("clip.vision.projector_type", "")
    if name not in ENCODERS:
        raise ModelFileError(
            meta.path,
            "{file} has a projector of type {name}, which is not supported yet.",
            "Supported types: {names}. Without this file, the model reads text only.",
            file=meta.path.name, name=quote(name), names=", ".join(sorted(ENCODERS)),
        )  # fmt: skip
    return ENCODERS[name]


MARK = "mmproj"  # part of the names of mmproj files
AUDIO = ("a.", "mm.a.")  # prefixes of audio encoders' tensors, which are not used


@dataclass(frozen=True, slots=True)
class VisionDeclaration:
    """A declared encoder: its tensors are located but not read."""

    encoder: VisionEncoder
    slots: tuple[Slot, ...]


def declare_vision_encoder(file: GGUFFile, text: TextModel) -> VisionDeclaration:
    """Declare the encoder in a file for a text model.

    Raises:
        ModelFileError: there is no known encoder, a tensor is missing or misshapen, or the encoder
            is for another model.
    """
    cls, keys = vision_encoder_class(file.meta), Keys(file.meta)
    keys.check_bounds()
    width = file.meta.int("clip.vision.projection_dim", None)
    if text.architecture not in cls.architectures or width not in (None, text.n_embd):
        raise ModelFileError(
            file.path,
            "{file} is for another model: it fits {names} of width {width}, but this is {type}"
            " of width {other}.",
            "Choose the mmproj file that was published with the model.",
            file=file.path.name, names=either(cls.architectures), width=str(width),
            type=text.architecture, other=text.n_embd,
        )  # fmt: skip
    source = TensorSource(str(file.path), file.tensors)
    cls.adapt(source, keys)
    encoder = cls(keys, text)
    if encoder.rule.most_tokens > MAX_TOKENS:
        raise keys.invalid("its images have more than {n} tokens", n=MAX_TOKENS)
    slots = tuple(encoder.bind(source))
    unknown = [n for n in file.tensors if n not in source.used and not n.startswith(AUDIO)]
    if unknown:
        raise InvalidGGUF(
            file.path,
            "it has the tensor {name}, which this kind of vision encoder does not have",
            "It may be a newer variant: check for a Tandem update, or try another file.",
            name=quote(unknown[0]),
        )
    return VisionDeclaration(encoder, slots)


def find_vision_encoder(model: Path, text: TextModel) -> Path | None:
    """Return an encoder file in a model's folder that fits the model, or None.

    Files whose names share the longest prefix with the model's name come first.
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
"""Storage of an encoder's matrices (see `DevicePlan.storage`): as in the file, dequantised on each
use, which is cheap compared with a product over an image's thousands of patches."""

UNPACK_BYTES = 2 * F32_BYTES * (1 << 22)  # bytes for dequantising a packed matrix in chunks


def work_bytes(encoder: VisionEncoder) -> int:
    """Estimate the working memory for the largest image, in bytes.

    It covers the residual stream, its norm and the larger of attention and FFN.
    """
    sizes = encoder.sizes
    n = encoder.rule.resizing.most_pixels // (sizes.patch * sizes.patch)
    scores = max_queries(n, sizes.n_head) * n * sizes.n_head if sizes.n_head else 0
    attention = n * 5 * sizes.n_embd + 2 * scores
    parts = max(attention, n * 3 * sizes.n_ff)
    return F32_BYTES * (n * 3 * sizes.n_embd + parts) + UNPACK_BYTES
