"""GGUF files taken apart into entries, for the fuzzer to break one by one."""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.helpers import raw_gguf
from tests.helpers.raw_gguf import ARRAY, BOOL, STRING

FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
"""Codes of `struct` of the kinds of a fixed size."""

FLOATS = (6, 12)

MAX_HOLE = 1 << 40
"""Largest hole in bytes, wherever tensors claim to be."""


@dataclass(frozen=True)
class Entry:
    """A metadata entry, whatever its contents.

    Attributes:
        key: bytes of the key.
        kind: GGUF's number of the type; `ARRAY` for a list.
        value: contents: a number, a text, bytes, or a list of these; what does not fit the kind is
            made to fit.
        item_kind: type of the elements of a list.
        length: number of elements, or bytes of a text, that the file claims; None is the truth.
    """

    key: bytes
    kind: int
    value: Any
    item_kind: int = 0
    length: int | None = None

    @cached_property
    def data(self) -> bytes:
        """Bytes of the entry."""
        if self.kind != ARRAY:
            return raw_gguf.entry(self.key, self.kind, self._payload(self.kind, self.value))
        items = self.value if isinstance(self.value, list) else [self.value]
        head = raw_gguf.u32(self.item_kind)
        head += raw_gguf.u64(len(items) if self.length is None else self.length)
        payload = head + b"".join(packed(self.item_kind, item) for item in items)
        return raw_gguf.entry(self.key, ARRAY, payload)

    def _payload(self, kind: int, value: Any) -> bytes:
        data = packed(kind, value)
        if kind == STRING and self.length is not None:
            return raw_gguf.u64(self.length) + data[8:]
        return data

    @property
    def is_list(self) -> bool:
        """Whether it is a list that can be changed item by item."""
        return self.kind == ARRAY and isinstance(self.value, list)


def packed(kind: int, value: Any) -> bytes:
    """Return the bytes of a value of any type as one of a kind; unknown kinds have eight bytes."""
    if kind in (STRING, ARRAY):
        return raw_gguf.string(value if isinstance(value, str | bytes) else str(value))
    if isinstance(value, list | bytes | str):
        value = len(value)
    code = FORMATS.get(kind, "Q")
    if kind in FLOATS:
        number = float(value)
        if kind == 6 and abs(number) > 3e38:
            number = float(np.float64(number) * np.inf) if number == number else number
        return struct.pack("<" + code, number)
    whole = int(value) if value == value and abs(value) != float("inf") else 0
    if kind == BOOL:
        return bytes([bool(whole)])
    size = struct.calcsize("<" + code)
    return (whole & (1 << 8 * size) - 1).to_bytes(size, "little")


@dataclass(frozen=True)
class Tensor:
    """The entry of a tensor; `sizes` are in the file's order, fastest first."""

    name: bytes
    sizes: tuple[int, ...]
    kind: int
    offset: int

    @cached_property
    def data(self) -> bytes:
        """Bytes of the entry."""
        sizes = [size & (1 << 64) - 1 for size in self.sizes]
        return raw_gguf.tensor(self.name, sizes, self.kind, self.offset & (1 << 64) - 1)


@dataclass
class FileDraft:
    """The contents of one file.

    Attributes:
        weights: the data behind the header.
        hole: number of zeros behind the weights; they take no room on disks.
        n_entries, n_tensors: counts that the file claims; None is the truth.
        alignment: bytes to which the header is filled up.
        edits: changes to the finished bytes, which take and return them.
    """

    entries: list[Entry]
    tensors: list[Tensor]
    weights: bytes = field(repr=False)
    hole: int = 0
    version: int = 3
    n_entries: int | None = None
    n_tensors: int | None = None
    alignment: int = 32
    edits: list[Callable[[bytes], bytes]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "FileDraft":
        """Take a file apart.

        Raises:
            ValueError: it has a type of tensors that the package gguf does not know.
        """
        reader = gguf.GGUFReader(path)
        fields = [f for key, f in reader.fields.items() if not key.startswith("GGUF.")]
        entries = [
            Entry(f.name.encode(), int(f.types[0]), f.contents(), int(f.types[-1])) for f in fields
        ]
        start = reader.data_offset
        tensors = [
            Tensor(
                t.name.encode(),
                tuple(int(n) for n in t.shape),
                int(t.tensor_type),
                int(t.data_offset) - start,
            )
            for t in reader.tensors
        ]
        return cls(entries, tensors, path.read_bytes()[start:])

    def copy(self) -> "FileDraft":
        """Return a copy whose lists can be changed."""
        return replace(
            self, entries=list(self.entries), tensors=list(self.tensors), edits=list(self.edits)
        )

    @property
    def architecture(self) -> str:
        """Name of the architecture as it stands in the file; "" without one."""
        found = (e.value for e in self.entries if e.key == b"general.architecture")
        return next((value for value in found if isinstance(value, str)), "")

    def encoded(self, hollow: bool) -> tuple[bytes, int]:
        """Return the bytes of the file and the size of the hole behind them.

        Args:
            hollow: whether to leave out the weights, so that a header costs little to write.
        """
        head = raw_gguf.gguf(
            [entry.data for entry in self.entries],
            [tensor.data for tensor in self.tensors],
            version=self.version,
            n_entries=self.n_entries,
            n_tensors=self.n_tensors,
            alignment=self.alignment,
        )
        whole = head if hollow else head + self.weights
        for edit in self.edits:
            whole = edit(whole)
        if len(whole) < len(head):
            return whole, 0
        return whole, min(MAX_HOLE, self.hole + len(self.weights) * hollow)


def set_entry(draft: FileDraft, rng: random.Random, entry: Entry) -> None:
    """Put an entry in the place of the one with its key, or anywhere."""
    for index, other in enumerate(draft.entries):
        if other.key == entry.key:
            draft.entries[index] = entry
            return
    draft.entries.insert(rng.randrange(len(draft.entries) + 1), entry)
