"""The layout of a state file: what it must have for a model, and whether it has.

The format is safetensors: the length of a JSON header as u64, the header, and the tensors' bytes
one after another, all little-endian. Tensors are as a single rank would have them: `tokens` (I32);
for each layer `N.k` and `N.v` with all key-value heads, (n_head_kv, positions, width) in the type
of the cache, blocks as bytes; for each recurrent layer its tensors in F32 with all units in order,
and as `N.saved.…` those that it can go back to. N counts the layers that remember something.

A file is untrusted: everything in its header is checked before any of its tensors is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from engine.errors import StateFileError
from engine.forward.state import KV_INFO, KVState, State
from engine.gguf.types import row_bytes

if TYPE_CHECKING:
    from engine.layers.module import Slot
    from engine.runtime.control_vectors import Direction

FORMAT, VERSION = "tandem state", "1"
MAX_TOKENS = 1 << 24
"""More than any context; they are read at once."""

MAX_HEADER = 16 << 20
"""Bytes of the JSON; that of a thousand layers has a few hundred KiB."""

LENGTH_BYTES = 8
DTYPES = {"f32": ("F32", 4), "f16": ("F16", 2), "bf16": ("BF16", 2)}
BLOCKS = ("U8", 1)
"""KV types of GGML blocks, as bytes."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file is about.

    Attributes:
        ids: the tokens in the cache, from the first one on.
        start: positions before it are not in the file; 0 for models with recurrent states.
        n_saved: of how many of the tokens the recurrent states are that it can go back to; 0 for
            none.
    """

    ids: Sequence[int]
    start: int = 0
    n_saved: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    Attributes:
        size: bytes of an element.
        state: the index of the layer among those that remember something; -1 for the tokens.
        tensor: its name among the tensors of that layer.
        saved: it is what the layer can go back to.
        has_positions: its second dimension are positions: they are keys or values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    state: int = -1
    tensor: str = ""
    saved: bool = False
    has_positions: bool = False

    @property
    def n_bytes(self) -> int:
        return self.size * prod(self.shape)


def entries(states: Sequence[State], kv_type: str, contents: Contents) -> list[Entry]:
    """The tensors that a file of `contents` has for a model that remembers `states`, in order."""
    found = [Entry("tokens", "I32", (len(contents.ids),), 4)]
    n_positions = len(contents.ids) - contents.start
    dtype, size = DTYPES.get(kv_type, BLOCKS)
    for index, state in enumerate(states):
        if isinstance(state, KVState):
            dims = {"k": state.head_dim_k, "v": state.head_dim_v}
            for tensor, (cut,) in state.cuts().items():
                width = row_bytes(KV_INFO[kv_type], dims[tensor]) // size
                name, rows = f"{index}.{tensor}", (cut.total, n_positions, width)
                found.append(Entry(name, dtype, rows, size, index, tensor, has_positions=True))
            continue
        for saved in (False, True) if contents.n_saved else (False,):
            for tensor, shape in state.whole_shapes().items():
                name = f"{index}.saved.{tensor}" if saved else f"{index}.{tensor}"
                found.append(Entry(name, "F32", shape, 4, index, tensor, saved))
    return found


def identity(
    model_hash: str, kv_type: str, slots: Sequence[Slot], directions: Mapping[int, Direction]
) -> dict[str, str]:
    """What must be the same for a state to mean the same.

    Which tensors a model uses may depend on the length of its context (`choose_rope_factors`).
    """
    names = "\n".join(slot.tensor.name for slot in slots)
    steering = hashlib.sha256()
    for layer, direction in sorted(directions.items()):
        steering.update(repr(layer).encode() + direction.tobytes())
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": model_hash,
        "kv_type": kv_type,
        "tensors": hashlib.sha256(names.encode()).hexdigest(),
        "steering": steering.hexdigest() if directions else "",
    }


def header(found: Sequence[Entry], about: Mapping[str, str], contents: Contents) -> bytes:
    """The first bytes of a file."""
    counts = {"start": str(contents.start), "n_saved": str(contents.n_saved)}
    table: dict[str, Any] = {"__metadata__": {**about, **counts}}
    begin = 0
    for entry in found:
        end = begin + entry.n_bytes
        table[entry.name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end],
        }  # fmt: skip
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


class StateHeader:
    """The header of an open file.

    Raises:
        StateFileError: it is no state file, or damaged.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._size = os.fstat(file.fileno()).st_size
        n_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        self._data = LENGTH_BYTES + n_bytes
        if not 2 <= n_bytes <= min(MAX_HEADER, self._size - LENGTH_BYTES):
            raise self.broken("its header has an impossible length")
        try:
            table = json.loads(file.read(n_bytes))
        except (ValueError, RecursionError):
            raise self.broken("its header is no JSON") from None
        about = table.pop("__metadata__", None) if isinstance(table, dict) else None
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise self.broken("its header has none of what belongs there")
        self._table: dict[str, Any] = table
        self._about: dict[str, Any] = about

    def broken(self, problem: str) -> StateFileError:
        return StateFileError(
            self.path,
            f"{self.path.name} is no usable state of a conversation: {problem}.",
            "Without it the conversation is computed again.",
        )

    def check_identity(self, wanted: Mapping[str, str], name: str) -> None:
        """Make sure that the state means the same for a model that is called `name`.

        Raises:
            StateFileError: says what differs.
        """
        if self._about.get("version") != VERSION:
            raise self.broken("another version of Tandem made it")
        kv_type = str(self._about.get("kv_type"))[:10]
        for key, problem, hint in (
            ("model", f"is of another model than {name}", "Load the model that it was saved with."),
            (
                "kv_type",
                f"holds keys and values in {kv_type} and not in {wanted['kv_type']}",
                f"Load the model with the KV type {kv_type}.",
            ),
            (
                "tensors",
                "was made with a context of a length for which the model marks positions otherwise",
                "Load the model with the context that it was saved with.",
            ),
            (
                "steering",
                "was made with other control vectors",
                "Load the model with the control vectors that it was saved with.",
            ),
        ):
            if self._about.get(key) != wanted[key]:
                raise StateFileError(self.path, f"{self.path.name} {problem}.", hint)

    def contents(self, file: BinaryIO, n_vocab: int) -> Contents:
        """Read the tokens, and what else decides which tensors there must be.

        Raises:
            StateFileError: they cannot be right.
        """
        begin, end = self._span("tokens")
        n = (end - begin) // 4
        if n > MAX_TOKENS:
            raise self.broken(f"it claims {n} tokens")
        self._check(Entry("tokens", "I32", (n,), 4))
        file.seek(self._data + begin)
        ids = np.frombuffer(file.read(end - begin), "<i4")
        if len(ids) != n or not n or ids.min() < 0 or ids.max() >= n_vocab:
            raise self.broken("it has tokens that the model does not have")
        start, n_saved = self._count("start"), self._count("n_saved")
        if not (start < n and n_saved <= n):
            raise self.broken("its tokens and its positions do not fit together")
        return Contents(ids.tolist(), start, n_saved)

    def places(self, expected: Sequence[Entry]) -> dict[str, int]:
        """Where each tensor begins in the file, once all of them are found to be in order.

        Raises:
            StateFileError: tensors are missing, misshapen, overlap or leave the file.
        """
        if set(self._table) != {entry.name for entry in expected}:
            raise self.broken("it does not have the tensors of this model")
        for entry in expected:
            self._check(entry)
        at = 0
        for begin, end in sorted(self._span(entry.name) for entry in expected):
            if begin != at:
                raise self.broken("its tensors overlap or have gaps between them")
            at = end
        if self._data + at != self._size:
            raise self.broken("it is truncated, or longer than its tensors")
        return {entry.name: self._data + self._span(entry.name)[0] for entry in expected}

    def _check(self, entry: Entry) -> None:
        found = self._table[entry.name]
        begin, end = self._span(entry.name)
        is_same = found.get("dtype") == entry.dtype and found.get("shape") == list(entry.shape)
        if not is_same or end - begin != entry.n_bytes:
            raise self.broken(f"its tensor {entry.name} is not as this model would have it")

    def _span(self, name: str) -> tuple[int, int]:
        """Where the bytes of a tensor lie, from the first tensor's on; inside the file."""
        entry = self._table.get(name)
        span = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not isinstance(span, list) or [type(at) for at in span] != [int, int]:
            raise self.broken(f"its header does not say where {name} lies")
        begin, end = span
        if not 0 <= begin <= end <= self._size - self._data:
            raise self.broken("it is truncated, or claims tensors outside of it")
        return begin, end

    def _count(self, key: str) -> int:
        text = self._about.get(key)
        if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 10:
            raise self.broken(f"its '{key}' is no count")
        return int(text)
