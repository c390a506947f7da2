"""Format of a state file: the tensors that it must have for a model, and checks of its header.

The format is safetensors: the length of a JSON header as u64, the header, and the tensors' bytes
one after another, all little-endian. Tensors are as a single rank would have them: `tokens` (I32,
or I64 where there are tokens of pictures, see `engine.vision.images.placed`);
for each layer `N.k` and `N.v` with all key-value heads, (n_head_kv, positions, width) in the types
of the cache, blocks as bytes; for each recurrent layer its tensors in F32 with all units in order,
and as `N.saved.…` the saved ones, to which it can go back. N counts the layers that have a state.
Layers with a window have only the positions that are seen from the end.

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
from engine.formats.gguf.tensors import row_bytes
from engine.model.forward.pages import PAGE
from engine.model.forward.state import KV_INFO, KVState, State, windows_of
from engine.vision.images.placed import FIRST_ID

if TYPE_CHECKING:
    from engine.formats.gguf.companions import Direction
    from engine.model.forward.pages import AttentionWindow
    from engine.model.layers.module import Slot

FORMAT, VERSION = "tandem state", "2"
MAX_TOKENS = 1 << 24
"""Largest number of tokens of a file, which are read at once; no context has more."""

MAX_HEADER = 16 << 20
"""Largest number of bytes of the JSON; a thousand layers need a few hundred KiB."""

LENGTH_BYTES = 8
DTYPES = {"f32": ("F32", 4), "f16": ("F16", 2), "bf16": ("BF16", 2)}
BLOCKS = ("U8", 1)
"""Safetensors type and element size of KV types that consist of GGML blocks: bytes."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The tokens that a state file stands for.

    Attributes:
        ids: ids of the cached tokens, from the first one on.
        start: first position whose keys and values are in the file; 0 for models with recurrent
            states.
        n_saved: number of tokens that the saved recurrent states stand for; 0 without any.
        firsts: first position that is in the file, for each group of layers with the same
            window, in the order of `windows_of`.
    """

    ids: Sequence[int]
    start: int = 0
    n_saved: int = 0
    firsts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a state file.

    Attributes:
        size: number of bytes of an element.
        state: index of the layer among those that have a state; -1 for the tokens.
        tensor: name of the tensor within its layer, such as "k".
        saved: whether it is a saved recurrent state, to which the layer can go back.
        group: number of the group of a layer with keys and values, whose second dimension is the
            positions; -1 for others.
        first: first of these positions.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    state: int = -1
    tensor: str = ""
    saved: bool = False
    group: int = -1
    first: int = 0

    @property
    def n_bytes(self) -> int:
        """Number of bytes of the tensor."""
        return self.size * prod(self.shape)


def tokens_entry(n: int, *, has_pictures: bool) -> Entry:
    """Return the tensor of a file's n tokens."""
    return Entry("tokens", *(("I64", (n,), 8) if has_pictures else ("I32", (n,), 4)))


def has_pictures(ids: Sequence[int]) -> bool:
    """Return whether some tokens are of images."""
    return max(ids, default=0) >= FIRST_ID


def entries(states: Sequence[State], kv_type: str, contents: Contents) -> list[Entry]:
    """Return the tensors that a file of `contents` has for a model with `states`, in order."""
    found = [tokens_entry(len(contents.ids), has_pictures=has_pictures(contents.ids))]
    windows = windows_of(states)
    for index, state in enumerate(states):
        if isinstance(state, KVState):
            types = state.held_types(kv_type)
            group = windows.index(state.window)
            first = contents.firsts[group]
            rows_of = {"k": (types.k, state.head_dim_k), "v": (types.v, state.head_dim_v)}
            for tensor, (cut,) in state.cuts().items():
                held, dim = rows_of[tensor]
                dtype, size = DTYPES.get(held, BLOCKS)
                width = row_bytes(KV_INFO[held], dim) // size
                name, n = f"{index}.{tensor}", len(contents.ids) - first
                rows = (cut.total, n, width)
                found.append(Entry(name, dtype, rows, size, index, tensor, False, group, first))
            continue
        for saved in (False, True) if contents.n_saved else (False,):
            for tensor, shape in state.whole_shapes().items():
                name = f"{index}.saved.{tensor}" if saved else f"{index}.{tensor}"
                found.append(Entry(name, "F32", shape, 4, index, tensor, saved))
    return found


def identity(
    model_hash: str, kv_type: str, slots: Sequence[Slot], directions: Mapping[int, Direction],
    rope: str = "",
) -> dict[str, str]:  # fmt: skip
    """Return the header entries that must match those of the model that loads a state.

    The names of the tensors in use are among them, since they may depend on the length of the
    context (`choose_rope_factors`), and how a load has changed RoPE.
    """
    names = "\n".join([slot.tensor.name for slot in slots] + [rope] * bool(rope))
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
    """Return the first bytes of a state file: the length of the JSON, and the JSON."""
    counts = {
        "start": str(contents.start),
        "n_saved": str(contents.n_saved),
        "firsts": " ".join(map(str, contents.firsts)),
    }
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
    """The header of an open state file.

    Raises:
        StateFileError: the file is no state file, or damaged.
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
        """Return the error that names a problem of this file."""
        return StateFileError(
            self.path,
            f"{self.path.name} is no usable state of a conversation: {problem}.",
            "Without it the conversation is computed again.",
        )

    def check_identity(self, wanted: Mapping[str, str], name: str) -> None:
        """Check that the state belongs to the loaded model, which is called `name`.

        Raises:
            StateFileError: something differs; the message says what.
        """
        if self._about.get("version") != VERSION:
            raise self.broken("another version of Tandem made it")
        kv_type = str(self._about.get("kv_type"))[:20]
        for key, problem, hint in (
            ("model", f"is of another model than {name}", "Load the model that it was saved with."),
            (
                "kv_type",
                f"holds keys and values in {kv_type} and not in {wanted['kv_type']}",
                f"Load the model with the KV type {kv_type}.",
            ),
            (
                "tensors",
                "was made with a context of a length, or RoPE settings, for which the model marks "
                "positions otherwise",
                "Load the model with the context and the RoPE settings that it was saved with.",
            ),
            (
                "steering",
                "was made with other control vectors",
                "Load the model with the control vectors that it was saved with.",
            ),
        ):
            if self._about.get(key) != wanted[key]:
                raise StateFileError(self.path, f"{self.path.name} {problem}.", hint)

    def contents(
        self, file: BinaryIO, n_vocab: int, windows: Sequence[AttentionWindow]
    ) -> Contents:
        """Read the tokens, the first positions and the number of tokens of saved states.

        Args:
            windows: windows of the groups of the model's layers.

        Raises:
            StateFileError: these are impossible, or the model does not have such tokens.
        """
        begin, end = self._span("tokens")
        is_wide = self._table["tokens"].get("dtype") == "I64"
        n = (end - begin) // (8 if is_wide else 4)
        if n > MAX_TOKENS:
            raise self.broken(f"it claims {n} tokens")
        self._check(tokens_entry(n, has_pictures=is_wide))
        file.seek(self._data + begin)
        ids = np.frombuffer(file.read(end - begin), "<i8" if is_wide else "<i4")
        is_known = ((ids >= 0) & (ids < n_vocab)) | (ids >= FIRST_ID)
        if len(ids) != n or not n or not is_known.all():
            raise self.broken("it has tokens that the model does not have")
        start, n_saved = (
            self._count(self._about.get("start")),
            self._count(self._about.get("n_saved")),
        )
        firsts = [self._count(text) for text in str(self._about.get("firsts", "")).split()]
        seen = [max(start, window.first_seen(n)) for window in windows]
        fit = len(firsts) == len(seen) and all(
            start <= first <= most and (first == start or not first % PAGE)
            for first, most in zip(firsts, seen, strict=False)
        )
        if not (fit and start < n and n_saved <= n):
            raise self.broken("its tokens and its positions do not fit together")
        return Contents(ids.tolist(), start, n_saved, firsts)

    def places(self, expected: Sequence[Entry]) -> dict[str, int]:
        """Return where each tensor begins in the file, by name, after a check of all of them.

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
        """Return begin and end of a tensor's bytes, counted from the first tensor's begin.

        Raises:
            StateFileError: the header does not say it, or the bytes lie outside of the file.
        """
        entry = self._table.get(name)
        span = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not isinstance(span, list) or [type(at) for at in span] != [int, int]:
            raise self.broken(f"its header does not say where {name} lies")
        begin, end = span
        if not 0 <= begin <= end <= self._size - self._data:
            raise self.broken("it is truncated, or claims tensors outside of it")
        return begin, end

    def _count(self, text: object) -> int:
        if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 10:
            raise self.broken("one of its counts is none")
        return int(text)
