"""Mathematical functions against F64, over the whole range of F32."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from llvmlite import ir
from numpy.typing import NDArray

from engine.backends.cpu.kernels.language import maths
from engine.backends.cpu.kernels.language.isa import Isa, supported
from engine.backends.cpu.kernels.language.loops import for_each_vector
from engine.backends.cpu.kernels.language.values import Code, Value, function
from engine.backends.cpu.kernels.running import jit

FUNCTIONS = {
    "exp": maths.exp, "expm1": maths.expm1, "softplus": maths.softplus, "tanh": maths.tanh,
}  # fmt: skip
Floats = NDArray[np.float32]


def build(module: ir.Module, isa: Isa) -> None:
    for name, apply in FUNCTIONS.items():
        add(module, name, apply)
    add(module, "exp2", lambda code, x: maths.exp2(code, isa, x))
    add(module, "exp2_single", lambda code, x: code.splat(maths.exp2(code, isa, x[0])))


def add(module: ir.Module, name: str, apply: Callable[[Code, Value], Value]) -> None:
    """Write `name(x, n, out)`, which applies a function to n floats."""
    code, (x, n, out) = function(module, name, 3)
    for_each_vector(code, n, lambda lanes: lanes.store(apply(code, lanes.load(x)), out))
    code.builder.ret_void()


def computed(isa: Isa, name: str) -> Callable[[Floats], Floats]:
    names = [*FUNCTIONS, "exp2", "exp2_single"]
    address = jit.addresses("test-maths", isa, names, lambda module: build(module, isa))[name]
    kernel = ctypes.CFUNCTYPE(None, *3 * [ctypes.c_int64])(address)

    def compute(x: Floats) -> Floats:
        out = np.empty_like(x)
        kernel(x.ctypes.data, len(x), out.ctypes.data)
        return out

    return compute


@pytest.mark.parametrize("isa", supported(), ids=lambda isa: isa.name)
def test_exp_is_exact_to_2e_7_and_right_at_the_ends(isa: Isa) -> None:
    exp = computed(isa, "exp")
    x = np.linspace(-87, 88.5, 1_000_003).astype(np.float32)
    true = np.exp(x.astype(np.float64))
    assert np.abs(exp(x) / true - 1).max() <= 2e-7
    least = np.float32(2.0**-149)
    tiny = np.linspace(-110, -87, 10_001).astype(np.float32)
    assert np.abs(exp(tiny) - np.exp(tiny.astype(np.float64))).max() <= least
    ends = np.array([0, -0.0, 89, 1e30, np.inf, -104.5, -1e30, -np.inf, np.nan], np.float32)
    expected = np.array([1, 1, np.inf, np.inf, np.inf, 0, 0, 0, np.nan], np.float32)
    np.testing.assert_array_equal(exp(ends), expected)


@pytest.mark.parametrize("isa", supported(), ids=lambda isa: isa.name)
def test_exp2_is_exact_to_2e_7_up_to_0(isa: Isa) -> None:
    exp2 = computed(isa, "exp2")
    x = np.linspace(-125.9, 0, 1_000_003).astype(np.float32)
    assert np.abs(exp2(x) / np.exp2(x.astype(np.float64)) - 1).max() <= 2e-7
    least = np.float32(2.0**-126)
    tiny = np.linspace(-160, -125.9, 10_001).astype(np.float32)
    assert np.abs(exp2(tiny) - np.exp2(tiny.astype(np.float64))).max() <= least
    ends = np.array([0, -0.0, -160, -1e30, -np.inf, np.nan], np.float32)
    expected = np.array([1, 1, 0, 0, 0, np.nan], np.float32)
    np.testing.assert_array_equal(exp2(ends), expected)
    alone = computed(isa, "exp2_single")
    for number, one in zip(ends, expected, strict=True):
        np.testing.assert_array_equal(alone(np.full(16, number)), np.full(16, one))


@pytest.mark.parametrize("isa", supported(), ids=lambda isa: isa.name)
def test_tanh_is_exact_to_2e_7_and_right_at_the_ends(isa: Isa) -> None:
    tanh = computed(isa, "tanh")
    x = np.concatenate([np.linspace(-12, 12, 1_000_003), np.geomspace(1e-37, 1, 10_001)])
    x = x.astype(np.float32)[x != 0]
    assert np.abs(tanh(x) / np.tanh(x.astype(np.float64)) - 1).max() <= 2e-7
    ends = np.array([0, 50, -50, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(tanh(ends), np.tanh(ends))


@pytest.mark.parametrize("isa", supported(), ids=lambda isa: isa.name)
def test_softplus_is_exact_to_3e_7_and_right_at_the_ends(isa: Isa) -> None:
    softplus = computed(isa, "softplus")
    x = np.concatenate([np.linspace(-87, 100, 1_000_003), np.geomspace(1e-37, 1, 10_001)])
    x = x.astype(np.float32)
    true = np.logaddexp(0, x.astype(np.float64))
    assert np.abs(softplus(x) / true - 1).max() <= 3e-7
    ends = np.array([1e30, np.inf, -106, -1e30, -np.inf, np.nan], np.float32)
    expected = np.array([1e30, np.inf, 0, 0, 0, np.nan], np.float32)
    np.testing.assert_array_equal(softplus(ends), expected)


@pytest.mark.parametrize("isa", supported(), ids=lambda isa: isa.name)
def test_expm1_keeps_the_digits_of_small_numbers(isa: Isa) -> None:
    sizes = np.geomspace(1e-37, 80, 100_001).astype(np.float32)
    expm1, x = computed(isa, "expm1"), np.concatenate([sizes, -sizes])
    assert np.abs(expm1(x) / np.expm1(x.astype(np.float64)) - 1).max() <= 3e-7
    ends = np.array([0, -200, 1e30, np.nan], np.float32)
    np.testing.assert_array_equal(expm1(ends), np.array([0, -1, np.inf, np.nan], np.float32))
