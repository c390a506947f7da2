"""Routed experts by kernels that look them up on the device, against one expert after another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine.backends.gpu import moe as experts
from engine.backends.gpu import moe as routing
from engine.backends.gpu.launch.configs import KernelTarget, use_target
from engine.backends.gpu.launch.kernel_launch import intercept_launches
from engine.backends.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.backends.gpu.moe import DeviceGroups
from engine.backends.reference.weights import DenseWeight
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.layout import LAYOUTS
from engine.model.forward.batch import SMALL_BATCH
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import SILU, Activation, Weight
from engine.model.forward.ops import Ops
from engine.model.layers.linear import ExpertLinear
from engine.model.sharding.placement import Shard
from engine.model.sharding.shares import Ranges
from tests.helpers.device_planes import Matrix, matrix
from tests.helpers.tiers import TYPICAL_TYPES, swept

EXACT = Ops()
N_EXPERT = 5

FEW, MANY = 2e-4, 3e-2
"""Relative tolerances: of activations in two bytes; of operands in BF16, to which the interpreter
truncates."""

every_type = pytest.mark.parametrize(
    "number", swept(LAYOUTS, TYPICAL_TYPES), ids=lambda n: TYPES[n].name
)


def some_choice(n_token: int, n_used: int = 2, seed: int = 0) -> Tensor:
    """Return each token's experts, ascending; the last expert is unused."""
    torch.manual_seed(seed)
    return torch.rand(n_token, N_EXPERT - 1).topk(n_used).indices.sort().values


def device_groups(chosen: Tensor, device: str) -> DeviceGroups:
    """Return the groups that the router would build."""
    n_token, n_used = chosen.shape
    if n_token > SMALL_BATCH:
        return routing.sorted_groups(chosen.to(torch.int32).to(device), N_EXPERT)
    order = torch.arange(n_token * n_used, device=device)
    table = torch.empty(0, 3, dtype=torch.int32, device=device)
    flat = chosen.view(-1).to(device)
    return DeviceGroups(table, flat, order, order.view(n_token, n_used), 0)


def expected_rows(weight: Weight, x: Tensor, chosen: Tensor, groups: DeviceGroups) -> Tensor:
    """Return the reference's products of x (T, n), in the order of the device's rows."""
    exact = Groups.of(chosen)
    y = weight.grouped(exact.rows(x), exact)
    return y[exact.row_of.view(-1)][groups.pair_of.cpu()]


def assert_near(found: Tensor | None, wanted: Tensor, tolerance: float) -> None:
    assert found is not None
    assert found.shape == wanted.shape
    assert (found.cpu() - wanted).norm() <= tolerance * wanted.norm()


def planes_of(some: Matrix, x_bytes: int = 2) -> GpuPlanes:
    return GpuPlanes(some.planes, some.number, some.n_rows, some.extent, x_bytes)


def check(some: Matrix, n_token: int, device: str, x_bytes: int = 2) -> None:
    chosen = some_choice(n_token)
    groups = device_groups(chosen, device)
    x = torch.randn(n_token, some.extent.n_columns)
    weight = planes_of(some, x_bytes)
    found = experts.grouped(weight, groups.rows(x.to(device)), groups)
    wanted = expected_rows(DenseWeight(some.values.cpu()), x, chosen, groups)
    tolerance = MANY if n_token > SMALL_BATCH or x_bytes == 1 else FEW
    assert_near(found, wanted, tolerance)


@every_type
def test_every_type(number: int, device: str) -> None:
    """The extent begins inside a block of the file; the rows do not fill a tile."""
    block = TYPES[number].block_size
    some = matrix(number, 12, 64 % block, 64 % block + 96, n_matrix=N_EXPERT, device=device)
    check(some, 1, device)
    check(some, 9, device)


@pytest.mark.parametrize("number", [Kind.Q5_K, Kind.Q8_0], ids=lambda n: n.name)
@pytest.mark.parametrize(("start", "stop"), [(0, 256), (40, 70), (31, 224)])
def test_cuts(number: int, start: int, stop: int, device: str) -> None:
    some = matrix(number, 20, start, stop, n_matrix=N_EXPERT, device=device)
    for n_token in (1, 2, 40):
        check(some, n_token, device)


def test_activations_of_one_byte(device: str) -> None:
    check(matrix(Kind.Q4_0, 16, 0, 64, n_matrix=N_EXPERT, device=device), 3, device, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n_columns", [64, 27])
@pytest.mark.parametrize("n_token", [1, 3, 12])
def test_plain_matrices(dtype: torch.dtype, n_columns: int, n_token: int, device: str) -> None:
    data = torch.randn(N_EXPERT, 7, n_columns).to(dtype)
    chosen = some_choice(n_token)
    groups = device_groups(chosen, device)
    x = torch.randn(n_token, n_columns) * 1e3
    found = experts.grouped(GpuPlain(data.to(device)), groups.rows(x.to(device)), groups)
    wanted = expected_rows(DenseWeight(data.float()), x, chosen, groups)
    is_exact = n_token <= SMALL_BATCH or dtype == torch.float32
    assert_near(found, wanted, 1e-5 if is_exact else MANY)


@pytest.mark.parametrize("n_token", [9, 37])
def test_all_rows_go_to_the_same_experts(n_token: int, device: str) -> None:
    some = matrix(Kind.Q4_0, 16, 0, 32, n_matrix=N_EXPERT, device=device)
    chosen = torch.tensor([[1, 4]]).repeat(n_token, 1)
    groups, x = device_groups(chosen, device), torch.randn(n_token, 32)
    found = experts.grouped(planes_of(some), groups.rows(x.to(device)), groups)
    assert_near(found, expected_rows(DenseWeight(some.values.cpu()), x, chosen, groups), MANY)


@pytest.mark.parametrize("number", [Kind.Q4_K, Kind.Q6_K], ids=lambda n: n.name)
def test_a_row_has_the_same_bits_alone_and_among_others(number: int, device: str) -> None:
    some = matrix(number, 16, 0, 256, n_matrix=N_EXPERT, device=device)
    weight, chosen, x = planes_of(some), some_choice(8), torch.randn(8, 256, device=device)
    many = device_groups(chosen, device)
    together = experts.grouped(weight, many.rows(x), many)
    assert together is not None
    for token in (0, 5):
        one = device_groups(chosen[token : token + 1], device)
        alone = experts.grouped(weight, one.rows(x[token : token + 1]), one)
        assert alone is not None
        assert torch.equal(alone, together[2 * token : 2 * token + 2])


def layer_of(weight: Weight, *, extras: bool, device: str, seed: int) -> ExpertLinear:
    """Return a layer of experts, with a scale and a bias if wanted."""
    n_rows = weight.n_rows if isinstance(weight, GpuPlanes | GpuPlain) else 0
    layer = ExpertLinear(N_EXPERT, 1, n_rows, Shard(1, Ranges(((0, n_rows),), n_rows)))
    layer.weight = weight
    if extras:
        torch.manual_seed(seed)
        layer.scale = 1 + torch.rand(N_EXPERT).to(device)
        layer.bias = torch.randn(N_EXPERT, n_rows).to(device)
    return layer


def exact_layer(layer: ExpertLinear, values: Tensor) -> ExpertLinear:
    """Return the same layer with exact weights for the reference, on the CPU."""
    exact = ExpertLinear(N_EXPERT, 1, values.shape[1], layer.placement)
    exact.weight = DenseWeight(values.float().cpu())
    exact.scale = None if layer.scale is None else layer.scale.cpu()
    exact.bias = None if layer.bias is None else layer.bias.cpu()
    return exact


WIDTH, N_FF = 32, 24

OAI, LIMITED, SQUARED = Activation("oai", 1.5), Activation("gelu", 0.5), Activation("relu2")


@pytest.mark.parametrize("n_token", [1, 11])
@pytest.mark.parametrize(
    ("act", "form", "has_factors"),
    [
        (SILU, "gated", False), (SILU, "gated", True), (OAI, "gated", False),
        (LIMITED, "fused", False), (SQUARED, "bare", False),
    ],
)  # fmt: skip
def test_whole_experts(
    act: Activation, form: str, has_factors: bool, n_token: int, device: str
) -> None:
    """Gate, up, activation and down, with scales and biases, or with factors as in Llama 4."""
    rows = 2 * N_FF if form == "fused" else N_FF
    shapes = [(rows, WIDTH)] * (2 if form == "gated" else 1) + [(WIDTH, N_FF)]
    found = [
        matrix(Kind.Q8_0, *shape[:1], 0, shape[1], n_matrix=N_EXPERT, seed=n, device=device)
        for n, shape in enumerate(shapes)
    ]
    layers = [
        layer_of(planes_of(some), extras=act.kind == "oai", device=device, seed=n)
        for n, some in enumerate(found)
    ]
    compare(act, form, layers, [some.values for some in found], n_token, device, has_factors)


def compare(
    act: Activation, form: str, layers: list[ExpertLinear], values: list[Tensor], n_token: int,
    device: str, has_factors: bool = False,
) -> None:  # fmt: skip
    """Compare whole experts with the reference, maybe with factors on their inputs."""
    *first, down = layers
    *exact_first, exact_down = [
        exact_layer(layer, numbers) for layer, numbers in zip(layers, values, strict=True)
    ]
    gate, up = arranged(form, first)
    exact_gate, exact_up = arranged(form, exact_first)
    chosen = some_choice(n_token)
    groups, exact = device_groups(chosen, device), Groups.of(chosen)
    x, weights = torch.randn(n_token, WIDTH), torch.rand(n_token, 2)
    factors = weights if has_factors else None
    given = weights.to(device) if has_factors else None
    y = experts.ffn(act, x.to(device), gate, up, down, groups, given)
    assert y is not None
    total = experts.sum_of_experts(y, weights.to(device), groups)
    wanted = EXACT.experts(act, x, exact_gate, exact_up, exact_down, exact, factors)
    tolerance = MANY if n_token > SMALL_BATCH else FEW
    assert_near(total, EXACT.sum_of_experts(wanted, weights, exact), tolerance)


def arranged(
    form: str, first: list[ExpertLinear]
) -> tuple[ExpertLinear | None, ExpertLinear | None]:
    """Return the gate and up layers in the arrangement to test."""
    if form == "gated":
        return first[0], first[1]
    return (first[0], None) if form == "fused" else (None, first[0])


@pytest.mark.parametrize("n_token", [2, 11])
def test_matrices_of_different_types(n_token: int, device: str) -> None:
    """A file may mix types, also unquantised ones."""
    gate = matrix(Kind.Q4_0, N_FF, 0, WIDTH, n_matrix=N_EXPERT, device=device)
    up = matrix(Kind.Q5_1, N_FF, 0, WIDTH, n_matrix=N_EXPERT, device=device)
    down = torch.randn(N_EXPERT, WIDTH, N_FF).half()
    weights = [planes_of(gate), planes_of(up), GpuPlain(down.to(device))]
    layers = [layer_of(weight, extras=False, device=device, seed=0) for weight in weights]
    compare(SILU, "gated", layers, [gate.values, up.values, down], n_token, device)


@pytest.mark.parametrize("n_token", [1, 12])
def test_one_expert_of_each_token(n_token: int, device: str) -> None:
    """Then there are as many rows of tokens as of experts, but in another order."""
    gate, up, down = (
        matrix(Kind.Q8_0, n_rows, 0, n_columns, n_matrix=N_EXPERT, seed=n, device=device)
        for n, (n_rows, n_columns) in enumerate([(32, 32), (32, 32), (16, 32)])
    )
    chosen = some_choice(n_token, 1)
    groups, exact = device_groups(chosen, device), Groups.of(chosen)
    layers = [layer_of(planes_of(m), extras=False, device=device, seed=0) for m in (gate, up, down)]
    x = torch.randn(n_token, 32)
    y = experts.ffn(SILU, x.to(device), *layers, groups)
    wanted = EXACT.experts(
        SILU, x, *(exact_layer(a, b.values) for a, b in zip(layers, (gate, up, down), strict=True)),
        exact,
    )  # fmt: skip
    assert y is not None
    found = groups.sum(y).cpu()
    assert_near(found, exact.sum(wanted), MANY if n_token > SMALL_BATCH else FEW)


@pytest.mark.parametrize("n_token", [1, 8, 9, 600])
@pytest.mark.parametrize("capability", [75, 90])
def test_shapes_alone_are_enough(n_token: int, capability: int) -> None:
    """Without memory the same launches happen, and few of them."""
    started: list[Any] = []
    some = matrix(Kind.Q4_0, 32, 0, 32, n_matrix=N_EXPERT)
    meta = replace(some, planes=some.planes.to("meta"))
    layers = [layer_of(planes_of(meta), extras=False, device="meta", seed=0) for _ in range(3)]
    groups = device_groups(some_choice(n_token), "meta")
    with (
        intercept_launches(lambda start: started.append(start) or True),
        use_target(KernelTarget("nvidia", capability, 100)),
    ):
        y = experts.ffn(SILU, torch.empty(n_token, 32, device="meta"), *layers, groups)
    assert y is not None
    assert y.shape == (2 * n_token, 32)
    is_few = n_token <= SMALL_BATCH
    names = [start.kernel.fn.__name__ for start in started]
    assert names.count("planes_rows" if is_few else "planes_product") == 2
    assert len(names) <= 6


def test_what_kernels_cannot_read_is_left_to_others(device: str) -> None:
    chosen = some_choice(2)
    groups, x = device_groups(chosen, device), torch.randn(4, 32, device=device)
    assert experts.grouped(object(), x, groups) is None
    some = matrix(Kind.Q4_0, 16, 0, 32, n_matrix=N_EXPERT, device=device)
    assert experts.grouped(planes_of(some), x.double(), groups) is None
    assert experts.grouped(planes_of(some), x, Groups.of(chosen)) is None
    assert experts.grouped(GpuPlain(torch.ones(16, 32, device=device)), x, groups) is None
