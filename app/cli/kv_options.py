"""The options that choose the types of the KV cache."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from engine import KV_TYPES, KVTypes, kv_types

BOTH, OF_KEYS, OF_VALUES = (
    ("--kv-type", "--cache-type"), ("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")
)  # fmt: skip
"""Names of the options for both types, for that of keys, and for that of values."""


def add_kv_types(group: argparse._ArgumentGroup) -> None:
    """Add the options of a command that loads one model."""
    group.add_argument(*BOTH, choices=KV_TYPES, help="number type of the KV cache (default: f16)")
    group.add_argument(*OF_KEYS, choices=KV_TYPES, help="type of the keys alone")
    group.add_argument(*OF_VALUES, choices=KV_TYPES, help="type of the values alone")


def given_kv_type(args: argparse.Namespace, base: str) -> str:
    """Return the KV type that options ask for; what none of them says is that of `base`."""
    k, v = kv_types(args.kv_type or base)
    return str(KVTypes(args.cache_type_k or k, args.cache_type_v or v))


def add_lists_of_kv_types(add: Callable[[tuple[str, ...], str], Any]) -> None:
    """Add the options of a command that tries several; `add` makes one of names and a help."""
    add(BOTH, f"{', '.join(KV_TYPES)} (default: f16)")
    add(OF_KEYS, "types of the keys alone")
    add(OF_VALUES, "types of the values alone")


def crossed_kv_types(args: argparse.Namespace, base: str) -> Iterator[str]:
    """Yield each KV type that lists of options ask for."""
    for text in args.kv_type or [base]:
        both = kv_types(text)
        for k in args.cache_type_k or [both.k]:
            for v in args.cache_type_v or [both.v]:
                yield str(KVTypes(k, v))


def flags_for(kv_type: str) -> Iterator[tuple[str, str]]:
    """Yield the options, with their values, that ask for a KV type."""
    k, v = kv_types(kv_type)
    if k == v:
        yield BOTH[0], k
    else:
        yield OF_KEYS[1], k
        yield OF_VALUES[1], v
