"""Keys and values in the host's memory, read by attention on another device."""

import gc
import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.hardware import host_memory
from engine.hardware.fallbacks import Fallbacks
from engine.hardware.host_memory import HostTensor
from engine.load_params import KV_TYPES
from engine.model.forward.batch import Batch
from engine.model.forward.cache import Cache, HostLayerCache, LayerCache
from engine.model.forward.operands import Scores
from engine.model.forward.ops import Ops
from engine.model.forward.state import CacheSize, KVState, RecurrentState
from engine.model.sharding.shares import Ranges

CPU = torch.device("cpu")


def state(*, v_in_k: bool = False, whole_groups: bool = True) -> KVState:
    """Return a state of four query heads on two key-value heads, cut by groups or 3 to 1."""
    heads = Ranges(((0, 4), (4, 4)) if whole_groups else ((0, 3), (3, 4)), 4)
    kv_heads = Ranges(((0, 2), (2, 2)) if whole_groups else ((0, 2), (1, 2)), 2)
    return KVState(heads, kv_heads, 64, 32, v_in_k=v_in_k)


def rows(n: int, heads: int, width: int) -> torch.Tensor:
    return torch.randn(n, heads, width, generator=torch.Generator().manual_seed(width))


@pytest.mark.parametrize("kv_type", [*KV_TYPES, "q8_0/f32", "f16/q4_0"])
@pytest.mark.parametrize("v_in_k", [False, True])
@pytest.mark.parametrize("whole_groups", [True, False])
def test_attention_gives_the_same_bits(kv_type: str, v_in_k: bool, whole_groups: bool) -> None:
    n_head = 4 if whole_groups else 3
    results = []
    for kind in (LayerCache, HostLayerCache):
        layout = state(v_in_k=v_in_k, whole_groups=whole_groups)
        cache = kind(layout, 0, 24, kv_type, CPU)
        k, v = rows(20, 2, 64), None if v_in_k else rows(20, 2, 32)
        batch = Batch.of_one(13, len(k) - 13, 0)
        cache.write(k[:13], None if v is None else v[:13], Batch.of_one(0, 13, 0))
        cache.write(k[13:], None if v is None else v[13:], batch)
        q = rows(7, n_head, 64)
        results.append(Ops().attention(q, cache, batch, Scores(0.125, window=9)))
        assert cache.n_bytes == 24 * layout.token_bytes(0, kv_type)
    assert results[0].equal(results[1])
    assert results[0].abs().sum() > 0


def test_what_is_read_is_a_copy_where_attention_is_computed() -> None:
    """Held in one place, computed with in another: a device without numbers shows which."""
    cache = HostLayerCache(state(), 0, 24, "f16", torch.device("meta"))
    cache.write(rows(5, 2, 64), rows(5, 2, 32), Batch.of_one(0, 5, 0))
    assert cache.k.is_cpu
    assert cache.v.is_cpu
    k, v = cache.read(Batch.of_one(0, 5, 0).pieces[0], 1, 5)
    assert k.is_meta
    assert v.is_meta
    assert (k.shape, v.shape) == ((2, 4, 64), (2, 4, 32))


@pytest.mark.parametrize("kv_on_host", [False, True])
def test_only_keys_and_values_move_to_the_host(kv_on_host: bool) -> None:
    heads = Ranges(((0, 4),), 4)
    recurrent = RecurrentState(s=(heads, (8, 8)))
    keys = KVState(heads, Ranges(((0, 2),), 2), 64, 32)
    size = CacheSize(24)
    cache = Cache([keys, recurrent], 0, size, torch.device("meta"), kv_on_host=kv_on_host)
    assert cache.tensors(recurrent)["s"].is_meta
    assert cache.kv(keys).k.is_cpu == kv_on_host
    assert cache.host_bytes == (keys.n_bytes(0, size) if kv_on_host else 0)
    assert cache.n_bytes == keys.n_bytes(0, size) + recurrent.n_bytes(0, size)


class FakeCuda:
    """Fake of CUDA's functions that pin memory, which notes its calls."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 3, "portable and mapped"
        self.pinned[address] = n_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def on_gpu(monkeypatch: pytest.MonkeyPatch, code: int) -> tuple[FakeCuda, list[Any], Any]:
    """Return a fake of CUDA, the devices it was called for, and one of these."""
    cuda, used = FakeCuda(code), []

    class Using:
        def __init__(self, device: Any) -> None:
            used.append(device)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device", Using)
    return cuda, used, SimpleNamespace(type="cuda", index=1)


def test_pages_are_pinned_as_long_as_they_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, used, device = on_gpu(monkeypatch, 0)
    held = HostTensor((3, 1000), torch.float16, device)
    ((address, n_bytes),) = cuda.pinned.items()
    assert address == held.value.data_ptr()
    assert address % mmap.PAGESIZE == 0
    assert n_bytes == held.value.nbytes == 6000
    assert held.is_pinned
    assert not held.value.any()
    del held
    gc.collect()
    assert cuda.pinned == {}
    assert used == [device, device], "the current GPU may be another one"


def test_memory_that_cannot_be_pinned_serves_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = Fallbacks()
    monkeypatch.setattr(host_memory, "OF_THIS_PROCESS", shared)
    cuda, _, device = on_gpu(monkeypatch, 2)
    launched = []
    make = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **o: launched.append(o["device"]) or make(1))
    held = HostTensor((2, 8), torch.uint8, device)
    assert not held.is_pinned
    assert "could not be pinned" in caplog.text
    other = HostTensor((2, 8), torch.uint8, device)
    (found,) = shared.current
    assert (found.kind, found.devices) == ("memory", ("cuda:1",))
    del other
    gc.collect()
    assert shared.current == (found,), "the first still lives"
    assert launched == [device] * 2, "CUDA's error is taken here, not at a later launch"
    held.value.fill_(7)
    assert int(held.value.sum()) == 7 * 16
    del held
    gc.collect()
    assert shared.current == ()
    assert len(cuda.pinned) == 2, "what was never pinned must not be let go"
