"""Keys and values are written by a kernel with the bytes of the reference."""

import warnings

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.gpu import attention as gpu
from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches
from engine.backends.gpu.page_tables import PagedRows
from engine.model.forward.batch import Batch
from engine.model.forward.cache import HostLayerCache, LayerCache
from engine.model.forward.state import KVState
from engine.model.sharding.shares import Ranges
from tests.helpers.kv_pairs import MIXED

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(
    kv_type: str, n_kv: int, dim_k: int, dim_v: int, n_ctx: int, device: str,
    kind: type[LayerCache] = LayerCache, *, v_in_k: bool = False,
) -> LayerCache:  # fmt: skip
    heads = Ranges(((0, n_kv),), n_kv)
    state = KVState(heads, heads, dim_k, dim_v, v_in_k=v_in_k)
    return kind(state, 0, n_ctx, kv_type, torch.device(device))


def alone(held: LayerCache, n_past: int, n_tokens: int, device: str = "cpu") -> PagedRows:
    """Return the rows of a sequence that has the cache alone."""
    positions = torch.arange(n_past, n_past + n_tokens, device=device)
    return PagedRows.alone(positions, held.k.shape[1])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().cpu().view(torch.uint8)


@pytest.mark.parametrize("kv_type", [*TYPES, *MIXED])
@pytest.mark.parametrize("n_tokens", [1, 3, 40])
def test_bytes_are_those_of_the_reference(kv_type: str, n_tokens: int, device: str) -> None:
    fast = layer(kv_type, 3, 96, 64, 50, device)
    plain = layer(kv_type, 3, 96, 64, 50, "cpu")
    whole = numbers(3, n_tokens, 3 * (96 + 64)) * 5
    k = whole[:, : 3 * 96].view(n_tokens, 3, 96)
    v = whole[:, 3 * 96 :].view(n_tokens, 3, 64)
    plain.write(k, v, Batch.of_one(7, n_tokens, 0))
    joined = whole.to(device)  # keys and values are parts of wider rows
    k = joined[:, : 3 * 96].view(n_tokens, 3, 96)
    v = joined[:, 3 * 96 :].view(n_tokens, 3, 64)
    assert gpu.write(fast, k, v, alone(fast, 7, n_tokens, device))
    assert torch.equal(bits(fast.k), bits(plain.k))
    assert torch.equal(bits(fast.v), bits(plain.v))


@pytest.mark.parametrize("kv_type", TYPES)
def test_hard_numbers_are_rounded_as_by_torch_and_gguf(kv_type: str, device: str) -> None:
    """Numbers of all sizes, with ties, zeros of both signs, and the limits of F16."""
    rng = np.random.default_rng(5)
    x = (rng.normal(size=(60, 64)) * np.exp(rng.uniform(-22, 12, (60, 1)))).astype(np.float32)
    x[0], x[1] = 0, -0.0
    x[2] = np.where(np.arange(64) % 2, 1, -1)
    x[3, :4] = 65519.9, 65520, -65536, 1e9
    x[4] = np.arange(64) * 2.0**-25
    x[5] = np.round(x[5] * 4) / 8
    x[6] = 1 + np.arange(64) * 2.0**-12
    held, k = layer(kv_type, 1, 64, 64, 60, device), torch.from_numpy(x).unsqueeze(1)
    with warnings.catch_warnings(), np.errstate(over="ignore"):  # where numpy interprets
        warnings.simplefilter("ignore", RuntimeWarning)
        assert gpu.write(held, k.to(device), None, alone(held, 0, 60, device))
    if kv_type in ("q8_0", "q4_0"):
        kind = gguf.GGMLQuantizationType[kv_type.upper()]
        with np.errstate(over="ignore", invalid="ignore"):
            expected = torch.from_numpy(gguf.quants.quantize(x, kind))
    else:
        expected = k[:, 0].to(held.k.dtype)
    assert torch.equal(bits(held.k[0]), bits(expected))


def test_only_the_position_in_memory_counts(device: str) -> None:
    """A launch also works at another position, as in a graph; it writes nothing else."""
    held, k = layer("f16", 2, 24, 24, 20, device), numbers(4, 2, 2, 24).to(device)
    place = alone(held, 3, 2, device)
    starts: list[KernelLaunch] = []

    def note(start: KernelLaunch) -> bool:
        starts.append(start)
        return True

    with intercept_launches(note):
        assert gpu.write(held, k, k * 2, place)
    assert len(starts) == 1
    for position in (11, 19, 20, -1):
        place.positions.copy_(torch.tensor([position, position + 1]))
        held.k.zero_()
        starts[0].run()
        expected = torch.zeros_like(held.k)
        for token in range(2):
            if 0 <= position + token < 20:
                expected[:, position + token] = k[token].half()
        assert torch.equal(held.k, expected)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_values_that_are_part_of_keys(kv_type: str, device: str) -> None:
    fast = layer(kv_type, 1, 96, 64, 20, device, v_in_k=True)
    plain = layer(kv_type, 1, 96, 64, 20, "cpu", v_in_k=True)
    k = numbers(5, 4, 1, 96)
    plain.write(k, None, Batch.of_one(2, 4, 0))
    assert gpu.write(fast, k.to(device), None, alone(fast, 2, 4, device))
    assert torch.equal(bits(fast.k), bits(plain.k))


def test_what_does_not_fit_is_refused() -> None:
    held, k = layer("f16", 2, 32, 32, 20, "cpu"), numbers(6, 2, 2, 32)
    place = alone(held, 0, 2)
    assert not gpu.write(held, k[..., :31], k, place)
    assert not gpu.write(held, k, k[:, :1], place)
    assert not gpu.write(held, k.double(), k, place)
    assert not gpu.write(held, k.mT, k, place)
    assert not gpu.write(layer("f16", 2, 32, 32, 20, "cpu", HostLayerCache), k, k, place)
    assert not held.k.any()


def test_without_memory() -> None:
    held = layer("q4_0", 2, 32, 32, 20, "meta")
    k, starts = torch.empty(1, 2, 32, device="meta"), []
    with intercept_launches(lambda start: starts.append(start) or True):
        assert gpu.write(held, k, k, alone(held, 0, 1, "meta"))
    assert len(starts) == 1
