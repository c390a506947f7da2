"""Parser for the header of one GGUF file, versions 2 and 3.

The file is untrusted. Every count, length, type and offset is checked before use, so that any bytes
yield a header or an `EngineError`, in time and memory bounded by `HEADER_LIMIT`.

    "GGUF", version u32, tensor count u64, metadata count u64
    metadata: (key, type u32, value) ...
    tensors:  (name, rank u32, sizes u64 ..., type u32, offset u64) ...
    padding to general.alignment, then the tensors' bytes at their offsets

A string is stored as its length (u64) and its bytes; an array as its element type (u32), its length
(u64) and its elements. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.errors import InvalidGGUF, Sentence, UnsupportedQuant
from engine.formats.gguf.metadata import ARRAY, DTYPES, STRING, U64, Metadata, MetadataValue
from engine.formats.gguf.tensors import TYPES, TensorInfo, check_layout, quote

HEADER_LIMIT: Final = 160 << 20  # bytes; the largest known vocabularies take about 30 MiB

# limits for a header
MAX_KEYS: Final = 1 << 14
MAX_TENSORS: Final = 1 << 16
MAX_ITEMS: Final = 1 << 24  # elements in one array
MAX_STRINGS: Final = 1 << 22  # strings in total; the largest known vocabularies have 800,000
MAX_NAME: Final = (1 << 16) - 1  # bytes in a key or a tensor's name
MAX_DIMS: Final = 4
DEFAULT_ALIGNMENT: Final = 32  # bytes

# Minimum size of an entry: an empty name with its length, then the fixed fields.
MIN_KEY_BYTES: Final = 8 + 4 + 1
MIN_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8

U32: Final = struct.Struct("<I")

OLD_GGML = Sentence("it is in the GGML format used before August 2023")

NOT_GGUF = {
    b"version https://git-lfs": Sentence("it is a Git LFS pointer, not the model itself"),
    b"PK\x03\x04": Sentence("it is a PyTorch or zip archive"),
    b"lmgg": OLD_GGML,
    b"fmgg": OLD_GGML,
    b"tjgg": OLD_GGML,
}


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file: format version, metadata and tensors in file order."""

    version: int
    meta: Metadata
    tensors: tuple[TensorInfo, ...]


class HeaderEndsEarly(InvalidGGUF):
    """Error for a header that continues beyond the given bytes."""


class Cursor:
    """A bounded forward reader of a header."""

    def __init__(self, path: Path, data: bytearray, file_size: int) -> None:
        self.path = path
        self.data = data
        self.file_size = file_size
        self.position = 0
        self.n_strings = 0

    @property
    def remaining(self) -> int:
        """Number of bytes left."""
        return len(self.data) - self.position

    def error(self, problem: Sentence) -> InvalidGGUF:
        """Return an error about this file; `problem` becomes the end of its message."""
        return InvalidGGUF(self.path, problem)

    def truncated(self) -> HeaderEndsEarly:
        """Return the error for a header that ends too early or is too long."""
        problem = Sentence(
            "its header is longer than {size} MiB"
            if self.file_size > len(self.data)
            else "the file is truncated: it ends inside its header",
            size=HEADER_LIMIT >> 20,
        )
        return HeaderEndsEarly(self.path, problem)

    def skip(self, n: int) -> int:
        """Skip `n` bytes and return the position before them."""
        if n > self.remaining:
            raise self.truncated()
        start = self.position
        self.position += n
        return start

    def check_count(self, n: int, most: int, min_bytes: int, problem: Sentence) -> None:
        """Raise an error if `n` entries exceed `most` or cannot fit in the data."""
        if n > most:
            raise self.error(problem)
        if n * min_bytes > self.remaining:
            raise self.truncated()

    def u32(self) -> int:
        """Read an unsigned 32-bit number."""
        value: int = U32.unpack_from(self.data, self.skip(4))[0]
        return value

    def u64(self) -> int:
        """Read an unsigned 64-bit number."""
        value: int = U64.unpack_from(self.data, self.skip(8))[0]
        return value

    def name(self, *, is_key: bool) -> str:
        """Read a metadata key, or a tensor's name if not `is_key`; it must be UTF-8."""
        n = self.u64()
        if n > MAX_NAME:
            raise self.error(
                Sentence(
                    "a metadata key claims to be {n} bytes long"
                    if is_key
                    else "a tensor's name claims to be {n} bytes long",
                    n=n,
                )
            )
        start = self.skip(n)
        try:
            return str(self.data[start : start + n], "utf-8")
        except UnicodeDecodeError:
            problem = Sentence(
                "a metadata key is not valid UTF-8"
                if is_key
                else "a tensor's name is not valid UTF-8"
            )
            raise self.error(problem) from None

    def skip_strings(self, n: int) -> None:
        """Skip `n` strings, at about 5 million per second.

        The loop has no checks; if a length points beyond the data, the next read fails.
        """
        self.n_strings += n
        if self.n_strings > MAX_STRINGS:
            raise self.error(Sentence("its metadata claims to have {n} strings", n=self.n_strings))
        data, position, unpack_from = self.data, self.position, U64.unpack_from
        try:
            for _ in range(n):
                position += unpack_from(data, position)[0] + 8
        except (struct.error, OverflowError):
            raise self.truncated() from None
        if position > len(data):
            raise self.truncated()
        self.position = position


def parse_header(path: Path, data: bytearray, file_size: int) -> Header:
    """Read and check the header of one file.

    Args:
        data: first bytes of the file, at most `HEADER_LIMIT`; cut after the metadata and kept.

    Raises:
        HeaderEndsEarly: the header continues beyond `data`.
        InvalidGGUF: the bytes are malformed, truncated, big-endian or of an unknown version.
        UnsupportedQuant: a tensor's type is unknown.
    """
    cursor = Cursor(path, data, file_size)
    version = _parse_version(cursor)
    n_tensors, n_keys = cursor.u64(), cursor.u64()
    problem = Sentence("it claims to have {n} metadata entries", n=n_keys)
    cursor.check_count(n_keys, MAX_KEYS, MIN_KEY_BYTES, problem)
    values = _parse_values(cursor, n_keys)
    meta = Metadata(path, data, values)
    end = cursor.position
    problem = Sentence("it claims to have {n} tensors", n=n_tensors)
    cursor.check_count(n_tensors, MAX_TENSORS, MIN_TENSOR_BYTES, problem)
    alignment = _alignment(cursor, meta)
    entries = [_parse_tensor(cursor) for _ in range(n_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = check_layout(path, entries, data_start, alignment, file_size)
    del data[end:]
    return Header(version, meta, tensors)


def is_header_whole(data: bytes | bytearray, file_size: int) -> bool:
    """Return whether the first bytes of a file contain its complete header.

    Args:
        data: first bytes of the file; at most `HEADER_LIMIT` count.

    Raises:
        InvalidGGUF: the header is not valid.
        UnsupportedQuant: a tensor's type is unknown.
    """
    try:
        parse_header(Path("The file"), bytearray(data[:HEADER_LIMIT]), file_size)
    except HeaderEndsEarly:
        return False
    return True


def _parse_version(cursor: Cursor) -> int:
    magic = bytes(cursor.data[:32])
    if not magic.startswith(b"GGUF"):
        known = (text for start, text in NOT_GGUF.items() if magic.startswith(start))
        raise cursor.error(next(known, Sentence("it does not begin with 'GGUF'")))
    cursor.skip(4)
    version = cursor.u32()
    if version and version & 0xFFFF == 0:
        raise cursor.error(Sentence("its numbers are big-endian, which only a few servers use"))
    if version not in (2, 3):
        problem = Sentence("its version is {n}, but only 2 and 3 can be read", n=version)
        raise cursor.error(problem)
    return version


def _parse_values(cursor: Cursor, n: int) -> dict[str, MetadataValue]:
    values: dict[str, MetadataValue] = {}
    for _ in range(n):
        key = cursor.name(is_key=True)
        if key in values:
            problem = Sentence("its metadata has the key {key} twice", key=quote(key))
            raise cursor.error(problem)
        values[key] = _locate_value(cursor, key)
    return values


def _locate_value(cursor: Cursor, key: str) -> MetadataValue:
    # the value is skipped without being decoded
    kind, length = cursor.u32(), None
    if kind == ARRAY:
        kind, length = cursor.u32(), cursor.u64()
        if kind == ARRAY:
            problem = "the metadata entry {key} is an array of arrays"
            raise cursor.error(Sentence(problem, key=quote(key)))
        if length > MAX_ITEMS:
            problem = "the metadata entry {key} claims to have {n} elements"
            raise cursor.error(Sentence(problem, key=quote(key), n=length))
    value = MetadataValue(kind, cursor.position, length)
    if kind == STRING:
        cursor.skip_strings(1 if length is None else length)
    elif kind in DTYPES:
        cursor.skip(DTYPES[kind].itemsize * (1 if length is None else length))
    else:
        problem = "the metadata entry {key} has the unknown type {type}"
        raise cursor.error(Sentence(problem, key=quote(key), type=kind))
    return value


def _alignment(cursor: Cursor, meta: Metadata) -> int:
    alignment = meta.int("general.alignment", DEFAULT_ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        problem = "its alignment is {n}, which is not a power of two"
        raise cursor.error(Sentence(problem, n=alignment))
    return alignment


def _parse_tensor(cursor: Cursor) -> TensorInfo:
    # the offset is still relative to the start of the tensor data
    name = cursor.name(is_key=False)
    n_dims = cursor.u32()
    if not 1 <= n_dims <= MAX_DIMS:
        problem = "the tensor {name} has {n} dimensions"
        raise cursor.error(Sentence(problem, name=quote(name), n=n_dims))
    sizes = [cursor.u64() for _ in range(n_dims)]
    number, offset = cursor.u32(), cursor.u64()
    if number not in TYPES:
        type_name = Sentence("type {number}", number=number)
        raise UnsupportedQuant(cursor.path, type_name, quote(name))
    return TensorInfo(name, TYPES[number], tuple(reversed(sizes)), part=0, offset=offset)
