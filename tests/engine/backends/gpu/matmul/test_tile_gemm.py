"""Tile GEMM and GEMM after dequantising, with matrices of all types."""

import pytest
import torch
from torch import Tensor

from engine.backends.gpu.launch.configs import KernelTarget, config_of
from engine.backends.gpu.matmul import dequant_gemm, tile_gemm
from engine.backends.gpu.matmul.dequant_gemm import half_dtype
from engine.backends.gpu.matmul.weights import GpuPlanes
from engine.backends.gpu.ops import GpuOps
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.layout import LAYOUTS
from engine.model.layers.linear import Linear
from engine.model.sharding.placement import Replicate
from tests.helpers.device_planes import Matrix, matrix
from tests.helpers.device_products import assert_near, short

Q4_0, Q8_0, Q3_K, Q4_K, Q6_K = 2, 8, 11, 12, 14

every_type = pytest.mark.parametrize("number", LAYOUTS, ids=lambda n: TYPES[n].name)


def held(found: Matrix) -> GpuPlanes:
    return GpuPlanes(found.planes, found.number, found.n_rows, found.extent, 1)


def some(x: Tensor, found: Matrix) -> Tensor:
    y = tile_gemm.product(x, held(found))
    assert y is not None
    return y


@every_type
def test_some_rows(number: int, device: str) -> None:
    found = matrix(number, 37, 256, 544, device=device)
    for n_row in (9, 17):
        x = torch.randn(n_row, 288, device=device)
        y = some(x, found)
        assert_near(y, short(x).float(), short(found.values), half_dtype(x.device))


@every_type
def test_many_rows(number: int, device: str) -> None:
    found = matrix(number, 37, 256, 544, device=device)
    x = torch.randn(300, 288, device=device)
    y = dequant_gemm.product(x, held(found))
    assert_near(y, x, short(found.values), half_dtype(x.device))


@pytest.mark.parametrize("number", [Q4_0, Q8_0, Q3_K, Q4_K, Q6_K], ids=lambda n: TYPES[n].name)
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (33, 290), (96, 500)])
def test_columns_may_be_cut_anywhere(number: int, start: int, stop: int, device: str) -> None:
    found = matrix(number, 19, start, stop, device=device)
    x = torch.randn(11, stop - start, device=device)
    values = short(found.values)
    assert_near(some(x, found), short(x).float(), values, half_dtype(x.device))
    assert_near(dequant_gemm.product(x, held(found)), x, values, half_dtype(x.device))


@pytest.mark.parametrize(("n_rows", "n_row"), [(1, 1), (16, 64), (70, 65)])
def test_any_number_of_rows_of_both(n_rows: int, n_row: int, device: str) -> None:
    found = matrix(Q4_0, n_rows, 0, 1024, device=device)
    x = torch.randn(n_row, 1024, device=device)
    values = short(found.values)
    assert_near(some(x, found), short(x).float(), values, half_dtype(x.device))


def test_matrices_that_are_cut_alike_share_rounded_rows(device: str) -> None:
    found = [matrix(number, 20, 0, 256, device=device) for number in (Q4_K, Q6_K, Q8_0, Q4_K)]
    x = torch.randn(12, 300, device=device)[:, 20:276]
    products = tile_gemm.products(x, [held(one) for one in found])
    assert products is not None
    for y, one in zip(products, found, strict=True):
        assert torch.equal(y, some(x.contiguous(), one))


def test_layers_with_the_same_input_add_their_biases(device: str) -> None:
    layers = []
    for number, bias in ((Q4_K, None), (Q6_K, torch.randn(20, device=device))):
        layer = Linear(256, 20, Replicate((0,)))
        layer.weight, layer.bias = held(matrix(number, 20, 0, 256, device=device)), bias
        layers.append(layer)
    x = torch.randn(12, 256, device=device)
    for y, layer in zip(GpuOps(torch.device(device)).linears(x, *layers), layers, strict=True):
        assert torch.equal(y, layer(x))


def test_no_rows_at_all(device: str) -> None:
    found = matrix(Q4_0, 20, 0, 32, device=device)
    assert held(found).matmul(torch.empty(0, 32, device=device)).shape == (0, 20)


def test_more_rows_than_it_serves() -> None:
    found = matrix(Q4_0, 20, 0, 32)
    assert tile_gemm.product(torch.zeros(257, 32), held(found)) is None


@pytest.mark.parametrize("number", [Q4_0, Q6_K])
def test_large_numbers_do_not_overflow_in_f16(
    number: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tile_gemm, dequant_gemm):
        monkeypatch.setattr(module, "half_dtype", lambda _: torch.float16)
    found = matrix(number, 20, 0, 256, device=device)
    x = torch.randn(10, 256, device=device) * 1e6
    x[3] = 0
    x[4] *= 1e-9
    for y in (some(x, found), dequant_gemm.product(x, held(found))):
        assert_near(y, x, found.values.half(), torch.float16)


def test_rows_are_turned_into_numbers_some_at_a_time(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = matrix(Q4_K, 50, 0, 256, device=device)
    x = torch.randn(3, 256, device=device)
    whole = dequant_gemm.product(x, held(found))
    monkeypatch.setattr(dequant_gemm, "chunk_rows", lambda *_: 16)
    torch.testing.assert_close(dequant_gemm.product(x, held(found)), whole)


def test_rows_are_rounded_once_for_all_matrices(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product has the bits that it has alone."""
    planes = [held(matrix(kind, 50, 0, 256, device=device)) for kind in (Q4_K, Q6_K)]
    plain = torch.randn(3, 40, 256, device=device).bfloat16()
    weights = [*planes, *plain, torch.randn(8, 256, device=device)]
    x = torch.randn(9, 256, device=device)
    alone = [dequant_gemm.product(x, weight) for weight in weights]
    rounded: list[torch.dtype] = []
    to_half = dequant_gemm.to_half

    def counted(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        rounded.append(dtype)
        return to_half(x, dtype)

    monkeypatch.setattr(dequant_gemm, "to_half", counted)
    for y, expected in zip(dequant_gemm.products(x, weights), alone, strict=True):
        assert torch.equal(y, expected)
    assert rounded == [half_dtype(x.device)]


@pytest.mark.parametrize("n_token", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("low", [2, 4, 8])
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
def test_programs_fit_into_shared_memory(n_token: int, low: int, capability: int) -> None:
    config = config_of(KernelTarget("nvidia", capability, 100), "many", n_token=n_token, low=low)
    words = config["blocks"] * low
    assert words >= 16
    x_bytes = 32 * config["blocks"] * config["tokens"] * 2
    word_bytes = config["rows"] * words * 4 * 2  # words, scales and their factors
    room = {75: 64, 80: 163, 90: 227, 100: 227}.get(capability, 99) << 10
    assert (x_bytes + word_bytes) * max(1, config["num_stages"] - 1) <= room
