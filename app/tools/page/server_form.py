"""The dialog for adding or editing a tool server: a program, a URL, or JSON to paste."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Signal
from PySide6.QtWidgets import (
    QDialog,
    QFormLayout,
    QHBoxLayout,
    QLineEdit,
    QPlainTextEdit,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr
from app.tools.server_store import MAX_NAME, ToolServer, join_command
from app.widgets.buttons import button
from app.widgets.text import label

PROGRAM, ADDRESS, JSON = range(3)  # tabs in the form
LINES_HEIGHT = 84
EXAMPLE_COMMAND = "npx -y @modelcontextprotocol/server-filesystem /home/me/Documents"
EXAMPLE_URL = "https://example.org/mcp"
EXAMPLE_JSON = '{"mcpServers": {"files": {"command": "npx", "args": ["-y", "…"]}}}'
EXAMPLE_VARIABLE = "API_KEY=…"
EXAMPLE_HEADER = "Authorization: Bearer …"


class ServerForm(QDialog):
    """Form for a tool server; its creator validates the input.

    Args:
        server: server to edit; None for a new one.
    """

    submitted = Signal()

    def __init__(self, server: ToolServer | None, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(
            tr("Add a tool server") if server is None else tr("Edit the tool server")
        )
        self.name, self.command, self.folder, self.url = (QLineEdit() for _ in range(4))
        self.variables, self.headers, self.json = (QPlainTextEdit() for _ in range(3))
        self.name.setMaxLength(MAX_NAME)
        self.tabs = QTabWidget()
        self.problem = label(role="danger")
        self.problem.setWordWrap(True)
        self.problem.hide()
        self.save = button(tr("Add") if server is None else tr("Save"), "primary")
        self.save.setDefault(True)
        self.save.clicked.connect(self.submitted)
        self.cancel = button(tr("Cancel"))
        self.cancel.clicked.connect(self.reject)
        self._make_fields()
        self._build(is_new=server is None)
        if server is not None:
            self._fill(server)

    def show_problem(self, text: str) -> None:
        """Show why the input is invalid."""
        self.problem.setText(text)
        self.problem.setVisible(bool(text))

    def _fill(self, server: ToolServer) -> None:
        self.name.setText(server.name)
        self.command.setText(join_command(server.command))
        self.folder.setText(server.folder)
        self.url.setText(server.url)
        self.variables.setPlainText(_lines(server.environment, "="))
        self.headers.setPlainText(_lines(server.headers, ": "))
        self.tabs.setCurrentIndex(ADDRESS if server.url else PROGRAM)

    def _make_fields(self) -> None:
        fields: Mapping[QLineEdit | QPlainTextEdit, tuple[str, str]] = {
            self.name: (tr("Name"), ""),
            self.command: (tr("Command"), EXAMPLE_COMMAND),
            self.folder: (tr("Folder"), tr("Working directory (optional)")),
            self.variables: (tr("Variables"), EXAMPLE_VARIABLE),
            self.url: (tr("Address"), EXAMPLE_URL),
            self.headers: (tr("Headers"), EXAMPLE_HEADER),
            self.json: (tr("JSON"), EXAMPLE_JSON),
        }
        for field, (name, example) in fields.items():
            field.setAccessibleName(name)
            field.setPlaceholderText(example)
            if isinstance(field, QPlainTextEdit):
                field.setTabChangesFocus(True)
        for field in (self.variables, self.headers):
            field.setFixedHeight(LINES_HEIGHT)

    def _build(self, *, is_new: bool) -> None:
        variables = tr("One per line. Stored in a file that only you can read.")
        headers = tr("One per line. Values are stored as secrets; leave a value empty to keep it.")
        program = _page(
            {
                tr("Command"): self.command,
                tr("Folder"): self.folder,
                tr("Variables"): self.variables,
            },
            variables,
        )
        address = _page({tr("Address"): self.url, tr("Headers"): self.headers}, headers)
        self.tabs.addTab(program, tr("Program"))
        self.tabs.addTab(address, tr("Address"))
        self._name_row = QWidget()
        row = QHBoxLayout(self._name_row)
        row.setContentsMargins(9, 0, 9, 0)  # same as the pages
        row.addWidget(label(tr("Name")))
        row.addWidget(self.name, 1)
        if is_new:
            self.tabs.addTab(self._json_page(), tr("From JSON"))
            self.tabs.currentChanged.connect(lambda tab: self._name_row.setVisible(tab != JSON))
        buttons = QHBoxLayout()
        buttons.addStretch(1)
        buttons.addWidget(self.cancel)
        buttons.addWidget(self.save)
        layout = QVBoxLayout(self)
        layout.setSpacing(12)
        layout.addWidget(self._name_row)
        layout.addWidget(self.tabs, 1)
        layout.addWidget(self.problem)
        layout.addLayout(buttons)
        self.resize(560, 400)

    def _json_page(self) -> QWidget:
        page = QWidget()
        column = QVBoxLayout(page)
        column.addWidget(_help(tr("Paste the configuration from the server's documentation.")))
        column.addWidget(self.json, 1)
        return page


def _page(rows: Mapping[str, QWidget], about: str) -> QWidget:
    page = QWidget()
    form = QFormLayout()
    form.setSpacing(8)
    form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.ExpandingFieldsGrow)
    for text, widget in rows.items():
        form.addRow(text, widget)
    column = QVBoxLayout(page)
    column.setSpacing(8)
    column.addLayout(form)
    column.addWidget(_help(about))
    column.addStretch(1)
    return page


def _help(text: str) -> QWidget:
    widget = label(text, "muted")
    widget.setWordWrap(True)
    return widget


def _lines(pairs: Mapping[str, str], between: str) -> str:
    return "\n".join(f"{name}{between}{value}" for name, value in pairs.items())
