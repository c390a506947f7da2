"""Packing straight from a file gives the same planes as from memory, in jobs of any size."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from engine.backends.cpu import file_packing
from engine.backends.cpu.file_packing import FilePacker, pack_rows
from engine.backends.cpu.worker import Worker
from engine.backends.reference.weights import FileReader
from engine.errors import Cancelled, ModelFileError
from engine.formats.gguf.tensor_bytes import OpenPart, TensorBytes
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.layout import LAYOUTS, Extent, n_tiles
from tests.helpers.kernels import random_rows

N_COLUMNS = 1024
FILLED = 0xA5
"""Initial value of the planes' bytes, which rows of other pieces must keep."""


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[int, Worker]]:
    workers = {n: Worker(n) for n in (1, 3)}
    yield workers
    for worker in workers.values():
        worker.close()


@pytest.fixture
def reader() -> Iterator[FileReader]:
    with FileReader() as reader:
        yield reader


@pytest.fixture(autouse=True)
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the sizes of reads, jobs and long rows to a few rows."""
    monkeypatch.setattr(file_packing, "READ_BYTES", 20_000)
    monkeypatch.setattr(file_packing, "MIN_JOB", 50_000)
    monkeypatch.setattr(file_packing, "JOB_S", (1.0, 2.0))


def written(path: Path, rows: np.ndarray) -> TensorBytes:
    """Return rows as a tensor of a file, at some offset."""
    path.write_bytes(b"GGUF!" + rows.tobytes())
    return TensorBytes.of(OpenPart(path), 5, rows.shape)


def planes_for(kind: Kind, extent: Extent, n_rows: int) -> torch.Tensor:
    shape = (n_tiles(n_rows), extent.tile_bytes(LAYOUTS[kind]))
    return torch.full(shape, FILLED, dtype=torch.uint8)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("goal_row", [0, 5])
@pytest.mark.parametrize(("start", "stop"), [(0, 1024), (288, 1024)])
@pytest.mark.parametrize("long_row", [100, 1 << 20])
@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q8_0], ids=lambda kind: kind.name)
def test_rows_of_a_file_become_the_same_planes(
    kind: Kind, long_row: int, start: int, stop: int, goal_row: int, n_threads: int,
    workers: dict[int, Worker], reader: FileReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(file_packing, "LONG_ROW", long_row)
    raw = random_rows(kind, 371, N_COLUMNS)
    size, info = raw.shape[1] // (N_COLUMNS // 32), TYPES[kind]
    begin = start // info.block_size * info.type_size if info.block_size > 32 else start // 32 * 34
    extent = Extent((start // 32) % (info.block_size // 32), (stop - start) // 32, 0, stop - start)
    rows, worker = written(tmp_path / "w", raw)[:, begin:], workers[n_threads]
    wanted, found = (planes_for(kind, extent, goal_row + len(raw)) for _ in range(2))
    pack_rows(raw[:, begin:], kind, extent, wanted, goal_row, worker)
    reported: list[int] = []
    FilePacker(worker, reported.append, reader).pack(rows, kind, extent, found, goal_row, size)
    assert torch.equal(found, wanted)
    assert sum(reported) == len(raw) * size
    assert len(reported) > 2


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("has_pread", [True, False])
@pytest.mark.parametrize("columns", [slice(0, 1024), slice(3, 900)])
def test_plain_rows_are_copied(
    columns: slice, has_pread: bool, n_threads: int, workers: dict[int, Worker],
    reader: FileReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(file_packing, "LARGE_PAGE", 64 << 10)
    if not has_pread:
        monkeypatch.setattr(file_packing, "read_address", lambda: 0)
    raw = np.random.default_rng(1).integers(0, 256, (371, 1024), np.uint8)
    rows, reported = written(tmp_path / "w", raw)[:, columns], list[int]()
    around = torch.full((raw.size + 5000,), FILLED, dtype=torch.uint8)
    goal = around[1001 : 1001 + rows.nbytes].view(rows.shape)
    FilePacker(workers[n_threads], reported.append, reader).copy(rows, goal)
    assert np.array_equal(goal.numpy(), raw[:, columns])
    assert (around[:1001] == FILLED).all()
    assert (around[1001 + rows.nbytes :] == FILLED).all()
    assert sum(reported) == rows.nbytes
    assert len(reported) > 2


def test_systems_without_pread_have_the_same_planes(
    workers: dict[int, Worker], reader: FileReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, extent = random_rows(Kind.Q6_K, 371, N_COLUMNS), Extent.of(0, N_COLUMNS)
    rows, found = written(tmp_path / "w", raw), []
    for address in (file_packing.read_address(), 0):
        monkeypatch.setattr(file_packing, "read_address", lambda known=address: known)
        found.append(planes_for(Kind.Q6_K, extent, len(raw)))
        packer = FilePacker(workers[3], lambda n: None, reader)
        packer.pack(rows, Kind.Q6_K, extent, found[-1], 0, 1)
    assert torch.equal(*found)


def test_a_truncated_file_is_an_error(
    workers: dict[int, Worker], reader: FileReader, tmp_path: Path
) -> None:
    raw, extent = random_rows(Kind.Q4_K, 371, N_COLUMNS), Extent.of(0, N_COLUMNS)
    rows = written(tmp_path / "w", raw)
    (tmp_path / "w").write_bytes(bytes(100_000))
    packer = FilePacker(workers[3], lambda n: None, reader)
    with pytest.raises(ModelFileError, match="became shorter"):
        packer.pack(rows, Kind.Q4_K, extent, planes_for(Kind.Q4_K, extent, len(raw)), 0, 1)
    with pytest.raises(ModelFileError, match="became shorter"):
        packer.copy(rows, torch.empty(rows.shape, dtype=torch.uint8))


def test_a_load_can_be_stopped_between_two_jobs(
    workers: dict[int, Worker], reader: FileReader, tmp_path: Path
) -> None:
    raw, extent = random_rows(Kind.Q4_K, 371, N_COLUMNS), Extent.of(0, N_COLUMNS)
    rows, planes = written(tmp_path / "w", raw), planes_for(Kind.Q4_K, extent, len(raw))

    def stop(n_bytes: int) -> None:
        raise Cancelled("Loading")

    with pytest.raises(Cancelled):
        FilePacker(workers[1], stop, reader).pack(rows, Kind.Q4_K, extent, planes, 0, 1)
    assert (planes[-1] == FILLED).all()
