"""The split that a person sets up: settings, the figures that follow, and requests to load.

Knows no widget. A change is planned and pictured at most once per turn of the event loop, however
many mouse events a drag sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.devices.split.fit import FitAnswer, FitFinder
from app.devices.split.picture import LoadState, SplitPicture
from app.devices.split.plan_source import PlannerFactory, open_planner
from app.devices.split.settings import SplitSettings
from app.devices.split.speed import MachineFactory, MachineFacts, this_machine
from app.devices.split.state import SplitState
from engine import DeviceInfo, DeviceSnapshot, Finished, LoadParams, ModelInfo, ModelLoaded

if TYPE_CHECKING:
    from engine import Choice, Forecaster


SEEN_BYTES = 64 << 20
"""Change of a device's memory, in bytes, from which on it is shown: sizes have tenths of a GiB."""

AT_ONCE = 0.01
"""Change of a device's memory, as a part of it, from which on it is shown at once."""

SMALL_EVERY = 4
"""Readings after which smaller changes are shown: other programs make some in almost each one."""

SEEN_W = 5.0
"""Change of a device's power, in watts, from which on it is shown."""


class SplitSession(QObject):
    """Devices, shares and context of the next load, and the figures that follow from them.

    Args:
        planner_factory: opens a model file for planning.
        machine_factory: finds the facts about devices.
    """

    pictured = Signal(object)  # SplitPicture of the present settings
    settings_changed = Signal()  # by the person
    devices_changed = Signal(object)  # tuple of DeviceInfo
    model_changed = Signal(int)  # longest context that the model was trained for; 0 is unknown
    block_changed = Signal(bool)  # whether the model may have an MTP block
    state_changed = Signal(str)  # LoadState
    progressed = Signal(float)  # part of the load that is done, 0 to 1
    load_requested = Signal()
    apply_requested = Signal()
    cancel_requested = Signal()

    def __init__(
        self,
        planner_factory: PlannerFactory = open_planner,
        machine_factory: MachineFactory = this_machine,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._pictured: tuple[DeviceSnapshot, ...] = ()
        self._n_unpictured = 0  # readings since then
        self._state = SplitState(planner_factory, machine_factory)
        self._finder = FitFinder(planner_factory, self)
        self._finder.found.connect(self._on_fit)
        self._picture: SplitPicture | None = None
        self._dragged: tuple[int, float] | None = None
        self._timer = QTimer(self, singleShot=True, interval=0)
        self._timer.timeout.connect(self._show)

    # what the program tells

    def set_devices(
        self, devices: Sequence[DeviceInfo], machine: MachineFacts | None = None
    ) -> None:
        """Offer these devices; settings made before are kept for those that are still here.

        Args:
            machine: facts about them; None to find these when they are needed.
        """
        self._state.set_devices(devices, machine)
        self.devices_changed.emit(tuple(devices))
        self._schedule()

    def set_model(self, info: ModelInfo | None) -> None:
        """Plan for this model; None is no model."""
        self._finder.ask(None)
        self._state.set_model(info)
        self.model_changed.emit(info.n_ctx_train if info else 0)
        self.block_changed.emit(info is None or info.has_mtp)
        self._schedule()

    def set_elsewhere(self, server: str) -> None:
        """Plan for no model: that in use is computed by a server with this name."""
        self.set_model(None)
        self.set_state("empty")
        self._state.elsewhere = server

    def set_snapshots(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        """Use the latest memory figures; while a model loads, those from before stay."""
        self._state.set_snapshots(snapshots)
        self._n_unpictured += 1
        part = 0.0 if self._n_unpictured >= SMALL_EVERY else AT_ONCE
        pairs = zip_longest(self._pictured, snapshots)
        if any(_differ(*pair, part) for pair in pairs):  # a picture costs more than a reading
            self._pictured, self._n_unpictured = tuple(snapshots), 0
            self._schedule()

    def set_state(self, state: LoadState) -> None:
        """Note what the engine does with the model."""
        self._state.set_state(state)
        self.state_changed.emit(state)
        self._schedule()

    def set_loaded(self, loaded: ModelLoaded) -> None:
        """Note the model that is loaded now; its figures show measurements beside predictions."""
        self.set_state("loaded")
        self._state.set_loaded(loaded)

    def note_answer(self, finished: Finished) -> None:
        """Compare the speed of an answer with its prediction."""
        self._state.note_answer(finished)
        self._schedule()

    def read_speeds(self) -> None:
        """Read again what was measured of devices and links, and predict with that."""
        self._state.read_speeds()
        self._schedule()

    def stop(self) -> None:
        """End the search for what fits, and emit no more pictures."""
        self._finder.stop()
        self._timer.stop()

    # what the program asks

    @property
    def settings(self) -> SplitSettings:
        """The present settings, without a drag that is still to be pictured."""
        return self._state.settings

    @property
    def load_state(self) -> LoadState:
        """State of the model in the engine."""
        return self._state.load_state

    def load_params(self) -> LoadParams:
        """Return the parameters of a load with the settings.

        Raises:
            EngineError: there is no device.
        """
        self._place_dragged()
        return self._state.load_params()

    def resplit_params(self) -> LoadParams | None:
        """Return the parameters for a live split; None where the model has to be loaded again."""
        self._place_dragged()
        return self._state.resplit_params()

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a JSON-ready dictionary."""
        self._place_dragged()
        return self._state.to_dict()

    def restore(self, data: Mapping[str, Any]) -> None:
        """Use the settings of a `to_dict`, now or when the devices are known."""
        self._state.restore(data)
        self._schedule()

    def tune_devices(self) -> tuple[str, ...]:
        """Return the devices for a search for the best split: the ranks that are on, or all."""
        ranks = self.settings.ranks
        on = tuple(rank.device for rank in ranks if rank.is_on)
        return on if len(on) > 1 else tuple(rank.device for rank in ranks)

    def free_bytes(self) -> dict[str, int]:
        """Return the bytes that the model could have, by device."""
        return self._state.free()

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        """All devices, usable or not."""
        return self._state.devices

    def forecasters(self) -> Callable[[], Forecaster] | None:
        """Return a function that makes forecasters for another thread; None without devices."""
        return self._state.speed.another() if self._state.devices else None

    def suggest(self, choice: Choice) -> None:
        """Use the suggested devices and split, and show why; context and the rest stay."""
        self._state.suggest(choice)
        self._schedule()

    def suggester(self) -> Callable[[ModelInfo], Choice | None]:
        """Return a function that suggests, on another thread, where to put a model."""
        return self._state.suggester()

    # changes by the person

    def change(self, settings: SplitSettings) -> None:
        """Use other settings; the person can undo it."""
        self._schedule()  # even without a change: a control may show a value that was refused
        if self._state.change(settings):
            self.settings_changed.emit()

    def choose(self, params: LoadParams) -> None:
        """Use settings that load `params`; the person can undo it."""
        self.change(self._state.settings_of(params))

    def set_overrides(self, overrides: tuple[tuple[str, str], ...]) -> None:
        """Set the tensors that lie elsewhere than the split puts them; the person can undo it."""
        self.change(replace(self.settings, overrides=overrides))

    def split_by_memory(self) -> None:
        """Set shares in proportion to the free memory of each rank."""
        self.change(self._state.split_by_memory())

    def split_by_speed(self) -> None:
        """Set shares in proportion to each rank's read speed."""
        self.change(self._state.split_by_speed())

    def step(self, handle: int, notches: int) -> None:
        """Move a boundary by `notches` possible places."""
        self.change(self._state.stepped(handle, notches))

    def drag(self, handle: int, position: float) -> None:
        """Move a boundary towards `position`, 0 to 1; of many calls in one turn the last counts."""
        self._dragged = handle, position
        self._schedule()

    def begin_gesture(self) -> None:
        """Make all changes until `end_gesture` one step for undo."""
        self._state.history.begin()

    def end_gesture(self) -> None:
        """End the step that `begin_gesture` began."""
        self._place_dragged()
        self._state.history.end()

    def undo(self) -> None:
        """Undo the last change."""
        self._go(self._state.undo)

    def redo(self) -> None:
        """Redo what was undone."""
        self._go(self._state.redo)

    def request_load(self) -> None:
        """Ask for the present settings to be used: by applying them live, or by loading."""
        picture = self._picture
        if picture is None or not picture.can_start:
            return
        if picture.load_state == "loaded" and picture.can_apply:
            self.apply_requested.emit()
        else:
            self.load_requested.emit()

    def _go(self, step: Callable[[], bool]) -> None:
        self._place_dragged()
        if not self._state.is_busy and step():
            self._schedule()
            self.settings_changed.emit()

    def _place_dragged(self) -> None:
        dragged, self._dragged = self._dragged, None
        if dragged is not None:
            self.change(self._state.dragged(*dragged))

    # showing

    def _schedule(self) -> None:
        if not self._timer.isActive():
            self._timer.start()

    @Slot()
    def _show(self) -> None:
        if not self.settings.ranks:
            return
        self._place_dragged()
        self._timer.stop()
        self._picture = picture = self._state.picture()
        if not self._state.is_busy:
            self._finder.ask(self._state.fit_question())
        self.pictured.emit(picture)

    @Slot(object)
    def _on_fit(self, answer: FitAnswer) -> None:
        self._state.set_fit(answer)
        self._schedule()


def _differ(old: DeviceSnapshot | None, new: DeviceSnapshot | None, part: float) -> bool:
    """Return whether a picture of one reading of a device would look unlike that of another.

    Args:
        part: part of the device's memory that has to change.
    """
    if old is None or new is None:
        return True
    if (old.device, old.problem, old.total_bytes) != (new.device, new.problem, new.total_bytes):
        return True
    seen = max(SEEN_BYTES, part * new.total_bytes)
    return (
        abs(old.used_bytes - new.used_bytes) >= seen
        or abs(old.free_bytes - new.free_bytes) >= seen
        or _rounded(old.temperature_c, 1.0) != _rounded(new.temperature_c, 1.0)
        or _rounded(old.power_w, SEEN_W) != _rounded(new.power_w, SEEN_W)
    )


def _rounded(value: float | None, step: float) -> int | None:
    return None if value is None else round(value / step)
