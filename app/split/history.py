"""Undo and redo of split settings; what happens during one gesture is one step."""

from __future__ import annotations

from typing import Final

from app.split.settings import SplitSettings

MAX_STEPS: Final = 200


class SettingsHistory:
    """Settings before and after those in use."""

    def __init__(self) -> None:
        self._before: list[SplitSettings] = []
        self._after: list[SplitSettings] = []
        self._is_in_gesture = self._is_noted = False

    @property
    def can_undo(self) -> bool:
        return bool(self._before)

    @property
    def can_redo(self) -> bool:
        return bool(self._after)

    def begin(self) -> None:
        """A drag begins: all its changes are one step."""
        self._is_in_gesture, self._is_noted = True, False

    def end(self) -> None:
        """The drag is over."""
        self._is_in_gesture = False

    def note(self, now: SplitSettings) -> None:
        """The settings `now` are about to be changed."""
        self._after.clear()
        if self._is_in_gesture and self._is_noted:
            return
        self._is_noted = True
        self._before.append(now)
        del self._before[:-MAX_STEPS]

    def undo(self, now: SplitSettings) -> SplitSettings:
        """What was before `now`; the same where there is nothing."""
        return self._step(self._before, self._after, now)

    def redo(self, now: SplitSettings) -> SplitSettings:
        """What `undo` took back; the same where there is nothing."""
        return self._step(self._after, self._before, now)

    def clear(self) -> None:
        """Other settings came from elsewhere; there is no way back over them."""
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
