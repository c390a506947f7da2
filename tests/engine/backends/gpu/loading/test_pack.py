"""Planes packed by torch equal the CPU packer's, byte for byte."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.backends.cpu.file_packing import pack_rows
from engine.backends.cpu.worker import Worker
from engine.backends.gpu.loading import weight_loader as packing
from engine.backends.gpu.loading.weight_loader import pack
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.layout import CODED, LAYOUTS, Extent, file_blocks, n_tiles
from tests.bench.random_blocks import random_tensor
from tests.helpers.planes import as_on_a_gpu

N_COLUMNS = 1024
FILLED = 0xA5
"""Value of the planes' bytes before packing, which bytes that are not written must keep."""

every_type = pytest.mark.parametrize("number", LAYOUTS, ids=lambda n: TYPES[n].name)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(1, 1)
    yield worker
    worker.close()


def random_rows(number: int, n: int, n_row: int) -> np.ndarray:
    """Return matrices of random bytes, also in scales, as far as results are numbers."""
    info, rng = TYPES[number], np.random.default_rng(int(number))
    if number in CODED:
        return random_tensor(number, (n * n_row, N_COLUMNS), 0.5, rng).reshape(n, n_row, -1)
    shape = (n, n_row, N_COLUMNS // info.block_size * info.type_size)
    return rng.integers(0, 256, shape, np.uint8)


def covering(raw: np.ndarray, number: int, extent: Extent) -> Tensor:
    """Return the bytes of the file's blocks that cover an extent."""
    info = TYPES[number]
    first, stop = file_blocks(info.block_size, extent)
    return torch.from_numpy(raw[..., first * info.type_size : stop * info.type_size].copy())


def planes_for(number: int, n: int, n_row: int, extent: Extent) -> Tensor:
    shape = (n, n_tiles(n_row), extent.tile_bytes(LAYOUTS[number]))
    return torch.full(shape, FILLED, dtype=torch.uint8)


def assert_packed(
    number: int, n: int, n_row: int, columns: tuple[int, int], goal_row: int,
    worker: Worker, device: str, chunks: Sequence[int] = (),
) -> None:  # fmt: skip
    raw, extent = random_rows(number, n, n_row), Extent.of(*columns)
    wanted = planes_for(number, n, goal_row + n_row, extent)
    found = wanted.to(device, copy=True)
    for matrix, goal in zip(raw, wanted, strict=True):
        pack_rows(matrix, number, extent, goal, goal_row, worker)
    given = covering(raw, number, extent).to(device)
    for rows in torch.split(given, list(chunks) or n_row, dim=1):
        pack(rows, number, extent, found, goal_row)
        goal_row += rows.shape[1]
    assert torch.equal(found.cpu(), as_on_a_gpu(wanted, number, extent))


@every_type
def test_planes_are_those_of_the_cpu(number: int, worker: Worker, device: str) -> None:
    assert_packed(number, 1, 37, (0, N_COLUMNS), 0, worker, device)
    assert_packed(number, 3, 37, (3 * 32 + 16, 20 * 32), 0, worker, device)


@every_type
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (31, 33), (32, 64), (224, 288), (7 * 32, 17 * 32), (800, 1024)]
)
def test_a_cut_may_fall_anywhere(
    number: int, start: int, stop: int, worker: Worker, device: str
) -> None:
    assert_packed(number, 1, 5, (start, stop), 0, worker, device)


@every_type
@pytest.mark.parametrize("goal_row", [1, 16, 31])
def test_rows_come_in_chunks_of_any_size(
    number: int, goal_row: int, worker: Worker, device: str
) -> None:
    chunks = (1, 14, 2, 17, 16)
    assert_packed(number, 2, sum(chunks), (96, 544), goal_row, worker, device, chunks)


@every_type
def test_work_is_done_in_pieces_that_bound_its_memory(
    number: int, worker: Worker, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both rows and matrices are split into pieces."""
    monkeypatch.setattr(packing, "PIECE_WEIGHTS", 20 * N_COLUMNS)
    assert_packed(number, 2, 37, (32, N_COLUMNS), 3, worker, device)
    assert_packed(number, 5, 9, (32, N_COLUMNS), 0, worker, device)


@every_type
def test_the_memory_it_takes_is_bounded(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n_weight = 64 * N_COLUMNS
    monkeypatch.setattr(packing, "PIECE_WEIGHTS", n_weight)
    extent = Extent.of(32, N_COLUMNS)
    raw = covering(random_rows(number, 2, 128), number, extent)
    goal = planes_for(number, 2, 128, extent)
    pack(raw, number, extent, goal)  # creates the cached tables
    with Allocated() as allocated:
        pack(raw, number, extent, goal)
    assert allocated.now == 0
    assert allocated.peak <= packing.WEIGHT_BYTES * n_weight


class Allocated(TorchDispatchMode):
    """Counter of the bytes of all tensors that operations create."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.nbytes and id_of(x) not in given:
                storage = x.untyped_storage()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, n_bytes: int) -> None:
        self.now -= n_bytes


def id_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def test_nothing_to_pack(device: str) -> None:
    extent = Extent.of(0, 64)
    goal = planes_for(Kind.Q8_0, 1, 3, extent).to(device)
    pack(torch.empty(1, 0, 68, dtype=torch.uint8, device=device), Kind.Q8_0, extent, goal, 2)
    assert (goal == FILLED).all()
