"""The zoom of the window: by keys, by the wheel over the chat, kept in the settings."""

from __future__ import annotations

from typing import Final

STEPS: Final = (70, 80, 90, 100, 110, 125, 150, 175, 200)
"""Percentages that the keys and the wheel go through; the settings page allows others."""


def next_zoom(percent: int, direction: int) -> int:
    """Return the next zoom in a direction: 1 larger, -1 smaller, 0 back to 100 %."""
    if direction > 0:
        return next((step for step in STEPS if step > percent), STEPS[-1])
    if direction < 0:
        return next((step for step in reversed(STEPS) if step < percent), STEPS[0])
    return 100
