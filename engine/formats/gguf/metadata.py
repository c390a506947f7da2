"""The metadata of a GGUF file: its key-value section.

Values stay in the header's bytes and are decoded on demand, because a vocabulary has hundreds of
thousands of strings that most readers never need. The bytes are in memory, so they outlive the file
and cannot change.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from struct import Struct
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar, overload

import numpy as np

from engine.errors import InvalidGGUF, Sentence

U32, BOOL, STRING, ARRAY = 4, 7, 8, 9

# Types with a fixed size. A boolean is read as a byte; any value but zero means true.
DTYPES: Final[Mapping[int, np.dtype[Any]]] = {
    kind: np.dtype(code)
    for kind, code in {
        0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 10: "<u8", 11: "<i8",
        6: "<f4", 12: "<f8",
        BOOL: "<u1",
    }.items()
}  # fmt: skip

INTS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})
FLOATS = frozenset({6, 12})

MAX_LAYERS = 1 << 16  # longest list that a single value is repeated to, whatever a file claims
MAX_NAME = 64  # characters in general.architecture

T = TypeVar("T")
D = TypeVar("D")


class _Missing(Enum):
    MISSING = 0


MISSING: Final = _Missing.MISSING

U64: Final = Struct("<Q")


class MetadataValue(NamedTuple):
    """Type and position of a metadata value that has not been decoded yet.

    Attributes:
        kind: GGUF's number for the type, or for the element type if it is an array.
        start: offset of the length (of a string), the first element (of an array), or the value.
        length: number of elements in an array; None for a single value.
    """

    kind: int
    start: int
    length: int | None

    @property
    def type_name(self) -> str:
        """Name of the type for display, such as "uint32" or "string[3]"."""
        if self.kind in DTYPES:
            name = "bool" if self.kind == BOOL else DTYPES[self.kind].name
        else:
            name = "string"
        return name if self.length is None else f"{name}[{self.length}]"


@dataclass(frozen=True, slots=True)
class Store:
    """The bytes of a header, and the position of each metadata value in them."""

    path: Path
    data: bytearray
    values: Mapping[str, MetadataValue]

    def decode(self, value: MetadataValue, limit: int | None = None) -> Any:
        """Return a value as a Python object, with at most `limit` elements or string bytes."""
        if value.kind == STRING:
            return self._decode_text(value, limit)
        n = 1 if value.length is None else value.length
        items = np.frombuffer(self.data, DTYPES[value.kind], n, value.start)[:limit]
        if value.kind == BOOL:
            items = items != 0
        return items.item() if value.length is None else items.tolist()

    def _decode_text(self, value: MetadataValue, limit: int | None) -> str | list[str]:
        if value.length is None:
            return self._string(value.start, limit)
        texts, start = [], value.start
        for _ in range(value.length if limit is None else min(value.length, limit)):
            (n,) = U64.unpack_from(self.data, start)
            texts.append(str(self.data[start + 8 : start + 8 + n], "utf-8", "replace"))
            start += 8 + n
        return texts

    def _string(self, start: int, limit: int | None) -> str:
        (n,) = U64.unpack_from(self.data, start)
        n = n if limit is None else min(n, limit)
        return str(self.data[start + 8 : start + 8 + n], "utf-8", "replace")


class TypedRead(Generic[T]):
    """Callable that reads values of one type, for example `meta.int`.

    Raises:
        InvalidGGUF: the key is missing and there is no default, or its value has another type.
    """

    __slots__ = ("_convert", "_is_array", "_kinds", "_store", "_wanted")

    def __init__(
        self, store: Store, wanted: Sentence, kinds: frozenset[int], convert: Callable[[Any], T], *,
        is_array: bool = False,
    ) -> None:  # fmt: skip
        self._store = store
        self._wanted = wanted
        self._kinds = kinds
        self._convert = convert
        self._is_array = is_array

    @overload
    def __call__(self, key: str) -> T: ...
    @overload
    def __call__(self, key: str, default: D) -> T | D: ...
    def __call__(self, key: str, default: D | Literal[_Missing.MISSING] = MISSING) -> T | D:
        value = self._store.values.get(key)
        if value is None:
            if default is MISSING:
                problem = Sentence("its metadata lacks '{key}'", key=key)
                raise InvalidGGUF(self._store.path, problem)
            return default
        if value.kind not in self._kinds or self._is_array != (value.length is not None):
            problem = Sentence(
                "'{key}' in its metadata is {type} instead of {wanted}",
                key=key, type=value.type_name, wanted=self._wanted,
            )  # fmt: skip
            raise InvalidGGUF(self._store.path, problem)
        return self._convert(self._store.decode(value))


class Metadata:
    """Read-only keys and values of a header.

    `str`, `int`, `float` and `bool` read one value; `strs`, `ints`, `floats` and `bools` read a
    list. If the key is missing, `meta.int(key)` raises `InvalidGGUF` and `meta.int(key, default)`
    returns the default; both raise it if the value has another type. A float may be stored as an
    integer. Bytes that are not UTF-8 become replacement characters.
    """

    def __init__(self, path: Path, data: bytearray, values: Mapping[str, MetadataValue]) -> None:
        store = Store(path, data, values)
        self._store = store
        numbers, text, flag = INTS | FLOATS, frozenset({STRING}), frozenset({BOOL})
        self.str = TypedRead[str](store, Sentence("a string"), text, str)
        self.int = TypedRead[int](store, Sentence("an integer"), INTS, int)
        self.float = TypedRead[float](store, Sentence("a number"), numbers, float)
        self.bool = TypedRead[bool](store, Sentence("true or false"), flag, bool)
        self.strs = TypedRead[list[str]](
            store, Sentence("a list of strings"), text, list, is_array=True
        )
        self.ints = TypedRead[list[int]](
            store, Sentence("a list of integers"), INTS, list, is_array=True
        )
        self.floats = TypedRead[list[float]](
            store, Sentence("a list of numbers"), numbers, _floats, is_array=True
        )
        self.bools = TypedRead[list[bool]](
            store, Sentence("a list of booleans"), flag, list, is_array=True
        )

    def __contains__(self, key: object) -> bool:
        return key in self._store.values

    def __len__(self) -> int:
        return len(self._store.values)

    def keys(self) -> KeysView[str]:
        """Return all keys, in file order."""
        return self._store.values.keys()

    @property
    def path(self) -> Path:
        """File that the header was read from; for a split model, the first part."""
        return self._store.path

    @property
    def data(self) -> bytearray:
        """The header's bytes up to the end of the metadata."""
        return self._store.data

    @property
    def architecture(self) -> str:
        """Architecture, such as "llama", from `general.architecture`.

        Raises:
            InvalidGGUF: the entry is missing or is not a name.
        """
        name = self.str("general.architecture")
        if not (0 < len(name) <= MAX_NAME and name.isprintable()):
            problem = "'general.architecture' in its metadata is not a name"
            raise InvalidGGUF(self._store.path, problem)
        return name

    @overload
    def int_list(self, key: str, n: int) -> list[int]: ...
    @overload
    def int_list(self, key: str, n: int, default: D) -> list[int] | D: ...
    def int_list(
        self, key: str, n: int, default: D | Literal[_Missing.MISSING] = MISSING
    ) -> list[int] | D:
        """Return one integer per layer: a single value repeated, or the first `n` values in a list.

        Raises:
            InvalidGGUF: as for `int`; or the list is shorter than `n`, or `n` is absurdly large.
        """
        if not 0 <= n <= MAX_LAYERS:
            problem = Sentence("it claims to have {n} layers", n=n)
            raise InvalidGGUF(self._store.path, problem)
        value = self._store.values.get(key)
        if value is None and default is not MISSING:
            return default
        if value is None or value.length is None:
            return [self.int(key)] * n
        items = self.ints(key)
        if len(items) < n:
            problem = Sentence(
                "'{key}' in its metadata has {n} entries for {layers} layers",
                key=key, n=len(items), layers=n,
            )  # fmt: skip
            raise InvalidGGUF(self._store.path, problem)
        return items[:n]

    def get(self, key: str, default: Any = None, limit: int | None = None) -> Any:
        """Return a value of any type; an array becomes a list.

        Args:
            limit: maximum number of array elements or string bytes to decode.
        """
        value = self._store.values.get(key)
        return default if value is None else self._store.decode(value, limit)

    def changed(self, values: Mapping[str, int | Sequence[float]]) -> Metadata:
        """Return a copy with some numbers or lists of numbers replaced; new keys are "uint32".

        Raises:
            InvalidGGUF: a number does not fit the existing type.
        """
        data, places = bytearray(self.data), dict(self._store.values)
        for key, value in values.items():
            kind = places[key].kind if key in places else U32
            length = len(value) if isinstance(value, Sequence) else None
            places[key] = MetadataValue(kind, len(data), length)
            try:
                data += np.asarray(value, DTYPES[kind]).tobytes()
            except OverflowError:
                problem = Sentence("'{key}' cannot be {value}", key=key, value=str(value))
                raise InvalidGGUF(self._store.path, problem) from None
        return Metadata(self._store.path, data, places)

    def array_length(self, key: str) -> int | None:
        """Return the number of elements in an array; None if the key is missing or not an array."""
        value = self._store.values.get(key)
        return None if value is None else value.length

    def describe(self, key: str, width: int = 60) -> str:
        """Return a short one-line description of a value; long arrays are not decoded."""
        value = self._store.values[key]
        if value.length is not None:
            some = self._store.decode(value, limit=3)
            items = [_shorten(repr(item), width // 3) for item in some]
            more = ["…"] if value.length > len(some) else []
            return f"{value.type_name} [{', '.join(items + more)}]"
        if value.kind == STRING:
            return _shorten(repr(self._store.decode(value, limit=4 * width)), width)
        return str(self._store.decode(value))


def _floats(items: list[float]) -> list[float]:
    return [float(item) for item in items]


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
