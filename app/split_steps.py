"""Arrow keys on a boundary: go to the next place where the model can really be cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from app.split_settings import SplitSettings

EffectiveBoundary = Callable[[SplitSettings, int], float]
"""Where the boundary after active rank number `handle` really lands; 0 to 1."""

MAX_TRIES: Final = 12


def step_boundary(
    settings: SplitSettings, handle: int, notches: int, notch: float, effective: EffectiveBoundary
) -> SplitSettings:
    """Move a boundary by so many notches, each to the next place where the model can be cut.

    Args:
        notches: negative to the left.
        notch: the smallest step to ask for, 0 to 1; what moves by less than half of it is no step.
    """
    direction = 1 if notches > 0 else -1
    for _ in range(abs(notches)):
        settings = _step_once(settings, handle, direction * notch, effective)
    return settings


def _step_once(
    settings: SplitSettings, handle: int, step: float, effective: EffectiveBoundary
) -> SplitSettings:
    asked, before = settings.boundary(handle), effective(settings, handle)
    moved = settings
    for tries in range(1, MAX_TRIES + 1):
        wanted = asked + tries * step
        moved = settings.with_boundary(handle, wanted)
        is_visible = (effective(moved, handle) - before) / step >= 0.5
        if is_visible or not 0.0 < wanted < 1.0:
            break
    return moved
