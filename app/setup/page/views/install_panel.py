"""The progress of an installation: what is done now, how far it is, and the way to end it."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QVBoxLayout, QWidget

from app.core.translation import tr
from app.widgets.buttons import button
from app.widgets.text import label

STEPS = 1000


class InstallPanel(QWidget):
    """Panel of the installation that runs, is paused or has failed."""

    pause_requested = Signal()
    resume_requested = Signal()  # also after a failure
    cancel_requested = Signal()
    leave_requested = Signal()  # to the choice, after a failure

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._title, self._stage = label(role="heading"), label(role="muted")
        self._problem, self._hint = label(role="danger"), label(role="muted")
        for text in (self._title, self._stage, self._problem, self._hint):
            text.setWordWrap(True)
        self._bar = QProgressBar(self, minimum=0, maximum=STEPS, textVisible=False)
        self._bar.setAccessibleName(tr("Progress of the installation"))
        self.pause, self.resume = button(tr("Pause")), button(tr("Resume"), "primary")
        self.retry = button(tr("Try again"), "primary")
        self.cancel, self.leave = button(tr("Cancel")), button(tr("Choose another engine"))
        self._controls = (self.pause, self.resume, self.retry, self.leave, self.cancel)
        self.pause.clicked.connect(self.pause_requested)
        for control in (self.resume, self.retry):
            control.clicked.connect(self.resume_requested)
        self.cancel.clicked.connect(self.cancel_requested)
        self.leave.clicked.connect(self.leave_requested)
        row = QHBoxLayout()
        row.setSpacing(8)
        for control in self._controls:
            row.addWidget(control)
        row.addStretch(1)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(16, 12, 16, 14)
        layout.setSpacing(8)
        for widget in (self._title, self._bar, self._stage, self._problem, self._hint):
            layout.addWidget(widget)
        layout.addLayout(row)

    @property
    def text(self) -> str:
        """Text of the panel about the installation's state."""
        return self._stage.text() if self._problem.isHidden() else self._problem.text()

    def show_running(self, title: str, share: float | None, stage: str, *, pauses: bool) -> None:
        """Show an installation that runs.

        Args:
            share: how much of it is done, 0 to 1; None where nobody knows.
            pauses: whether this stage can be paused.
        """
        self._show(title, share, stage, (self.pause, self.cancel))
        self.pause.setEnabled(pauses)

    def show_paused(self, title: str, share: float | None, stage: str) -> None:
        """Show an installation that is paused, or that the last window has left."""
        self._show(title, share or 0.0, stage, (self.resume, self.cancel))

    def show_failure(self, title: str, problem: str, hint: str) -> None:
        """Show why an installation has failed, and how to go on."""
        self._show(title, None, "", (self.retry, self.leave), problem, hint)

    def _show(
        self, title: str, share: float | None, stage: str, controls: tuple[QWidget, ...],
        problem: str = "", hint: str = "",
    ) -> None:  # fmt: skip
        had_focus = any(control.hasFocus() for control in self._controls)
        self._title.setText(title)
        self._bar.setMaximum(0 if share is None else STEPS)  # 0 makes it go to and fro
        self._bar.setValue(round(STEPS * (share or 0.0)))
        self._bar.setVisible(not problem)
        for text, words in ((self._stage, stage), (self._problem, problem), (self._hint, hint)):
            text.setText(words)
            text.setVisible(bool(words))
        for control in self._controls:
            control.setVisible(control in controls)
        if had_focus and not any(control.hasFocus() for control in controls):
            controls[0].setFocus()  # the one that was pressed has gone
