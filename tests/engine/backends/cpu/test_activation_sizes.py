"""Products of quantised matrices and activations of any magnitude, against float64."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine.backends.cpu.file_packing import pack_rows
from engine.backends.cpu.weights import FineWeight, PlaneWeight
from engine.backends.cpu.worker import Worker
from engine.formats.quants.dequantise import QUANTS, dequantise
from engine.formats.quants.layout import LAYOUTS, Extent, n_tiles
from tests.bench.random_blocks import random_tensor
from tests.helpers.tiers import swept

N_ROWS, N_COLUMNS = 37, 768
WHOLE = Extent.of(0, N_COLUMNS)
N_TOKENS = 25
"""Panels of all sizes."""

MAX_ERROR = {PlaneWeight: 1e-4, FineWeight: 1e-7}
"""Maximum NMSE of products with activations of one and of two bytes."""


QUICK = (Kind.Q8_0, Kind.Q4_1, Kind.Q2_K, Kind.Q4_K, Kind.Q6_K, Kind.MXFP4, Kind.IQ2_XS)
"""A type for each scale format."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(2)
    yield worker
    worker.close()


def name(number: int) -> str:
    return QUANTS[number].name


def activations(size: float) -> Tensor:
    """Return random tokens with this largest magnitude."""
    x = torch.randn(N_TOKENS, N_COLUMNS, generator=torch.Generator().manual_seed(1))
    x = (x / x.abs().max() * size).float()
    x[1] = 0.1 * x[1].abs()  # some types have weights of one sign
    return x


def packed(number: int, worker: Worker) -> tuple[Tensor, Tensor]:
    """Return the planes and the numbers of a random matrix."""
    raw = random_tensor(number, (N_ROWS, N_COLUMNS), 0.02, np.random.default_rng(0))
    raw = raw.reshape(N_ROWS, -1)
    tile_bytes = LAYOUTS[number].tile_bytes(WHOLE.n_blocks, WHOLE.skip)
    planes = torch.zeros(n_tiles(N_ROWS), tile_bytes, dtype=torch.uint8)
    pack_rows(raw, number, WHOLE, planes, 0, worker)
    return planes, dequantise(torch.from_numpy(raw), number)


@pytest.mark.parametrize("form", MAX_ERROR)
@pytest.mark.parametrize("number", swept(LAYOUTS, quick=QUICK), ids=name)
def test_finite_results_do_not_overflow(
    worker: Worker, number: int, form: type[PlaneWeight]
) -> None:
    """Sums neither overflow nor underflow on the way."""
    planes, w = packed(number, worker)
    weight = form(planes, number, N_ROWS, WHOLE, worker)
    for size in (1e-25, 1.0, 1e33, 1e36, 3e38):
        x = activations(size)
        exact = x.double() @ w.double().T / size
        assert exact.abs().max() * size < 3.4e38
        for n in (1, N_TOKENS):
            off = weight.matmul(x[:n]).double() / size - exact[:n]
            assert off.square().sum() < MAX_ERROR[form] * exact[:n].square().sum(), (size, n)
