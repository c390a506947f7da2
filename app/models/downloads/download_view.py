"""The search tab of the models page, and the list of downloads."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QModelIndex, QSortFilterProxyModel, Qt, Signal, Slot
from PySide6.QtGui import QKeyEvent, QStandardItem, QStandardItemModel
from PySide6.QtWidgets import (
    QDialog,
    QHBoxLayout,
    QLineEdit,
    QProgressBar,
    QScrollArea,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_n
from app.core.units import TransferProgress, decimal_size
from app.models.downloads.download_session import DownloadJob
from app.models.downloads.hub.client import FoundRepo, Repository
from app.models.downloads.hub.offers import ModelOffer
from app.models.downloads.questions import (
    repository_facts,
    result_cells,
    result_headers,
    state_text,
)
from app.models.library.library_view import LibraryCell
from app.widgets.buttons import button
from app.widgets.layout import NO_MARGINS, fill
from app.widgets.row_table import RowTable
from app.widgets.shortcuts import is_pressed
from app.widgets.text import ElidedLabel, PlainLabel, label, row_item, set_tip
from app.widgets.theme import px
from engine import one_line

MAX_HEIGHT = 220
STEPS = 1000


class TransferRow(QWidget):
    """Row for one download, with buttons that depend on its state."""

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
        controls = self.pause, self.resume, self.open, self.cancel
        head = fill(QHBoxLayout(), (self._title, 1), self._state, *controls)
        parts = head, self._bar, self._problem
        fill(QVBoxLayout(self), *parts, margins=(12, 4, 8, 6), spacing=4)

    @property
    def text(self) -> str:
        """The download's state as text."""
        return self._problem.text() or self._state.text()

    def show_job(self, job: DownloadJob, progress: TransferProgress) -> None:
        """Show the state of a download."""
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
        if had_focus:  # the clicked button may now be hidden
            next(c for c in (self.pause, self.resume, self.open) if not c.isHidden()).setFocus()


class TransfersView(QScrollArea):
    """List of downloads, hidden if empty; signals carry a download's id."""

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
        self._layout = fill(QVBoxLayout(inner), margins=NO_MARGINS, spacing=6)
        self.setWidget(inner)
        self.hide()

    def set_jobs(self, jobs: Sequence[tuple[DownloadJob, TransferProgress]]) -> None:
        """Show these downloads, newest first."""
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
        """Show the state of a download."""
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
        self.setFixedHeight(min(self._layout.sizeHint().height(), px(MAX_HEIGHT)))


ORDER = Qt.ItemDataRole.UserRole
KEY = Qt.ItemDataRole.UserRole + 1


def row_of(cells: Sequence[LibraryCell], key: str) -> list[QStandardItem]:
    """Return the items for a row, with `key` as their data."""
    items = []
    for cell in cells:
        item = row_item(cell.text, cell.tip)
        item.setData(cell.order, ORDER)
        item.setData(key, KEY)
        items.append(item)
    return items


class ResultsView(QWidget):
    """Table of repositories, in the hub's order until a header is clicked."""

    chosen = Signal(str)  # repository

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._rows = QStandardItemModel(0, len(result_headers()), self)
        self._rows.setHorizontalHeaderLabels(list(result_headers()))
        self._sorted = QSortFilterProxyModel(self)
        self._sorted.setSortRole(ORDER)
        self._sorted.setSourceModel(self._rows)
        self.table = RowTable(tr("Repositories"))
        self.table.setModel(self._sorted)
        self.table.setSortingEnabled(True)
        self.table.set_headers()
        self.table.chosen.connect(self._on_chosen)
        fill(QVBoxLayout(self), self.table, margins=NO_MARGINS)

    def show_found(self, found: Sequence[FoundRepo]) -> None:
        """Show these repositories and select the first."""
        self._rows.setRowCount(0)
        for one in found:
            self._rows.appendRow(row_of(result_cells(one), one.repo))
        self.table.sortByColumn(-1, Qt.SortOrder.AscendingOrder)
        if found:
            self.table.setCurrentIndex(self._sorted.index(0, 0))

    @Slot(QModelIndex)
    def _on_chosen(self, index: QModelIndex) -> None:
        self.chosen.emit(str(index.siblingAtColumn(0).data(KEY)))


VERDICT = 1


class OffersView(QWidget):
    """Table of a repository's offers; signals carry an offer's index."""

    back_requested = Signal()
    page_requested = Signal(str)  # address
    check_requested = Signal(int)
    download_requested = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._page = ""
        headers = tr("Quantisation"), tr("On these devices"), tr("Size"), tr("Files")
        self._rows = QStandardItemModel(0, len(headers), self)
        self._rows.setHorizontalHeaderLabels(list(headers))
        self.table = RowTable(tr("Quantisations"))
        self.table.setModel(self._rows)
        self.table.set_headers()
        self.table.chosen.connect(self._on_chosen)
        self._title = ElidedLabel()
        self._facts, self._gated = ElidedLabel(), ElidedLabel()
        self._facts.setProperty("role", "muted")
        self._gated.setProperty("role", "warn")
        self.back = button(tr("Results"), "quiet", tr("Back to the results"))
        self.back.clicked.connect(self.back_requested)
        self._read = button(tr("Open its page"), "quiet")
        self._read.clicked.connect(lambda: self.page_requested.emit(self._page))
        self.check = button(tr("Check fit"))
        set_tip(self.check, tr("Download the model's header (a few MB) and plan with it"))
        self.check.clicked.connect(lambda: self._emit(self.check_requested))
        self.download = button(tr("Download"), "primary")
        self.download.clicked.connect(lambda: self._emit(self.download_requested))
        self._build()

    def show_repository(
        self, repository: Repository, offers: Sequence[ModelOffer], verdicts: Sequence[LibraryCell]
    ) -> None:
        """Show a repository's offers and select the first."""
        self._page = repository.page
        self._title.set_full_text(repository.repo)
        self._facts.set_full_text(repository_facts(repository))
        self._gated.set_full_text(
            tr("Gated: accept the conditions on its page, then enter a token here.")
        )
        self._gated.setVisible(repository.is_gated)
        self._read.setVisible(bool(repository.page))
        self._rows.setRowCount(0)
        for number, (offer, verdict) in enumerate(zip(offers, verdicts, strict=True)):
            self._rows.appendRow(row_of(_cells(offer, verdict), str(number)))
        for control in (self.check, self.download):
            control.setEnabled(bool(offers))
        self.select(0)

    def set_verdict(self, number: int, verdict: LibraryCell) -> None:
        """Show the verdict about an offer."""
        if number < self._rows.rowCount():
            self._rows.setItem(number, VERDICT, row_of([verdict], str(number))[0])

    def select(self, number: int) -> None:
        """Select an offer."""
        if number < self._rows.rowCount():
            self.table.setCurrentIndex(self._rows.index(number, 0))

    def _emit(self, signal: object) -> None:
        row = self.table.currentIndex().row()
        if row >= 0:
            signal.emit(row)  # type: ignore[attr-defined]

    @Slot(QModelIndex)
    def _on_chosen(self, index: QModelIndex) -> None:
        self.download_requested.emit(index.row())

    def _build(self) -> None:
        head = fill(QHBoxLayout(), self.back, (self._title, 1), self._read, spacing=8)
        row = fill(QHBoxLayout(), (self._facts, 1), self.check, self.download, spacing=8)
        parts = head, row, self._gated, (self.table, 1)
        fill(QVBoxLayout(self), *parts, margins=NO_MARGINS, spacing=8)


def _cells(offer: ModelOffer, verdict: LibraryCell) -> list[LibraryCell]:
    n = len(offer.files)
    names = "\n".join(one_line(file.name, 120) for file in offer.files[:12])
    helped = tr("{quant} · with {file}") if offer.helpers else "{quant}"
    helper = one_line(offer.helpers[0].name.rpartition("/")[2], 40) if offer.helpers else ""
    return [
        LibraryCell(helped.format(quant=offer.quant, file=helper), offer.quant, names),
        verdict,
        LibraryCell(decimal_size(offer.n_bytes), offer.n_bytes),
        LibraryCell(tr_n("{n} file", "{n} files", n), n, names),
    ]


class DownloadView(QWidget):
    """Page with a search field, its results or a repository's offers, and all downloads."""

    search_requested = Signal(str)
    folder_requested = Signal()
    token_requested = Signal()
    left = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.search = QLineEdit()
        text = tr("Search Hugging Face, or paste owner/name or a link to a .gguf file")
        self.search.setPlaceholderText(tr("Search Hugging Face"))
        set_tip(self.search, text)
        self.search.setAccessibleName(tr("Search Hugging Face"))
        self.search.setClearButtonEnabled(True)
        self.search.returnPressed.connect(self._ask)
        self.go = button(tr("Search"), "primary")
        self.go.clicked.connect(self._ask)
        self.results, self.offers, self.transfers = ResultsView(), OffersView(), TransfersView()
        self.offers.back_requested.connect(self.show_results)
        self._hint = _hint()
        self._middle = QStackedWidget()
        for page in (self._hint, self.results, self.offers):
            self._middle.addWidget(page)
        self._status = label(role="muted")
        self._folder = ElidedLabel()
        self._build()
        self._status.hide()

    @property
    def has_offers(self) -> bool:
        """Whether a repository's offers are shown."""
        return self._middle.currentWidget() is self.offers

    def set_status(self, text: str) -> None:
        """Show the progress or result of a search."""
        self._status.setText(text)
        self._status.setVisible(bool(text))

    def set_folder(self, folder: str) -> None:
        """Show the folder for downloads."""
        self._folder.set_full_text(tr("Saved in {folder}").format(folder=folder))

    @Slot()
    def show_results(self) -> None:
        """Show the repositories found by the search."""
        self._middle.setCurrentWidget(self.results)
        self.results.table.setFocus()

    def show_offers(self) -> None:
        """Show the repository's offers."""
        self._middle.setCurrentWidget(self.offers)
        self.offers.table.setFocus()

    @Slot()
    def _ask(self) -> None:
        if self.search.text().strip():
            self.search_requested.emit(self.search.text().strip())

    def _build(self) -> None:
        head = fill(QHBoxLayout(), (self.search, 1), self.go, spacing=8)
        folder = button(tr("Change…"), "quiet", tr("Change the folder for downloaded models"))
        folder.clicked.connect(self.folder_requested)
        token = button(tr("Token…"), "quiet", tr("Enter a Hugging Face token"))
        token.clicked.connect(self.token_requested)
        foot = fill(QHBoxLayout(), (self._folder, 1), folder, token, spacing=8)
        parts = head, (self._middle, 1), self._status, self.transfers, foot
        fill(QVBoxLayout(self), *parts, margins=(20, 12, 20, 8), spacing=8)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if not is_pressed("leave-page", event):
            super().keyPressEvent(event)
        elif self.has_offers:
            self.show_results()
        else:
            self.left.emit()


def _hint() -> PlainLabel:
    hint = label(
        tr(
            "Find a model on Hugging Face by name.\nBefore you download a quantisation, you can see"
            " whether it fits your devices.\nTandem does not use the network until you press"
            " Search."
        ),
        "muted",
    )
    hint.setAlignment(Qt.AlignmentFlag.AlignCenter)
    hint.setWordWrap(True)
    return hint


class TokenDialog(QDialog):
    """Dialog to enter a token; the stored token is never shown."""

    entered = Signal(str)  # "" removes the token

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(tr("Hugging Face token"))
        self.field = QLineEdit()
        self.field.setEchoMode(QLineEdit.EchoMode.Password)
        self.field.setAccessibleName(tr("Token"))
        text = label(
            tr(
                "Only gated and private models need a token. Create one with read access in your"
                " account's settings. It is stored in the system keyring and sent only to the hub."
            ),
            "muted",
        )
        text.setWordWrap(True)
        self.keep = button(tr("Use"), "primary")
        self.keep.setDefault(True)
        self.keep.clicked.connect(lambda: self._end(self.field.text()))
        self.remove = button(tr("Remove the token"))
        self.remove.clicked.connect(lambda: self._end(""))
        cancel = button(tr("Cancel"))
        cancel.clicked.connect(self.reject)
        self.keep.setEnabled(False)
        self.field.textChanged.connect(lambda typed: self.keep.setEnabled(bool(typed.strip())))
        row = fill(QHBoxLayout(), self.remove, (None, 1), cancel, self.keep)
        fill(QVBoxLayout(self), text, self.field, row, spacing=12)
        self.resize(460, self.sizeHint().height())

    def _end(self, token: str) -> None:
        self.field.clear()
        self.entered.emit(token)
        self.accept()
