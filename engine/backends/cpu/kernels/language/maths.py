"""exp, exp2, expm1, sigmoid, softplus and tanh of F32 numbers or vectors.

Relative errors are at most 2e-7 in exp, exp2 and tanh, and at most 3e-7 in expm1 and softplus.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Avx512, Isa
from engine.backends.cpu.kernels.language.values import FLOATS, I16, I32, Code, Value, vector

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440054690583e-4
"""ln 2 in two parts; the first has so few bits that its products with exponents are exact."""

ROUNDER = 1.5 * 2.0**23
"""Adding this to a float below 2²² rounds the float to an integer, in the low bits."""

EXP_LEAST, EXP_MOST = -105.0, 90.0
"""Below the first, exp is 0; above the second, it is infinite."""

EXP_TERMS = (
    0.4999999403953552, 0.16666515171527863, 0.04166845604777336, 0.008369418792426586,
    0.0013813144760206342,
)  # fmt: skip
"""Coefficients of the polynomial p for which 1 + r + r² p(r) is closest to exp within ±ln 2 / 2
(minimax)."""

EXP2_TERMS = (
    0.6931512951850891, 0.2401645928621292, 0.055799514055252075, 0.009017480537295341,
    0.0018669526325538754,
)  # fmt: skip
"""Coefficients of the polynomial p for which 1 + r p(r) is closest to 2ʳ from 0 to 1 (minimax)."""

EXP2_LEAST = -126.0
"""For smaller x, exp2 may return 0."""

ROUND_DOWN, CURRENT_ROUNDING = 9, 4
"""Operands for AVX-512 instructions: round down to integers; use the current rounding mode."""

TANH_BORDER = 0.625
"""Below this magnitude, tanh is computed as a polynomial; above it, from exp."""

TANH_TERMS = (
    -0.3333328068256378, 0.13331373035907745, -0.0537336990237236, 0.020618626847863197,
    -0.005681286100298166,
)  # fmt: skip
"""Coefficients of the polynomial p for which x + x³ p(x²) is closest to tanh below the border
(minimax)."""

ATANH_TERMS = (0.3333320915699005, 0.2001076340675354, 0.14000903069972992, 0.1400599181652069)
"""Coefficients of the polynomial p for which z + z³ p(z²) is closest to atanh up to 1/3
(minimax)."""

EXPM1_BORDER = 0.34
"""Below this magnitude (at most ln 2 / 2), expm1 is exp's polynomial without its first term."""


def ints_like(kind: Any, element: Any = I32) -> Any:
    """Return the integer type that has as many elements as a float type."""
    return vector(element, kind.count) if isinstance(kind, ir.VectorType) else element


def exp(code: Code, x: Value) -> Value:
    """Return e to the power of x; 0 or infinity for large |x|, NaN for NaN.

    x is n ln 2 + r, so the result is 2ⁿ times a polynomial in r. 2ⁿ is applied in two halves
    because it may overflow a float.
    """
    kind = x.kind
    ints = ints_like(kind)
    x = code.minimum(x, code.constant(kind, EXP_MOST))
    x = code.maximum(x, code.constant(kind, EXP_LEAST))
    rounder = code.constant(kind, ROUNDER)
    shifted = code.fma(x, code.constant(kind, LOG2_E), rounder)
    whole, n = shifted - rounder, shifted.bitcast(ints) - rounder.bitcast(ints)
    r = code.fma(whole, code.constant(kind, -LN2_HIGH), x)
    r = code.fma(whole, code.constant(kind, -LN2_LOW), r)
    result = code.fma(_polynomial(code, r, EXP_TERMS), r * r, r) + 1.0
    half = ((n + 1024) >> 1) - 512
    for exponent in (half, n - half):
        result = result * ((exponent + 127) << 23).bitcast(kind)
    return result


def exp2(code: Code, isa: Isa, x: Value) -> Value:
    """Return 2 to the power of x, for x up to 0; 0 for very small x, NaN for NaN.

    x is floor(x) + r, so the result is a power of two times a polynomial in r.
    """
    kind = x.kind
    if isinstance(isa, Avx512):
        return _avx512_exp2(code, x) if kind == FLOATS else _avx512_exp2(code, code.splat(x))[0]
    ints, one = ints_like(kind), code.constant(kind, 1.0)
    least, rounder = code.constant(kind, EXP2_LEAST), code.constant(kind, ROUNDER)
    is_small = x < least
    x = code.where(is_small, least, x)
    shifted = (x - 0.5) + rounder
    r, n = x - (shifted - rounder), shifted.bitcast(ints) - rounder.bitcast(ints)
    result = code.fma(_polynomial(code, r, EXP2_TERMS), r, one)
    result = result * ((n + 127) << 23).bitcast(kind)
    return code.where(is_small, code.constant(kind, 0.0), result)


def _avx512_exp2(code: Code, x: Value) -> Value:
    """Return `exp2` of 16 numbers, using `vreduceps` (which computes r) and `vscalefps`."""
    all_lanes, nearest = code.constant(I16, -1), code.constant(I32, CURRENT_ROUNDING)
    down = code.constant(I32, ROUND_DOWN)
    r = code.call("llvm.x86.avx512.mask.reduce.ps.512", x.kind, x, down, x, all_lanes, nearest)
    result = code.fma(_polynomial(code, r, EXP2_TERMS), r, code.constant(x.kind, 1.0))
    return code.call("llvm.x86.avx512.mask.scalef.ps.512", x.kind, result, x, x, all_lanes, nearest)


def expm1(code: Code, x: Value) -> Value:
    """Return e to the power of x, minus 1; NaN for NaN."""
    small = code.fma(_polynomial(code, x, EXP_TERMS), x * x, x)
    return code.where(code.unary("fabs", x) < EXPM1_BORDER, small, exp(code, x) - 1.0)


def sigmoid(code: Code, x: Value) -> Value:
    """Return 1 / (1 + exp(-x))."""
    one = code.constant(x.kind, 1.0)
    return one / (exp(code, x * -1.0) + one)


def softplus(code: Code, x: Value) -> Value:
    """Return ln(1 + exp(x)); NaN for NaN.

    It is max(x, 0) + ln(1 + u) with u = exp(-|x|) ≤ 1, and ln(1 + u) is 2 atanh(u / (2 + u)).
    """
    u = exp(code, code.unary("fabs", x) * -1.0)
    z = u / (u + 2.0)
    square = z * z
    half = code.fma(_polynomial(code, square, ATANH_TERMS), square * z, z)
    return code.maximum(x, code.constant(x.kind, 0.0)) + (half + half)


def tanh(code: Code, x: Value) -> Value:
    """Return the hyperbolic tangent; NaN for NaN."""
    square = x * x
    small = code.fma(_polynomial(code, square, TANH_TERMS), square * x, x)
    size = code.unary("fabs", x)
    one, two = (code.constant(x.kind, number) for number in (1.0, 2.0))
    large = one - two / (exp(code, size + size) + one)
    signed = code.where(x < 0.0, large * -1.0, large)
    return code.where(size < TANH_BORDER, small, signed)


def _polynomial(code: Code, x: Value, terms: Sequence[float]) -> Value:
    values = (code.constant(x.kind, term) for term in reversed(terms))
    return reduce(lambda total, term: code.fma(total, x, term), values)
