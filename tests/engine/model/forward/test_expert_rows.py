"""Tests of rows grouped by expert against a loop over experts."""

import pytest
import torch
from torch import Tensor

from engine.backends.reference.weights import DenseWeight, PackedWeight
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import Routing
from engine.model.forward.ops import Ops
from engine.model.layers.linear import ExpertLinear
from engine.model.sharding.placement import Shard
from engine.model.sharding.shares import Ranges

SIZES = [(1, 1, 4), (1, 8, 64), (2, 2, 2), (3, 2, 5), (17, 4, 9), (64, 16, 40), (300, 3, 5)]
"""Numbers of tokens, of experts per token, and of all experts."""

Q8_0 = 8


def some_choice(n_token: int, n_used: int, n_expert: int) -> tuple[Tensor, Tensor]:
    """Return random weights and experts, ascending, both (n_token, n_used)."""
    torch.manual_seed(n_token)
    chosen = torch.randn(n_token, n_expert).topk(n_used).indices
    return torch.randn(n_token, n_used), chosen.sort().values


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("n", [1, 33, 64])
def test_each_token_gets_the_sum_of_its_experts_in_their_order(
    size: tuple[int, int, int], n: int
) -> None:
    """Check that the sums have the bits of adding one expert after another."""
    weights, chosen = some_choice(*size)
    x, factors = torch.randn(size[0], n), torch.randn(size[2], n)
    expected = torch.zeros(size[0], n)
    for expert, factor in enumerate(factors):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        expected.index_add_(0, token, x[token] * factor * weights[token, place, None])
    groups = Groups.of(chosen)
    y = groups.rows(x) * factors[groups.expert_of]
    assert torch.equal(Ops().sum_of_experts(y, weights, groups), expected)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_row_is_in_the_group_of_its_expert(size: tuple[int, int, int]) -> None:
    _, chosen = some_choice(*size)
    groups, n_row = Groups.of(chosen), chosen.numel()
    assert [expert for expert, _ in groups] == sorted(set(chosen.flatten().tolist()))
    rows = [(expert, n) for expert, part in groups for n in range(part.start, part.stop)]
    assert rows == list(zip(groups.expert_of.tolist(), range(n_row), strict=True))
    assert torch.equal(chosen.view(-1)[groups.pair_of], groups.expert_of)
    assert torch.equal(groups.row_of.view(-1)[groups.pair_of], torch.arange(n_row))
    within = groups.pair_of[1:] > groups.pair_of[:-1]
    assert (within | (groups.expert_of[1:] > groups.expert_of[:-1])).all()


def test_weights_go_with_their_experts() -> None:
    routing, logits = Routing(9, 3), torch.randn(5, 9)
    weights, chosen = Ops().route(routing, logits, None)
    sorted_weights, groups = Ops().assign(routing, logits, None)
    dense = torch.zeros(5, 9)
    dense[groups.pair_of // 3, groups.expert_of] = groups.weights(sorted_weights)[:, 0]
    assert torch.equal(dense, torch.zeros(5, 9).scatter(1, chosen, weights))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_matrix_for_each_expert(size: tuple[int, int, int], is_packed: bool) -> None:
    """Check products with biases and scales bit for bit against one expert after another."""
    groups = Groups.of(some_choice(*size)[1])
    layer = ExpertLinear(size[2], 64, 5, Shard(1, Ranges(((0, 5),), 5)))
    numbers = torch.randint(-9, 9, (size[2], 5, 64))
    layer.weight = DenseWeight(numbers.float())
    if is_packed:
        blocks = numbers.to(torch.int8).view(torch.uint8).view(size[2], 5, 2, 32)
        one = torch.tensor([0, 0x3C], dtype=torch.uint8).expand(size[2], 5, 2, 2)
        raw = torch.cat((one, blocks), -1).flatten(2)
        layer.weight = PackedWeight(raw, Q8_0, slice(None))
    layer.scale, layer.bias = torch.randn(size[2]), torch.randn(size[2], 5)
    x = torch.randn(groups.n_row, 64)
    found = layer(x, groups)
    for expert, rows in groups:
        product = torch.nn.functional.linear(x[rows], numbers[expert].float())
        assert torch.equal(found[rows], product * layer.scale[expert] + layer.bias[expert])
