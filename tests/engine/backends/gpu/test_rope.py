"""RoPE by kernels against the reference."""

import math

import pytest
import torch

from engine.backends.gpu import elementwise as gpu
from engine.model.forward.operands import RopeParams
from engine.model.forward.ops import Ops
from engine.model.layers.norm import RMSNorm
from engine.model.sharding.placement import Replicate

EXACT = Ops()
PLAIN = RopeParams(24, "neox", 10000.0)
LONG = RopeParams(16, "norm", 500000.0, scale=0.25, yarn=True, n_ctx_orig=8192)


@pytest.mark.parametrize("params", [PLAIN, LONG, RopeParams(8, "neox", 1e6, scale=0.5)])
def test_angles_of_near_and_far_positions(params: RopeParams, device: str) -> None:
    angles = gpu.Angles()
    positions = torch.tensor([0, 1, 17, 131071, (1 << 20) + 1], device=device)
    factors = torch.linspace(1.0, 7.5, params.n_rot // 2, device=device)
    for chosen in (None, factors):
        for n in (1, 5):  # one token's angles first
            found = angles(params, chosen, positions[-n:])
            expected = EXACT.rope_angles(params, chosen, positions[-n:])
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_frequencies_are_made_once(device: str) -> None:
    """Otherwise a graph would compute them again for each token."""
    angles, positions = gpu.Angles(), torch.tensor([3], device=device)
    first = angles._turns_of(PLAIN, None, positions.device)
    assert angles._turns_of(RopeParams(24, "neox", 10000.0), None, positions.device) is first


@pytest.mark.parametrize("style", ["norm", "neox"])
@pytest.mark.parametrize(("n_rot", "dim"), [(2, 2), (16, 16), (24, 40), (64, 96)])
def test_heads_are_turned(style: str, n_rot: int, dim: int, device: str) -> None:
    """Heads are rotated whole or in part, also within wider rows."""
    q = torch.randn(3, 5, dim + 8, device=device)[..., :dim]
    k = torch.randn(3, 2, dim, device=device)
    angle = torch.randn(3, 1, n_rot // 2, device=device)
    cos, sin = angle.cos(), angle.sin()
    both = gpu.rope_all((q, k), cos, sin, style)
    assert both is not None
    for x, y in zip((q, k), both, strict=True):
        expected = EXACT.rope(x, cos, sin, style)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
        alone = gpu.rope(x, cos, sin, style)
        assert alone is not None
        assert torch.equal(alone, y)


@pytest.mark.parametrize("n_rot", [16, 24])
def test_heads_are_normalised_first(n_rot: int, device: str) -> None:
    q, k = torch.randn(3, 5, 24, device=device), torch.randn(3, 2, 24, device=device)
    angle = torch.randn(3, 1, n_rot // 2, device=device)
    norms = [norm(24, eps, device) for eps in (1e-5, 0.5)]
    both = gpu.rope_all((q, k), angle.cos(), angle.sin(), "neox", norms)
    assert both is not None
    for x, y, layer in zip((q, k), both, norms, strict=True):
        expected = EXACT.rope(layer.apply(x, EXACT), angle.cos(), angle.sin(), "neox")
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=2e-6)


def norm(dim: int, eps: float, device: str) -> RMSNorm:
    layer = RMSNorm(dim, eps, Replicate((0,)))
    layer.weight = torch.randn(dim, device=device)
    return layer


def test_norms_that_do_not_fit_are_refused() -> None:
    x, cos = torch.ones(2, 3, 16), torch.zeros(2, 1, 8)
    biased, per_head, absent = (norm(16, 1e-5, "cpu") for _ in range(3))
    assert gpu.rope_all((x,), cos, cos, "norm", [biased]) is not None
    biased.bias, per_head.weight = torch.zeros(16), torch.ones(3, 16)
    absent.is_absent = True
    for layer in (biased, per_head, absent):
        assert gpu.rope_all((x,), cos, cos, "norm", [layer]) is None


def test_what_does_not_fit_is_refused() -> None:
    x, cos = torch.zeros(2, 3, 16), torch.zeros(2, 1, 8)
    assert gpu.rope(x, cos, cos, "norm") is not None
    assert gpu.rope(x.double(), cos, cos, "norm") is None
    assert gpu.rope(x.mT, cos, cos, "norm") is None
    assert gpu.rope(x[..., :14], cos, cos, "norm") is None
    assert gpu.rope_all((x, x[:1]), cos, cos, "norm") is None


def test_without_memory() -> None:
    """Launches are collected before a model is loaded."""
    positions = torch.empty(4, dtype=torch.int64, device="meta")
    cos, sin = gpu.Angles()(PLAIN, torch.empty(12, device="meta"), positions)
    x = torch.empty(4, 2, 32, device="meta")
    y = gpu.rope(x, cos, sin, "neox")
    assert y is not None
    assert y.shape == x.shape
    assert math.prod(cos.shape) == 4 * 12
