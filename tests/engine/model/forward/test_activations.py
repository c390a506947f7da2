"""Tests of activations and of the choice of experts against their formulas."""

import pytest
import torch

from engine.model.architectures.llama_variants import Xielu, softplus
from engine.model.forward.operands import Activation, Routing
from engine.model.forward.ops import Ops

OPS = Ops()


def test_limits_hold_behind_silu() -> None:
    """Check with large gates, which become 1; limited before SiLU, they would become 0.73."""
    gate, up = torch.linspace(-9, 9, 61), torch.linspace(7, -7, 61)
    limited = OPS.gated(Activation("silu", limit=1.0), gate, up)
    expected = torch.minimum(gate * torch.sigmoid(gate), torch.ones(61))
    torch.testing.assert_close(limited, expected * up.clip(-1, 1))
    assert limited.abs().max() == 1.0


@pytest.mark.parametrize("x", [-700.0, -3.0, 0.0, 0.5, 30.0, 1e6])
def test_softplus(x: float) -> None:
    expected = torch.nn.functional.softplus(torch.tensor(x, dtype=torch.float64)).item()
    assert softplus(x) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("alpha_p", "alpha_n", "beta", "eps"), [(0.8, 0.8, 0.5, -1e-6), (2, -1, 0.1, 0.3)]
)
def test_xielu_is_that_of_transformers(
    alpha_p: float, alpha_n: float, beta: float, eps: float
) -> None:
    activations = pytest.importorskip("transformers.activations")
    module = activations.XIELUActivation(beta=beta, eps=eps, dtype=torch.float32)
    module.alpha_p.data.fill_(alpha_p)
    module.alpha_n.data.fill_(alpha_n)
    x = torch.cat((torch.linspace(-40, 40, 161), torch.tensor([-1e-7, 0.0, 1e-7, 0.2])))
    f = Xielu(softplus(alpha_p), beta + softplus(alpha_n), beta, eps)
    found = OPS.xielu(x, f.positive, f.negative, f.beta, f.eps)
    torch.testing.assert_close(found, module._xielu_python(x).detach())


def test_experts_beyond_where_sigmoid_is_one_are_told_apart() -> None:
    logits = torch.tensor([[20.0, 30.0, 25.0], [-1.0, 18.0, 19.0]])
    weights, chosen = OPS.route(Routing(3, 1, "sigmoid", normalise=False), logits, None)
    assert chosen.flatten().tolist() == [1, 2]
    assert weights.flatten().tolist() == [1.0, 1.0]
