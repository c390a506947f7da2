"""Connects downloads and the hub to their page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject, QUrl, Signal, Slot
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QFileDialog

from app.core import paths
from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr, tr_n
from app.models.downloads.download_session import DownloadJob, DownloadSession, new_job
from app.models.downloads.download_view import DownloadView, TokenDialog
from app.models.downloads.hub.client import FoundRepo
from app.models.downloads.hub.offers import Address, hub_endpoint, parse_address
from app.models.downloads.questions import Choices, HubQuestions, OfferVerdict, estimate, verdict_of
from app.models.downloads.transfer.source import Denied
from app.models.library.library_session import Situation
from engine import EngineError


class DownloadPresenter(QObject):
    """Connects a `DownloadSession` and the hub to their page.

    Args:
        situation: returns the devices for which to predict.
        keep: saves settings.
        may_open: returns whether a finished download may be opened automatically now.
    """

    noticed = Signal(object)  # Notice
    open_requested = Signal(str)  # path of a model
    arrived = Signal()  # a download is complete

    def __init__(
        self,
        session: DownloadSession,
        questions: HubQuestions,
        view: DownloadView,
        situation: Callable[[], Situation],
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        may_open: Callable[[], bool],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._session, self._questions, self._view = session, questions, view
        self._situation, self._settings, self._keep = situation, settings, keep
        self._may_open = may_open
        self._choices: Choices | None = None
        self._wire_view()
        self._wire_answers()
        self._show_jobs()
        self.show_folder()

    @property
    def folder(self) -> Path:
        """Folder for new downloads."""
        chosen = self._settings.current.download_folder
        return Path(chosen).expanduser() if chosen else paths.models_dir()

    def show_folder(self) -> None:
        self._view.set_folder(str(self.folder))

    def _wire_view(self) -> None:
        view, session = self._view, self._session
        view.search_requested.connect(self.search)
        view.results.chosen.connect(lambda repo: self._ask(Address(repo)))
        view.offers.page_requested.connect(_browse)
        view.offers.check_requested.connect(self._look)
        view.offers.download_requested.connect(self._download)
        view.folder_requested.connect(self._choose_folder)
        view.token_requested.connect(self._ask_token)
        transfers = view.transfers
        transfers.pause_requested.connect(session.pause)
        transfers.resume_requested.connect(session.resume)
        transfers.cancel_requested.connect(session.cancel)
        transfers.open_requested.connect(self._open)

    def _wire_answers(self) -> None:
        questions, session = self._questions, self._session
        questions.found.connect(self._on_found)
        questions.opened.connect(self._on_opened)
        questions.looked.connect(self._on_looked)
        questions.failed.connect(self._on_failed)
        questions.kept.connect(self._on_kept)
        session.listed.connect(self._show_jobs)
        session.changed.connect(self._show_job)
        session.done.connect(self._on_done)
        session.failed.connect(self._on_job_failed)

    @Slot(str)
    def search(self, text: str) -> None:
        """Open the repository or file that `text` names, or else search for its words."""
        address = parse_address(text, hub_endpoint())
        if address is not None:
            self._ask(address)
        elif "://" in text:
            self.noticed.emit(
                Notice(
                    tr("This link does not point to a model."),
                    tr("Paste the address of a Hugging Face page, or a link ending in .gguf."),
                    "warning",
                )
            )
        else:
            self._view.set_status(tr("Searching …"))
            self._questions.search(text)

    def _ask(self, address: Address) -> None:
        self._view.set_status(tr("Listing files …"))
        self._questions.open(address)

    @Slot(object)
    def _on_found(self, found: list[FoundRepo]) -> None:
        n = len(found)
        text = tr_n("{n} repository", "{n} repositories", n) if n else tr("No repositories found.")
        self._view.set_status(text)
        self._view.results.show_found(found)
        self._view.show_results()

    @Slot(object)
    def _on_opened(self, choices: Choices) -> None:
        self._choices = choices
        free = dict(self._situation().free_bytes)
        verdicts = [estimate(offer, free) for offer in choices.offers]
        self._view.set_status("")
        self._view.offers.show_repository(choices.repository, choices.offers, verdicts)
        self._view.offers.select(choices.first)
        self._view.show_offers()

    @Slot(int)
    def _look(self, number: int) -> None:
        if self._choices is not None:
            self._view.set_status(tr("Reading the header …"))
            self._questions.look(self._choices.offers[number], self._situation())

    @Slot(object)
    def _on_looked(self, look: OfferVerdict) -> None:
        self._view.set_status("")
        offers = self._choices.offers if self._choices else ()
        if look.offer in offers:
            self._view.offers.set_verdict(offers.index(look.offer), verdict_of(look.entry))

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        self._view.set_status("")
        page = self._choices.repository.page if self._choices else ""
        if isinstance(error, Denied) and page:
            self.noticed.emit(Notice.of(error, "", tr("Open its page"), lambda: _browse(page)))
        else:
            self.noticed.emit(Notice.of(error))

    @Slot(int)
    def _download(self, number: int) -> None:
        if self._choices is None:
            return
        offer, repository = self._choices.offers[number], self._choices.repository
        title = offer.name if offer.quant in offer.name.upper() else f"{offer.name} {offer.quant}"
        try:
            job = new_job(title, repository.repo, offer.files, self.folder, repository.page)
        except EngineError as error:
            self.noticed.emit(Notice.of(error))
            return
        if not self._session.add(job):
            self._view.set_status(tr("This model is already in the download list."))

    @Slot()
    def _show_jobs(self) -> None:
        jobs = [(job, self._session.progress(job.id)) for job in self._session.jobs]
        self._view.transfers.set_jobs(jobs)

    @Slot(str)
    def _show_job(self, job_id: str) -> None:
        for job in self._session.jobs:
            if job.id == job_id:
                self._view.transfers.show_job(job, self._session.progress(job_id))

    @Slot(object)
    def _on_done(self, job: DownloadJob) -> None:
        self.arrived.emit()
        path = str(job.path)
        if self._settings.current.opens_downloads and self._may_open():
            self.open_requested.emit(path)
            return
        text = tr("{name} has been downloaded.").format(name=job.title)
        is_verified = all(file.sha256 for file in job.files)
        warning = tr("Its server provides no checksum, so only the size was verified.")
        hint = "" if is_verified else warning
        act = partial(self.open_requested.emit, path)
        self.noticed.emit(Notice(text, hint, "info", tr("Open"), act, is_news=True))

    @Slot(object)
    def _on_job_failed(self, job: DownloadJob) -> None:
        if job.needs_account and job.page:
            action, act = tr("Open its page"), lambda: _browse(job.page)
        else:
            action, act = tr("Try again"), lambda: self._resume(job.id)
        text = f"{job.title}: {job.problem}"
        self.noticed.emit(Notice(text, job.hint, "error", action, act))

    def _resume(self, job_id: str) -> None:
        if any(job.id == job_id for job in self._session.jobs):
            self._session.resume(job_id)

    @Slot(str)
    def _open(self, job_id: str) -> None:
        for job in self._session.jobs:
            if job.id == job_id:
                self.open_requested.emit(str(job.path))

    @Slot()
    def _choose_folder(self) -> None:
        folder = QFileDialog.getExistingDirectory(
            self._view, tr("Folder for downloaded models"), str(self.folder)
        )
        if folder:
            self._keep(replace(self._settings.current, download_folder=folder))
            self.show_folder()

    @Slot()
    def _ask_token(self) -> None:
        dialog = TokenDialog(self._view)
        dialog.entered.connect(self._questions.keep_token)
        dialog.open()

    @Slot(object)
    def _on_kept(self, is_kept: bool) -> None:
        if is_kept:
            self.noticed.emit(Notice(tr("The system keyring was updated.")))
            return
        text = tr("No keyring is available: the token is kept until Tandem closes.")
        hint = tr("Desktops such as GNOME and KDE provide one.")
        self.noticed.emit(Notice(text, hint, "warning"))


def _browse(address: str) -> None:
    if address.startswith(("https://", "http://")):
        QDesktopServices.openUrl(QUrl(address))
