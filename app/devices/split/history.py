"""Undo and redo of split settings; all changes of one gesture are one step."""

from __future__ import annotations

from typing import Final

from app.devices.split.settings import SplitSettings

MAX_STEPS: Final = 200


class SettingsHistory:
    """The settings that undo and redo lead to."""

    def __init__(self) -> None:
        self._before: list[SplitSettings] = []
        self._after: list[SplitSettings] = []
        self._is_in_gesture = self._is_noted = False

    @property
    def can_undo(self) -> bool:
        """Whether there is a step to undo."""
        return bool(self._before)

    @property
    def can_redo(self) -> bool:
        """Whether there is a step to redo."""
        return bool(self._after)

    def begin(self) -> None:
        """Begin a gesture such as a drag: all its changes are one step."""
        self._is_in_gesture, self._is_noted = True, False

    def end(self) -> None:
        """End the gesture."""
        self._is_in_gesture = False

    def note(self, now: SplitSettings) -> None:
        """Remember the settings `now`, which are about to change."""
        self._after.clear()
        if self._is_in_gesture and self._is_noted:
            return
        self._is_noted = True
        self._before.append(now)
        del self._before[:-MAX_STEPS]

    def undo(self, now: SplitSettings) -> SplitSettings:
        """Return the settings before `now`, or `now` if there are none."""
        return self._step(self._before, self._after, now)

    def redo(self, now: SplitSettings) -> SplitSettings:
        """Return the settings that `undo` left last, or `now` if there are none."""
        return self._step(self._after, self._before, now)

    def clear(self) -> None:
        """Forget all steps: settings that came from elsewhere cannot be undone."""
        self._before.clear()
        self._after.clear()
        self.end()

    def _step(
        self, source: list[SplitSettings], target: list[SplitSettings], now: SplitSettings
    ) -> SplitSettings:
        self.end()
        if not source:
            return now
        target.append(now)
        return source.pop()
