"""Gemv with matrices in planes: products of dequantised values, of the same bits in any batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar
from unittest import mock

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine.backends.gpu import elementwise, quantised
from engine.backends.gpu.launch import configs
from engine.backends.gpu.launch.configs import KernelTarget
from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches
from engine.backends.gpu.matmul import gemv
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.layout import LAYOUTS, Extent
from engine.model.forward.attention import computing
from engine.model.forward.batch import SMALL_BATCH
from engine.model.forward.operands import GELU, RELU2, SILU, Activation
from engine.model.forward.ops import Ops
from tests.helpers.checked_pass import checked
from tests.helpers.device_planes import Matrix, matrix
from tests.helpers.ptx import emulated
from tests.helpers.tiers import TYPICAL_TYPES, swept


def every_type(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with every type, with small matrices: their programs have one step."""
    test = pytest.mark.parametrize("number", LAYOUTS, ids=lambda n: TYPES[n].name)(test)
    return pytest.mark.usefixtures("one_step")(test)


def typical_types(test: Callable[..., None]) -> Callable[..., None]:
    """As `every_type`, but the types that are read like others are left to `-m slow`."""
    cases = swept(LAYOUTS, TYPICAL_TYPES)
    test = pytest.mark.parametrize("number", cases, ids=lambda n: TYPES[n].name)(test)
    return pytest.mark.usefixtures("one_step")(test)


T = TypeVar("T")

START, STOP = 40, 600
"""Columns that begin and end inside of blocks; some of the file's 256 are cut."""

N_ROWS = 13


@dataclass
class Held:
    """A matrix as products take it."""

    planes: Tensor
    type_number: int
    n_rows: int
    extent: Extent
    x_bytes: int
    values: Tensor


def held(found: Matrix, x_bytes: int = 1) -> Held:
    return Held(found.planes, found.number, found.n_rows, found.extent, x_bytes, found.values)


def some(number: int, device: str, n_rows: int = N_ROWS, x_bytes: int = 1, seed: int = 0) -> Held:
    return held(matrix(number, n_rows, START, STOP, seed=seed, device=device), x_bytes)


def random_x(n: int, device: str, n_columns: int = STOP - START) -> Tensor:
    return torch.randn(n, n_columns, generator=torch.Generator().manual_seed(n)).to(device)


def product(x: Tensor, weight: Held, **more: Tensor) -> Tensor:
    y = gemv.product(x, weight, **more)
    assert y is not None
    return y


@contextmanager
def gemv_operands(name: str) -> Iterator[None]:
    """Make gemv multiply activations of this type on all devices."""
    with mock.patch.object(KernelTarget, "gemv_operands", name):
        yield


@pytest.fixture
def one_step() -> Iterator[None]:
    """Make each program compute all columns of a tile in one step."""
    rules = {
        "few": lambda target, **facts: {"num_warps": 4, "unroll": 1},
        "few_parts": lambda target, **facts: {"parts": 1},
    }
    with mock.patch.dict(configs.RULES, rules):
        yield


@contextmanager
def many_parts() -> Iterator[None]:
    """Split each tile's columns between two programs."""
    with mock.patch.dict(configs.RULES, few_parts=lambda target, **facts: {"parts": 2}):
        yield


def counted(call: Callable[[], T]) -> tuple[T, int]:
    """Return a function's result, and the number of kernels that it launches."""
    starts: list[KernelLaunch] = []
    with intercept_launches(lambda start: starts.append(start) is None):
        found = call()
    return found, len(starts)


def seen(x: Tensor, weight: Held) -> Tensor:
    """Return the numbers that quantised rows represent, in F64."""
    rows, extent = quantised.quantise(x, weight.extent, weight.x_bytes), weight.extent
    shape = (len(x), extent.n_blocks, weight.x_bytes, 2, 16)
    whole = rows.numbers.view(torch.int8).view(shape).double()
    total = whole[:, :, 0] if weight.x_bytes == 1 else whole[:, :, 0] * 255 + whole[:, :, 1]
    scale = rows.facts.view(torch.float32).view(len(x), -1, 4)[..., :2].double()
    numbers = (total * scale[..., None]).view(len(x), -1)
    return numbers[:, extent.lead : extent.lead + extent.n_columns]


def assert_near(y: Tensor, x: Tensor, values: Tensor) -> None:
    """Assert products up to roundings of F32."""
    size = x.double().abs() @ values.double().abs().T
    assert ((y - x.double() @ values.double().T).abs() <= 3e-6 * size).all()


@every_type
@pytest.mark.parametrize("x_bytes", [1, 2])
def test_products_of_bytes(number: int, x_bytes: int, device: str) -> None:
    weight, x = some(number, device, x_bytes=x_bytes), random_x(2, device)
    with gemv_operands("int8"):
        y = product(x, weight)
        numbers = seen(x, weight)
    assert y.shape == (2, weight.n_rows)
    assert_near(y, numbers, weight.values)
    exact = x.double() @ weight.values.double().T
    error = (1e-4, 1e-9)[x_bytes - 1]
    assert (y - exact).square().sum() <= error * exact.square().sum()


@every_type
def test_products_of_numbers(number: int, device: str) -> None:
    weight, x = some(number, device), random_x(1, device)
    with gemv_operands("f32"):
        assert_near(product(x, weight), x, weight.values)


@typical_types
def test_nvidias_instructions_give_the_same_bits(number: int) -> None:
    weight, x = some(number, "cpu"), random_x(2, "cpu")
    for x_bytes in (1, 2):
        weight = replace(weight, x_bytes=x_bytes)
        plain = product(x, weight)
        with mock.patch.object(KernelTarget, "has_asm", True), emulated():
            assert torch.equal(product(x, weight), plain)


@typical_types
def test_a_row_has_the_same_bits_in_any_company(number: int, device: str) -> None:
    weight, x = some(number, device), random_x(8, device)
    with gemv_operands("int8"):
        together = product(x, weight)
        for start, n in ((5, 1), (3, 2), (1, 3)):
            assert torch.equal(product(x[start : start + n], weight), together[start : start + n])


@pytest.mark.parametrize("parts", [1, 2])
def test_so_has_a_row_among_more_that_check_guesses(parts: int, device: str) -> None:
    """Rows after the eighth are multiplied by separate programs."""
    weight, x = some(Kind.Q4_K, device, n_rows=32), random_x(11, device)
    residual = torch.randn(11, 32, generator=torch.Generator().manual_seed(1)).to(device)
    with many_parts() if parts > 1 else nullcontext(), computing(checked(11)):
        found = product(x, weight, residual=residual)
        gated = gemv.gated(x, weight, weight, SILU)
        assert gated is not None
        inner = quantised.attached(gated)
        assert inner is not None
        for rows in (slice(0, 2), slice(7, 9), slice(10, 11)):
            assert torch.equal(product(x[rows], weight, residual=residual[rows]), found[rows])
            alone = gemv.gated(x[rows], weight, weight, SILU)
            assert alone is not None
            assert torch.equal(alone, gated[rows])
            numbers = quantised.quantise(alone, inner.extent, inner.x_bytes).numbers
            assert torch.equal(numbers, inner.numbers[rows])


@pytest.mark.parametrize("number", [Kind.Q4_K, Kind.Q6_K], ids=lambda n: n.name)
@pytest.mark.usefixtures("one_step")
def test_the_same_of_numbers(number: int, device: str) -> None:
    weight, x = some(number, device, n_rows=16), random_x(5, device)
    with gemv_operands("f32"):
        together = product(x, weight)
        for row in (0, 4):
            assert torch.equal(product(x[row : row + 1], weight), together[row : row + 1])


@pytest.mark.parametrize(
    ("n_rows", "start", "stop"),
    [(1, 0, 32), (16, 0, 256), (17, 255, 257), (40, 96, 2048), (3, 31, 736)],
)
def test_sizes(n_rows: int, start: int, stop: int, device: str) -> None:
    weight = held(matrix(Kind.Q4_K, n_rows, start, stop, device=device))
    x = random_x(3, device, stop - start)
    assert_near(product(x, weight), seen(x, weight), weight.values)


def test_parts_of_a_tile_are_added(device: str) -> None:
    weight, x = some(Kind.Q4_K, device, n_rows=40), random_x(3, device)
    alone = product(x, weight)
    with many_parts():
        shared = product(x, weight)
        for n in (1, 2):
            assert torch.equal(product(x[:n], weight), shared[:n])
    assert_near(shared, seen(x, weight), weight.values)
    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("n_rows", "n_blocks", "n_warps", "parts"),
    [(1024, 128, 4, 4), (4096, 128, 4, 1), (16, 160, 4, 5), (528, 160, 4, 5), (1056, 160, 4, 3),
     (64, 24, 2, 2), (64, 8, 1, 1), (128256, 64, 4, 1)],
)  # fmt: skip
def test_how_programs_are_cut(n_rows: int, n_blocks: int, n_warps: int, parts: int) -> None:
    h200 = KernelTarget("nvidia", 90, 132)
    found = configs.gemv_config(h200, n_blocks=n_blocks)["num_warps"]
    assert found == n_warps
    cut = configs.gemv_parts_config(h200, n_blocks=n_blocks, n_rows=n_rows, num_warps=n_warps)
    assert cut == {"parts": parts}


def test_what_is_added(device: str) -> None:
    weight, x = some(Kind.Q5_0, device), random_x(3, device)
    bias, residual = random_x(1, device, N_ROWS)[0], random_x(3, device, N_ROWS)
    plain = product(x, weight)
    assert torch.equal(product(x, weight, bias=bias), plain + bias)
    assert torch.equal(product(x, weight, residual=residual), plain + residual)
    with many_parts():
        plain = product(x, weight)
        both = product(x, weight, bias=bias, residual=residual)
    assert torch.equal(both, plain + bias + residual)


@pytest.mark.usefixtures("one_step")
def test_several_matrices_at_once(device: str) -> None:
    x = random_x(3, device)
    sizes = ((Kind.Q4_K, 20), (Kind.Q6_K, 16), (Kind.Q4_K, 7), (Kind.Q4_K, 17), (Kind.Q4_K, 16))
    weights = [some(number, device, n, seed=n) for number, n in sizes]
    biases = [random_x(1, device, n)[0] if n != 7 else None for _, n in sizes]
    together, n_start = counted(lambda: gemv.products(x, weights, biases))
    assert n_start == 4  # one that quantises; Q4_K with and without a bias, Q6_K
    alone = [gemv.product(x, w, b) for w, b in zip(weights, biases, strict=True)]
    assert together is not None
    for found, wanted in zip(together, alone, strict=True):
        assert wanted is not None
        assert torch.equal(found, wanted)


def test_several_matrices_in_parts(device: str) -> None:
    x, weights = random_x(2, device), [some(Kind.Q8_0, device, n, seed=n) for n in (32, 17, 5, 16)]
    with many_parts():
        together = gemv.products(x, weights)
        assert together is not None
        for found, weight in zip(together, weights, strict=True):
            assert torch.equal(found, product(x, weight))


ACTS = (SILU, GELU, RELU2, Activation("relu"), Activation("silu", 0.7), Activation("oai", 0.7))


@pytest.mark.parametrize("act", ACTS, ids=lambda act: f"{act.kind}-{act.limit}")
@pytest.mark.parametrize("is_shared", [False, True])
def test_gated(act: Activation, is_shared: bool, device: str) -> None:
    gate, up = (some(Kind.Q4_K, device, seed=seed) for seed in (1, 2))
    x = random_x(2, device) / 8
    with many_parts() if is_shared else mock.MagicMock():
        y = gemv.gated(x, gate, up, act)
        numbers = product(x, gate), product(x, up)
    assert y is not None
    wanted = elementwise.gated(act, *numbers)
    assert wanted is not None
    if device == "cpu" or act.kind.startswith("relu"):
        assert torch.equal(y, wanted)
    torch.testing.assert_close(y, Ops().gated(act, *numbers), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("one_step")
@pytest.mark.parametrize(("x_bytes", "how"), [(1, "int8"), (2, "int8"), (1, "f32")])
def test_what_is_rounded_on_the_way(x_bytes: int, how: str, device: str) -> None:
    gate, up = (some(Kind.Q4_0, device, 32, x_bytes, seed) for seed in (1, 2))
    down = held(matrix(Kind.Q4_0, 20, 0, 32, device=device), x_bytes)
    x = random_x(2, device) / 8
    for shared in (mock.MagicMock(), many_parts()):
        with gemv_operands(how), shared:
            inner = gemv.gated(x, gate, up, SILU)
            assert inner is not None
            y, n_start = counted(lambda: product(inner, down))  # noqa: B023 called at once
            assert n_start == 1
            assert torch.equal(y, product(inner.clone(), down))
            other = held(matrix(Kind.Q4_0, 20, 40, 72, device=device), x_bytes)
            assert torch.equal(product(inner, other), product(inner.clone(), other))


def test_counters_are_zeros_again(device: str) -> None:
    weight, x = some(Kind.Q4_0, device, n_rows=40), random_x(2, device)
    made: list[quantised.QuantisedRows] = []

    def kept(*given: object) -> quantised.QuantisedRows:
        made.append(quantised.quantise(*given))
        return made[-1]

    with many_parts(), mock.patch.object(gemv, "quantise", kept):
        product(x, weight)
        assert gemv.gated(x, weight, weight, SILU) is not None
    assert len(made) == 2
    assert not any(rows.counters.any() for rows in made)


def test_shapes_without_memory() -> None:
    weight = some(Kind.Q4_K, "cpu")
    weight.planes = weight.planes.to("meta")
    x = torch.empty(3, STOP - START, device="meta")
    assert product(x, weight).shape == (3, N_ROWS)
    assert [y.shape for y in gemv.products(x, [weight] * 4) or ()] == [(3, N_ROWS)] * 4
    gated = gemv.gated(x, weight, weight, SILU)
    assert gated is not None
    assert gated.shape == (3, N_ROWS)


def test_what_is_left_to_others(device: str) -> None:
    weight, x = some(Kind.Q4_K, device), random_x(1, device)
    assert gemv.product(x.expand(SMALL_BATCH + 1, -1).contiguous(), weight) is None
    assert gemv.product(x[:0], weight) is None
    assert gemv.product(x.double(), weight) is None
    assert gemv.product(x[0], weight) is None
    assert gemv.product(x[:, :-1].contiguous(), weight) is None
    assert gemv.product(x, weight, bias=random_x(1, device)[0].double()) is None
    assert gemv.products(x, [weight, replace(weight, type_number=Kind.F16)]) is None
    assert gemv.gated(x, weight, some(Kind.Q6_K, device), SILU) is None
    assert gemv.gated(x, weight, some(Kind.Q4_K, device, n_rows=7), SILU) is None
