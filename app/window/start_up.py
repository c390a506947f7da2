"""Start-up after the first frame: imports, engine and devices; also recovery of a lost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QTimer, Signal, Slot

import engine
from app.chat.session import ChatSession
from app.core.background import LatestJob
from app.core.engine_client import EngineClient, EngineState, is_cancelled
from app.core.notice import Notice
from app.core.process.spare_time import import_host, import_planner
from app.core.translation import tr, tr_n
from app.devices.split.speed import MachineFacts, simulated_machine, this_machine
from app.models.current.model_session import ModelSession
from app.remote.client.address import is_remote
from engine import DeviceInfo, EngineCrashed, EngineError, ModelLoaded

if TYPE_CHECKING:
    from app.setup.engine_pack.activation import Origin
    from engine import Rig, Wires

UNSEEN_MS = 300
"""Milliseconds until start-up begins if the window is not painted (for example, if minimised)."""

Found = tuple[Sequence[DeviceInfo], MachineFacts]


class StartUp(QObject):
    """Start-up after the first frame: imports on a thread, followed by a device search.

    Args:
        rig: simulated machine to plan for instead of the real one.

    Attributes:
        is_ready: whether the devices are known, so that models can be opened.
        others: returns the devices of other machines, and the links to them.
    """

    host_imported = Signal(str)  # Origin of the engine
    devices_found = Signal(object, object)  # Sequence[DeviceInfo], MachineFacts

    def __init__(self, rig: Rig | None, parent: QObject) -> None:
        super().__init__(parent)
        self._rig = rig
        self._has_begun = self.is_ready = self._is_told_again = False
        self._origin: Origin = "own"
        self.devices: tuple[DeviceInfo, ...] = ()
        self.others: Callable[[], tuple[Sequence[DeviceInfo], Wires | None]] = lambda: ((), None)
        self._unseen_timer = QTimer(self, singleShot=True, interval=UNSEEN_MS)
        self._unseen_timer.timeout.connect(self.begin)
        self._imports = LatestJob("tandem-imports", self)
        self._imports.done.connect(self._on_imported)
        self._search = LatestJob("tandem-devices", self)
        self._search.done.connect(self._on_found)

    def arm(self) -> None:
        """Begin soon, even if the window is never painted."""
        self._unseen_timer.start()

    @Slot()
    def begin(self) -> None:
        """Begin, unless start-up has already begun or been closed."""
        self._unseen_timer.stop()
        if not self._has_begun:
            self._has_begun = True
            self._imports.run(_import_first)

    def close(self) -> None:
        """Wait for the threads, and start no more."""
        self._has_begun = True
        self._unseen_timer.stop()
        self._imports.close()
        self._search.close()

    def search_again(self, origin: Origin) -> None:
        """Find the devices again for another engine, and report them even if they are unchanged."""
        self._origin, self._is_told_again = origin, True
        self._search.run(lambda: self._find(wait=True))

    @Slot()
    def look_again(self) -> None:
        """Find and report the devices again, after other machines have changed."""
        self._is_told_again = True
        self._search.run(lambda: self._find(wait=False))

    def machine(self, devices: Sequence[DeviceInfo]) -> MachineFacts:
        """Return facts about a machine with these devices; reads files, so call it on a thread."""
        if self._rig is not None:
            return simulated_machine(self._rig)
        return this_machine(devices, self.others()[1])

    def _find(self, *, wait: bool) -> Found:
        import_planner()
        rig = self._rig
        if rig is not None:
            devices = rig.list_devices()
        else:
            from app.setup.page.engine_session import without_commands

            found = engine.list_devices(wait=wait)
            devices = [without_commands(device, self._origin) for device in found]
            devices += self.others()[0]
        return devices, self.machine(devices)

    @Slot(object)
    def _on_imported(self, origin: Origin) -> None:
        self._origin = origin
        self.host_imported.emit(origin)
        self._search.run(lambda: self._find(wait=False))

    @Slot(object)
    def _on_found(self, found: Found) -> None:
        devices, machine = found
        is_same = self.is_ready and [d.id for d in devices] == [d.id for d in self.devices]
        if is_same and not self._is_told_again:
            return
        self._is_told_again = False
        is_first, self.is_ready = not self.is_ready, True
        self.devices = tuple(devices)
        self.devices_found.emit(devices, machine)
        # torch may find GPUs that no driver reports
        if is_first and self._rig is None and not any(d.kind == "cuda" for d in devices):
            self._search.run(lambda: self._find(wait=True))


def _import_first() -> Origin:
    from app.setup.engine_pack.activation import activate

    origin = activate()  # first, as child processes started later import from there
    import_host()
    return origin


class Recovery(QObject):
    """Offers to reload a lost model and continue the answers that were cut off.

    Nothing loads without a click. If the load fails, the offer stays.

    Args:
        flush: stores typed text before another chat opens.
    """

    noticed = Signal(object)  # Notice

    def __init__(
        self,
        client: EngineClient,
        models: ModelSession,
        chats: ChatSession,
        flush: Callable[[], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._client, self._models, self._chats, self._flush = client, models, chats, flush
        self._lost: ModelLoaded | None = None
        self._is_wanted = False  # whether a click started the load
        client.lost.connect(self._on_lost)
        client.loaded.connect(self._on_loaded)
        client.unloaded.connect(self._forget)
        commands = client.load_failed, client.resplit_failed, client.tune_failed
        for failure in (*commands, client.failed):
            failure.connect(self._on_failed)
        client.failed.connect(self._on_answer_failed)

    @Slot(object, object)
    def _on_lost(self, error: EngineError, lost: ModelLoaded) -> None:
        self._lost = lost
        self._offer(error)

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        self._is_wanted = False
        if self._client.model is None and (self._lost or isinstance(error, EngineCrashed)):
            self._offer(error)

    @Slot(object)
    def _on_answer_failed(self, error: EngineError) -> None:
        if self._lost is not None:
            self._on_failed(error)

    def _offer(self, error: EngineError) -> None:
        if is_cancelled(error) or self._client.state is EngineState.LOADING:
            return
        lost, selected = self._lost, self._models.info
        if lost is None and selected is None:
            return
        is_there = lost is not None and is_remote(lost.info.path)
        is_other = lost is not None and selected is not None and selected.path != lost.info.path
        if lost is not None and self._chats.lost_answers:
            again = tr("Reconnect and continue") if is_there else tr("Reload and continue")
            previous = tr("Load the previous model and continue")
        else:
            again = tr("Reconnect") if is_there else tr("Reload")
            previous = tr("Load the previous model")
        action = previous if is_other else again
        self.noticed.emit(Notice.of(error, action=action, on_action=self._load))

    def _load(self) -> None:
        if self._client.state is EngineState.LOADING:
            return
        if self._client.model is not None:
            self._go_on()
            return
        self._is_wanted = True
        if self._lost is not None:
            self._models.load_again(self._lost)
        else:
            self._models.load()

    @Slot(object)
    def _on_loaded(self, loaded: ModelLoaded) -> None:
        lost, is_wanted = self._lost, self._is_wanted
        self._forget()
        cuts = self._chats.lost_answers
        if lost is None or not cuts:
            return
        if is_wanted:
            self._go_on()
        elif loaded.info.path == lost.info.path:  # loaded with another button
            what = tr("An answer in “{chat}” was cut off.").format(chat=cuts[0].chat.shown_title)
            if len(cuts) > 1:
                what = tr_n("{n} answer was cut off.", "{n} answers were cut off.", len(cuts))
            self.noticed.emit(Notice(what, "", "info", tr("Continue"), self._go_on))

    def _go_on(self) -> None:
        self._flush()
        self._chats.resume()

    @Slot()
    def _forget(self) -> None:
        self._lost, self._is_wanted = None, False
