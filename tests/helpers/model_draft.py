"""A model file taken apart, which can be changed and written again with something wrong in it."""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.helpers import raw_gguf

KINDS_OF_INT = {raw_gguf.U32: "<I", raw_gguf.I32: "<i", raw_gguf.U64: "<Q", raw_gguf.I64: "<q"}
TYPE_OF_DTYPE = {"float32": 0, "float16": 1, "int32": 26, "int64": 27}


@dataclass
class DraftTensor:
    """A tensor of a file; `shape` has the slowest dimension first."""

    shape: tuple[int, ...]
    type_number: int
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, values: np.ndarray) -> "DraftTensor":
        return cls(values.shape, TYPE_OF_DTYPE[values.dtype.name], values.tobytes())


@dataclass
class ModelDraft:
    """Contents of a file: change the two dictionaries as you like, then `write` it."""

    meta: dict[str, Any]
    tensors: dict[str, DraftTensor]

    @classmethod
    def read(cls, path: Path) -> "ModelDraft":
        reader = gguf.GGUFReader(path)
        meta = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        tensors = {
            t.name: DraftTensor(
                tuple(int(n) for n in reversed(t.shape)), int(t.tensor_type), t.data.tobytes()
            )
            for t in reader.tensors
        }
        return cls(meta, tensors)

    def copy(self) -> "ModelDraft":
        return ModelDraft(dict(self.meta), dict(self.tensors))

    def changed(self, meta: Mapping[str, Any], prefix: str = "") -> "ModelDraft":
        """Return a copy with other metadata; None drops a key."""
        merged = self.meta | {prefix + key: value for key, value in meta.items()}
        kept = {key: value for key, value in merged.items() if value is not None}
        return ModelDraft(kept, dict(self.tensors))

    def write(self, path: Path, *, hollow: bool = False) -> Path:
        """Write the file.

        Args:
            hollow: whether to write a hole in place of the weights, which is faster.
        """
        data, entries, n_bytes = [], [], 0
        for name, tensor in self.tensors.items():
            sizes = tensor.shape[::-1]
            entries.append(raw_gguf.tensor(name, sizes, tensor.type_number, n_bytes))
            data += [tensor.data, bytes(-len(tensor.data) % 32)]
            n_bytes += len(data[-2]) + len(data[-1])
        meta = [encoded(key, value) for key, value in self.meta.items()]
        whole = raw_gguf.gguf(meta, entries, b"" if hollow else b"".join(data))
        path.unlink(missing_ok=True)  # to write over a file takes 20 times as long on ext4
        path.write_bytes(whole)
        if hollow:
            os.truncate(path, len(whole) + n_bytes)
        return path


def encoded(key: str, value: Any) -> bytes:
    """Return a metadata entry of the narrowest type that GGUF writers use for such a value."""
    if isinstance(value, list):
        kind = max((_kind(item) for item in value), default=raw_gguf.I32)
        payload = b"".join(_payload(kind, item) for item in value)
        return raw_gguf.array(key, kind, len(value), payload)
    kind = _kind(value)
    return raw_gguf.entry(key, kind, _payload(kind, value))


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return raw_gguf.BOOL
    if isinstance(value, str):
        return raw_gguf.STRING
    if isinstance(value, float):
        return raw_gguf.F32
    ranges = {raw_gguf.U32: (0, 2**32), raw_gguf.I32: (-(2**31), 0), raw_gguf.U64: (0, 2**64)}
    return next((k for k, (a, b) in ranges.items() if a <= value < b), raw_gguf.I64)


def _payload(kind: int, value: Any) -> bytes:
    if kind == raw_gguf.STRING:
        return raw_gguf.string(value)
    if kind == raw_gguf.BOOL:
        return bytes([value])
    return struct.pack("<f" if kind == raw_gguf.F32 else KINDS_OF_INT[kind], value)
