"""The interface of what shows a progress in the taskbar."""

from collections.abc import Callable
from typing import Final

Painter = Callable[[float | None], None]
"""Shows a share of 0 to 1 in the taskbar; None takes it away."""

STEPS: Final = 100
"""Number of different shares that are shown."""
