"""Rows of planes are the numbers of the dequantised file, bit for bit."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine.gguf.types import TYPES
from engine.gpu.rows import dequantised_rows, looked_up
from engine.kernels.extent import Extent, n_tiles
from engine.kernels.layout import LAYOUTS
from engine.ops.packing import _pack
from engine.ops.worker import Worker
from engine.quants import dequantise

N_ROWS, N_COLUMNS = 37, 768

every_type = pytest.mark.parametrize("number", LAYOUTS, ids=lambda n: TYPES[n].name)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(1, 1)
    yield worker
    worker.close()


@pytest.fixture(autouse=True)
def any_numbers() -> Iterator[None]:
    """Random bytes are infinite and no numbers here and there; numpy must not mind."""
    with np.errstate(all="ignore"):
        yield


def random_rows(number: int) -> np.ndarray:
    """Rows of all byte values, also in scales."""
    info = TYPES[number]
    shape = (N_ROWS, N_COLUMNS // info.block_size * info.type_size)
    return np.random.default_rng(int(number)).integers(0, 256, shape, np.uint8)


def packed(raw: np.ndarray, number: int, extent: Extent, worker: Worker) -> Tensor:
    planes = torch.zeros(n_tiles(len(raw)), extent.tile_bytes(LAYOUTS[number]), dtype=torch.uint8)
    _pack(raw, number, extent, planes, 0, worker)
    return planes


def weights(raw: np.ndarray, number: int, start: int, stop: int) -> Tensor:
    return dequantise(torch.from_numpy(raw), number)[:, start:stop].contiguous()


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    found = found.cpu()
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    kind = torch.int32 if found.dtype == torch.float32 else torch.int16
    same = (found.view(kind) == wanted.view(kind)) | (found.isnan() & wanted.isnan())
    assert same.all(), f"{(~same).sum()} of {same.numel()} differ"


@every_type
def test_rows_are_those_of_the_file(number: int, worker: Worker, device: str) -> None:
    assert_rows(number, 5, 20, 3 * 32, 8 * 32, worker, device)


@pytest.mark.parametrize("number", [Kind.Q4_K, Kind.Q6_K, Kind.Q8_0], ids=lambda n: n.name)
@pytest.mark.parametrize(
    ("first", "n", "start", "stop"),
    [(0, 37, 0, N_COLUMNS), (36, 1, 40, 70), (16, 16, 255, 257), (15, 2, 31, 736), (4, 0, 0, 32)],
)
def test_cuts(
    number: int, first: int, n: int, start: int, stop: int, worker: Worker, device: str
) -> None:
    assert_rows(number, first, n, start, stop, worker, device)


def assert_rows(
    number: int, first: int, n: int, start: int, stop: int, worker: Worker, device: str
) -> None:
    """Some rows in F32, and rows that are looked up."""
    raw, extent = random_rows(number), Extent.of(start, stop)
    planes = packed(raw, number, extent, worker).to(device)
    wanted = weights(raw, number, start, stop)
    found = dequantised_rows(planes, number, extent, N_ROWS, first, n, torch.float32)
    assert_same_bits(found, wanted[first : first + n])
    ids = torch.tensor([36, -1, 3, 37, -(1 << 40)], device=device)
    expected = torch.zeros(len(ids), stop - start)
    expected[[0, 2]] = wanted[[36, 3]]
    assert_same_bits(looked_up(planes, number, extent, N_ROWS, ids), expected)
