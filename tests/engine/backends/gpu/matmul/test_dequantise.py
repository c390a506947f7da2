"""Dequantised rows of planes equal the file's, bit for bit."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine.backends.cpu.file_packing import pack_rows
from engine.backends.cpu.worker import Worker
from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches
from engine.backends.gpu.matmul.dequant_gemm import dequantise_rows, look_up
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.dequantise import dequantise
from engine.formats.quants.layout import LAYOUTS, Extent, n_tiles
from tests.bench.random_blocks import random_tensor
from tests.helpers.planes import as_on_a_gpu

N_ROWS, N_COLUMNS = 37, 768

every_type = pytest.mark.parametrize("number", LAYOUTS, ids=lambda n: TYPES[n].name)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(1, 1)
    yield worker
    worker.close()


@pytest.fixture(autouse=True)
def any_numbers() -> Iterator[None]:
    """Let numpy compute with infinities and NaNs, which random bytes contain."""
    with np.errstate(all="ignore"):
        yield


def random_rows(number: int) -> np.ndarray:
    """Return rows of random bytes, also in scales."""
    info = TYPES[number]
    shape = (N_ROWS, N_COLUMNS // info.block_size * info.type_size)
    return np.random.default_rng(int(number)).integers(0, 256, shape, np.uint8)


def finite_rows(number: int) -> np.ndarray:
    rng = np.random.default_rng(int(number))
    return random_tensor(number, (N_ROWS, N_COLUMNS), 0.5, rng).reshape(N_ROWS, -1)


def packed(raw: np.ndarray, number: int, extent: Extent, worker: Worker) -> Tensor:
    planes = torch.zeros(n_tiles(len(raw)), extent.tile_bytes(LAYOUTS[number]), dtype=torch.uint8)
    pack_rows(raw, number, extent, planes, 0, worker)
    return as_on_a_gpu(planes, number, extent)


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
    """Assert some rows in F32, and rows that are looked up."""
    raw, extent = random_rows(number), Extent.of(start, stop)
    planes = packed(raw, number, extent, worker).to(device)
    wanted = weights(raw, number, start, stop)
    found = dequantise_rows(planes, number, extent, N_ROWS, first, n, torch.float32)
    assert_same_bits(found, wanted[first : first + n])
    ids = torch.tensor([36, -1, 3, 37, -(1 << 40)], device=device)
    expected = torch.zeros(len(ids), stop - start)
    expected[[0, 2]] = wanted[[36, 3]]
    assert_same_bits(look_up(planes, number, extent, N_ROWS, ids), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stop", [256, 250])
def test_short_numbers_are_rounded(
    dtype: torch.dtype, stop: int, worker: Worker, device: str
) -> None:
    """They are rounded to the nearest; Triton's interpreter truncates to BF16."""
    raw, extent = finite_rows(Kind.Q6_K), Extent.of(32, stop)
    planes = packed(raw, Kind.Q6_K, extent, worker).to(device)
    wanted = weights(raw, Kind.Q6_K, 32, stop)
    out = torch.empty(20, extent.n_columns, dtype=dtype, device=device)
    found = dequantise_rows(planes, Kind.Q6_K, extent, N_ROWS, 3, 20, dtype, out)
    assert found is out
    if dtype == torch.float16 or device == "cuda":
        assert_same_bits(found, wanted[3:23].to(dtype))
    else:
        torch.testing.assert_close(found.float(), wanted[3:23], rtol=2**-7, atol=0.0)


def test_one_of_several_matrices(worker: Worker, device: str) -> None:
    raw, extent = finite_rows(Kind.Q4_K), Extent.of(64, 256)
    one = packed(raw, Kind.Q4_K, extent, worker)
    planes = torch.stack([torch.zeros_like(one), one]).to(device)
    wanted = weights(raw, Kind.Q4_K, 64, 256)
    found = dequantise_rows(planes[1], Kind.Q4_K, extent, N_ROWS, 0, N_ROWS, torch.float32)
    assert_same_bits(found, wanted)
    ids = torch.tensor([2], dtype=torch.int32, device=device)
    assert_same_bits(look_up(planes[1], Kind.Q4_K, extent, N_ROWS, ids), wanted[[2]])


def test_tensors_without_memory() -> None:
    extent = Extent.of(100, 4000)
    tile_bytes = extent.tile_bytes(LAYOUTS[Kind.Q4_K])
    planes = torch.empty(n_tiles(500), tile_bytes, dtype=torch.uint8, device="meta")
    starts: list[KernelLaunch] = []
    with intercept_launches(lambda start: bool(starts.append(start))):
        found = dequantise_rows(planes, Kind.Q4_K, extent, 500, 40, 100, torch.float16)
        ids = torch.zeros(3, dtype=torch.int64, device="meta")
        other = look_up(planes, Kind.Q4_K, extent, 500, ids)
        look_up(planes, Kind.Q4_K, extent, 500, ids[:0])
    assert (found.shape, found.dtype, found.device.type) == ((100, 3900), torch.float16, "meta")
    assert (other.shape, other.dtype, other.device.type) == ((3, 3900), torch.float32, "meta")
    assert [start.grid for start in starts] == [(7, 16), (3, 4)]
