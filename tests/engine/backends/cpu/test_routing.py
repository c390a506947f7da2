"""Routing kernels against the reference, on every supported instruction set."""

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.kernels.language.isa import supported
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.backends.cpu.routing import RoutingOps
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import Routing
from engine.model.forward.ops import Ops

REFERENCE = Ops()
FIELDS = ("expert_of", "pair_of", "row_of")


@pytest.fixture(scope="module", params=supported(), ids=lambda isa: isa.name)
def ops(request: pytest.FixtureRequest) -> RoutingOps:
    return RoutingOps(ThreadPool(2), request.param)


def some_logits(n_token: int, n_expert: int) -> Tensor:
    """Return logits that are distinct for all experts of a token."""
    torch.manual_seed(n_expert)
    order = torch.rand(n_token, n_expert).argsort()
    return torch.linspace(-3, 3, n_expert)[order] * torch.linspace(0.5, 1, n_token)[:, None]


def check(ops: RoutingOps, rule: Routing, logits: Tensor, bias: Tensor | None) -> None:
    """Compare choice and order exactly, weights within rounding."""
    found = ops.assign(rule, logits, bias)
    assert found is not None
    weights, groups = REFERENCE.assign(rule, logits, bias)
    table, n_group = found[1].table, len(groups.table)
    assert torch.equal(table[:n_group], groups.table)
    assert not table[n_group:].any(), "entries without rows"
    for field in FIELDS:
        assert torch.equal(getattr(found[1], field), getattr(groups, field)), field
    torch.testing.assert_close(found[0], weights, rtol=1e-6, atol=0)


RULES = [
    Routing(64, 8),
    Routing(60, 4, normalise=False),
    Routing(8, 2, "softmax_chosen"),
    Routing(5, 1, "sigmoid", normalise=False),
    Routing(128, 1),
    Routing(17, 17, "sigmoid", scale=2.5),
    Routing(160, 22, "softmax_chosen", scale=0.5),
    Routing(32, 6, "sigmoid", n_group=8, n_group_used=3),
    Routing(256, 8, "sigmoid", scale=2.5, n_group=8, n_group_used=4),
    Routing(18, 4, n_group=9, n_group_used=2),
    Routing(2, 1, n_group=1),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("n_token", [1, 2, 33, 700])
def test_choices_match_the_reference(
    ops: RoutingOps, rule: Routing, has_bias: bool, n_token: int
) -> None:
    bias = torch.linspace(-0.4, 0.6, rule.n_expert).exp() if has_bias else None
    check(ops, rule, some_logits(n_token, rule.n_expert), bias)


def test_logits_with_equal_scores_are_distinguished(ops: RoutingOps) -> None:
    logits = torch.tensor([[20.0, 30.0, 25.0], [-1.0, 18.0, 19.0]])
    check(ops, Routing(3, 1, "sigmoid", normalise=False), logits, None)


def test_tiny_sums_do_not_divide(ops: RoutingOps) -> None:
    check(ops, Routing(20, 3, "sigmoid"), torch.linspace(-60, -30, 20)[None], None)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 0.0])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_experts_are_distinct_for_any_logits(ops: RoutingOps, rule: Routing, number: float) -> None:
    logits = some_logits(9, rule.n_expert)
    logits[1:, ::2] = number
    logits[5] = number
    found = ops.assign(rule, logits, None)
    assert found is not None
    chosen = found[1].expert_of[found[1].row_of]
    assert (chosen[:, 1:] > chosen[:, :-1]).all()
    assert chosen.min() >= 0
    assert chosen.max() < rule.n_expert
    if number == 0 and rule.n_group == 1:
        assert chosen[5].tolist() == list(range(rule.n_used))


@pytest.mark.parametrize("size", [(1, 8), (2, 1), (37, 3), (600, 17)], ids=str)
@pytest.mark.parametrize("n", [1, 48, 2050])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_sums_have_the_bits_of_the_reference(
    ops: RoutingOps, size: tuple[int, int], n: int, is_weighted: bool
) -> None:
    n_token, n_used = size
    groups = Groups.of(torch.rand(n_token, 20).topk(n_used).indices.sort().values)
    y, weights = torch.randn(groups.n_row, n), torch.randn(n_token, n_used)
    given = weights if is_weighted else None
    found = ops.sum_of_experts(y, given, groups)
    assert found is not None
    assert torch.equal(found, REFERENCE.sum_of_experts(y, given, groups))


def test_unsupported_tensors_use_the_reference(ops: RoutingOps) -> None:
    rule, logits = Routing(8, 2), some_logits(4, 16)
    assert ops.assign(rule, logits[:, ::2], None) is None
    assert ops.assign(rule, logits[:, :8].double(), None) is None
    assert ops.assign(rule, logits[:, :8].contiguous(), torch.ones(8).double()) is None
    assert ops.assign(Routing(5000, 2), some_logits(1, 5000), None) is None
    _, groups = REFERENCE.assign(rule, logits[:, :8].contiguous(), None)
    assert ops.sum_of_experts(torch.ones(8, 6)[:, ::2], None, groups) is None
