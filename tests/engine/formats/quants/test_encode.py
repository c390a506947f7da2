"""Quantisation against the gguf package, byte for byte."""

import numpy as np
import pytest
import torch
from gguf import quants as reference
from gguf.constants import GGMLQuantizationType

from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.dequantise import dequantise
from engine.formats.quants.encode import WRITERS, quantise

every_type = pytest.mark.parametrize("number", WRITERS, ids=lambda number: TYPES[number].name)


@every_type
@pytest.mark.parametrize("largest", [1, 8, 127, 300])
def test_ties_are_stored_as_the_gguf_package_does(number: int, largest: int) -> None:
    """Multiples of a half: several largest numbers of both signs, zeros, values between codes."""
    rng = np.random.default_rng(largest)
    rows = rng.integers(-largest, largest, (300, 64), endpoint=True).astype(np.float32) / 2
    rows[0], rows[1, :32] = 0, 0
    rows[2], rows[3] = rows[2] * np.float32(1e-6), rows[3] * np.float32(1e4)
    assert_same_bytes(rows, number)


@every_type
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3])
def test_random_rows_are_stored_as_the_gguf_package_does(number: int, scale: float) -> None:
    rows = np.random.default_rng(1).normal(0, scale, (500, 5, 96)).astype(np.float32)
    assert_same_bytes(rows, number)


@every_type
def test_halves_are_rounded_away_from_zero(number: int) -> None:
    """A largest number of 127 (or -8) makes the scale one, so that codes are the numbers."""
    rows = np.arange(-16, 16, dtype=np.float32)[None] / 2
    rows[0, 0] = {"Q8_0": 127, "Q4_0": -8}[TYPES[number].name]
    assert_same_bytes(rows, number)
    stored = quantise(torch.from_numpy(rows), number)
    back = dequantise(stored, number)[0].tolist()
    assert back[1:4] == {"Q8_0": [-8, -7, -7], "Q4_0": [-7, -7, -6]}[TYPES[number].name]


def assert_same_bytes(rows: np.ndarray, number: int) -> None:
    with np.errstate(all="ignore"):
        wanted = reference.quantize(rows, GGMLQuantizationType(number))
    got = quantise(torch.from_numpy(rows), number)
    assert got.dtype == torch.uint8
    assert got.shape == wanted.shape
    assert got.numpy().tobytes() == wanted.tobytes()


@every_type
def test_strided_rows_are_taken(number: int) -> None:
    x = torch.randn(7, 3, 64, generator=torch.Generator().manual_seed(0))
    assert quantise(x.transpose(0, 1), number).equal(quantise(x, number).transpose(0, 1))


@pytest.mark.parametrize(
    ("x", "number", "problem"),
    [
        (torch.zeros(2, 48), 8, "Q8_0 is made of F32 rows in blocks of 32"),
        (torch.zeros(2, 32, dtype=torch.float16), 2, "Q4_0 is made of F32 rows"),
        (torch.tensor(1.0), 8, "Q8_0 is made of F32 rows"),
        (torch.zeros(32), 12, "type 12 cannot be written"),
    ],
)
def test_what_cannot_be_stored_is_refused(x: torch.Tensor, number: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        quantise(x, number)
