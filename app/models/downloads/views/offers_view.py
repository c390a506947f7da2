"""What one repository offers: a row for each quantisation, with how it would run here."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QModelIndex, Signal, Slot
from PySide6.QtGui import QStandardItemModel
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app.core.translation import tr, tr_n
from app.core.units import decimal_size
from app.models.downloads.hub.client import Repository
from app.models.downloads.hub.offers import ModelOffer
from app.models.downloads.texts import repository_facts
from app.models.downloads.views.results_view import row_of
from app.models.library.texts import LibraryCell
from app.widgets.buttons import button
from app.widgets.row_table import RowTable
from app.widgets.text import ElidedLabel, set_tip
from engine import one_line

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
