"""Format of state files: which tensors a model's file has, and checks of the header.

The format is safetensors: the length of a JSON header as u64, the header, and the tensors' bytes,
all little-endian. Tensors are as a single rank would have them: `tokens` (I32, or I64 if there are
image tokens; see `engine.vision.images.placed`); for each attention layer, `N.k` and `N.v` with all
key-value heads, (n_head_kv, positions, width) in the cache's types, with blocks as bytes; for each
recurrent layer, its tensors in F32 with all units in order, and its checkpoint as `N.saved.…`. N is
the index among layers that have a state. Layers with an attention window only have the positions
that are visible from the end.

Files are untrusted, so the whole header is checked before any tensor is used.
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

from engine.errors import Sentence, StateFileError
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
"""Maximum number of tokens in a file, as they are read together; no context has more."""

MAX_HEADER = 16 << 20
"""Maximum size of the JSON in bytes; a thousand layers need a few hundred KiB."""

LENGTH_BYTES = 8
DTYPES = {"f32": ("F32", 4), "f16": ("F16", 2), "bf16": ("BF16", 2)}
BLOCKS = ("U8", 1)
"""Safetensors type and element size for KV types with GGML blocks, stored as bytes."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The tokens of a state file.

    Attributes:
        ids: ids of the cached tokens, starting with the first.
        start: first position whose keys and values are in the file; 0 for models with recurrent
            states.
        n_saved: number of tokens in the checkpoint of recurrent states; 0 if there is none.
        firsts: for each group of layers with the same window, the first position in the file, in
            the order of `windows_of`.
    """

    ids: Sequence[int]
    start: int = 0
    n_saved: int = 0
    firsts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a state file.

    Attributes:
        size: bytes per element.
        state: index of the layer among those with a state; -1 for the tokens.
        tensor: name of the tensor within its layer, such as "k".
        saved: whether it belongs to a checkpoint of recurrent states.
        group: index of the layer's group if it has keys and values, otherwise -1.
        first: first of its positions, which are the second dimension.
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
        """Size of the tensor in bytes."""
        return self.size * prod(self.shape)


def tokens_entry(n: int, *, has_images: bool) -> Entry:
    """Return the entry for a file's n tokens."""
    return Entry("tokens", *(("I64", (n,), 8) if has_images else ("I32", (n,), 4)))


def has_images(ids: Sequence[int]) -> bool:
    """Return whether there are image tokens."""
    return max(ids, default=0) >= FIRST_ID


def entries(states: Sequence[State], kv_type: str, contents: Contents) -> list[Entry]:
    """Return the tensors, in order, that a file with `contents` has for a model with `states`."""
    found = [tokens_entry(len(contents.ids), has_images=has_images(contents.ids))]
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
    """Return the header entries that must match when a model loads a state.

    They include the names of the tensors in use, which may depend on the context size
    (`choose_rope_factors`), and changed RoPE settings.
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
        StateFileError: the file is damaged or not a state file.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._size = os.fstat(file.fileno()).st_size
        n_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        self._data = LENGTH_BYTES + n_bytes
        if not 2 <= n_bytes <= min(MAX_HEADER, self._size - LENGTH_BYTES):
            raise self.broken(Sentence("its header has an impossible length"))
        try:
            table = json.loads(file.read(n_bytes))
        except (ValueError, RecursionError):
            raise self.broken(Sentence("its header is not JSON")) from None
        about = table.pop("__metadata__", None) if isinstance(table, dict) else None
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise self.broken(Sentence("its header lacks required entries"))
        self._table: dict[str, Any] = table
        self._about: dict[str, Any] = about

    def broken(self, problem: str) -> StateFileError:
        """Return the error for a problem with this file."""
        return StateFileError(
            self.path,
            "{file} is not a usable conversation state: {problem}.",
            "Without it, the conversation is recomputed.",
            file=self.path.name,
            problem=problem,
        )

    def check_identity(self, expected: Mapping[str, str], name: str) -> None:
        """Check that the state belongs to the loaded model, which is called `name`.

        Raises:
            StateFileError: something differs; the message says what.
        """
        if self._about.get("version") != VERSION:
            raise self.broken(Sentence("it was saved by another version of Tandem"))
        kv_type = str(self._about.get("kv_type"))[:20]
        problems = {
            "model": (
                Sentence("it was saved with a model other than {name}", name=name),
                Sentence("Load the model that it was saved with."),
            ),
            "kv_type": (
                Sentence(
                    "its keys and values are {found} instead of {expected}",
                    found=kv_type,
                    expected=expected["kv_type"],
                ),
                Sentence("Load the model with the KV type {kv_type}.", kv_type=kv_type),
            ),
            "tensors": (
                Sentence("it was saved with a different context length or RoPE settings"),
                Sentence("Load the model with the context and RoPE settings it was saved with."),
            ),
            "steering": (
                Sentence("it was saved with different control vectors"),
                Sentence("Load the model with the control vectors that it was saved with."),
            ),
        }
        for key, (problem, hint) in problems.items():
            if self._about.get(key) != expected[key]:
                message = "{file} cannot be used here: {problem}."
                raise StateFileError(self.path, message, hint, file=self.path.name, problem=problem)

    def contents(
        self, file: BinaryIO, n_vocab: int, windows: Sequence[AttentionWindow]
    ) -> Contents:
        """Read the tokens, the first positions and the length of the checkpoint.

        Args:
            windows: attention window of each of the model's layer groups.

        Raises:
            StateFileError: these are impossible, or some tokens are not in the model's vocabulary.
        """
        begin, end = self._span("tokens")
        is_wide = self._table["tokens"].get("dtype") == "I64"
        n = (end - begin) // (8 if is_wide else 4)
        if n > MAX_TOKENS:
            raise self.broken(Sentence("it claims {n} tokens", n=n))
        self._check(tokens_entry(n, has_images=is_wide))
        file.seek(self._data + begin)
        ids = np.frombuffer(file.read(end - begin), "<i8" if is_wide else "<i4")
        is_known = ((ids >= 0) & (ids < n_vocab)) | (ids >= FIRST_ID)
        if len(ids) != n or not n or not is_known.all():
            raise self.broken(Sentence("it has tokens that do not exist in the model"))
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
            raise self.broken(Sentence("its tokens and positions do not match"))
        return Contents(ids.tolist(), start, n_saved, firsts)

    def places(self, expected: Sequence[Entry]) -> dict[str, int]:
        """Return the offset of each tensor in the file, by name, after checking all of them.

        Raises:
            StateFileError: tensors are missing, misshapen, overlap or extend beyond the file.
        """
        if set(self._table) != {entry.name for entry in expected}:
            raise self.broken(Sentence("it does not have the tensors of this model"))
        for entry in expected:
            self._check(entry)
        at = 0
        for begin, end in sorted(self._span(entry.name) for entry in expected):
            if begin != at:
                raise self.broken(Sentence("its tensors overlap or have gaps between them"))
            at = end
        if self._data + at != self._size:
            raise self.broken(Sentence("it is truncated, or longer than its tensors"))
        return {entry.name: self._data + self._span(entry.name)[0] for entry in expected}

    def _check(self, entry: Entry) -> None:
        found = self._table[entry.name]
        begin, end = self._span(entry.name)
        is_same = found.get("dtype") == entry.dtype and found.get("shape") == list(entry.shape)
        if not is_same or end - begin != entry.n_bytes:
            problem = Sentence("its tensor {name} does not match this model", name=entry.name)
            raise self.broken(problem)

    def _span(self, name: str) -> tuple[int, int]:
        entry = self._table.get(name)
        span = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not isinstance(span, list) or [type(at) for at in span] != [int, int]:
            raise self.broken(Sentence("its header does not locate {name}", name=name))
        begin, end = span
        if not 0 <= begin <= end <= self._size - self._data:
            raise self.broken(Sentence("it is truncated, or its tensors extend beyond its end"))
        return begin, end

    def _count(self, text: object) -> int:
        if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 10:
            raise self.broken(Sentence("one of its counts is invalid"))
        return int(text)
