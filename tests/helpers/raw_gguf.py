"""GGUF files put together byte by byte, for contents that no honest writer writes."""

import struct
from collections.abc import Sequence

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = 0, 4, 5, 6, 7, 8, 9, 10, 11, 12  # kinds

GGML_F32, GGML_Q4_0 = 0, 2  # tensor types


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data)) + data


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + u32(kind) + payload


def array(key: str, kind: int, length: int, payload: bytes) -> bytes:
    return entry(key, ARRAY, u32(kind) + u64(length) + payload)


def strings(key: str, texts: Sequence[str | bytes]) -> bytes:
    return array(key, STRING, len(texts), b"".join(map(string, texts)))


def tensor(name: str | bytes, sizes: Sequence[int], kind: int = GGML_F32, offset: int = 0) -> bytes:
    """Return a tensor's entry; `sizes` are in the file's order, fastest first."""
    return string(name) + u32(len(sizes)) + b"".join(map(u64, sizes)) + u32(kind) + u64(offset)


def gguf(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_entries: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Return a whole file; the counts are those of the lists unless others are given."""
    head = (
        b"GGUF"
        + u32(version)
        + u64(len(tensors) if n_tensors is None else n_tensors)
        + u64(len(entries) if n_entries is None else n_entries)
        + b"".join(entries)
        + b"".join(tensors)
    )
    return head + bytes(-len(head) % alignment) + data
