"""NVIDIA's instructions in kernels, emulated in numpy for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton._C.libtriton import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Words = NDArray[np.int32]
Addresses = NDArray[np.uint64]

LANES = np.arange(4)


class Results:
    """Results of an instruction, in the order of its outputs."""

    def __init__(self, words: list[Words]) -> None:
        self._words = words

    def get_result(self, index: int) -> TensorHandle:
        return TensorHandle(self._words[index], tl.int32)


def loaded(addresses: Addresses, n: int) -> list[Words]:
    """Emulate `ld`, `ld.v2` and `ld.v4`, whose addresses must be multiples of their size."""
    assert not (addresses % (4 * n)).any()
    there = np.ones(addresses.shape, bool)
    other = np.zeros(addresses.shape, np.int32)
    return [interpreter.load(addresses + 4 * word, there, other, np.dtype(np.int32))
            for word in range(n)]  # fmt: skip


def bytes_of(words: Words, kind: type[np.int8] | type[np.uint8]) -> NDArray[np.int32]:
    return np.ascontiguousarray(words)[..., None].view(kind).astype(np.int32)


def dot(kind: type[np.int8] | type[np.uint8], a: Words, b: Words, c: Words) -> Words:
    """Emulate `dp4a`, whose first factors are of this kind."""
    return np.asarray(c + (bytes_of(a, kind) * bytes_of(b, np.int8)).sum(-1), np.int32)


def permuted(a: Words, b: Words, selector: Words) -> Words:
    """Emulate `prmt` without a mode."""
    nibbles = selector[..., None].astype(np.uint32) >> (4 * LANES).astype(np.uint32) & 15
    sources = np.concatenate([bytes_of(a, np.uint8), bytes_of(b, np.uint8)], -1).astype(np.uint8)
    found = np.take_along_axis(sources, (nibbles & 7).astype(np.int64), -1)
    signs = np.where(found >= 128, 255, 0).astype(np.uint8)
    found = np.ascontiguousarray(np.where(nibbles >= 8, signs, found))
    return found.view(np.int32)[..., 0]


def create_inline_asm(
    _: InterpreterBuilder, text: str, constraints: str, handles: list[TensorHandle],
    types: list[object], is_pure: bool, pack: int,
) -> Results:  # fmt: skip
    """Emulate inline assembly; `InterpreterBuilder` lacks this method."""
    n_output = constraints.count("=")
    assert (len(types), len(handles)) == (n_output, constraints.count(",") + 1 - n_output)
    assert pack == 1
    given = [handle.data for handle in handles]
    name = text.split()[0]
    if name.startswith("ld.global.nc"):
        assert name.endswith(".b32" if n_output == 1 else f".v{n_output}.b32")
        return Results(loaded(given[0], n_output))
    instructions: dict[str, Callable[..., Words]] = {
        "dp4a.s32.s32": lambda a, b, c: dot(np.int8, a, b, c),
        "dp4a.u32.s32": lambda a, b, c: dot(np.uint8, a, b, c),
        "prmt.b32": permuted,
    }
    return Results([instructions[name](*given)])


@contextmanager
def emulated() -> Iterator[None]:
    """Let kernels use the instructions above meanwhile."""
    with mock.patch.object(InterpreterBuilder, "create_inline_asm", create_inline_asm, create=True):
        yield
