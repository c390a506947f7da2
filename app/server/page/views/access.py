"""Switches of the page that decide who may use the server: key, network, web pages."""

from __future__ import annotations

from PySide6.QtCore import Signal, Slot
from PySide6.QtWidgets import QLineEdit, QVBoxLayout, QWidget

from app.core.settings import Settings
from app.core.translation import tr
from app.server.page.choices import pages_text, read_pages
from app.server.page.views.parts import CopiedText, SwitchRow
from app.widgets.buttons import button
from app.widgets.text import label, set_tip
from engine import EngineError


class AccessSettings(QWidget):
    """Three switches, with the key and the list of web pages below two of them."""

    chosen = Signal(str, object)  # name and value of a setting
    key_renewed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.needs_key = SwitchRow(tr("Ask for a key"), "")
        self.network = SwitchRow(
            tr("Reachable from the network"),
            tr(
                "Other machines can use the model with the key. What is sent is not encrypted, so"
                " switch it on only in networks that you trust."
            ),
        )
        self.for_pages = SwitchRow(
            tr("Web pages may ask (CORS)"),
            tr("Pages in a browser can use the model. Without it, only programs can."),
        )
        self.key = CopiedText(tr("Key"), tr("Copy the key"))
        self.key.edit.setEchoMode(QLineEdit.EchoMode.Password)
        self.show_key = button(tr("Show"), "quiet", tr("Show the key"))
        self.show_key.setCheckable(True)
        self.new_key = button(tr("New key"), "quiet", tr("New key"))
        set_tip(self.new_key, tr("Programs with the old key are refused from then on."))
        self.key.row.addWidget(self.show_key)
        self.key.row.addWidget(self.new_key)
        self.key_problem, self.pages_problem = label(role="shortage"), label(role="shortage")
        self.pages = QLineEdit()
        self.pages.setAccessibleName(tr("Web pages that may ask"))
        self.pages.setPlaceholderText("http://localhost:3000, https://example.org")
        self._build()

    def _build(self) -> None:
        for problem in (self.key_problem, self.pages_problem):
            problem.setWordWrap(True)
            problem.hide()
        self.needs_key.below.addWidget(self.key)
        self.needs_key.below.addWidget(self.key_problem)
        self.for_pages.below.addWidget(self.pages)
        self.for_pages.below.addWidget(self.pages_problem)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(10)
        for row in (self.needs_key, self.network, self.for_pages):
            layout.addWidget(row)
        self.needs_key.toggled.connect(lambda on: self.chosen.emit("server_needs_key", on))
        self.network.toggled.connect(lambda on: self.chosen.emit("server_on_network", on))
        self.for_pages.toggled.connect(lambda on: self.chosen.emit("server_for_pages", on))
        self.show_key.toggled.connect(self._reveal)
        self.new_key.clicked.connect(self.key_renewed)
        self.pages.editingFinished.connect(self._choose_pages)

    def show_settings(self, settings: Settings, key: str, key_problem: str) -> None:
        """Show what is chosen, and the key; "" while it is unknown."""
        is_locked = settings.server_on_network
        self.needs_key.set_on(is_locked or settings.server_needs_key, is_locked=is_locked)
        self.needs_key.set_help(
            tr("Always so while the server is reachable from the network.")
            if is_locked
            else tr("Programs of other people on this machine cannot use the model without it.")
        )
        self.network.set_on(settings.server_on_network)
        self.for_pages.set_on(settings.server_for_pages)
        self.key.setVisible(self.needs_key.is_on)
        self.key.set_text(key)
        self.key_problem.setText(key_problem)
        self.key_problem.setVisible(bool(key_problem) and self.needs_key.is_on)
        self.pages.setVisible(settings.server_for_pages)
        if not (self.pages.hasFocus() or self.pages_problem.text()):
            self.pages.setText(pages_text(settings.server_pages))
        self._show_pages_problem(self.pages_problem.text())

    @Slot(bool)
    def _reveal(self, on: bool) -> None:
        mode = QLineEdit.EchoMode
        self.key.edit.setEchoMode(mode.Normal if on else mode.Password)
        self.show_key.setText(tr("Hide") if on else tr("Show"))
        self.show_key.setAccessibleName(tr("Hide the key") if on else tr("Show the key"))

    @Slot()
    def _choose_pages(self) -> None:
        try:
            pages = read_pages(self.pages.text())
        except EngineError as error:
            self._show_pages_problem(f"{error.message} {error.hint}")
            return
        self._show_pages_problem("")
        self.chosen.emit("server_pages", pages)

    def _show_pages_problem(self, text: str) -> None:
        self.pages_problem.setText(text)
        self.pages_problem.setVisible(bool(text) and self.for_pages.is_on)
