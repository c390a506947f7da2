"""Several machines in the window: their dialog, devices and links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QTimer, Signal, Slot
from PySide6.QtGui import QGuiApplication, QStandardItemModel
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

import engine  # its list of network interfaces is imported on first use
from app.core.background import LatestJob
from app.core.translation import error_text, tr, tr_later, translated
from app.core.units import decimal, size_text
from app.remote.machines.team import MachineTeam
from app.widgets.buttons import IconButton, button
from app.widgets.text import label, row_item
from app.widgets.theme import set_role
from engine import EngineError

if TYPE_CHECKING:
    from app.remote.machines.team import TeamHost
    from engine import EngineHost, HostEvent, JoinedMachine, Wires

MAX_MACHINES = 16
HEADERS = (
    tr_later("Machine"), tr_later("Devices"), tr_later("Free memory"),
    tr_later("Load", "how busy a device is"), tr_later("Latency"), tr_later("Speed"),
)  # fmt: skip
WIDTH, HEIGHT = 640, 420


class MachinesDialog(QDialog):
    """Dialog for the number of machines, the join command and the machines that have joined.

    Attributes:
        number: number of machines, including this one.
        address: this machine's address for the others.
        command: command with which the others join.
        switch: button that starts waiting, and later disconnects the machines.
    """

    begun = Signal(int, str)  # number of machines, address
    ended = Signal()

    def __init__(self, addresses: Sequence[str], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Other machines"))
        self.number = QSpinBox(minimum=2, maximum=MAX_MACHINES)
        self.number.setAccessibleName(tr("Number of machines, including this one"))
        self.address = QComboBox(editable=True)
        self.address.addItems(list(addresses))
        self.address.setAccessibleName(tr("This machine's address"))
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
                "Several machines can run one model that is too large for each of them alone. Each"
                " needs Tandem and a copy of the model file. The traffic between them is not"
                " encrypted, so use a network that you trust."
            ),
            role="muted",
        )
        about.setWordWrap(True)
        form = QFormLayout()
        form.addRow(tr("Machines, including this one"), self.number)
        form.addRow(tr("This machine's address"), self.address)
        row = QHBoxLayout()
        row.addWidget(self.command, 1)
        row.addWidget(self.copy)
        self._instruction = label(tr("Run this on each of the others:"))
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
        layout.addWidget(self._instruction)
        layout.addLayout(row)
        layout.addWidget(self.table, 1)
        layout.addLayout(buttons)

    def show_command(self, command: str) -> None:
        """Show the join command, or hide it if it is ""."""
        self._is_waiting = bool(command)
        self.command.setText(command)
        self.command.setCursorPosition(0)
        for widget in (self._instruction, self.command, self.copy):
            widget.setVisible(self._is_waiting)
        for field in (self.number, self.address):
            field.setEnabled(not self._is_waiting)
        self.switch.setText(tr("Disconnect") if self._is_waiting else tr("Wait for machines"))

    def show_machines(self, rows: Sequence[Sequence[str]]) -> None:
        """Show the machines that have joined, one row of texts per machine."""
        known = [[self._text(row, at) for at in range(len(HEADERS))] for row in range(len(self))]
        if known == [list(row) for row in rows]:
            return
        self._rows.setRowCount(0)
        for row in rows:
            self._rows.appendRow([row_item(text) for text in row])

    def show_status(self, text: str, *, is_error: bool = False) -> None:
        """Show a message next to the button."""
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


LOOK_MS = 2000  # interval in ms between updates of memory and load while the dialog is open


class MachinesPart(QObject):
    """Waits for machines, shows them, and creates the host for models on all of them.

    Args:
        path_of: returns the selected model's path, or "".
        over: widget whose window the dialog opens over.
    """

    changed = Signal()  # other machines' devices or links have changed
    completed = Signal()  # all machines have joined

    _updated = Signal()

    def __init__(self, path_of: Callable[[], str], over: QWidget, parent: QObject) -> None:
        super().__init__(parent)
        self._path_of, self._over = path_of, over
        self.team = MachineTeam()
        self.team.on_change = self._updated.emit
        self.dialog: MachinesDialog | None = None
        self._host: TeamHost | None = None
        self._known: tuple[object, ...] = ()
        self._was_complete = False
        self._problem = ""  # error of the last action
        self._job = LatestJob("tandem-machines-open", self)
        self._job.done.connect(self._on_opened)
        self._job.failed.connect(self._on_failed)
        self._timer = QTimer(self, interval=LOOK_MS)
        self._timer.timeout.connect(self._show)
        self._updated.connect(self._on_change)

    def make_host(self, on_event: Callable[[HostEvent], None]) -> EngineHost:
        """Return the host for models on all machines."""
        from app.remote.machines.team import TeamHost  # imported late: rarely used

        self._host = TeamHost(on_event, self.team)
        return self._host

    @property
    def wires(self) -> Wires | None:
        """Measured links between the machines; None while unknown."""
        linked = self.team.linked
        return None if linked is None else engine.Wires(measured=linked.wires)

    @Slot()
    def open(self) -> None:
        if self.dialog is None:
            self.dialog = MachinesDialog(_addresses(), self._over.window())
            self.dialog.begun.connect(self._begin)
            self.dialog.ended.connect(self._end)
            self.dialog.finished.connect(self._timer.stop)
        self._timer.start()
        self._show()
        self.dialog.open()

    def close(self) -> None:
        """Disconnect the machines and wait for threads."""
        self._timer.stop()
        self._job.close()
        self.team.on_change = lambda: None
        self.team.close()

    @Slot(int, str)
    def _begin(self, n_machines: int, address: str) -> None:
        assert self.dialog is not None, "its signal"
        path = self._path_of()
        self._problem = "" if path else tr("Choose a model first.")
        self._show()
        if not path:
            return
        self.dialog.switch.setEnabled(False)
        self._job.run(lambda: self.team.open(path, n_machines, address))

    @Slot()
    def _end(self) -> None:
        self._problem = ""
        self._job.run(self._close_team)

    def _close_team(self) -> None:
        if self._host is not None:
            self._host.leave()
        self.team.close()

    @Slot(object)
    def _on_opened(self, _: object) -> None:
        if self.dialog is not None:
            self.dialog.switch.setEnabled(True)
        self._problem = ""
        self._on_change()

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        self._problem = error_text(error)
        if self.dialog is not None:
            self.dialog.switch.setEnabled(True)
        self._show()

    @Slot()
    def _on_change(self) -> None:
        team = self.team
        if team.is_complete and not self._was_complete:
            self.completed.emit()  # the receiver creates the host
            if self._host is not None:
                self._job.run(self._host.begin)
        self._was_complete = team.is_complete
        known = (tuple(device.id for device in team.devices), team.linked)
        if known != self._known:
            self._known = known
            self.changed.emit()
        self._show()

    @Slot()
    def _show(self) -> None:
        if self.dialog is None:
            return
        team = self.team
        self.dialog.show_command(team.command)
        self.dialog.show_machines([_row(team, one) for one in team.machines])
        if self._problem:
            self.dialog.show_status(self._problem, is_error=True)
        elif team.gathering is None:
            self.dialog.show_status("")
        elif team.is_complete:
            self.dialog.show_status(
                tr("All machines have joined. Their devices appear in the split.")
            )
        else:
            n = team.n_machines - 1 - len(team.machines)
            waits = tr("Waiting for {n} more.").format(n=n)
            self.dialog.show_status(f"{translated(team.status)} {waits}".strip())


def _row(team: MachineTeam, one: JoinedMachine) -> Sequence[str]:
    free = sum(state.free_bytes for state in one.states)
    loads = [state.load_percent for state in one.states if state.load_percent is not None]
    wires = () if team.linked is None else team.linked.wires
    wire = next((wire for wire in wires if (wire.a, wire.b) == (0, one.number)), None)
    return (
        f"{one.number + 1}: {one.name} ({one.address})",
        ", ".join(info.name for info in one.infos),
        size_text(free) if free else "",
        f"{max(loads):.0f} %" if loads else "",
        "" if wire is None else decimal(f"{1e3 * wire.mean_s:.2f} ms"),
        "" if wire is None else f"{8 * wire.bytes_per_s / 1e6:.0f} Mbit/s",
    )


def _addresses() -> list[str]:
    found = []
    with suppress(EngineError):
        found.append(engine.default_address())
    return [*found, *(address for address in engine.own_addresses() if address not in found)]
