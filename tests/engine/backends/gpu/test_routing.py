"""Expert routing and sums over experts, by kernels, against the reference."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.gpu import moe as routing
from engine.backends.gpu.launch.kernel_launch import intercept_launches
from engine.backends.gpu.moe import DeviceGroups
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import Routing
from engine.model.forward.ops import Ops

EXACT = Ops()
FIELDS = ("expert_of", "pair_of", "row_of")

RULES = [
    Routing(64, 8),
    Routing(60, 4, normalise=False),
    Routing(8, 2, "softmax_chosen"),
    Routing(5, 1, "sigmoid", normalise=False),
    Routing(512, 10),
    Routing(17, 17, "sigmoid", scale=2.5),
    Routing(160, 22, "softmax_chosen", scale=0.5),
    Routing(32, 6, "sigmoid", n_group=8, n_group_used=3),
    Routing(256, 8, "sigmoid", scale=2.5, n_group=8, n_group_used=4),
    Routing(18, 4, n_group=9, n_group_used=2),
    Routing(15, 4, n_group=3, n_group_used=2),
    Routing(2, 1, n_group=1),
]


def some_logits(n_token: int, n_expert: int) -> Tensor:
    """Return logits in which all experts of a token differ."""
    torch.manual_seed(n_expert)
    order = torch.rand(n_token, n_expert).argsort()
    return torch.linspace(-3, 3, n_expert)[order] * torch.linspace(0.5, 1, n_token)[:, None]


def choice(groups: Groups) -> Tensor:
    """Return each token's experts, (T, n_used)."""
    return groups.expert_of[groups.row_of].cpu()


def check(rule: Routing, logits: Tensor, bias: Tensor | None, device: str) -> DeviceGroups:
    """Check that the choice is the reference's, and the weights agree within rounding."""
    found = routing.assign(rule, logits.to(device), None if bias is None else bias.to(device))
    assert found is not None
    weights, groups = EXACT.assign(rule, logits, bias)
    assert torch.equal(choice(found[1]), choice(groups))
    torch.testing.assert_close(found[0].cpu(), weights, rtol=2e-6, atol=1e-8)
    return found[1]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_tokens_choose_as_the_reference(rule: Routing, has_bias: bool, device: str) -> None:
    """Their rows are the pairs in token order."""
    bias = torch.linspace(-0.4, 0.6, rule.n_expert).exp() if has_bias else None
    for n_token in (1, 3):
        groups = check(rule, some_logits(n_token, rule.n_expert), bias, device)
        assert groups.are_pairs
        assert groups.table.shape == (0, 3)
        order = torch.arange(groups.n_row)
        assert torch.equal(groups.pair_of.cpu(), order)
        assert torch.equal(groups.row_of.cpu().view(-1), order)


@pytest.mark.parametrize("rule", [RULES[0], RULES[3], RULES[5], RULES[9]], ids=str)
@pytest.mark.parametrize("n_token", [9, 40])
def test_many_tokens_are_sorted_by_expert(rule: Routing, n_token: int, device: str) -> None:
    logits = some_logits(n_token, rule.n_expert)
    groups = check(rule, logits, None, device)
    expected = EXACT.assign(rule, logits, None)[1]
    for field in FIELDS:
        assert torch.equal(getattr(groups, field).cpu(), getattr(expected, field)), field
    check_table(groups, expected)


def check_table(groups: DeviceGroups, expected: Groups) -> None:
    """Check that blocks are parts of the groups, in order, and none is too large."""
    blocks = groups.table.tolist()
    assert len(blocks) >= sum(1 for block in blocks if block[2])
    used = [block for block in blocks if block[2]]
    assert used == blocks[: len(used)]
    size = groups.block_rows
    assert used == [
        [expert, first + start, min(size, n - start)]
        for expert, first, n in expected.table.tolist()
        for start in range(0, n, size)
    ]


@pytest.mark.parametrize("n_token", [9, 140])
@pytest.mark.parametrize("experts", [[0, 1], [3, 6], [5, 6]], ids=str)
def test_all_tokens_go_to_the_same_experts(
    experts: Sequence[int], n_token: int, device: str
) -> None:
    """They fill more than a step of the kernel, and other experts are not used at all."""
    chosen = torch.tensor(experts).repeat(n_token, 1)
    groups = routing.sorted_groups(chosen.to(torch.int32).to(device), 7)
    expected = Groups.of(chosen)
    for field in FIELDS:
        assert torch.equal(getattr(groups, field).cpu(), getattr(expected, field)), field
    check_table(groups, expected)


def test_rows_beyond_one_step(device: str) -> None:
    chosen = torch.rand(400, 6).topk(3).indices.sort().values
    groups = routing.sorted_groups(chosen.to(torch.int32).to(device), 6)
    expected = Groups.of(chosen)
    for field in FIELDS:
        assert torch.equal(getattr(groups, field).cpu(), getattr(expected, field)), field
    check_table(groups, expected)


def test_what_sigmoid_makes_equal_is_told_apart(device: str) -> None:
    logits = torch.tensor([[20.0, 30.0, 25.0], [-1.0, 18.0, 19.0]])
    check(Routing(3, 1, "sigmoid", normalise=False), logits, None, device)


def test_tiny_sums_do_not_divide(device: str) -> None:
    check(Routing(20, 3, "sigmoid"), torch.linspace(-60, -30, 20)[None], None, device)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 0.0])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_experts_differ_whatever_the_logits_are(rule: Routing, number: float, device: str) -> None:
    """The first experts are chosen among equal logits."""
    logits = some_logits(4, rule.n_expert)
    logits[1:, ::2] = number
    logits[3] = number
    found = routing.assign(rule, logits.to(device), None)
    assert found is not None
    chosen = choice(found[1])
    assert (chosen[:, 1:] > chosen[:, :-1]).all()
    assert chosen.min() >= 0
    assert chosen.max() < rule.n_expert
    if number == 0:
        assert chosen[3].tolist() == list(range(rule.n_used))


@pytest.mark.parametrize("size", [(1, 8), (2, 1), (13, 3)], ids=str)
@pytest.mark.parametrize("n", [1, 48, 330])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_sums_are_those_of_the_reference(
    size: tuple[int, int], n: int, is_weighted: bool, device: str
) -> None:
    n_token, n_used = size
    groups = Groups.of(torch.rand(n_token, 20).topk(n_used).indices.sort().values.to(device))
    y, weights = torch.randn(groups.n_row, n), torch.randn(n_token, n_used)
    given = weights if is_weighted else None
    found = routing.sum_of_experts(
        y.to(device), None if given is None else given.to(device), groups
    )
    assert found is not None
    expected = EXACT.sum_of_experts(
        y.to(device), None if given is None else given.to(device), groups
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n_token", [1, 5, 40])
def test_groups_serve_as_those_of_the_host(n_token: int, device: str) -> None:
    """They gather and sum the same rows; only the host cannot iterate over them."""
    rule, logits = Routing(9, 3), some_logits(n_token, 9)
    found = routing.assign(rule, logits.to(device), None)
    assert found is not None
    weights, groups = found
    expected_weights, expected = EXACT.assign(rule, logits, None)
    x = torch.randn(n_token, 7)

    def summed(x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        y = groups.rows(x) * groups.weights(weights)
        return groups.sum(y * (1 + groups.expert_of[:, None]))

    torch.testing.assert_close(
        summed(x.to(device), weights, groups).cpu(), summed(x, expected_weights, expected)
    )
    assert groups.n_row == expected.n_row
    with pytest.raises(TypeError, match="host"):
        next(iter(groups))


@pytest.mark.parametrize("n_token", [1, 8, 9, 500])
def test_shapes_alone_are_enough(n_token: int) -> None:
    """No number is read: the launches are the same without any memory."""
    started: list[Any] = []
    with intercept_launches(lambda start: started.append(start.kernel) or True):
        found = routing.assign(Routing(32, 4), torch.empty(n_token, 32, device="meta"), None)
        assert found is not None
        weights, groups = found
        assert weights.shape == (n_token, 4)
        x = groups.rows(torch.empty(n_token, 6, device="meta"))
        y = routing.sum_of_experts(x.contiguous(), weights, groups)
    assert y is not None
    assert y.shape == (n_token, 6)
    assert len(started) == (2 if n_token <= 8 else 3)


def test_other_tensors_are_left_to_the_reference(device: str) -> None:
    rule, logits = Routing(8, 2), some_logits(4, 16).to(device)
    ones = torch.ones(8, device=device)
    assert routing.assign(rule, logits[:, ::2], None) is None
    assert routing.assign(rule, logits[:, :8].double(), None) is None
    assert routing.assign(rule, logits[:, :8].contiguous(), ones.double()) is None
    assert routing.assign(Routing(5000, 2), some_logits(1, 5000).to(device), None) is None
    found = routing.assign(rule, logits[:, :8].contiguous(), None)
    assert found is not None
    assert routing.sum_of_experts(torch.ones(8, 6, device=device)[:, ::2], None, found[1]) is None
