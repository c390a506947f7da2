"""Comparison of results with torch's, and how far rounding may take them apart.

A product `y = w · x` of one row is compared relative to its size s = |w| rms(x): relative to y
itself, the error of a y near zero would say nothing. Errors come from

- activations as bytes: at most 1/254 of the largest of 16, for normal numbers 0.4 % of s (rms);
- activations and weights in BF16: at most 2^-9 of each number, 0.2 % of s (rms) for both.

Checks first multiply numbers that neither rounding changes, then normal ones. The first leaves
nothing for gemv and 0.1 % for weights in BF16. In a row of 4096, one wrong weight changes y by
about 1 % of s, a wrong block of 32 by 12 %, a wrong row or scale by all of it. So each number has a
bar of its own, and one wrong row cannot hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Bar(NamedTuple):
    """Largest errors that pass, relative to the size of the results.

    Attributes:
        each: of any single number.
        rms: root mean square of all.
    """

    each: float
    rms: float

    def times(self, factor: float) -> Bar:
        """Return a bar that is wider by a factor."""
        return Bar(self.each * factor, self.rms * factor)


EXACT = Bar(1e-6, 1e-6)
"""Bar of numbers that are only copied or converted."""

IN_F32 = Bar(2e-3, 5e-4)
"""Bar of results that are computed in F32 from the same numbers, sums in another order."""

OF_WHOLE = Bar(0.02, 0.005)
"""Bar of products of activations that no rounding changes; weights may be rounded to BF16."""

OF_ROUNDED = Bar(0.06, 0.015)
"""Bar of products of rounded activations: 8 and 3 standard deviations of the errors above."""

OF_SEVERAL = Bar(0.12, 0.03)
"""Bar of results that are rounded several times, such as experts' and attention's."""

KV_BARS = {
    "f32": EXACT, "f16": Bar(2e-3, 1e-3), "bf16": Bar(2e-2, 5e-3), "q8_0": Bar(0.03, 0.01),
    "q4_0": Bar(0.5, 0.15),
}  # fmt: skip
"""Bar of what a KV cache gives back, by its type: half a step of it, for normal numbers."""


class Pair(NamedTuple):
    """A result and what it should be.

    Attributes:
        found: the result of kernels.
        expected: the result of torch, of the same shape.
        size: size of the result, of a shape like it; None for each number's own, plus the root
            mean square of all.
    """

    found: Tensor
    expected: Tensor
    bar: Bar
    size: Tensor | None = None

    @property
    def agrees(self) -> bool:
        """Whether the two differ by no more than rounding; NaN never does."""
        if self.found.shape != self.expected.shape:
            return False
        if not self.found.numel():
            return True
        expected = self.expected.float()
        size = self.size
        if size is None:
            size = expected.abs() + expected.square().mean().sqrt()
        error = (self.found.float() - expected).abs() / size.clamp(min=SMALLEST)
        largest, mean = error.max(), error.square().mean().sqrt()
        return bool((largest <= self.bar.each) & (mean <= self.bar.rms))


SMALLEST = 1e-20
"""Least size of a result, so that rows of zeros can be compared."""


def all_agree(pairs: Sequence[Pair]) -> bool:
    """Return whether all results are as they should be."""
    return all(pair.agrees for pair in pairs)
