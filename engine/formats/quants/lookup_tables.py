"""Lookup tables of codes, cached per device.

An entry packs several int8 values into one integer word, so that a single gather yields all of
them. The tables have a few KiB each.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from gguf import quants as reference
from numpy.typing import NDArray
from torch import Tensor

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return the int8 values of every code: (..., w) -> (..., w * values per entry)."""
    words = table.index_select(0, codes.reshape(-1).to(torch.int32))
    return words.view(torch.int8).view(*codes.shape[:-1], codes.shape[-1] * table.itemsize)


def look_up_pairs(table: Tensor, codes: Tensor) -> Tensor:
    """Look up 4-bit codes in a table of `code_pairs`: int8 of the shape of `codes`."""
    return look_up(table, codes.view(torch.int16))


@cache
def code_pairs(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the values of two adjacent bytes with a 4-bit code each, given the 16 values."""
    codes = np.arange(0x0F0F + 1)
    decoded = np.array(values)
    return _packed(np.stack([decoded[codes & 0x0F], decoded[codes >> 8 & 0x0F]], axis=1), device)


@cache
def bits(device: torch.device) -> Tensor:
    """Return the eight bits of each byte as 0 or 1, lowest first."""
    return _packed(_bits(np.arange(256)), device)


@cache
def signs(device: torch.device) -> Tensor:
    """Return the eight bits of each byte as +1 (clear) or -1 (set), lowest first."""
    return _packed(1 - 2 * _bits(np.arange(256)), device)


@cache
def even_signs(device: torch.device) -> Tensor:
    """Return eight signs of each 7-bit code; the eighth makes the number of minus signs even."""
    low = _bits(np.arange(128))[:, :7]
    eighth = low.sum(axis=1, keepdims=True) % 2
    return _packed(1 - 2 * np.concatenate([low, eighth], axis=1), device)


@cache
def two_bit_codes(offset: int, device: torch.device) -> Tensor:
    """Return the four 2-bit codes of each byte plus `offset`, lowest first."""
    codes = np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3
    return _packed(codes + offset, device)


@cache
def grid(name: str, device: torch.device) -> Tensor:
    """Return the grid of an IQ2 or IQ3 type: four or eight magnitudes per entry."""
    return _packed(_reference_grid(name), device)


@cache
def shifted_ternary_grid(device: torch.device) -> Tensor:
    """Return the grid of the IQ1 types in eighths: plus one, then (from 2048 on) minus one."""
    eighths = 8 * _reference_grid("IQ1_S")
    return _packed(np.concatenate([eighths + 1, eighths - 1]), device)


def _reference_grid(name: str) -> NDArray[Any]:
    kind = getattr(reference, name)
    kind.init_grid()
    values: NDArray[Any] = kind.grid.reshape(kind.grid_shape)
    return values


def _bits(numbers: NDArray[Any]) -> NDArray[Any]:
    return numbers[:, None] >> np.arange(8) & 1


def _packed(rows: NDArray[Any], device: torch.device) -> Tensor:
    """Pack each row of two, four or eight small integers into one word."""
    values = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int8))
    return values.view(_WORDS[rows.shape[1]]).reshape(-1).to(device)
