"""What is new in a release, and the page to download it from, which opens at a click only."""

from __future__ import annotations

from PySide6.QtCore import QUrl, Slot
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QWidget

from app.core.translation import tr
from app.setup.updates.release import Release, is_web_page
from app.widgets.buttons import button
from app.widgets.page_dialog import PageDialog, plain_page
from app.widgets.text import label


class NewsDialog(PageDialog):
    """Page with the news of a release as plain text."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(tr("New release"), parent, (640, 520))
        self._page = ""
        self.head_line = label()
        self.head_line.setWordWrap(True)
        self.head.addWidget(self.head_line)
        self.text = plain_page(tr("What is new"))
        self.set_content(self.text)
        self.address = label(role="muted")
        self.address.setWordWrap(True)
        self.column.insertWidget(2, self.address)
        self.visit = button(tr("Open the download page"))
        self.visit.clicked.connect(self._open)
        self.foot.insertWidget(0, self.visit)

    def show_release(self, release: Release, own: str) -> None:
        """Show a release beside the version that runs here."""
        line = tr("Tandem {version} is out; this is {own}. Tandem never replaces itself.")
        self.head_line.setText(line.format(version=release.version, own=own))
        self.text.setPlainText(release.news or tr("This release does not say what is new."))
        self._page = release.page
        self.address.setText(release.page)

    @Slot()
    def _open(self) -> None:
        if is_web_page(self._page):
            QDesktopServices.openUrl(QUrl(self._page))
