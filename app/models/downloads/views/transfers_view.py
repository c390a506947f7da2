"""The downloads that run, wait, are paused, have failed or are done."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QScrollArea, QVBoxLayout, QWidget

from app.core.scale import px
from app.core.translation import tr
from app.core.units import TransferProgress
from app.models.downloads.questions import state_text
from app.models.downloads.session import DownloadJob
from app.widgets.buttons import button
from app.widgets.text import ElidedLabel, label

MOST_HEIGHT = 220
STEPS = 1000


class TransferRow(QWidget):
    """Row of one download; its buttons are those that make sense in its state."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("role", "panel")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._title, self._state = ElidedLabel(), label(role="muted")
        self._problem = label(role="shortage")
        self._problem.setWordWrap(True)
        self._bar = QProgressBar(self, minimum=0, maximum=STEPS, textVisible=False)
        self.pause = button(tr("Pause"), "quiet")
        self.resume = button(tr("Resume"), "quiet")
        self.open = button(tr("Open"), "quiet")
        self.cancel = button(tr("Cancel"), "quiet")
        head = QHBoxLayout()
        head.addWidget(self._title, 1)
        head.addWidget(self._state)
        for control in (self.pause, self.resume, self.open, self.cancel):
            head.addWidget(control)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(12, 4, 8, 6)
        layout.setSpacing(4)
        layout.addLayout(head)
        layout.addWidget(self._bar)
        layout.addWidget(self._problem)

    @property
    def text(self) -> str:
        """State of the download, as the row shows it."""
        return self._problem.text() or self._state.text()

    def show_job(self, job: DownloadJob, progress: TransferProgress) -> None:
        """Show a download as it is now."""
        self._title.set_full_text(job.title)
        is_failed = job.state == "failed"
        self._state.setText("" if is_failed else state_text(job, progress))
        self._problem.setText(state_text(job, progress) if is_failed else "")
        self._problem.setVisible(is_failed)
        n_bytes = job.n_bytes if job.state == "done" else progress.n_bytes
        self._bar.setValue(STEPS * n_bytes // max(job.n_bytes, 1))
        self._bar.setVisible(job.state != "done")
        self._bar.setAccessibleName(tr("Progress of {name}").format(name=job.title))
        had_focus = any(control.hasFocus() for control in (self.pause, self.resume))
        self.pause.setVisible(job.state in ("running", "waiting"))
        self.resume.setVisible(job.state in ("paused", "failed"))
        self.resume.setText(tr("Try again") if job.state == "failed" else tr("Resume"))
        self.open.setVisible(job.state == "done")
        self.cancel.setText(tr("Remove from the list") if job.state == "done" else tr("Cancel"))
        for control in (self.pause, self.resume, self.open, self.cancel):
            control.setAccessibleName(f"{control.text()}: {job.title}")
        if had_focus:  # the one that was pressed has gone
            next(c for c in (self.pause, self.resume, self.open) if not c.isHidden()).setFocus()


class TransfersView(QScrollArea):
    """List of downloads, hidden while there is none; signals name a download by its id."""

    pause_requested = Signal(str)
    resume_requested = Signal(str)
    cancel_requested = Signal(str)
    open_requested = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setAccessibleName(tr("Downloads"))
        self.rows: dict[str, TransferRow] = {}
        inner = QWidget()
        self._layout = QVBoxLayout(inner)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.setSpacing(6)
        self.setWidget(inner)
        self.hide()

    def set_jobs(self, jobs: Sequence[tuple[DownloadJob, TransferProgress]]) -> None:
        """Show these downloads, the newest first."""
        for gone in self.rows.keys() - {job.id for job, _ in jobs}:
            row = self.rows.pop(gone)
            row.hide()
            row.deleteLater()
        for job, progress in jobs:
            if job.id not in self.rows:
                self.rows[job.id] = self._new_row(job.id)
            self.rows[job.id].show_job(job, progress)
        self.setVisible(bool(jobs))
        self._fit()

    def show_job(self, job: DownloadJob, progress: TransferProgress) -> None:
        """Show a download as it is now."""
        if job.id in self.rows:
            self.rows[job.id].show_job(job, progress)
            self._fit()

    def _new_row(self, job_id: str) -> TransferRow:
        row = TransferRow(self)
        for control, signal in (
            (row.pause, self.pause_requested),
            (row.resume, self.resume_requested),
            (row.cancel, self.cancel_requested),
            (row.open, self.open_requested),
        ):
            control.clicked.connect(lambda _=False, s=signal: s.emit(job_id))
        self._layout.insertWidget(0, row)
        row.show()
        return row

    def _fit(self) -> None:
        """Take as much height as the rows need, up to a limit."""
        wanted = self._layout.sizeHint().height()
        self.setFixedHeight(min(wanted, px(MOST_HEIGHT)))
