"""The part of the models page where models are found, and the list of downloads."""

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
from app.widgets.row_table import RowTable
from app.widgets.shortcuts import is_pressed
from app.widgets.text import ElidedLabel, PlainLabel, label, row_item, set_tip
from app.widgets.theme import px
from engine import one_line

MAX_HEIGHT = 220
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
        self.setFixedHeight(min(wanted, px(MAX_HEIGHT)))


ORDER = Qt.ItemDataRole.UserRole
KEY = Qt.ItemDataRole.UserRole + 1


def row_of(cells: Sequence[LibraryCell], key: str) -> list[QStandardItem]:
    """Return the items of a row; `key` says what it stands for."""
    items = []
    for cell in cells:
        item = row_item(cell.text, cell.tip)
        item.setData(cell.order, ORDER)
        item.setData(key, KEY)
        items.append(item)
    return items


class ResultsView(QWidget):
    """Table of repositories, in the order of the hub until a header is clicked."""

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
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.table)

    def show_found(self, found: Sequence[FoundRepo]) -> None:
        """Show these repositories in place of others, and select the first."""
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
    """Table of a repository's offers; signals name an offer by its number."""

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
        set_tip(self.check, tr("Fetch the model's header, a few MB, and plan with it"))
        self.check.clicked.connect(lambda: self._emit(self.check_requested))
        self.download = button(tr("Download"), "primary")
        self.download.clicked.connect(lambda: self._emit(self.download_requested))
        self._build()

    def show_repository(
        self, repository: Repository, offers: Sequence[ModelOffer], verdicts: Sequence[LibraryCell]
    ) -> None:
        """Show the offers of a repository and select the first."""
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
        """Show what is known of an offer by now."""
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
        head, row = QHBoxLayout(), QHBoxLayout()
        for line in (head, row):
            line.setSpacing(8)
        head.addWidget(self.back)
        head.addWidget(self._title, 1)
        head.addWidget(self._read)
        row.addWidget(self._facts, 1)
        row.addWidget(self.check)
        row.addWidget(self.download)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(8)
        layout.addLayout(head)
        layout.addLayout(row)
        layout.addWidget(self._gated)
        layout.addWidget(self.table, 1)


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
    """Page with a search, its results or the offers of one repository, and all downloads."""

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
        """Whether the offers of a repository are shown."""
        return self._middle.currentWidget() is self.offers

    def set_status(self, text: str) -> None:
        """Say what is going on, or what was found."""
        self._status.setText(text)
        self._status.setVisible(bool(text))

    def set_folder(self, folder: str) -> None:
        """Name the folder that models are saved in."""
        self._folder.set_full_text(tr("Saved in {folder}").format(folder=folder))

    @Slot()
    def show_results(self) -> None:
        """Show the repositories that were found."""
        self._middle.setCurrentWidget(self.results)
        self.results.table.setFocus()

    def show_offers(self) -> None:
        """Show the offers of a repository."""
        self._middle.setCurrentWidget(self.offers)
        self.offers.table.setFocus()

    @Slot()
    def _ask(self) -> None:
        if self.search.text().strip():
            self.search_requested.emit(self.search.text().strip())

    def _build(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(8)
        head.addWidget(self.search, 1)
        head.addWidget(self.go)
        folder = button(tr("Change…"), "quiet", tr("Change the folder of downloaded models"))
        folder.clicked.connect(self.folder_requested)
        token = button(tr("Token…"), "quiet", tr("Enter a token of Hugging Face"))
        token.clicked.connect(self.token_requested)
        foot = QHBoxLayout()
        foot.setSpacing(8)
        foot.addWidget(self._folder, 1)
        for control in (folder, token):
            foot.addWidget(control)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(20, 12, 20, 8)
        layout.setSpacing(8)
        layout.addLayout(head)
        layout.addWidget(self._middle, 1)
        layout.addWidget(self._status)
        layout.addWidget(self.transfers)
        layout.addLayout(foot)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if not is_pressed("leave-page", event):
            super().keyPressEvent(event)
        elif self.has_offers:
            self.show_results()
        else:
            self.left.emit()


def _hint() -> PlainLabel:
    """Return what the page says before the first search."""
    hint = label(
        tr(
            "Find a model on Hugging Face by its name.\nFor each quantisation you see whether it"
            " fits your devices before you download it.\nNothing is asked of the network until"
            " you press Search."
        ),
        "muted",
    )
    hint.setAlignment(Qt.AlignmentFlag.AlignCenter)
    hint.setWordWrap(True)
    return hint


class TokenDialog(QDialog):
    """Asks for a token, which is never shown again."""

    entered = Signal(str)  # "" removes the one that is known

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(tr("Hugging Face token"))
        self.field = QLineEdit()
        self.field.setEchoMode(QLineEdit.EchoMode.Password)
        self.field.setAccessibleName(tr("Token"))
        text = label(
            tr(
                "Only gated and private models need one; make it on your account's settings page,"
                " with the right to read. It is kept in the system's keyring, and goes to the hub"
                " alone."
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
        row = QHBoxLayout()
        row.addWidget(self.remove)
        row.addStretch(1)
        row.addWidget(cancel)
        row.addWidget(self.keep)
        layout = QVBoxLayout(self)
        layout.setSpacing(12)
        layout.addWidget(text)
        layout.addWidget(self.field)
        layout.addLayout(row)
        self.resize(460, self.sizeHint().height())

    def _end(self, token: str) -> None:
        self.field.clear()
        self.entered.emit(token)
        self.accept()
