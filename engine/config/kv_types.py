"""Types in which a KV cache stores keys and values."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""Types in which keys, or values, can be stored."""


class KVTypes(NamedTuple):
    """The types of a KV cache.

    Attributes:
        k: type of the keys, one of `KV_TYPES`.
        v: type of the values, likewise.
    """

    k: str
    v: str

    def __str__(self) -> str:
        """Return the text that `kv_types` reads: one type where both are the same."""
        return self.k if self.k == self.v else f"{self.k}/{self.v}"


@cache
def kv_types(text: str) -> KVTypes:
    """Read a KV type: one type for both, or those of keys and values with a slash between.

    Raises:
        ValueError: it is neither.
    """
    k, _, v = text.partition("/")
    found = KVTypes(k, v or k)
    if not set(found) <= set(KV_TYPES) or text.endswith("/"):
        raise ValueError(text)
    return found
