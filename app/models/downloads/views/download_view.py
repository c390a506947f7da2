"""The part of the models page where models are found and downloaded."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QStackedWidget, QVBoxLayout, QWidget

from app.core.translation import tr
from app.models.downloads.views.offers_view import OffersView
from app.models.downloads.views.results_view import ResultsView
from app.models.downloads.views.transfers_view import TransfersView
from app.widgets.buttons import button
from app.widgets.shortcuts import is_pressed
from app.widgets.text import ElidedLabel, PlainLabel, label, set_tip


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
