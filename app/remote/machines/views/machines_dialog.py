"""The dialog in which other machines are awaited and shown."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal, Slot
from PySide6.QtGui import QGuiApplication, QStandardItem, QStandardItemModel
from PySide6.QtWidgets import (
    QComboBox,
    QDialog,
    QFormLayout,
    QHBoxLayout,
    QHeaderView,
    QLineEdit,
    QSpinBox,
    QTableView,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_later
from app.widgets.buttons import IconButton, button
from app.widgets.text import label, row_item
from app.widgets.theme import set_role

MOST_MACHINES = 16
HEADERS = (
    tr_later("Machine"), tr_later("Devices"), tr_later("Free memory"),
    tr_later("Load", "how busy a device is"), tr_later("Latency"), tr_later("Speed"),
)  # fmt: skip
WIDTH, HEIGHT = 640, 420


class MachinesDialog(QDialog):
    """Asks how many machines shall compute, shows the command for each and who is there.

    Attributes:
        number: number of machines, with this one.
        address: address of this machine at which the others join.
        command: command line for them.
        switch: button that begins to wait, and ends it.
        status: what is being waited for, or what has failed.
    """

    begun = Signal(int, str)  # number of machines, address
    ended = Signal()

    def __init__(self, addresses: Sequence[str], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Other machines"))
        self.number = QSpinBox(minimum=2, maximum=MOST_MACHINES)
        self.number.setAccessibleName(tr("Number of machines with this one"))
        self.address = QComboBox(editable=True)
        self.address.addItems(list(addresses))
        self.address.setAccessibleName(tr("Address of this machine"))
        self.command = QLineEdit(readOnly=True)
        self.command.setAccessibleName(tr("Command for the other machines"))
        self.copy = IconButton("copy", tr("Copy the command"), size=16)
        self.switch = button(tr("Wait for machines"), "primary")
        self.status = label(role="muted")
        self.status.setWordWrap(True)
        self._rows = QStandardItemModel(0, len(HEADERS), self)
        self.table = QTableView()
        self._rows.setHorizontalHeaderLabels([tr(header) for header in HEADERS])
        self.table.setModel(self._rows)
        self.table.setAccessibleName(tr("Machines that have joined"))
        self._is_waiting = False
        self._build()
        self.copy.clicked.connect(lambda: QGuiApplication.clipboard().setText(self.command.text()))
        self.switch.clicked.connect(self._press)
        self.show_command("")
        self.resize(WIDTH, HEIGHT)

    def _build(self) -> None:
        about = label(
            tr(
                "The machines compute one model together, for what fits none of them. Each needs"
                " Tandem and a copy of the model's file. What they send each other is not"
                " encrypted, so use a network that you trust."
            ),
            role="muted",
        )
        about.setWordWrap(True)
        form = QFormLayout()
        form.addRow(tr("Machines with this one"), self.number)
        form.addRow(tr("Address of this machine"), self.address)
        row = QHBoxLayout()
        row.addWidget(self.command, 1)
        row.addWidget(self.copy)
        self._told = label(tr("Run this on each of the others:"))
        header = self.table.horizontalHeader()
        header.setHighlightSections(False)
        header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        header.setStretchLastSection(True)
        self.table.verticalHeader().hide()
        self.table.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
        buttons = QHBoxLayout()
        buttons.addWidget(self.status, 1)
        buttons.addWidget(self.switch)
        layout = QVBoxLayout(self)
        layout.addWidget(about)
        layout.addLayout(form)
        layout.addWidget(self._told)
        layout.addLayout(row)
        layout.addWidget(self.table, 1)
        layout.addLayout(buttons)

    def show_command(self, command: str) -> None:
        """Show what the other machines run; "" while nobody is awaited."""
        self._is_waiting = bool(command)
        self.command.setText(command)
        self.command.setCursorPosition(0)
        for widget in (self._told, self.command, self.copy):
            widget.setVisible(self._is_waiting)
        for field in (self.number, self.address):
            field.setEnabled(not self._is_waiting)
        self.switch.setText(tr("Let them go") if self._is_waiting else tr("Wait for machines"))

    def show_machines(self, rows: Sequence[Sequence[str]]) -> None:
        """Show the machines that are there, a row of texts for each."""
        known = [[self._text(row, at) for at in range(len(HEADERS))] for row in range(len(self))]
        if known == [list(row) for row in rows]:
            return
        self._rows.setRowCount(0)
        for row in rows:
            items: list[QStandardItem] = [row_item(text) for text in row]
            self._rows.appendRow(items)

    def show_status(self, text: str, *, is_error: bool = False) -> None:
        """Show a sentence beside the button."""
        set_role(self.status, "danger" if is_error else "muted")
        self.status.setText(text)

    def __len__(self) -> int:
        return self._rows.rowCount()

    def _text(self, row: int, column: int) -> str:
        return str(self._rows.index(row, column).data())

    @Slot()
    def _press(self) -> None:
        if self._is_waiting:
            self.ended.emit()
        else:
            self.begun.emit(self.number.value(), self.address.currentText())
