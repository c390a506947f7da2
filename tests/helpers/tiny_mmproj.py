"""Small mmproj files with random weights, of each projector type that the engine knows."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from engine.formats.gguf.reader import GGUFFile
from engine.formats.gguf.tensors import TYPES, TensorInfo
from engine.model.layers.keys import Keys
from engine.model.layers.module import TensorSource
from engine.vision.encoders.base import TextModel
from engine.vision.encoders.registry import ENCODERS
from tests.helpers.tiny_gguf import finish, value_type

N_TEXT = 64
"""Width of the text models that they are for."""

KEYS: dict[str, Any] = {
    "clip.has_vision_encoder": True,
    "clip.use_gelu": True,
    "clip.vision.image_size": 32,
    "clip.vision.patch_size": 4,
    "clip.vision.embedding_length": 32,
    "clip.vision.feed_forward_length": 48,
    "clip.vision.block_count": 2,
    "clip.vision.attention.head_count": 2,
    "clip.vision.attention.layer_norm_epsilon": 1e-6,
    "clip.vision.image_mean": [0.5, 0.5, 0.5],
    "clip.vision.image_std": [0.5, 0.5, 0.5],
    "clip.vision.projection_dim": N_TEXT,
}
"""Keys of all of them."""

OWN: dict[str, dict[str, Any]] = {
    "gemma4uv": {"clip.vision.block_count": 0, "clip.vision.image_max_pixels": 1 << 12},
    "gemma4v": {"clip.vision.image_max_pixels": 1 << 12},
    "qwen2.5vl_merger": {"clip.vision.n_wa_pattern": 2, "clip.vision.image_max_pixels": 1 << 12},
    "qwen3vl_merger": {
        "clip.vision.is_deepstack_layers": [True, False], "clip.vision.image_max_pixels": 1 << 12,
        "clip.vision.image_min_pixels": 1 << 8,
    },
}  # fmt: skip
"""Further keys of some projector types, which may replace those of all."""


def text_of(projector: str) -> TextModel:
    """Return a text model for a projector type."""
    return TextModel(ENCODERS[projector].architectures[0], N_TEXT)


class _Asked(TensorSource):
    """Tensors that are all there, in the shapes in which they are looked up."""

    def __init__(self) -> None:
        super().__init__("", {})
        self.shapes: dict[str, tuple[int, ...]] = {}

    def get(self, name: str, shape: tuple[int, ...], *others: tuple[int, ...]) -> TensorInfo:
        self.shapes.setdefault(name, shape)
        return TensorInfo(name, TYPES[0], shape, 0, 0)


def tiny_mmproj(path: Path, projector: str, seed: int = 0) -> Path:
    """Write a file for `text_of` a projector type, and return `path`."""
    keys = {**KEYS, "clip.projector_type": projector, **OWN.get(projector, {})}
    _write(path, keys, {})
    source = _Asked()
    with GGUFFile.open(path) as file:
        ENCODERS[projector](Keys(file.meta), text_of(projector)).bind(source)
    rng = np.random.default_rng(seed)
    return _write(
        path, keys,
        {
            name: rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
            for name, shape in source.shapes.items()
        },
    )  # fmt: skip


def _write(path: Path, keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    writer = GGUFWriter(path, "clip")
    for key, value in keys.items():
        writer.add_key_value(key, value, value_type(value))
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)
    return path
