"""Weights of GPUs equal the CPU's planes, whatever the buffers; failures leave no files."""

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from engine.backends.cpu.file_packing import FilePacker
from engine.backends.cpu.packing import load_for_kernels
from engine.backends.cpu.plain_weights import PlainWeight
from engine.backends.cpu.weights import JoinedColumns, PlaneWeight
from engine.backends.cpu.worker import Worker
from engine.backends.gpu.backend import GpuBackend
from engine.backends.gpu.loading import staging as stages
from engine.backends.gpu.loading.staging import Buffer, CpuCopier, Staging
from engine.backends.gpu.loading.weight_loader import Arenas, load_for_gpu, send_bytes, staging_for
from engine.backends.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.backends.reference.weights import FileReader, PackedWeight
from engine.errors import Cancelled, DeviceError, ModelFileError
from engine.formats.gguf.tensor_bytes import OpenPart, TensorBytes
from engine.formats.gguf.tensors import TYPES, TensorInfo
from engine.formats.quants.layout import LAYOUTS
from engine.hardware.host_memory import HostTensor
from engine.model.forward.operands import Weight
from engine.model.layers.module import Module, Slot
from engine.model.sharding.placement import Placement, Replicate, Shard
from engine.model.sharding.shares import Ranges
from engine.runtime.loader import ByteProgress, load_rank
from tests.bench.random_blocks import random_tensor
from tests.helpers.planes import as_on_a_gpu
from tests.helpers.stored_bytes import stored
from tests.helpers.tiers import TYPICAL_TYPES, swept

Bytes = np.ndarray
CPU = torch.device("cpu")
N_COLUMNS = 512


@dataclass
class File:
    """A fake of a model file with one tensor."""

    tensor: TensorInfo
    data: Bytes

    def raw(self, tensor: TensorInfo) -> TensorBytes:
        return stored(self.data.reshape(*tensor.shape[:-1], -1))

    def check_unchanged(self) -> None:
        """Do nothing: it is never written to."""


def file_of(number: int, *shape: int) -> File:
    tensor = TensorInfo("w", TYPES[number], shape, 0, 0)
    rng = np.random.default_rng(int(number))
    data = random_tensor(number, (tensor.n_rows, shape[-1]), 0.5, rng)
    return File(tensor, data.reshape(tensor.n_rows, -1).view(np.uint8))


class Owner(Module):
    weight: Weight | None = None


def slot_of(file: File, placement: Placement, *, is_lookup: bool = False) -> Slot:
    return Slot(Owner(), "weight", file.tensor, placement, True, is_lookup)


def cut(total: int, *stops: int) -> Ranges:
    """Return an interval for each rank."""
    return Ranges(tuple(zip((0, *stops), (*stops, total), strict=True)), total)


PLACEMENTS: dict[str, tuple[tuple[int, ...], Placement]] = {
    "whole": ((37, N_COLUMNS), Replicate((0, 1))),
    "rows": ((37, N_COLUMNS), Shard(0, cut(37, 11))),
    "two intervals of rows": ((70, N_COLUMNS), Shard(0, (cut(37, 11), cut(33, 20)))),
    "columns": ((37, N_COLUMNS), Shard(1, cut(16, 5))),
    "columns inside a block": ((20, N_COLUMNS), Shard(1, cut(512, 100))),
    "two intervals of columns": ((37, N_COLUMNS), Shard(1, (cut(7, 3), cut(9, 1)))),
    "experts": ((7, 19, N_COLUMNS), Shard(0, cut(7, 3))),
    "experts of whole tiles": ((6, 32, N_COLUMNS), Shard(0, (cut(2, 1), cut(4, 1)))),
    "rows of experts": ((3, 37, N_COLUMNS), Shard(1, cut(37, 21))),
    "two intervals of experts' rows": ((3, 40, N_COLUMNS), Shard(1, (cut(17, 6), cut(23, 9)))),
    "columns of experts": ((3, 18, N_COLUMNS), Shard(2, cut(16, 9))),
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(1, 2)  # unquantised matrices stay as in the file, as GPUs have them
    yield worker
    worker.close()


@pytest.fixture
def reader() -> Iterator[FileReader]:
    with FileReader() as reader:
        yield reader


def loaded(
    file: File, slot: Slot, rank: int, device: torch.device = CPU, n_bytes: int = 10_000,
    report: Callable[[int], object] = [].append,
) -> Weight:  # fmt: skip
    """Load a weight through small buffers."""
    pieces = slot.placement.pieces(file.tensor.shape, rank)
    with Staging(device, report, n_bytes) as staging:
        return load_for_gpu(file, slot, pieces, staging, Arenas([slot], rank, device), 2)


def assert_same(found: Weight, wanted: Weight) -> None:
    """Assert equal bytes, except after the last rows of tiles, which are never read."""
    if isinstance(wanted, JoinedColumns):
        assert isinstance(found, JoinedColumns)
        assert found.widths == wanted.widths
        for part, other in zip(found.parts, wanted.parts, strict=True):
            assert_same(part, other)
    elif isinstance(wanted, PlainWeight):
        assert isinstance(found, GpuPlain)
        assert found.data.dtype == wanted.data.dtype
        assert torch.equal(found.data.cpu(), wanted.data)
    else:
        assert isinstance(wanted, PlaneWeight)
        assert isinstance(found, GpuPlanes)
        assert (found.n_rows, found.extent) == (wanted.n_rows, wanted.extent)
        assert found.type_number == wanted.type_number
        assert found.x_bytes == 2
        assert found.planes.shape == wanted.planes.shape
        end = used_bytes(wanted)
        expected = as_on_a_gpu(wanted.planes, wanted.type_number, wanted.extent)
        assert torch.equal(found.planes[..., :end].cpu(), expected[..., :end])
        assert not found.planes[..., end:].any()


def used_bytes(weight: PlaneWeight) -> int:
    layout, extent = LAYOUTS[weight.type_number], weight.extent
    _, _, supers, _ = layout.offsets(extent.n_blocks, extent.skip)
    return supers + -(-(extent.n_blocks + extent.skip) // 8) * layout.super_bytes


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize(
    "kind", [Kind.Q4_K, Kind.IQ2_XS, Kind.Q8_0, Kind.BF16, Kind.F32], ids=lambda k: k.name
)
def test_weights_are_those_of_the_cpu(
    kind: Kind, name: str, rank: int, worker: Worker, reader: FileReader, device: str
) -> None:
    shape, placement = PLACEMENTS[name]
    file = file_of(kind, *shape)
    slot = slot_of(file, placement)
    pieces = slot.placement.pieces(shape, rank)
    counted: list[int] = []
    wanted = load_for_kernels(file, slot, pieces, FilePacker(worker, counted.append, reader))
    reported: list[int] = []
    assert_same(loaded(file, slot, rank, torch.device(device), report=reported.append), wanted)
    assert sum(reported) == sum(counted)
    assert max(reported) <= 10_000


@pytest.mark.parametrize("number", swept(LAYOUTS, TYPICAL_TYPES), ids=lambda n: TYPES[n].name)
def test_every_type(number: int, worker: Worker, reader: FileReader, device: str) -> None:
    file = file_of(number, 21, N_COLUMNS)
    slot = slot_of(file, Shard(1, cut(16, 5)))
    pieces = slot.placement.pieces(file.tensor.shape, 1)
    wanted = load_for_kernels(file, slot, pieces, FilePacker(worker, lambda n: None, reader))
    assert_same(loaded(file, slot, 1, torch.device(device)), wanted)


def test_what_is_looked_up_stays_as_in_the_file(device: str) -> None:
    file = file_of(Kind.Q5_K, 50, N_COLUMNS)
    with Staging(torch.device(device), lambda n: None, 3000) as staging:
        whole = send_bytes(stored(file.data), staging)
    assert np.array_equal(whole.cpu().numpy(), file.data)


def backend(device: str) -> GpuBackend:
    return GpuBackend(torch.device(device), x_bytes=2, n_ctx=256)


def progress(is_cancelled: object = None) -> ByteProgress:
    return ByteProgress(1 << 40, lambda event: None, is_cancelled or (lambda: False))


@pytest.mark.parametrize("is_lookup", [False, True])
def test_a_rank_with_a_card_is_loaded_so(
    is_lookup: bool, worker: Worker, reader: FileReader, device: str
) -> None:
    file = file_of(Kind.Q4_K, 50, N_COLUMNS)
    slot = slot_of(file, Shard(0, cut(50, 20)), is_lookup=is_lookup)
    load_rank(
        file, [slot], 1, torch.device(device), "kernels", backend(device), progress()
    )  # fmt: skip
    value = slot.owner.weight
    if is_lookup:
        assert isinstance(value, PackedWeight)
        assert value.columns == slice(0, N_COLUMNS)
        assert np.array_equal(value.raw.cpu().numpy(), file.data[20:])
    else:
        pieces = slot.placement.pieces(file.tensor.shape, 1)
        assert_same(
            value, load_for_kernels(file, slot, pieces, FilePacker(worker, lambda n: None, reader))
        )


def test_buffers_are_no_larger_than_is_worth_it() -> None:
    file = file_of(Kind.F32, 30, N_COLUMNS)
    report = [].append
    small = staging_for([slot_of(file, Replicate((0,)))], 0, CPU, report)
    assert small.n_bytes == 1 << 20
    large = TensorInfo("w", TYPES[Kind.F32], (1 << 16, 1 << 12), 0, 0)
    slot = Slot(Owner(), "weight", large, Replicate((0,)), True)
    assert staging_for([slot], 0, CPU, report).n_bytes == 32 << 20
    wide = TensorInfo("w", TYPES[Kind.F32], (2, 1 << 24), 0, 0)
    slot = Slot(Owner(), "weight", wide, Replicate((0,)), True)
    assert staging_for([slot], 0, CPU, report).n_bytes == 64 << 20, "a row at least"


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[HostTensor]:
    """Return the set of all buffers that are alive."""
    made: weakref.WeakSet[HostTensor] = weakref.WeakSet()
    make = CpuCopier.buffer

    def buffer(self: CpuCopier, n_bytes: int) -> Buffer:
        found = make(self, n_bytes)
        made.add(found.host)
        return found

    monkeypatch.setattr(CpuCopier, "buffer", buffer)
    return made


def n_threads() -> int:
    return sum(thread.name.startswith("tandem-load") for thread in threading.enumerate())


class Failure:
    """Failure at the third call, like that of a lost or of a full device."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.n_calls = 0

    def __call__(self, *args: object) -> None:
        self.n_calls += 1
        if self.n_calls == 3:
            raise self.error


@pytest.mark.parametrize(
    ("where", "error", "told"),
    [
        ("_fill", OSError(5, "Input/output error"), DeviceError),
        ("_fill", torch.AcceleratorError("CUDA error: launch failure\nmore"), DeviceError),
        ("copy", torch.AcceleratorError("CUDA error: the device is lost"), DeviceError),
        ("copy", torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        ("pack", torch.AcceleratorError("CUDA error: out of memory"), torch.AcceleratorError),
        ("pack", RuntimeError("a mistake"), RuntimeError),
        ("report", Cancelled("Loading"), Cancelled),
    ],
)
def test_what_fails_leaves_nothing(
    where: str, error: BaseException, told: type[BaseException],
    buffers: weakref.WeakSet[HostTensor], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """No weights, buffers or threads are left; and the error is a sentence."""
    failure = Failure(error)
    file = file_of(Kind.Q8_0, 400, N_COLUMNS)
    slot = slot_of(file, Replicate((0,)))
    if where == "copy":
        monkeypatch.setattr(CpuCopier, "copy", failing(CpuCopier.copy, failure))
    elif where == "_fill":
        monkeypatch.setattr(stages, "_fill", failing(stages._fill, failure))
    elif where == "pack":
        monkeypatch.setattr("engine.backends.gpu.loading.weight_loader.pack", failure)
    reported = failure if where == "report" else [].append
    before = n_threads()
    with pytest.raises(told) as raised:
        loaded(file, slot, 0, CPU, 20_000, reported)
    assert failure.n_calls >= 3
    assert n_threads() == before
    if told is DeviceError:
        assert "\n" not in str(raised.value)
        assert raised.value.hint
    del raised
    error.__traceback__ = None
    gc.collect()
    assert not buffers


def test_a_file_that_is_cut_while_it_is_read(
    tmp_path: Path, buffers: weakref.WeakSet[HostTensor]
) -> None:
    """The error does not blame the device, and nothing is left."""
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(400 * N_COLUMNS))
    raw = TensorBytes.of(OpenPart(path), 0, (400, N_COLUMNS))

    def cut(n_bytes: int) -> None:
        os.truncate(path, 100 * N_COLUMNS)

    with pytest.raises(ModelFileError, match="became shorter"), Staging(CPU, cut, 20_000) as s:
        send_bytes(raw, s)
    raw.part.close()
    gc.collect()
    assert not buffers
    assert not n_threads()


def failing(function: object, failure: Failure) -> object:
    def called(*args: object) -> object:
        failure(*args)
        return function(*args)

    return called


def test_cancelling_in_the_middle_of_a_load(buffers: weakref.WeakSet[HostTensor]) -> None:
    file = file_of(Kind.Q4_K, 3000, N_COLUMNS)
    slots = [slot_of(file, Replicate((0,))) for _ in range(5)]
    n_asked = 0

    def is_cancelled() -> bool:
        nonlocal n_asked
        n_asked += 1
        return n_asked > 3

    with pytest.raises(Cancelled):
        load_rank(file, slots, 0, CPU, "kernels", backend("cpu"), progress(is_cancelled))
    assert n_asked == 4
    assert slots[-1].owner.weight is None
    gc.collect()
    assert not buffers
    assert not n_threads()
