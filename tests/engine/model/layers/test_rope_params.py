"""Tests of YaRN's factors on cos and sin, and of its bounds."""

from math import log

import pytest

from engine.model.forward.operands import RopeParams


def params(stretch: float, *, yarn: bool = True) -> RopeParams:
    return RopeParams(64, "norm", 10000.0, scale=1 / stretch, yarn=yarn, n_ctx_orig=4096)


def m(stretch: float, multiplier: float) -> float:
    """Return `yarn_get_mscale` of DeepSeek's configuration."""
    return 0.1 * multiplier * log(stretch) + 1


@pytest.mark.parametrize("stretch", [2.0, 40.0])
def test_factors_are_those_of_the_configuration(stretch: float) -> None:
    rope = params(stretch)
    assert rope.magnitude() == pytest.approx(m(stretch, 1))
    assert rope.mscale(0.707) == pytest.approx(m(stretch, 0.707))
    assert rope.balanced(0.707, 0.707).magnitude() == pytest.approx(1)
    assert rope.balanced(1, 0.5).magnitude() == pytest.approx(m(stretch, 1) / m(stretch, 0.5))


def test_without_yarn_nothing_is_sharpened() -> None:
    rope = params(4, yarn=False)
    assert rope.mscale(1) == 1
    assert rope.balanced(1, 0.5) == rope
    assert rope.magnitude() == 1


def test_bounds_of_a_file_move_the_blend() -> None:
    rope = params(4)
    low, high = rope.yarn_bounds()
    slower = RopeParams(64, "norm", 10000.0, 0.25, True, 4096, beta_fast=4, beta_slow=0.5)
    assert (low, high) == (10, 23)
    assert slower.yarn_bounds() == (17, 25)
