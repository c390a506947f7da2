"""Limits of the axes of graphs."""

from __future__ import annotations

import math
from typing import Final

HEADROOM: Final = 1.1
"""Top of an axis over the highest value that is drawn, at least."""


def nice_top(highest: float) -> float:
    """Return a top with headroom above `highest`: 1, 2, 4, 5 or 8 times a power of ten."""
    wanted = max(1.0, highest * HEADROOM)
    power: float = 10.0 ** math.floor(math.log10(wanted))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= wanted)
