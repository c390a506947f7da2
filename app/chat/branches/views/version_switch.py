"""The switch between versions of a message: ‹ 1/2 ›."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QWidget

from app.core.translation import tr
from app.widgets.buttons import IconButton
from app.widgets.text import label


class VersionSwitch(QWidget):
    """Two buttons and "1/2" between them; hidden where there is one version only."""

    chosen = Signal(int)  # id of another version

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._ids: Sequence[int] = ()
        self._place = 0
        self._older = IconButton("chevron-left", tr("Previous version (Alt+Left)"), self, size=16)
        self._newer = IconButton("chevron-right", tr("Next version (Alt+Right)"), self, size=16)
        self._count = label(role="muted")
        self._older.clicked.connect(lambda: self.go(-1))
        self._newer.clicked.connect(lambda: self.go(1))
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(1)
        for part in (self._older, self._count, self._newer):
            row.addWidget(part)
        self.hide()

    @property
    def text(self) -> str:
        """Text between the buttons; "" for none."""
        return self._count.text() if len(self._ids) > 1 else ""

    def set_versions(self, ids: Sequence[int], shown: int) -> None:
        """Show which one of the versions with these ids is seen."""
        if ids == self._ids and ids[self._place] == shown:
            return
        self._ids, self._place = ids, ids.index(shown)
        number, total = self._place + 1, len(ids)
        self._count.setText(f"{number}/{total}")
        words = tr("Version {number} of {total}").format(number=number, total=total)
        self._count.setAccessibleName(words)
        self._older.setEnabled(number > 1)
        self._newer.setEnabled(number < total)
        self.setVisible(total > 1)

    @property
    def focused_step(self) -> int:
        """Step of the button with the focus: -1 or 1; 0 if neither has it."""
        return int(self._newer.hasFocus()) - int(self._older.hasFocus())

    def take_focus(self, step: int) -> None:
        """Give the focus to the button of a step, or to the other one where that is the end."""
        is_newer = self._newer.isEnabled() if step > 0 else not self._older.isEnabled()
        (self._newer if is_newer else self._older).setFocus()

    def go(self, step: int) -> None:
        """Ask for the version so many places away, if there is one."""
        if 0 <= (place := self._place + step) < len(self._ids):
            self.chosen.emit(self._ids[place])
