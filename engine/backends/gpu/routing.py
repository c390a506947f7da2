"""Expert routing on the GPU: which experts each token goes to, known only there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.gpu.elementwise import is_plain, power_of_two
from engine.backends.gpu.kernels import routing
from engine.backends.gpu.launch.configs import KernelTarget, target_of
from engine.backends.gpu.launch.kernel_launch import launch
from engine.backends.gpu.launch.refusals import allows, refusable
from engine.model.forward.attention import most_few_rows
from engine.model.forward.expert_rows import Groups
from engine.model.forward.ops import MIN_SUM

if TYPE_CHECKING:
    from engine.model.forward.operands import Routing

MOST_EXPERTS = 2048
"""Most experts that one program compares."""

LEAST_BLOCK = 16
"""Smallest block of rows of one expert that are multiplied together, for many tokens."""

SORT_STEP = 1024
"""Pairs that a program of the sort reads at once."""

SUM_STEP = 256
"""Elements that one program of the sum over experts computes."""


@dataclass(frozen=True, slots=True)
class DeviceGroups(Groups):
    """Groups of rows by expert in the device's memory, with shapes that the host knows beforehand.

    For few tokens, rows are the pairs of token and expert in token order, experts ascending. For
    many, they are in the order of `Groups`.

    Attributes:
        table: expert, first row and number of rows of each block, at most `block_rows` rows:
            int32 (n_block, 3). It has as many entries as there can be at most; unused ones at the
            end have 0 rows. Empty for few tokens.
        block_rows: most rows of a block; 0 for few tokens.
    """

    block_rows: int

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        raise TypeError("the host does not know which rows experts have")

    @property
    def are_pairs(self) -> bool:
        """Whether rows are pairs in token order."""
        return self.block_rows == 0

    def rows(self, x: Tensor, factors: Tensor | None = None) -> Tensor:
        n_token, n_used = self.row_of.shape
        if not self.are_pairs or n_token == 1:
            return Groups.rows(self, x, factors)
        rows = x[:, None].expand(-1, n_used, -1)
        if factors is not None:
            rows = rows * factors[:, :, None]
        return rows.reshape(self.n_row, -1)

    def weights(self, weights: Tensor) -> Tensor:
        return weights.view(-1, 1) if self.are_pairs else Groups.weights(self, weights)


def assign(
    rule: Routing, logits: Tensor, bias: Tensor | None
) -> tuple[Tensor, DeviceGroups] | None:
    """Compute `Ops.assign`; None where the kernels do not support the arguments.

    The first ones are chosen among experts with equal scores.
    """
    n_expert = rule.n_expert
    if not is_plain(logits) or n_expert > MOST_EXPERTS or not (bias is None or is_plain(bias)):
        return None
    n_token, n_used = logits.shape[0], rule.n_used
    is_few = n_token <= most_few_rows()
    if not allows(logits.device, "assign", int(is_few)):
        return None
    weights = logits.new_empty(n_token, n_used)
    chosen = _numbers(n_token * n_used, logits, torch.int64 if is_few else torch.int32)
    pair_of = _numbers(n_token * n_used, logits)
    has_groups = rule.n_group > 1 and rule.gating != "softmax_chosen"
    n_group = rule.n_group if has_groups else 1
    launch(
        routing.assign, (n_token,),
        logits, logits if bias is None else bias, weights, chosen, pair_of, rule.scale,
        MIN_SUM, num_warps=1, N_EXPERT=n_expert, N_USED=n_used, N_GROUP=n_group,
        N_GROUP_USED=rule.n_group_used, GROUPS=power_of_two(n_group),
        MEMBERS=power_of_two(n_expert // n_group), GATING=rule.gating,
        HAS_BIAS=bias is not None, NORMALISES=rule.normalise, IN_PAIRS=is_few,
    )  # fmt: skip
    if is_few:
        table, row_of = _numbers(0, logits, torch.int32).view(0, 3), pair_of.view(n_token, n_used)
        return weights, DeviceGroups(table, chosen, pair_of, row_of, 0)
    return weights, sorted_groups(chosen.view(n_token, n_used), n_expert)


def sorted_groups(chosen: Tensor, n_expert: int) -> DeviceGroups:
    """Sort the pairs of many tokens by expert.

    Args:
        chosen: each token's experts, ascending, int32 (T, n_used), without gaps.
    """
    n_pair = chosen.numel()
    wanted = max(power_of_two(-(-n_pair // n_expert)), LEAST_BLOCK)
    block_rows = min(wanted, most_block_rows(target_of(chosen.device)))
    n_block = n_pair // block_rows + min(n_expert, n_pair)
    table = _numbers(n_block * 3, chosen, torch.int32).view(n_block, 3)
    expert_of, pair_of, row_of = (_numbers(n_pair, chosen) for _ in range(3))
    launch(
        routing.sort, (n_expert,),
        chosen, n_pair, expert_of, pair_of, row_of, table, n_block, N_EXPERT=n_expert,
        SIZE=power_of_two(n_expert + 1), STEP=SORT_STEP, BLOCK_ROWS=block_rows,
    )  # fmt: skip
    return DeviceGroups(table, expert_of, pair_of, row_of.view(chosen.shape), block_rows)


def most_block_rows(target: KernelTarget) -> int:
    """Return the most rows of one expert per program: with more, weights are decoded less often."""
    if target.maker == "nvidia" and target.capability < 80:
        return LEAST_BLOCK
    return 128 if target.maker == "nvidia" and 90 <= target.capability < 120 else 64


@refusable
def sum_of_experts(y: Tensor, weights: Tensor | None, groups: Groups) -> Tensor | None:
    """Compute `Ops.sum_of_experts`; None where the kernel does not support it."""
    if not is_plain(y) or not (weights is None or is_plain(weights)):
        return None
    (n_token, n_used), n = groups.row_of.shape, y.shape[1]
    out = y.new_empty(n_token, n)
    size = min(SUM_STEP, power_of_two(n))
    launch(
        routing.sum_of_experts, (n_token, -(-n // size)),
        y, y if weights is None else weights, groups.row_of, out, n,
        N_USED=n_used, HAS_WEIGHTS=weights is not None, SIZE=size,
    )  # fmt: skip
    return out


def _numbers(n: int, like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(n, dtype=dtype, device=like.device)
