"""Versions, and the licences of all that Tandem is made of."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QListWidget, QSplitter, QWidget

from app.help.facts import Component
from app.help.views.page_dialog import PageDialog, plain_page
from app.translation import tr
from app.widgets.text import label, list_item


class AboutDialog(PageDialog):
    """Page of versions; a list of components shows the licence of the selected one."""

    licence_requested = Signal(str)  # name of a component

    def __init__(self, parent: QWidget) -> None:
        super().__init__(tr("About Tandem"), parent, (720, 560))
        self._components: tuple[Component, ...] = ()
        self.versions = label(tr("Reading …"))
        self.versions.setWordWrap(True)
        self.head.addWidget(self.versions)
        self.list = QListWidget()
        self.list.setProperty("role", "field")
        self.list.setAccessibleName(tr("Components"))
        self.text = plain_page(tr("Licence"))
        both = QSplitter()
        both.addWidget(self.list)
        both.addWidget(self.text)
        both.setStretchFactor(1, 2)
        self.set_content(both)
        self.list.currentRowChanged.connect(self._on_row)

    def show_facts(
        self, versions: Sequence[tuple[str, str]], components: Sequence[Component]
    ) -> None:
        """Show versions, and components by name."""
        self.versions.setText("\n".join(f"{name} {version}" for name, version in versions))
        self._components = tuple(components)
        self.list.clear()
        for component in components:
            text = f"{component.name} {component.version}"
            self.list.addItem(list_item(text, component.licence))
        if components:
            self.list.setCurrentRow(0)

    def show_licence(self, name: str, text: str) -> None:
        """Show the licence of a component, if it is still the selected one."""
        row = self.list.currentRow()
        if 0 <= row < len(self._components) and self._components[row].name == name:
            title = f"{name}: {self._components[row].licence}"
            self.text.setPlainText(f"{title}\n\n{text or tr('It brings no text of its licence.')}")

    def _on_row(self, row: int) -> None:
        if 0 <= row < len(self._components):
            self.licence_requested.emit(self._components[row].name)
