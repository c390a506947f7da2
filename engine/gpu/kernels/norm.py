"""Norms over the last dimension."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"])
def rms_norm(x, weight, bias, y, n, eps, SIZE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
             HAS_BIAS: tl.constexpr):  # fmt: skip
    """`y = x / sqrt(mean(x²) + eps) * weight + bias` of one row for each program.

    Args:
        x, y: (rows, n), F32, without gaps.
        weight, bias: (n,), F32; any pointer where there is none.
        SIZE: the power of two from n on.
    """
    row = tl.program_id(0).to(tl.int64) * n
    at = tl.arange(0, SIZE)
    inside = at < n
    value = tl.load(x + row + at, mask=inside, other=0.0)
    value = value * tl.rsqrt(tl.sum(value * value) / n + eps)
    if HAS_WEIGHT:
        value = value * tl.load(weight + at, mask=inside, other=0.0)
    if HAS_BIAS:
        value = value + tl.load(bias + at, mask=inside, other=0.0)
    tl.store(y + row + at, value, mask=inside)
