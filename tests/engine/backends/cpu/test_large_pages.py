"""Weights are adjacent in an arena; each returns its memory separately."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from engine.backends.cpu import large_pages
from engine.backends.cpu.large_pages import ALIGNMENT, LARGE_PAGE, WeightArena

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems' own memory")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@only_linux
def test_neighbours_share_large_pages_and_keep_their_own_bytes() -> None:
    arena = WeightArena()
    shapes = [(3, 5, 7), (1000,), (LARGE_PAGE + 1,), (64, 64)]
    dtypes = [torch.uint8, torch.bfloat16, torch.uint8, torch.float32]
    tensors = [
        arena.tensor(shape, dtype).fill_(n)
        for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    arena.close()
    places = [tensor.data_ptr() for tensor in tensors]
    assert places == sorted(places)
    for n, (tensor, shape, dtype) in enumerate(zip(tensors, shapes, dtypes, strict=True)):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert (tensor == n).all()
    assert places[-1] + tensors[-1].nbytes - places[0] < sum(t.nbytes for t in tensors) + 512


@only_linux
def test_a_tensor_returns_its_memory_while_its_neighbours_stay() -> None:
    arena, n_bytes = WeightArena(), 32 << 20
    before = resident_bytes()
    tensors = [arena.tensor((n_bytes,), torch.uint8).fill_(n) for n in range(3)]
    view = tensors[1][5:9]
    held = resident_bytes() - before
    assert held > 2.9 * n_bytes
    del tensors[1]
    gc.collect()
    assert resident_bytes() - before > held - n_bytes // 2  # a view holds it
    del view
    gc.collect()
    assert resident_bytes() - before < held - 0.9 * n_bytes
    assert [int(tensor.sum(dtype=torch.int64)) for tensor in tensors] == [0, 2 * n_bytes]


@only_linux
def test_a_tensor_larger_than_a_chunk_gets_its_own_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "CHUNK_BYTES", 1 << 20)
    arena = WeightArena()
    first = arena.tensor((1 << 10,), torch.uint8).fill_(1)
    large = arena.tensor((3 << 20,), torch.uint8).fill_(2)
    last = arena.tensor((1 << 10,), torch.uint8).fill_(3)
    arena.close()
    assert [int(each[0]) for each in (first, large, last)] == [1, 2, 3]
    assert int(large[-1]) == 2


@pytest.mark.parametrize("shape", [(0,), (4, 0)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    assert WeightArena().tensor(shape, torch.float32).shape == shape


def test_other_systems_use_torchs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    arena = WeightArena()
    assert (arena.tensor((5, 3), torch.float16).fill_(2) == 2).all()
    arena.close()
