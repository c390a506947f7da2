"""Tests of the queries' temperature against its formula."""

from math import floor, log
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.model.layers.mixers.attention import Temperature


@pytest.mark.parametrize(("n_ctx", "offset"), [(16, 0), (5, 0), (5, 1), (8192, 1)])
@pytest.mark.parametrize("start", [0, 3, 8190])
def test_factors_follow_the_formula(n_ctx: int, offset: int, start: int) -> None:
    positions = range(start, start + 40)
    ctx = cast(Any, SimpleNamespace(positions=torch.tensor(positions)))
    q = torch.randn(len(positions), 3, 4)
    scaled = Temperature(0.1, n_ctx, offset).apply(q, ctx)
    for row, position in enumerate(positions):
        factor = 1 + 0.1 * log(1 + floor((position + offset) / n_ctx))
        torch.testing.assert_close(scaled[row], q[row] * factor)
