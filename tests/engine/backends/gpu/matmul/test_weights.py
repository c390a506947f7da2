"""Weights of a GPU give the products of their dequantised values, for any number of rows."""

import pytest
import torch

from engine.backends.gpu.matmul import dequant_gemm
from engine.backends.gpu.matmul.dequant_gemm import half_dtype
from engine.backends.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.backends.gpu.ops import GpuOps
from engine.backends.reference.weights import DenseWeight
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.layout import LAYOUTS
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import SILU
from engine.model.layers.linear import Linear
from engine.model.sharding.placement import Replicate
from tests.helpers.device_planes import Matrix, matrix
from tests.helpers.device_products import assert_near, short

every_type = pytest.mark.parametrize("number", LAYOUTS, ids=lambda n: TYPES[n].name)
PLAIN = (torch.float16, torch.bfloat16, torch.float32)


def held(found: Matrix) -> GpuPlanes:
    return GpuPlanes(found.planes, found.number, found.n_rows, found.extent, 1)


@pytest.mark.parametrize("n_row", [8, 9, 257])
def test_products_of_any_number_of_rows(n_row: int, device: str) -> None:
    found = matrix(12, 37, 256, 544, device=device)
    x = torch.randn(n_row, 288, device=device)
    expected = x @ found.values.T
    deviation = (x.square() @ found.values.square().T).sqrt()
    assert ((held(found).matmul(x) - expected).abs() < 0.05 * deviation).all()


@every_type
def test_rows_are_looked_up_exactly(number: int, device: str) -> None:
    found = matrix(number, 37, 32, 288, device=device)
    ids = torch.tensor([5, 36, -1, 0, 37, 5], device=device)
    expected = DenseWeight(found.values).lookup(ids)
    assert torch.equal(held(found).lookup(ids), expected)


@pytest.mark.parametrize("number", [2, 8, 10, 12, 14], ids=lambda n: TYPES[n].name)
@pytest.mark.parametrize(("rows", "n_token"), [(slice(None), 3), (slice(13, 29), 20)])
def test_a_matrix_for_each_head(number: int, rows: slice, n_token: int, device: str) -> None:
    found = matrix(number, 40, 32, 128, n_matrix=3, device=device)
    values, n_part = found.values[:, rows], len(range(40)[rows])
    x = torch.randn(3, n_token, 96, device=device)
    back = torch.randn(3, n_token, n_part, device=device)
    planes, plain = held(found), GpuPlain(found.values)
    as_held = values if n_token <= 8 else short(values)
    dtype = torch.float32 if n_token <= 8 else half_dtype(x.device)
    for weight, numbers, kind in ((planes, as_held, dtype), (plain, values, torch.float32)):
        y = weight.per_head(x.transpose(0, 1), rows)
        assert_near(y.transpose(0, 1), x, numbers, kind)
        y = weight.per_head(back.transpose(0, 1), rows, transposed=True)
        assert_near(y.transpose(0, 1), back, numbers.mT, kind)


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_plain_matrices_for_each_head(dtype: torch.dtype, device: str) -> None:
    data = torch.randn(2, 21, 40, device=device).to(dtype)
    x = torch.randn(2, 5, 40, device=device)
    assert_near(GpuPlain(data).per_head(x.transpose(0, 1)).transpose(0, 1), x, data.float())
    many = torch.randn(2, 9, 40, device=device)
    assert_near(GpuPlain(data).per_head(many.transpose(0, 1)).transpose(0, 1), many, data, dtype)


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("n_row", [9, 300])
def test_plain_matrices(dtype: torch.dtype, n_row: int, device: str) -> None:
    data = torch.randn(45, 200, device=device).to(dtype)
    x = torch.randn(n_row, 200, device=device)
    assert_near(GpuPlain(data).matmul(x), x, data.float(), dtype if n_row > 8 else torch.float32)
    ids = torch.tensor([3, -1, 44, 45], device=device)
    assert torch.equal(GpuPlain(data).lookup(ids), DenseWeight(data.float()).lookup(ids))


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_matrix_for_each_expert(is_plain: bool, device: str) -> None:
    found = matrix(2, 20, 0, 64, n_matrix=4, device=device)
    weight = GpuPlain(found.values) if is_plain else held(found)
    groups = Groups.of(torch.tensor([[0, 2], [2, 3], [0, 3]], device=device))
    x = torch.randn(6, 64, device=device)
    expected = DenseWeight(found.values).grouped(x, groups)
    tolerance = 1e-4 if is_plain else 0.2  # activations may be quantised to bytes
    torch.testing.assert_close(weight.grouped(x, groups), expected, rtol=0, atol=tolerance)


def test_large_activations_do_not_overflow_in_f16() -> None:
    data = torch.randn(7, 64, dtype=torch.float16)
    x = torch.randn(12, 64) * 1e6
    x[3] = 0
    assert_near(GpuPlain(data).matmul(x), x, data.float(), torch.float16)


@pytest.mark.parametrize("is_plain", [False, True])
def test_many_rows_are_rounded_once_for_all_layers_that_read_them(
    is_plain: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values, and gate and up, with the bits that each has alone."""
    layers = [Linear(64, n, Replicate((0,))) for n in (48, 16, 48)]
    for layer in layers:
        found = matrix(2, layer.shape[0], 0, 64, device=device)
        layer.weight = GpuPlain(found.values.bfloat16()) if is_plain else held(found)
    layers[1].bias = torch.randn(16, device=device)
    layers[2].scale = torch.tensor([0.3], device=device)
    x = torch.randn(257, 64, device=device)
    ops, to_half = GpuOps(torch.device(device)), dequant_gemm.to_half
    alone = [layer(x) for layer in layers]
    gated = ops.gated(SILU, alone[0], alone[2])
    n_rounded: list[int] = []

    def counted(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        n_rounded.append(len(x))
        return to_half(x, dtype)

    monkeypatch.setattr(dequant_gemm, "to_half", counted)
    for y, expected in zip(ops.linears(x, *layers), alone, strict=True):
        assert torch.equal(y, expected)
    assert n_rounded == [257]
    assert torch.equal(ops.gated_linears(SILU, x, layers[0], layers[2]), gated)
    assert n_rounded == [257] * 2


def test_layers_of_another_kind_are_multiplied_as_before(device: str) -> None:
    layers = [Linear(64, 16, Replicate((0,))) for _ in range(2)]
    found = matrix(2, 16, 0, 64, device=device)
    layers[0].weight, layers[1].weight = held(found), DenseWeight(found.values)
    x = torch.randn(257, 64, device=device)
    for y, layer in zip(GpuOps(torch.device(device)).linears(x, *layers), layers, strict=True):
        assert torch.equal(y, layer(x))


def test_shapes_are_known_without_memory() -> None:
    found = matrix(12, 40, 0, 256)
    weight = GpuPlanes(found.planes.to("meta"), 12, 40, found.extent, 1)
    for n_row in (1, 8, 9, 64, 300):
        assert weight.matmul(torch.empty(n_row, 256, device="meta")).shape == (n_row, 40)
    assert weight.lookup(torch.zeros(3, dtype=torch.int64, device="meta")).shape == (3, 256)
    plain = GpuPlain(torch.empty(40, 256, dtype=torch.bfloat16, device="meta"))
    for n_row in (1, 9):
        assert plain.matmul(torch.empty(n_row, 256, device="meta")).shape == (n_row, 40)


def test_bytes_are_those_of_the_memory() -> None:
    found = matrix(14, 40, 0, 256)
    assert held(found).n_bytes == found.planes.nbytes
    assert GpuPlain(found.values).n_bytes == found.values.nbytes
