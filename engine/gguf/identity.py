"""Telling models apart, and noticing that a file has changed, without reading it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.gguf.reader import GGUFFile

SAMPLES = 32
"""Tensors that are looked at, evenly among all of them in the order of the file."""

SAMPLE_BYTES = 4096
"""Of each of them, from its middle."""

Stamp = tuple[tuple[str, int, int], ...]


def model_hash(file: GGUFFile) -> str:
    """A name for what is in a file, whatever the file is called: 64 hexadecimal digits.

    It covers the header and some of the weights, since models that were trained further often have
    the header of the one that they come from. It takes milliseconds.
    """
    digest = hashlib.sha256(file.meta.data)
    tensors = list(file.tensors.values())
    for tensor in tensors:
        entry = (tensor.name, tensor.type.name, tensor.shape, tensor.part, tensor.offset)
        digest.update(repr(entry).encode())
    for index in range(min(SAMPLES, len(tensors))):
        tensor = tensors[index * len(tensors) // min(SAMPLES, len(tensors))]
        raw = file.raw(tensor).reshape(-1)
        start = max(0, len(raw) - SAMPLE_BYTES) // 2
        digest.update(raw[start : start + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()


def file_stamp(file: GGUFFile) -> Stamp:
    """Path, bytes and time of the last change (ns) of each part that is on the disk now."""
    stats = [(path, path.stat()) for path in file.paths if path.exists()]
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)
