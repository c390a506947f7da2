"""Versions, newer releases, and the licences of all that Tandem is made of."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtWidgets import QHBoxLayout, QListWidget, QSplitter, QVBoxLayout, QWidget

from app.core.scale import px
from app.core.translation import tr
from app.widgets.buttons import button
from app.widgets.page_dialog import PageDialog, plain_page, search_field
from app.widgets.text import label, list_item
from app.window.help.licences import Component


class AboutDialog(PageDialog):
    """Page of versions; a list of components shows the licence of the selected one."""

    licence_requested = Signal(object)  # Component
    check_requested = Signal()  # for a newer release
    news_requested = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(tr("About Tandem"), parent, (860, 620))
        self._components: tuple[Component, ...] = ()
        self.versions = label(tr("Reading …"))
        self.versions.setWordWrap(True)
        self.head.addWidget(self.versions, 1)
        self.head.addLayout(self._make_update(), 1)
        self.search = search_field(tr("Search components and licences"))
        self.list = QListWidget()
        self.list.setProperty("role", "field")
        self.list.setAccessibleName(tr("Components"))
        self.text = plain_page(tr("Licence"))
        side = QWidget()
        column = QVBoxLayout(side)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(self.search)
        column.addWidget(self.list, 1)
        both = QSplitter()
        both.addWidget(side)
        both.addWidget(self.text)
        both.setSizes([px(260), px(560)])
        self.set_content(both)
        self.search.textChanged.connect(self._filter)
        self.list.currentRowChanged.connect(self._on_row)

    def show_facts(
        self, versions: Sequence[tuple[str, str]], components: Sequence[Component]
    ) -> None:
        """Show versions, and components in their order."""
        self.versions.setText("\n".join(f"{name} {version}" for name, version in versions))
        self._components = tuple(components)
        self.list.clear()
        for component in components:
            text = f"{component.name} {component.version}".strip()
            self.list.addItem(list_item(text, component.licence))
        if components:
            self.list.setCurrentRow(0)
        self._filter(self.search.text())

    def show_licence(self, component: Component, text: str) -> None:
        """Show the licence of a component, if it is still the selected one."""
        row = self.list.currentRow()
        if 0 <= row < len(self._components) and self._components[row] == component:
            title = f"{component.name}: {component.licence}"
            self.text.setPlainText(f"{title}\n\n{text or tr('It brings no text of its licence.')}")

    def show_update(self, text: str, has_news: bool) -> None:
        """Show what is known of newer releases.

        Args:
            has_news: whether there is something to read about one.
        """
        self.update_line.setText(text)
        self.update_line.setVisible(bool(text))
        self.news.setVisible(has_news)

    def _make_update(self) -> QVBoxLayout:
        """Make what asks for a newer release, and tells of it."""
        self.update_line = label(role="muted")
        self.update_line.setWordWrap(True)
        self.update_line.setAlignment(Qt.AlignmentFlag.AlignRight)
        self.update_line.hide()
        self.check = button(tr("Look for a new release"))
        self.check.clicked.connect(self.check_requested)
        self.news = button(tr("What is new"), "primary")
        self.news.clicked.connect(self.news_requested)
        self.news.hide()
        for made in (self.check, self.news):
            made.setAutoDefault(False)
        buttons = QHBoxLayout()
        buttons.addStretch()
        buttons.addWidget(self.news)
        buttons.addWidget(self.check)
        column = QVBoxLayout()
        column.addLayout(buttons)
        column.addWidget(self.update_line)
        column.addStretch()
        return column

    @Slot(str)
    def _filter(self, text: str) -> None:
        """Show the components whose name, version or licence has all words of a text."""
        wanted = text.casefold().split()
        for row, component in enumerate(self._components):
            known = f"{component.name} {component.version} {component.licence}".casefold()
            self.list.item(row).setHidden(not all(word in known for word in wanted))

    @Slot(int)
    def _on_row(self, row: int) -> None:
        if 0 <= row < len(self._components):
            self.licence_requested.emit(self._components[row])
