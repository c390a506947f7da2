"""Rows have the same bits in any batch: products and small operations."""

from collections.abc import Callable, Iterator
from math import inf

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine.backends.cpu import worker as gemm_choice
from engine.backends.cpu.kernels.language.isa import Isa, chosen, supported
from engine.backends.cpu.kernels.products.gemm import MAX_PANELS
from engine.backends.cpu.kernels.running import compiled
from engine.backends.cpu.ops import CpuOps
from engine.backends.cpu.plain_weights import KINDS, PlainWeight
from engine.backends.cpu.weights import JoinedColumns, JointProduct, PlaneWeight
from engine.backends.cpu.worker import Worker
from engine.formats.quants.layout import Extent
from engine.model.forward.batch import Batch
from engine.model.forward.operands import Activation, RopeParams, Routing, Weight
from tests.helpers.kernels import packed, random_rows
from tests.helpers.planes import TYPES

ISAS = supported()

LENGTHS = (1, 2, 7, 8, 9, 16, 17, 31, 33, 64)
"""Numbers of rows of a call, compared with all rows together."""

N_ROWS = 257

N_COLUMNS, N_OUT = 512, 75
"""Matrix shape: neither whole tiles nor whole vectors."""

TYPICAL = (Kind.Q4_K, Kind.Q6_K, Kind.IQ4_NL)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(isa, id=isa.name, marks=[pytest.mark.slow] * (isa not in (ISAS[0], ISAS[-1])))
        for isa in ISAS
    ],
)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    """Compile kernels for one instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_CPU", request.param.name)
        _forget_kernels()
        yield request.param
    _forget_kernels()


def _forget_kernels() -> None:
    chosen.cache_clear()
    for found in vars(compiled).values():
        if hasattr(found, "cache_clear"):
            found.cache_clear()


@pytest.fixture(scope="module")
def worker(isa: Isa) -> Iterator[Worker]:
    worker = Worker(2)
    yield worker
    worker.close()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def check(function: Callable[..., Tensor], *rows: Tensor) -> None:
    """Compare the results of all rows together and of fewer at a time."""
    whole = function(*rows).clone()
    assert whole.isfinite().all()
    for n in LENGTHS:
        for start in (0, n, 3, (len(whole) - 1) // n * n):  # the last call may have fewer rows
            part = function(*(x[start : start + n] for x in rows))
            assert torch.equal(part, whole[start : start + n]), (n, start)


def in_planes(kind: Kind, worker: Worker, n_matrices: int = 0, seed: int = 0) -> PlaneWeight:
    """Return a random matrix in planes, or several."""
    found = [
        packed(random_rows(kind, N_OUT, N_COLUMNS, seed=seed + n), kind, chosen(), worker.pool)
        for n in range(n_matrices or 1)
    ]
    planes = torch.stack([torch.from_numpy(m).view(-(-N_OUT // 16), -1) for m in found])
    planes = planes if n_matrices else planes[0]
    return PlaneWeight(planes, kind, N_OUT, Extent.of(0, N_COLUMNS), worker)


def plain(dtype: torch.dtype, worker: Worker, *matrices: int) -> PlainWeight:
    return PlainWeight(numbers(*matrices, N_OUT, N_COLUMNS - 3).to(dtype), worker)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_products_with_quantised_matrices(isa: Isa, worker: Worker, kind: Kind) -> None:
    if isa.name == ISAS[0].name or kind in TYPICAL:  # on lesser processors, others are alike
        check(in_planes(kind, worker).matmul, numbers(N_ROWS, N_COLUMNS))


@pytest.mark.parametrize("kind", TYPICAL, ids=lambda kind: kind.name)
def test_products_of_activations_of_two_bytes(isa: Isa, kind: Kind) -> None:
    if isa.name == ISAS[0].name or kind == Kind.Q4_K:
        worker = Worker(2, x_bytes=2)
        check(in_planes(kind, worker).matmul, numbers(N_ROWS, N_COLUMNS))
        worker.close()


def test_more_rows_than_fit_on_the_stack(isa: Isa, worker: Worker) -> None:
    n_rows = MAX_PANELS * isa.tile_tokens + 20
    check(in_planes(Kind.Q6_K, worker).matmul, numbers(n_rows, N_COLUMNS))


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_products_with_unquantised_matrices(worker: Worker, dtype: torch.dtype) -> None:
    check(plain(dtype, worker).matmul, numbers(N_ROWS, N_COLUMNS - 3))


@pytest.mark.parametrize("dtype", [*KINDS, None], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_heads(worker: Worker, dtype: torch.dtype | None, transposed: bool) -> None:
    weight: Weight = in_planes(Kind.Q8_0, worker, 3) if dtype is None else plain(dtype, worker, 3)
    n_in = N_COLUMNS if dtype is None else N_COLUMNS - 3
    x = numbers(N_ROWS, 3, 40 if transposed else n_in)
    check(lambda rows: weight.per_head(rows, slice(5, 45), transposed=transposed), x)


def test_joint_products(worker: Worker) -> None:
    """Joint, gated, and summed over intervals of columns."""
    weights = [in_planes(Kind.Q4_K, worker, seed=1), in_planes(Kind.Q6_K, worker, seed=2)]
    joint = JointProduct(weights)
    x = numbers(joint.n_tokens, N_COLUMNS)
    check(lambda rows: torch.cat([part.clone() for part in joint(rows)], -1), x)
    kernel = CpuOps(worker.pool)._small_ops.activation("silu", 0.0)
    assert kernel is not None
    check(lambda rows: joint.gated(rows, *kernel).clone(), x)
    columns = JoinedColumns([*weights, plain(torch.bfloat16, worker)], [N_COLUMNS] * 2 + [509])
    check(columns.matmul, numbers(N_ROWS, 2 * N_COLUMNS + 509))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.F16], ids=lambda kind: kind.name)
def test_routed_experts(worker: Worker, kind: Kind) -> None:
    ops, is_plain = CpuOps(worker.pool), kind == Kind.F16
    experts: Weight = plain(torch.float16, worker, 6) if is_plain else in_planes(kind, worker, 6)

    def routed(x: Tensor, logits: Tensor) -> Tensor:
        weights, groups = ops.assign(Routing(6, 2), logits, None)
        return ops.sum_of_experts(experts.grouped(groups.rows(x), groups), weights, groups)

    check(routed, numbers(N_ROWS, N_COLUMNS - 3 * is_plain), numbers(N_ROWS, 6, seed=1))


@pytest.mark.parametrize("kind", ["silu", "gelu", "relu", "relu2", "sigmoid"])
def test_activations(worker: Worker, kind: str) -> None:
    ops, act, x = CpuOps(worker.pool), Activation(kind), numbers(N_ROWS, N_OUT)  # type: ignore[arg-type]
    check(lambda rows: ops.activate(act, rows), x)
    check(lambda rows, up: ops.gated(act, rows, up), x, numbers(N_ROWS, N_OUT, seed=1))


def test_functions_of_single_elements(worker: Worker) -> None:
    ops, x = CpuOps(worker.pool), numbers(N_ROWS, 21) * 4
    check(ops.softplus, x)
    check(lambda rows: ops.softcap(rows, 30.0), x)
    check(lambda rows: ops.xielu(rows, 0.8, 0.9, 0.5, -1e-6), x)


def test_norms(worker: Worker) -> None:
    ops, weight = CpuOps(worker.pool), numbers(N_OUT)
    for x in (numbers(N_ROWS, N_OUT), numbers(N_ROWS, 3, N_OUT)):
        check(lambda rows: ops.rms_norm(rows, weight, weight, 1e-5), x)
        check(lambda rows: ops.layer_norm(rows, weight, None, 1e-5), x)
        check(lambda rows: ops.l2_norm(rows, 1e-6), x)


def test_row_gates(worker: Worker) -> None:
    ops, door = CpuOps(worker.pool), numbers(N_COLUMNS - 3)
    x, y, other = (numbers(N_ROWS, n, seed=n) for n in (N_COLUMNS - 3, 21, 22))
    check(lambda *rows: ops.opened(rows[0], door, rows[1], rows[2][:, :21]), x, y, other)


@pytest.mark.parametrize("style", ["norm", "neox"])
def test_rope(worker: Worker, style: str) -> None:
    ops, x = CpuOps(worker.pool), numbers(N_ROWS, 3, 50)
    params, positions = RopeParams(42, style, 1e4), torch.arange(200, 200 + N_ROWS)  # type: ignore[arg-type]

    def rotated(rows: Tensor, at: Tensor) -> Tensor:
        ops.begin(Batch.of_one(int(at[0]), len(at), 0), at)
        return ops.rope(rows, *ops.rope_angles(params, None, at), style)

    check(rotated, x, positions)


@pytest.mark.parametrize("kind", [*TYPICAL, None], ids=str)
def test_lookup(worker: Worker, kind: Kind | None) -> None:
    weight: Weight = plain(torch.bfloat16, worker) if kind is None else in_planes(kind, worker)
    check(weight.lookup, torch.arange(N_ROWS) % N_OUT)


def test_bf16_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """In models without routers, from the number of rows on where it was measured to be faster."""
    monkeypatch.setattr(gemm_choice, "bf16_from", lambda n_threads: 4)
    monkeypatch.setattr(gemm_choice, "is_bf16_fast", lambda n_threads: True)
    x, products = numbers(20, N_COLUMNS), []
    for asked, x_bytes in ((False, 1), (True, 1), (True, 2)):
        worker = Worker(1, x_bytes, fast_prompts=asked)
        uses_bf16 = asked and x_bytes == 1
        assert worker.bf16_from == (4 if uses_bf16 else inf)
        assert worker.is_bf16_fast == uses_bf16
        products.append(in_planes(Kind.Q8_0, worker).matmul(x))
        products.append(plain(torch.float16, worker).matmul(x[:, : N_COLUMNS - 3]))
        worker.close()
    quantised, unquantised = products[::2], products[1::2]
    assert torch.equal(unquantised[0], unquantised[2])
    for found in (quantised, unquantised):
        assert not torch.equal(found[0], found[1])
        torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=2.0)
