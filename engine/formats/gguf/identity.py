"""Identifies models without reading the whole file."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from engine.errors import ModelFileError

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile

SAMPLES = 32
"""Number of tensors to sample, evenly spaced in the order of the file."""

SAMPLE_BYTES = 4096
"""Bytes to sample of each of these tensors, from its middle."""


def model_hash(file: GGUFFile) -> str:
    """Return a hash of a model's content, whatever its file is called: 64 hexadecimal digits.

    It covers the header and samples of the weights, as a model that was trained further often has
    the header of the model it comes from. It takes milliseconds.
    """
    digest = hashlib.sha256(file.meta.data)
    tensors = list(file.tensors.values())
    for tensor in tensors:
        entry = (tensor.name, tensor.type.name, tensor.shape, tensor.part, tensor.offset)
        digest.update(repr(entry).encode())
    for index in range(min(SAMPLES, len(tensors))):
        tensor = tensors[index * len(tensors) // min(SAMPLES, len(tensors))]
        raw = file.raw(tensor).flat()
        start = max(0, len(raw) - SAMPLE_BYTES) // 2
        digest.update(raw[start : start + SAMPLE_BYTES].read().data)
    return digest.hexdigest()


def check_unchanged(file: GGUFFile, stamps: object) -> None:
    """Check that a file is the one that was opened before, see `GGUFFile.stamps`.

    Raises:
        ModelFileError: another one lies under its path now.
    """
    if file.stamps != stamps:
        raise ModelFileError(
            file.path, f"{file.path.name} has changed since the model was loaded.", "Load it again."
        )
