"""The download tab of the models page, created on first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.core import paths
from app.core.background import LatestJob
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr
from app.models.library.library_session import Situation

if TYPE_CHECKING:
    from app.models.downloads.download_presenter import DownloadPresenter
    from app.models.downloads.download_session import DownloadSession
    from app.models.downloads.download_view import DownloadView
    from app.models.downloads.questions import HubQuestions


class DownloadsPart(QObject):
    """The download tab of the models page; see `DownloadPresenter` for the arguments."""

    noticed = Signal(object)  # Notice
    open_requested = Signal(str)  # path of a model
    arrived = Signal()  # a download is complete
    progressed = Signal(object)  # completed fraction of all running downloads, or None
    left = Signal()

    def __init__(
        self,
        situation: Callable[[], Situation],
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        may_open: Callable[[], bool],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._situation, self._settings, self._keep = situation, settings, keep
        self._may_open = may_open
        self.view: DownloadView | None = None
        self.session: DownloadSession | None = None
        self._questions: HubQuestions | None = None
        self._presenter: DownloadPresenter | None = None
        self._frame: QWidget | None = None
        self._imports = LatestJob("tandem-imports", self)
        self._imports.done.connect(self._make)

    @property
    def title(self) -> str:
        return tr("Download")

    def widget(self) -> QWidget:
        """Return the page; its content appears once the modules are imported."""
        if self._frame is None:
            self._frame = QWidget()
            QVBoxLayout(self._frame).setContentsMargins(0, 0, 0, 0)
            self._imports.run(_import_all)
        return self._frame

    def enter(self) -> None:
        """Update the page when it is shown."""
        if self.view is not None and self._presenter is not None:
            self._presenter.show_folder()
            self.view.search.setFocus()

    def close(self) -> None:
        """Pause all downloads and wait for all threads."""
        self._imports.close()
        if self.session is not None and self._questions is not None:
            self.session.close()
            self._questions.close()

    @Slot()
    def _make(self) -> None:
        # imported here because the window's first frame does not need it
        from app.models.downloads.download_presenter import DownloadPresenter
        from app.models.downloads.download_session import DownloadSession, JobStore
        from app.models.downloads.download_view import DownloadView
        from app.models.downloads.hub.client import Hub, TokenStore, machine_token
        from app.models.downloads.hub.offers import hub_endpoint
        from app.models.downloads.questions import HubQuestions
        from app.models.downloads.transfer.source import Source

        endpoint = hub_endpoint()
        tokens = TokenStore(endpoint, machine_token)

        def open_source() -> Source:
            return Source(endpoint, tokens.get)

        self.session = DownloadSession(JobStore(paths.downloads_dir()), open_source, self)
        for signal in (self.session.listed, self.session.changed):
            signal.connect(self._report_progress)
        self._questions = HubQuestions(Hub(endpoint, tokens.get), tokens, open_source, self)
        view = self.view = DownloadView()
        presenter = self._presenter = DownloadPresenter(
            self.session, self._questions, view, self._situation, self._settings, self._keep,
            self._may_open, self,
        )  # fmt: skip
        presenter.noticed.connect(self.noticed)
        presenter.open_requested.connect(self.open_requested)
        presenter.arrived.connect(self.arrived)
        view.left.connect(self.left)
        assert self._frame is not None
        layout = self._frame.layout()
        assert layout is not None
        layout.addWidget(view)
        if self._frame.isVisible():
            self.enter()

    @Slot()
    def _report_progress(self) -> None:
        assert self.session is not None
        running = [job for job in self.session.jobs if job.state == "running"]
        n_bytes = sum(job.n_bytes for job in running)
        n_done = sum(self.session.progress(job.id).n_bytes for job in running)
        self.progressed.emit(n_done / n_bytes if n_bytes else None)


def _import_all() -> None:
    """Import the network libraries, which takes too long for the GUI thread."""
    import_module("app.models.downloads.download_presenter")
