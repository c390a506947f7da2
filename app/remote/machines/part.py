"""The window's part of other machines: the dialog, their devices and the links to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QTimer, Signal, Slot
from PySide6.QtWidgets import QWidget

import engine  # what reads interfaces is resolved when it is used
from app.core.background import LatestJob
from app.core.engine_sentences import translated
from app.core.translation import tr
from app.core.units import decimal, size_text
from app.remote.machines.team import MachineTeam
from engine import EngineError

if TYPE_CHECKING:
    from app.remote.machines.host import TeamHost
    from app.remote.machines.views.machines_dialog import MachinesDialog
    from engine import EngineHost, HostEvent, JoinedMachine, Wires

LOOK_MS = 2000
"""Milliseconds between two looks at the machines' memory and load while the dialog is open."""


class MachinesPart(QObject):
    """Waits for machines, shows them, and has models computed by them.

    Args:
        path_of: returns the path of the selected model's file; "" for none.
        over: widget over whose window the dialog opens.

    Attributes:
        team: the machines.
        dialog: the dialog, once it was opened.
    """

    changed = Signal()  # devices of other machines, or links to them
    completed = Signal()  # all machines are there

    _stirred = Signal()

    def __init__(self, path_of: Callable[[], str], over: QWidget, parent: QObject) -> None:
        super().__init__(parent)
        self._path_of, self._over = path_of, over
        self.team = MachineTeam()
        self.team.on_change = self._stirred.emit
        self.dialog: MachinesDialog | None = None
        self._host: TeamHost | None = None
        self._known: tuple[object, ...] = ()
        self._was_complete = False
        self._problem = ""  # why the last thing that was asked for has failed
        self._job = LatestJob("tandem-machines-open", self)
        self._job.done.connect(self._on_opened)
        self._job.failed.connect(self._on_failed)
        self._timer = QTimer(self, interval=LOOK_MS)
        self._timer.timeout.connect(self._show)
        self._stirred.connect(self._on_change)

    def make_host(self, on_event: Callable[[HostEvent], None], first: int) -> EngineHost:
        """Return the host of models that all machines compute."""
        from app.remote.machines.host import TeamHost  # late: few people have several machines

        self._host = TeamHost(on_event, self.team, first)
        return self._host

    @property
    def wires(self) -> Wires | None:
        """Measured links between the machines; None while they are unknown."""
        linked = self.team.linked
        return None if linked is None else engine.Wires(measured=linked.wires)

    @Slot()
    def open(self) -> None:
        """Show the dialog."""
        if self.dialog is None:
            from app.remote.machines.views.machines_dialog import MachinesDialog

            self.dialog = MachinesDialog(_addresses(), self._over.window())
            self.dialog.begun.connect(self._begin)
            self.dialog.ended.connect(self._end)
            self.dialog.finished.connect(self._timer.stop)
        self._timer.start()
        self._show()
        self.dialog.open()

    def close(self) -> None:
        """Let the machines go, and wait for threads."""
        self._timer.stop()
        self._job.close()
        self.team.on_change = lambda: None
        self.team.close()

    @Slot(int, str)
    def _begin(self, n_machines: int, address: str) -> None:
        assert self.dialog is not None, "it has asked"
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
        """Free what the machines hold, and let them go; work for a thread."""
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
        self._problem = " ".join(translated(part) for part in (error.message, error.hint) if part)
        if self.dialog is not None:
            self.dialog.switch.setEnabled(True)
        self._show()

    @Slot()
    def _on_change(self) -> None:
        """Show machines that have come or gone; tell the window of their devices."""
        team = self.team
        if team.is_complete and not self._was_complete:
            self.completed.emit()  # whoever has the host makes it
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
                tr("All machines are there. Their devices are in the list of the split.")
            )
        else:
            n = team.n_machines - 1 - len(team.machines)
            waits = tr("Waiting for {n} more.").format(n=n)
            self.dialog.show_status(f"{translated(team.said)} {waits}".strip())


def _row(team: MachineTeam, one: JoinedMachine) -> Sequence[str]:
    """Return the texts of a machine."""
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
    """Return this machine's address on its default route, and those of its other interfaces."""
    found = []
    with suppress(EngineError):
        found.append(engine.default_address())
    return [*found, *(address for address in engine.own_addresses() if address not in found)]
