"""Elementwise kernels and norms against the reference."""

from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor

from engine.backends.gpu import elementwise
from engine.backends.gpu.launch.configs import KernelTarget
from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches
from engine.backends.gpu.quantised import quantise
from engine.formats.quants.layout import Extent
from engine.model.forward.operands import Activation, Addend
from engine.model.forward.ops import Ops
from engine.model.layers.norm import LayerNorm, Norm, RMSNorm
from engine.model.sharding.placement import Replicate

EXACT = Ops()


def randn(*shape: int, device: str, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def check(y: Tensor | None, expected: Tensor) -> None:
    assert y is not None
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("n", [1, 40, 256])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms(name: str, n: int, device: str) -> None:
    weight, bias = randn(n, device=device, seed=2), randn(n, device=device, seed=3)
    for n_row, (w, b) in product((1, 3), ((weight, bias), (weight, None), (None, None))):
        x = randn(n_row, n, device=device) + 1
        check(getattr(elementwise, name)(x, w, b, 1e-5), getattr(EXACT, name)(x, w, b, 1e-5))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_heads_of_a_fused_projection(name: str, device: str) -> None:
    """Their rows have gaps between tokens, and each head has its own weight."""
    whole = randn(3, 5 * 20, device=device)
    for start, width in ((0, 60), (20, 80), (3, 60)):
        x = whole[:, start : start + width].view(3, -1, 20)
        weight, bias = (randn(x.shape[1], 20, device=device, seed=seed) for seed in (2, 3))
        for w, b in ((weight, bias), (weight[0], None)):
            check(getattr(elementwise, name)(x, w, b, 1e-5), getattr(EXACT, name)(x, w, b, 1e-5))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_rows_that_no_program_holds(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elementwise, "MAX_ROW", 64)
    x, weight, bias = (randn(*shape, device=device) for shape in ((2, 200), (200,), (200,)))
    check(
        getattr(elementwise, name)(x, weight, bias, 1e-5),
        getattr(EXACT, name)(x, weight, bias, 1e-5),
    )
    check(elementwise.l2_norm(x, 1e-6), EXACT.l2_norm(x, 1e-6))


def test_l2_norm(device: str) -> None:
    x = randn(2, 6, 16, device=device)[:, 1:4]
    x[0, 0] = 0
    check(elementwise.l2_norm(x, 1e-6), EXACT.l2_norm(x, 1e-6))


def test_what_no_kernel_reads(device: str) -> None:
    x = randn(4, 8, device=device)
    assert elementwise.rms_norm(x.half(), None, None, 1e-5) is None
    assert elementwise.rms_norm(x.T, None, None, 1e-5) is None
    assert elementwise.rms_norm(x[:0], None, None, 1e-5) is None
    assert elementwise.rms_norm(x, x[0, :4], None, 1e-5) is None
    assert elementwise.gated(Activation(), x, x[0]) is None
    assert elementwise.add_norm(x, Addend(x[:1]), None) is None


def norm_with(kind: type[Norm], n: int, device: str, *, has_bias: bool) -> Norm:
    norm = kind(n, 1e-5, Replicate((0,)))
    norm.weight = randn(n, device=device, seed=5)
    norm.bias = randn(n, device=device, seed=6) if has_bias else None
    return norm


@pytest.mark.parametrize("how", ["int8", "f32"])
@pytest.mark.parametrize("x_bytes", [1, 2])
def test_normed_rows_are_rounded_on_the_way(how: str, x_bytes: int, device: str) -> None:
    x, addend = randn(3, 96, device=device), Addend(randn(3, 96, device=device, seed=2))
    norm, extent = norm_with(RMSNorm, 96, device, has_bias=False), Extent.of(0, 96)
    with mock.patch.object(KernelTarget, "gemv_operands", how):
        made, plain = (elementwise.add_norm(x, addend, norm, n) for n in (x_bytes, None))
        assert made is not None
        assert plain is not None
        y, wanted = made[1], plain[1]
        assert y is not None
        assert wanted is not None
        assert torch.equal(y, wanted)
        starts: list[KernelLaunch] = []
        with intercept_launches(lambda start: starts.append(start) is None):
            found = quantise(y, extent, x_bytes)
        assert not starts
        alone = quantise(wanted, extent, x_bytes)
    assert torch.equal(found.numbers, alone.numbers)
    assert torch.equal(found.facts, alone.facts)
    assert not found.counters.any()


def test_rows_that_cannot_be_rounded(device: str) -> None:
    norm = norm_with(RMSNorm, 40, device, has_bias=False)
    made = elementwise.add_norm(
        randn(2, 40, device=device), Addend(randn(2, 40, device=device)), norm, 1
    )
    assert made is not None
    assert made[1] is not None
    assert quantise(made[1], Extent.of(0, 40), 1).extent.n_blocks == 2


@pytest.mark.parametrize("n", [3, 48])
def test_add_norm(n: int, device: str) -> None:
    x, delta = randn(2, n, device=device), randn(2, n, device=device, seed=2)
    rms = norm_with(RMSNorm, n, device, has_bias=False)
    layer = norm_with(LayerNorm, n, device, has_bias=True)
    absent = RMSNorm(n, 1e-5, Replicate((0,)), optional=True)
    absent.is_absent = True
    bias = randn(n, device=device, seed=4)
    for addend, norm in (
        (Addend(delta), rms),
        (Addend(delta, bias), layer),
        (Addend(delta, bias, rms, 0.5), rms),
        (Addend(delta, None, layer), None),
        (Addend(delta, None, absent, 2.0), absent),
        (Addend(delta, sum_scale=randn(1, device=device)), rms),
    ):
        made = elementwise.add_norm(x, addend, norm)
        total, y = EXACT.add_norm(x, addend, norm)
        assert made is not None
        check(made[0], total)
        if y is None:
            assert made[1] is None
        else:
            check(made[1], y)


@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
def test_norm_with_a_gate(kind: str, device: str) -> None:
    act = Activation(kind)  # type: ignore[arg-type]
    x, gate = randn(3, 4, 20, device=device), randn(3, 90, device=device, seed=2)[:, 10:]
    norm = norm_with(RMSNorm, 20, device, has_bias=False)
    for heads in (x, x[:, 1:].clone()):
        door = gate[:, : heads[0].numel()]
        check(
            elementwise.norm_gated(heads, norm, act, door), EXACT.norm_gated(heads, norm, act, door)
        )


@pytest.mark.parametrize(("n_in", "n"), [(40, 64), (24, 7)])
def test_opened(n_in: int, n: int, device: str) -> None:
    x, y = randn(3, n_in + 5, device=device)[:, 5:], randn(3, n, device=device, seed=2)
    door = randn(n_in, device=device, seed=3)
    for other in (None, randn(3, n + 1, device=device, seed=4)[:, 1:]):
        check(elementwise.opened(x, door, y, other), EXACT.opened(x, door, y, other))


def test_gates_of_heads(device: str) -> None:
    gate = randn(3, 4 * 24, device=device).view(3, 4, 24)[..., 12:]
    heads = randn(3, 4, 12, device=device, seed=2)
    act = Activation("sigmoid")
    check(elementwise.gated(act, gate, heads), EXACT.gated(act, gate, heads))


@pytest.mark.parametrize("kind", ["silu", "gelu", "relu", "relu2", "sigmoid"])
def test_activations(kind: str, device: str) -> None:
    act = Activation(kind)  # type: ignore[arg-type]
    whole = 4 * randn(3, 2 * 1100, device=device)
    for x in (whole, whole[:, 1:12], whole[1].view(2, 5, -1)):
        check(elementwise.activate(act, x), EXACT.activate(act, x))


@pytest.mark.parametrize("kind", ["silu", "gelu", "relu", "relu2", "oai"])
@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_gates(kind: str, limit: float, device: str) -> None:
    act = Activation(kind, limit)  # type: ignore[arg-type]
    whole = 4 * randn(3, 2 * 1100, device=device)
    gate, up = whole.chunk(2, dim=-1)
    for a, b in ((gate, up), (gate.contiguous(), up.contiguous()), (gate, up.contiguous())):
        check(elementwise.gated(act, a, b), EXACT.gated(act, a, b))


def test_xielu(device: str) -> None:
    x = torch.cat((3 * randn(2, 50, device=device), torch.linspace(-2, 2, 60).view(2, 30)), 1)
    check(elementwise.xielu(x, 0.8, 1.1, 0.5, -1e-6), EXACT.xielu(x, 0.8, 1.1, 0.5, -1e-6))


def test_softplus(device: str) -> None:
    x = torch.cat((-torch.logspace(-3, 1.9, 40), torch.logspace(-3, 1.9, 40))).view(2, 40)
    x = x.to(device)
    bias = randn(40, device=device)
    y = elementwise.softplus(x)
    assert y is not None
    torch.testing.assert_close(y, EXACT.softplus(x), rtol=1e-5, atol=0.0)
    check(elementwise.softplus(x, bias), EXACT.softplus(x + bias))


def test_without_memory() -> None:
    """Launches without memory equal the ones with memory."""
    x, n = torch.empty(2, 3, 32, device="meta"), 32
    norm = RMSNorm(n, 1e-5, Replicate((0,)))
    norm.weight = torch.empty(n, device="meta")
    seen: list[KernelLaunch] = []

    def note(start: KernelLaunch) -> bool:
        seen.append(start)
        return True

    with intercept_launches(note):
        made = [
            elementwise.rms_norm(x, norm.weight, None, 1e-5),
            elementwise.layer_norm(x, norm.weight, None, 1e-5),
            elementwise.l2_norm(x, 1e-5),
            elementwise.activate(Activation(), x),
            elementwise.gated(Activation(), x, x),
            elementwise.xielu(x, 1.0, 1.0, 1.0, 1.0),
            elementwise.softplus(x),
        ]
        gate = torch.empty(2, 96, device="meta")
        made.append(elementwise.norm_gated(x, norm, Activation(), gate))
        made.append(elementwise.opened(gate, norm.weight.repeat(3), gate))
        both = elementwise.add_norm(x[:, 0].clone(), Addend(x[:, 1].clone()), norm)
    assert all(y is not None and y.numel() == x.numel() and y.is_meta for y in made)
    assert both is not None
    assert both[1] is not None
    assert len(seen) == len(made) + 1
