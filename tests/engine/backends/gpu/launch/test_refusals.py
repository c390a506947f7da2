"""Refused kernels: others compute the same, and nothing else changes."""

import threading
from collections.abc import Iterator

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine import EngineError
from engine.backends.gpu import elementwise, moe
from engine.backends.gpu.launch.configs import (
    KernelTarget,
    allow_all,
    allows,
    refuse,
    refused,
    use_target,
    watched,
)
from engine.backends.gpu.launch.kernel_launch import intercept_launches
from engine.backends.gpu.matmul import tile_gemm
from engine.backends.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.backends.gpu.ops import GpuOps
from engine.model.forward.operands import SILU, Routing
from engine.model.forward.ops import REFERENCE
from tests.helpers.device_planes import matrix

CPU, META = torch.device("cpu"), torch.device("meta")
Q8_0 = int(Kind.Q8_0)
N_ROWS, N_COLUMNS = 40, 64


@pytest.fixture(autouse=True)
def nothing_refused() -> Iterator[None]:
    allow_all()
    yield
    allow_all()


def weight() -> tuple[GpuPlanes, Tensor]:
    """Return a matrix, and its exact values."""
    found = matrix(Q8_0, N_ROWS, 0, N_COLUMNS)
    return GpuPlanes(found.planes, Q8_0, N_ROWS, found.extent, 1), found.values


def started(compute: object) -> list[str]:
    """Return the names of the kernels that a function starts."""
    names: list[str] = []
    with intercept_launches(lambda start: not names.append(start.kernel.__name__)):  # type: ignore[func-returns-value]
        compute()  # type: ignore[operator]
    return names


def rows(n: int) -> Tensor:
    return torch.randn(n, N_COLUMNS, generator=torch.Generator().manual_seed(n))


def assert_product(y: Tensor, x: Tensor, values: Tensor) -> None:
    expected = x @ values.T
    assert (y - expected).square().mean() < 1e-3 * expected.square().mean()


def test_a_refusal_is_for_one_kind_of_device() -> None:
    card, other = (KernelTarget("nvidia", capability, 80) for capability in (80, 90))
    with use_target(card):
        refuse(META, [("gemv", 8, 1)])
        assert not allows(META, "gemv", 8, 1)
        assert allows(META, "gemv", 8, 2)
        assert refused(META) == {("gemv", 8, 1)}
    with use_target(other):
        assert allows(META, "gemv", 8, 1)


def test_a_trial_is_for_one_thread_and_notes_what_is_asked_for() -> None:
    found: list[bool] = []
    with watched([("norm",)]) as asked:
        found.append(allows(CPU, "norm"))
        thread = threading.Thread(target=lambda: found.append(allows(CPU, "norm")))
        thread.start()
        thread.join()
        assert found == [False, True]
        assert list(asked) == [("norm",)]
    assert allows(CPU, "norm")
    assert not refused(CPU)


@pytest.mark.parametrize(
    ("n", "keys", "kernel"),
    [
        (1, [], "products"),
        (1, [("gemv", Q8_0, 1)], "product"),
        (1, [("gemv", Q8_0, 1), ("tile_gemm", Q8_0, 16)], "dequantise"),
        (12, [("tile_gemm", Q8_0, 16)], "dequantise"),
        (12, [("tile_gemm", Q8_0, 16), ("dequant_gemm", Q8_0)], "products"),
        (300, [("dequant_gemm", Q8_0)], "product"),
    ],
)
def test_another_kernel_multiplies(n: int, keys: list[tuple[str | int, ...]], kernel: str) -> None:
    held, values = weight()
    refuse(CPU, keys)
    x = rows(n)
    assert_product(held.matmul(x), x, values)
    assert kernel in started(lambda: held.matmul(x))
    allow_all()
    if keys:
        assert kernel not in started(lambda: held.matmul(x))


def test_where_all_are_refused_there_is_one_sentence() -> None:
    held, _ = weight()
    refuse(CPU, [("gemv", Q8_0, 1), ("tile_gemm", Q8_0, 16), ("dequant_gemm", Q8_0)])
    with pytest.raises(EngineError, match=r"^No kernel multiplies Q8_0 weights correctly"):
        held.matmul(rows(1))


def test_products_of_other_types_stay() -> None:
    """One launch for several matrices is split up."""
    (held, values), other = weight(), matrix(int(Kind.Q4_0), N_ROWS, 0, N_COLUMNS)
    layers = [Layer(held), Layer(GpuPlanes(other.planes, other.number, N_ROWS, other.extent, 1))]
    refuse(CPU, [("gemv", other.number, 1)])
    ops, x = GpuOps(CPU), rows(1)
    for y, exact in zip(ops.linears(x, *layers), (values, other.values), strict=True):
        assert_product(y, x, exact)
    names = started(lambda: ops.linears(x, *layers))
    assert names.count("products") == 1
    assert names.count("product") == 1


class Layer:
    """Linear map without bias or scale."""

    scale = added_bias = None
    is_bare = True

    def __init__(self, weight: GpuPlanes) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.matmul(x)

    def finish(self, y: Tensor) -> Tensor:
        return y


def test_gate_and_up_are_multiplied_one_by_one() -> None:
    held, values = weight()
    refuse(CPU, [("gated", Q8_0, 1)])
    ops, layer, x = GpuOps(CPU), Layer(held), rows(1)
    y = ops.gated_linears(SILU, x, layer, layer)
    z = REFERENCE.gated(SILU, x @ values.T, x @ values.T)
    assert (y - z).square().mean() < 1e-3 * z.square().mean()
    assert started(lambda: ops.gated_linears(SILU, x, layer, layer)) == [
        "as_bytes", "products", "gated"
    ]  # fmt: skip


def test_rows_are_looked_up_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.gpu.matmul.dequant_gemm.DEVICE_CHUNK", 16 * N_COLUMNS)
    held, values = weight()
    ids = torch.tensor([0, 39, 17, -1, 40, 16])
    expected = held.lookup(ids)
    assert torch.equal(expected[0], values[0])
    refuse(CPU, [("look_up", Q8_0)])
    assert torch.equal(held.lookup(ids), expected)
    assert "look_up" not in started(lambda: held.lookup(ids))


@pytest.mark.parametrize("transposed", [False, True])
def test_heads_are_multiplied_another_way(transposed: bool) -> None:
    found = matrix(Q8_0, 32, 0, 64, n_matrix=2)
    held = GpuPlanes(found.planes, Q8_0, 32, found.extent, 1)
    x = torch.randn(1, 2, 32 if transposed else 64)
    expected = held.per_head(x, transposed=transposed)
    refuse(CPU, [("per_head", Q8_0, int(transposed))])
    y = held.per_head(x, transposed=transposed)
    assert (y - expected).square().mean() < 1e-3 * expected.square().mean()
    assert started(lambda: held.per_head(x, transposed=transposed)) == ["dequantise"]


@pytest.mark.parametrize("n_token", [2, 9])
def test_experts_are_computed_one_by_one(n_token: int) -> None:
    found = matrix(Q8_0, N_ROWS, 0, N_COLUMNS, n_matrix=5)
    held = GpuPlanes(found.planes, Q8_0, N_ROWS, found.extent, 2)
    _, groups = GpuOps(CPU).assign(Routing(5, 2), torch.randn(n_token, 5), None)
    x = groups.rows(rows(n_token)).contiguous()
    expected = held.grouped(x, groups)
    refuse(CPU, [("expert_gemv" if n_token == 2 else "expert_gemm", Q8_0)])
    assert moe.grouped(held, x, groups) is None
    y = held.grouped(x, groups)
    assert (y - expected).square().mean() < 1e-3 * expected.square().mean()


def test_unquantised_matrices_are_multiplied_by_torch() -> None:
    data, x = torch.randn(N_ROWS, N_COLUMNS).half(), rows(2)
    refuse(CPU, [("plain", "torch.float16", 2)])
    assert_product(GpuPlain(data).matmul(x), x, data.float())
    assert not started(lambda: GpuPlain(data).matmul(x))


def test_a_norm_is_computed_by_torch() -> None:
    x = rows(3)
    refuse(CPU, [("rms_norm",)])
    assert elementwise.rms_norm(x, None, None, 1e-5) is None
    y = GpuOps(CPU).rms_norm(x, None, None, 1e-5)
    torch.testing.assert_close(y, REFERENCE.rms_norm(x, None, None, 1e-5))


def test_positions_are_turned_by_torch() -> None:
    from engine.model.forward.operands import RopeParams

    params, positions = RopeParams(8, "neox", 1e4), torch.arange(3)
    refuse(CPU, [("rope_angles",)])
    found = GpuOps(CPU).rope_angles(params, None, positions)
    for mine, exact in zip(found, REFERENCE.rope_angles(params, None, positions), strict=True):
        assert torch.equal(mine, exact)


def test_most_rows_of_a_tile_are_as_before() -> None:
    held, _ = weight()
    x = rows(tile_gemm.MAX_ROWS)
    assert tile_gemm.product(x, held) is not None
    refuse(CPU, [("tile_gemm", Q8_0, tile_gemm.MAX_ROWS)])
    assert tile_gemm.product(x, held) is None
