"""Kernels of norms, activations and RoPE against the reference, on every instruction set."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.kernels.language.isa import supported
from engine.backends.cpu.kernels.running import fastcall
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.backends.cpu.kernels.small.small_ops import SmallOps
from engine.model.forward.operands import Activation
from engine.model.forward.ops import Ops

REFERENCE = Ops()


@pytest.fixture(scope="module", params=supported(), ids=lambda isa: isa.name)
def steps(request: pytest.FixtureRequest) -> SmallOps:
    return SmallOps(ThreadPool(2), request.param)


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3 + 0.5


SHAPES = [(1, 1), (1, 7), (3, 16), (2, 100), (5, 2048), (3, 4, 64), (2, 3, 80), (40, 2050), (0, 64)]


PARAMETERS = {"softplus": (), "softcap": (30.0,), "xielu": (0.8, 0.9, 0.5, -1e-6)}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_functions_with_parameters(steps: SmallOps, name: str, shape: tuple[int, ...]) -> None:
    x = rows(1, *shape) * 4
    x.view(-1)[:3] = torch.tensor([0.0, 90.0, -90.0])[: x.numel()]
    exact = getattr(REFERENCE, name)(x.double(), *PARAMETERS[name]).float()
    for given in (x, x.mT.contiguous().mT):
        found = steps.function(name, given, *PARAMETERS[name])
        torch.testing.assert_close(found, exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has", ["", "weight", "weight, bias", "bias", "weight, bias per head"])
def test_norms(steps: SmallOps, norm: str, shape: tuple[int, ...], has: str) -> None:
    x = rows(1, *shape)
    inner = shape[1:] if "head" in has and len(shape) == 3 else shape[-1:]
    weight = rows(2, *inner) if "weight" in has else None
    bias = rows(3, *inner) if "bias" in has else None
    found = getattr(steps, norm)(x, weight, bias, 1e-5)
    exact = getattr(REFERENCE, norm)(
        x.double(), *(None if t is None else t.double() for t in (weight, bias)), 1e-5
    )
    torch.testing.assert_close(found, exact.float(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(0, 5), (1, 17), (1, 2048), (70, 1001)], ids=str)
@pytest.mark.parametrize("has", ["", "weight", "weight, bias"])
def test_fused_sum_and_norm_have_the_bits_of_both(
    steps: SmallOps, kind: str, shape: tuple[int, int], has: str
) -> None:
    x, delta = rows(1, *shape), rows(2, shape[0], shape[1] + 3)[:, :-3]
    weight = rows(3, shape[1]) if "weight" in has else None
    bias = rows(4, shape[1]) if "bias" in has else None
    found = steps.add_norm(kind, x, delta, weight, bias, 1e-5)
    assert found is not None
    assert torch.equal(found[0], x + delta)
    assert torch.equal(found[1], getattr(steps, f"{kind}_norm")(x + delta, weight, bias, 1e-5))
    for wrong in (delta.double(), delta[:, :-1], delta[None]):
        assert steps.add_norm(kind, x, wrong, weight, bias, 1e-5) is None


@pytest.mark.parametrize("shape", [(1,), (1, 17), (0, 3), (1, 2048), (70, 1001)], ids=str)
def test_sums_and_products(steps: SmallOps, shape: tuple[int, ...]) -> None:
    x, y = rows(6, *shape), rows(7, *shape)
    for other in (y, y[None]):
        added, product = (steps.pairwise(name, x, other) for name in ("add", "multiply"))
        assert added is not None
        assert product is not None
        assert torch.equal(added, x + other)
        assert torch.equal(product, x * other)
    for wrong in (y.double(), rows(7, *shape, 2), rows(7, *shape, 2)[..., 0], y[..., None]):
        if shape != (1,) and shape[0]:
            assert steps.pairwise("add", x, wrong) is None


def test_rows_with_gaps_between(steps: SmallOps) -> None:
    """As from a fused matrix of queries, keys and values."""
    whole = rows(1, 6, 300)
    for x in (whole[:, 20:120], whole[:, 50:242].unflatten(1, (3, 64))):
        found = steps.rms_norm(x, None, None, 1e-6)
        assert found is not None
        assert found.is_contiguous()
        torch.testing.assert_close(found, REFERENCE.rms_norm(x, None, None, 1e-6))
    gate, up = whole[:, :150], whole[:, 150:]
    silu = Activation("silu")
    for a, b in (
        (gate, up),
        (gate.T, up.T),
        (gate.unflatten(1, (3, 50)), up.unflatten(1, (3, 50))),
    ):
        found = steps.gated("silu", 0.0, a, b)
        torch.testing.assert_close(found, REFERENCE.gated(silu, a, b))


@pytest.mark.parametrize("kind", ["silu", "gelu", "relu", "relu2", "oai", "sigmoid"])
@pytest.mark.parametrize("limit", [0.0, 2.5])
@pytest.mark.parametrize(
    "shape", [(1,), (3, 17), (1, 8192), (2, 5000), (2, 3, 33), (0, 4)], ids=str
)
def test_activations(steps: SmallOps, kind: Any, limit: float, shape: tuple[int, ...]) -> None:
    act = Activation(kind, limit)
    gate, up = rows(4, *shape) * 3, rows(5, *shape) * 2
    exact = REFERENCE.gated(act, gate.double(), up.double()).float()
    found = steps.gated(act.kind, act.limit, gate, up)
    torch.testing.assert_close(found, exact, rtol=3e-6, atol=1e-6)
    if act.kind != "oai":
        exact = REFERENCE.activate(act, gate.double()).float()
        found = steps.gated(act.kind, act.limit, gate, None)
        torch.testing.assert_close(found, exact, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["silu", "gelu", "relu", "relu2", "sigmoid"])
def test_activations_of_extreme_numbers(steps: SmallOps, kind: Any) -> None:
    x = torch.tensor([0, -0.0, 1e-40, 88, -88, 200, -200, 1e18, -1e18, torch.inf, torch.nan])
    found = steps.gated(kind, 0.0, x, None)
    torch.testing.assert_close(
        found, REFERENCE.activate(Activation(kind), x), equal_nan=True, rtol=1e-6, atol=1e-30
    )


@pytest.mark.parametrize("style", ["norm", "neox"])
@pytest.mark.parametrize(("head_dim", "n_rot"), [(64, 64), (128, 32), (80, 80), (30, 22), (9, 2)])
@pytest.mark.parametrize("n_tokens", [1, 3, 70])
def test_rope(steps: SmallOps, style: str, head_dim: int, n_rot: int, n_tokens: int) -> None:
    x = rows(6, n_tokens, 5 * head_dim + 3)[:, 1:-2].unflatten(1, (5, head_dim))
    angles = rows(7, n_tokens, 1, n_rot // 2)
    found = steps.rope(x, angles.cos(), angles.sin(), style)
    assert found is not None
    torch.testing.assert_close(found, REFERENCE.rope(x, angles.cos(), angles.sin(), style))
    assert torch.equal(found[..., n_rot:], x[..., n_rot:])


def test_results_do_not_depend_on_threads_and_other_tokens(steps: SmallOps) -> None:
    x, w, angles = rows(8, 300, 4, 96), rows(9, 96), rows(10, 300, 1, 48)

    def results(pool: ThreadPool, x: Tensor, angles: Tensor) -> list[Tensor | None]:
        mine = SmallOps(pool, steps.isa)
        return [
            mine.rms_norm(x, w, w, 1e-5),
            mine.layer_norm(x, w, w, 1e-5),
            mine.gated("gelu", 0.0, x, x),
            mine.rope(x, angles.cos(), angles.sin(), "norm"),
        ]

    one, three = (results(ThreadPool(n), x, angles) for n in (1, 3))
    single = results(ThreadPool(1), x[7:8], angles[7:8])
    for a, b, c in zip(one, three, single, strict=True):
        assert a is not None
        assert b is not None
        assert c is not None
        assert torch.equal(a, b)
        assert torch.equal(a[7:8], c)


def test_unsupported_tensors_return_none() -> None:
    steps, x = SmallOps(ThreadPool(1)), rows(1, 4, 64)
    assert steps.rms_norm(x.double(), None, None, 1e-5) is None
    assert steps.rms_norm(x.T, None, None, 1e-5) is None
    assert steps.rms_norm(x, rows(2, 63), None, 1e-5) is None
    assert steps.rms_norm(x, rows(2, 4, 64), None, 1e-5) is None
    assert steps.rms_norm(x, rows(2, 64), rows(2, 64).double(), 1e-5) is None
    assert steps.rms_norm(x, None, rows(2, 128)[::2], 1e-5) is None
    assert steps.gated("silu", 0.0, x, x[:3]) is None
    assert steps.gated("silu", 0.0, x.double(), x.double()) is None
    assert steps.function("softplus", x.double()) is None
    assert steps.gated("swish", 0.0, x, x) is None
    heads, angles = x.reshape(4, 2, 32), rows(3, 4, 1, 16)
    assert steps.rope(heads, angles, angles, "norm") is not None
    assert steps.rope(heads, angles[:3], angles[:3], "norm") is None
    assert steps.rope(heads, rows(3, 4, 1, 17), rows(3, 4, 1, 17), "norm") is None
    assert steps.rope(x, angles, angles, "norm") is None


def test_arguments_must_be_64_bit_integers() -> None:
    touched = fastcall.bind(0, 2, holds_gil=True)
    for arguments in ((1,), (1, 2, 3), ("1", 2), (1.0, 2)):
        with pytest.raises(TypeError):
            touched(*arguments)
    with pytest.raises(OverflowError):
        touched(1, 1 << 63)
