"""The split that a person sets up: settings, the figures that follow, and requests to load."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.devices.split.figures import (
    FigureInputs,
    FitFigures,
    LoadState,
    SpeedFigures,
    SplitPicture,
    blocks_by_rank,
    outside_bytes,
    plan_by_rank,
    rank_colour,
    readings_differ,
    row_figures,
    shortages,
)
from app.devices.split.loads import is_same_load, resplit_params, settings_for
from app.devices.split.planning import (
    FitAnswer,
    FitFinder,
    FitQuestion,
    PlannerFactory,
    PlanSource,
    first_plan,
    open_planner,
)
from app.devices.split.saving import from_dict, to_dict
from app.devices.split.settings import SplitSettings, default_settings
from app.devices.split.speed import MachineFactory, MachineFacts, SpeedSource, this_machine
from engine import (
    DeviceInfo,
    DeviceSnapshot,
    EngineError,
    Finished,
    LoadParams,
    ModelInfo,
    ModelLoaded,
)

if TYPE_CHECKING:
    from engine import Choice, Evaluation, Forecaster

AT_ONCE = 0.01
"""Change of a device's memory, as a part of it, from which on it is shown at once."""

SMALL_EVERY = 4
"""Readings after which smaller changes are shown: other programs make some in almost each one."""

MAX_INT: Final = 2**31 - 1
"""Largest number that a Qt signal carries as an int; a damaged file may claim a longer context."""

MAX_STEPS: Final = 200
"""Number of changes that can be undone."""


class SettingsHistory:
    """The settings that undo and redo lead to."""

    def __init__(self) -> None:
        self._before: list[SplitSettings] = []
        self._after: list[SplitSettings] = []
        self._is_in_gesture = self._is_noted = False

    @property
    def can_undo(self) -> bool:
        """Whether there is a step to undo."""
        return bool(self._before)

    @property
    def can_redo(self) -> bool:
        """Whether there is a step to redo."""
        return bool(self._after)

    def begin(self) -> None:
        """Begin a gesture such as a drag: all its changes are one step."""
        self._is_in_gesture, self._is_noted = True, False

    def end(self) -> None:
        """End the gesture."""
        self._is_in_gesture = False

    def note(self, now: SplitSettings) -> None:
        """Remember the settings `now`, which are about to change."""
        self._after.clear()
        if self._is_in_gesture and self._is_noted:
            return
        self._is_noted = True
        self._before.append(now)
        del self._before[:-MAX_STEPS]

    def undo(self, now: SplitSettings) -> SplitSettings:
        """Return the settings before `now`, or `now` if there are none."""
        return self._step(self._before, self._after, now)

    def redo(self, now: SplitSettings) -> SplitSettings:
        """Return the settings that `undo` left last, or `now` if there are none."""
        return self._step(self._after, self._before, now)

    def clear(self) -> None:
        """Forget all steps: settings that came from elsewhere cannot be undone."""
        self._before.clear()
        self._after.clear()
        self.end()

    def _step(
        self, source: list[SplitSettings], target: list[SplitSettings], now: SplitSettings
    ) -> SplitSettings:
        self.end()
        if not source:
            return now
        target.append(now)
        return source.pop()


class SplitSession(QObject):
    """Devices, shares and context of the next load, and the figures that follow from them.

    Knows no widget. A change is planned and pictured at most once per turn of the event loop,
    however many mouse events a drag sends.

    Args:
        planner_factory: opens a model file for planning.
        machine_factory: finds the facts about devices.

    Attributes:
        settings: the present settings, without a drag that is still to be pictured.
        devices: all devices, usable or not.
        loaded: the model that is loaded; None if there is none.
        load_state: state of the model in the engine.
        history: undo and redo of the settings.
        speed: predicted and measured speed.
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
        self.settings = SplitSettings()
        self.devices: tuple[DeviceInfo, ...] = ()
        self.loaded: ModelLoaded | None = None
        self.load_state: LoadState = "empty"
        self.history = SettingsHistory()
        self.speed = SpeedSource(machine_factory)
        self._loaded_at = 0.0
        self._server = ""  # that computes the model in use
        self._factory = planner_factory
        self._plans = PlanSource(planner_factory)
        self._saved: Mapping[str, Any] | None = None
        self._snapshots: tuple[DeviceSnapshot, ...] = ()
        self._pictured: tuple[DeviceSnapshot, ...] = ()
        self._n_unpictured = 0  # readings since then
        self._outside: dict[str, int] = {}
        self._overhead: dict[str, int] = {}
        self._model_error = ""
        self._fit: FitAnswer | None = None
        self._suggested = SplitSettings(), ""
        self._own_context: int | None = None  # the one that was suggested for the present model
        self._finder = FitFinder(planner_factory, self)
        self._finder.found.connect(self._on_fit)
        self._picture: SplitPicture | None = None
        self._dragged: tuple[int, float] | None = None
        self._timer = QTimer(self, singleShot=True, interval=0)
        self._timer.timeout.connect(self._show)

    @property
    def info(self) -> ModelInfo | None:
        """The selected model."""
        return self._plans.info

    @property
    def n_ctx_train(self) -> int:
        """Longest context that the model was trained for, in tokens; 0 is unknown.

        A factor of RoPE stretches it.
        """
        n_ctx = self.info.n_ctx_train if self.info else 0
        return round(n_ctx * max(1.0, self.settings.rope_factor))

    @property
    def is_busy(self) -> bool:
        """Whether the engine is at work with the settings."""
        return self.load_state in ("loading", "applying")

    # devices, model and engine

    def set_devices(
        self, devices: Sequence[DeviceInfo], machine: MachineFacts | None = None
    ) -> None:
        """Offer these devices; settings made before are kept for those that are still here.

        Args:
            machine: facts about them; None to find these when they are needed.
        """
        is_chosen = bool(self.devices) and self.settings != default_settings(self.devices)
        saved = self._saved or (to_dict(self.settings) if is_chosen else None)
        self.devices = tuple(devices)
        self.settings = from_dict(saved, devices) if saved else default_settings(devices)
        self.history.clear()
        self.speed.set_devices(devices, machine)
        self._plans.set_free(self.free_bytes())
        self.devices_changed.emit(self.devices)
        self._schedule()

    def set_model(self, info: ModelInfo | None) -> None:
        """Plan for this model; None is no model."""
        self._finder.ask(None)
        is_other = info is not None and (self.info is None or self.info.path != info.path)
        self._model_error = self._server = ""
        self._fit = None
        self.speed.forget()
        try:
            self._plans.open(info)
        except EngineError as error:
            self._model_error = _sentence(error)
        if is_other:  # settings that name blocks and tensors were meant for another model
            self._suggested = SplitSettings(), ""
            self.history.clear()
            kept = None if self.settings.n_ctx == self._own_context else self.settings.n_ctx
            self._own_context, self.settings = None, self.settings.for_another_model(kept)
        n_ctx = self.settings.n_ctx
        if n_ctx and self.n_ctx_train and n_ctx > self.n_ctx_train:
            self.settings = replace(self.settings, n_ctx=self.n_ctx_train)
        self.model_changed.emit(min(info.n_ctx_train, MAX_INT) if info else 0)
        self.block_changed.emit(info is None or info.has_mtp)
        self._schedule()

    def set_elsewhere(self, server: str) -> None:
        """Plan for no model: that in use is computed by a server with this name."""
        self.set_model(None)
        self.set_state("empty")
        self._server = server

    def set_snapshots(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        """Use the latest memory figures; while a model loads, those from before stay."""
        self._snapshots = tuple(snapshots)
        if not self.is_busy:
            self._outside = outside_bytes(snapshots, self.loaded, self._overhead)
            self._plans.set_free(self.free_bytes())
        self._n_unpictured += 1
        part = 0.0 if self._n_unpictured >= SMALL_EVERY else AT_ONCE
        pairs = zip_longest(self._pictured, snapshots)
        if any(readings_differ(*pair, part) for pair in pairs):  # a picture costs more
            self._pictured, self._n_unpictured = tuple(snapshots), 0
            self._schedule()

    def set_state(self, state: LoadState) -> None:
        """Note what the engine does with the model."""
        self.load_state = state
        if state in ("empty", "ready"):
            self.loaded = None
        if state in ("empty", "ready", "loading"):
            self.speed.forget()
        self.state_changed.emit(state)
        self._schedule()

    def set_loaded(self, loaded: ModelLoaded) -> None:
        """Note the model that is loaded now; its figures show measurements beside predictions."""
        self.set_state("loaded")
        self.loaded, self._loaded_at = loaded, time.monotonic()
        self.speed.forget()
        evaluation, _ = self._evaluation()
        self._overhead = evaluation.plan.overhead() if evaluation else {}

    def note_answer(self, finished: Finished) -> None:
        """Compare an answer with its prediction, if the present split computed all of it."""
        seconds = finished.timings.first_token_s + finished.timings.decode_s
        evaluation, _ = self._evaluation()
        is_whole = self.loaded is not None and time.monotonic() - seconds >= self._loaded_at
        if self.loaded is not None and is_whole and evaluation and not self.has_changed():
            quant = self.loaded.info.quant
            self.speed.note_answer(finished, evaluation, self._params(), quant)
        self._schedule()

    def read_speeds(self) -> None:
        """Read again what was measured of devices and links, and predict with that."""
        self.speed.set_devices(self.devices)
        self._schedule()

    def free_bytes(self) -> dict[str, int]:
        """Return the bytes that the model could have, by device id."""
        return {
            device.id: max(0, device.total_bytes - self._outside[device.id])
            if device.id in self._outside
            else device.free_bytes
            for device in self.devices
        }

    def stop(self) -> None:
        """End the search for what fits, and emit no more pictures."""
        self._finder.stop()
        self._timer.stop()

    # parameters of a load

    def load_params(self) -> LoadParams:
        """Return the parameters of a load with the settings.

        Raises:
            EngineError: there is no device.
        """
        self._place_dragged()
        return self._params()

    def resplit_params(self) -> LoadParams | None:
        """Return the parameters for a live split; None where the model has to be loaded again."""
        self._place_dragged()
        if self.loaded is None:
            return None
        n_ctx_train = self.loaded.info.n_ctx_train
        return resplit_params(self._params(), self.loaded.params, n_ctx_train)

    def has_changed(self) -> bool:
        """Return whether the settings differ from the loaded ones."""
        if self.loaded is None:
            return False
        n_ctx_train = self.loaded.info.n_ctx_train
        return not is_same_load(self._params(), self.loaded.params, n_ctx_train)

    def _params(self) -> LoadParams:
        return self.settings.load_params(self.info.path if self.info else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a JSON-ready dictionary."""
        self._place_dragged()
        if not self.devices and self._saved is not None:
            return dict(self._saved)
        return to_dict(self.settings)

    def restore(self, data: Mapping[str, Any]) -> None:
        """Use the settings of a `to_dict`, now or when the devices are known."""
        self._saved = data
        self.history.clear()
        if self.devices:
            self.settings = from_dict(data, self.devices)
        self._schedule()

    # suggestions

    def tune_devices(self) -> tuple[str, ...]:
        """Return the devices for a search for the best split: the ranks that are on, or all."""
        ranks = self.settings.ranks
        on = tuple(rank.device for rank in ranks if rank.is_on)
        return on if len(on) > 1 else tuple(rank.device for rank in ranks)

    def forecasters(self) -> Callable[[], Forecaster] | None:
        """Return a function that makes forecasters for another thread; None without devices."""
        return self.speed.another() if self.devices else None

    def suggest(self, choice: Choice) -> None:
        """Use the suggested devices and split, and show why; context and the rest stay."""
        if self.settings.n_ctx is None:
            self._own_context = choice.params.n_ctx
        made = settings_for(self.settings, choice.params)
        self.settings = replace(
            self.settings, ranks=made.ranks, mode=made.mode, single=made.single,
            n_ctx=self.settings.n_ctx or choice.params.n_ctx, n_cpu_blocks=made.n_cpu_blocks,
            n_cpu_moe=made.n_cpu_moe, kv_on_host=made.kv_on_host, overrides=made.overrides,
        )  # fmt: skip
        self._suggested = self.settings, choice.reason
        self.history.clear()
        self._schedule()

    def suggester(self) -> Callable[[ModelInfo], Choice | None]:
        """Return a function that suggests, on another thread, where to put a model.

        It also reads the header and makes a first plan, so that `set_model` need not.
        """
        is_chosen = self.info is None and self.history.can_undo  # by a person, before any model
        forecaster = None if is_chosen else self.speed.another()
        free, settings, factory = dict(self._plans.free), self.settings, self._factory

        def suggest(info: ModelInfo) -> Choice | None:
            planner, choice = first_plan(info, settings, free, factory, forecaster)
            self._plans.offer(info.path, planner)
            return choice

        return suggest

    @property
    def _chosen_because(self) -> str:
        """Sentence on why the settings were suggested; "" if the person chose them."""
        suggested, reason = self._suggested
        return reason if self.settings == suggested else ""

    # changes by the person

    def change(self, settings: SplitSettings) -> None:
        """Use other settings; the person can undo it."""
        self._schedule()  # even without a change: a control may show a value that was refused
        if settings != self.settings:
            self.history.note(self.settings)
            self.settings, self._saved = settings, None
            self.settings_changed.emit()

    def choose(self, params: LoadParams) -> None:
        """Use settings that load `params`; the person can undo it."""
        self.change(settings_for(self.settings, params))

    def set_overrides(self, overrides: tuple[tuple[str, str], ...]) -> None:
        """Set the tensors that lie elsewhere than the split puts them; the person can undo it."""
        self.change(replace(self.settings, overrides=overrides))

    def split_by_memory(self) -> None:
        """Set shares in proportion to the free memory of each rank."""
        free = self.free_bytes()
        self._split_by({d: max(0, size - self.settings.reserved(d)) for d, size in free.items()})

    def split_by_speed(self) -> None:
        """Set shares in proportion to each rank's read speed."""
        self._split_by(self.speed.machine.bytes_per_s)

    def _split_by(self, weights: Mapping[str, float]) -> None:
        ranks = self.settings.ranks
        n_on = Counter(rank.device for rank in ranks if rank.is_on)
        self.change(
            self.settings.with_weights(
                [weights.get(rank.device, 0.0) / max(1, n_on[rank.device]) for rank in ranks]
            )
        )

    def step(self, handle: int, notches: int) -> None:
        """Move a boundary by `notches` possible places."""
        self.change(self._plans.stepped(self.settings, handle, notches))

    def drag(self, handle: int, position: float) -> None:
        """Move a boundary towards `position`, 0 to 1; of many calls in one turn the last counts."""
        self._dragged = handle, position
        self._schedule()

    def begin_gesture(self) -> None:
        """Make all changes until `end_gesture` one step for undo."""
        self.history.begin()

    def end_gesture(self) -> None:
        """End the step that `begin_gesture` began."""
        self._place_dragged()
        self.history.end()

    def undo(self) -> None:
        """Undo the last change."""
        self._go(self.history.undo)

    def redo(self) -> None:
        """Redo what was undone."""
        self._go(self.history.redo)

    def _go(self, step: Callable[[SplitSettings], SplitSettings]) -> None:
        self._place_dragged()
        if self.is_busy:
            return
        before, self.settings = self.settings, step(self.settings)
        if self.settings != before:
            self._schedule()
            self.settings_changed.emit()

    def _place_dragged(self) -> None:
        dragged, self._dragged = self._dragged, None
        if dragged is not None:
            self.change(self._plans.dragged(self.settings, *dragged))

    def request_load(self) -> None:
        """Ask for the present settings to be used: by applying them live, or by loading."""
        picture = self._picture
        if picture is None or not picture.can_start:
            return
        if picture.load_state == "loaded" and picture.can_apply:
            self.apply_requested.emit()
        else:
            self.load_requested.emit()

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
        self._picture = picture = self.picture()
        if not self.is_busy:
            self._finder.ask(self.fit_question())
        self.pictured.emit(picture)

    @Slot(object)
    def _on_fit(self, answer: FitAnswer) -> None:
        self._fit = answer
        self._schedule()

    def fit_question(self) -> FitQuestion | None:
        """Return the question on what fits for the present settings; None without a model."""
        if self.info is None or self._model_error or not self.settings.ranks:
            return None
        speeds = self.speed.machine.bytes_per_s
        rooms = tuple((d, size, speeds.get(d, 1.0)) for d, size in self._plans.free.items())
        return FitQuestion(self._params(), rooms, self.n_ctx_train, self.info.n_layer)

    def picture(self) -> SplitPicture:
        """Plan, and compute every figure."""
        evaluation, error = self._evaluation()
        plan = evaluation.plan if evaluation else None
        inputs = FigureInputs(
            devices={device.id: device for device in self.devices},
            snapshots={snapshot.device: snapshot for snapshot in self._snapshots},
            outside=self._outside,
            by_rank=plan_by_rank(self.settings, plan),
            blocks=blocks_by_rank(self.settings, evaluation),
            overhead=plan.overhead() if plan else {},
            slots=self.speed.machine.slots,
            kept=plan.checkpoint_bytes if plan else 0,
            apart=plan.pictures_apart if plan else 0,
        )
        rows = row_figures(self.settings, inputs)
        has_changed = self.has_changed()
        return SplitPicture(
            load_state=self.load_state,
            loaded=self.loaded,
            has_model=self.info is not None,
            settings=self.settings,
            rows=tuple(rows),
            colours=tuple(
                rank_colour(self.settings, inputs, i) for i in range(len(self.settings.ranks))
            ),
            plan=plan,
            problems=(error,) if error else tuple(shortages(rows)),
            n_ctx=plan.n_ctx if plan else self._params().context_for(self.n_ctx_train),
            measured={} if has_changed else self._measured(),
            can_load=self.info is not None and not error,
            has_changed=has_changed,
            can_apply=has_changed and self.resplit_params() is not None,
            can_undo=self.history.can_undo,
            can_redo=self.history.can_redo,
            speed=self._speed_figures(evaluation, has_changed),
            fit=self._fit_figures(),
            chosen_because=self._chosen_because,
            elsewhere=self._server,
        )

    def _evaluation(self) -> tuple[Evaluation | None, str]:
        """Return what the settings take, or a sentence on why they cannot be planned."""
        if self._model_error:
            return None, self._model_error
        try:
            return self._plans.evaluate(self.settings), ""
        except EngineError as error:
            return None, _sentence(error)

    def _speed_figures(self, evaluation: Evaluation | None, has_changed: bool) -> SpeedFigures:
        if evaluation is None:
            return SpeedFigures()
        devices = [device.device for device in evaluation.plan.devices]
        quant = self.info.quant if self.info else ""
        return SpeedFigures(
            self.speed.forecast(evaluation, self._params(), quant),
            self.speed.n_past,
            self.speed.is_measured(devices),
            self.speed.machine.is_simulated,
            0.0 if has_changed else self.speed.measured,
            0.0 if has_changed else self.speed.expected,
        )

    def _fit_figures(self) -> FitFigures:
        if self._fit is None:
            return FitFigures()
        is_current = self._fit.question == self.fit_question()
        return FitFigures(self._fit.n_ctx, self._fit.remedies, is_current)

    def _measured(self) -> dict[int, int]:
        memory = self.loaded.memory if self.loaded else ()
        totals = [entry.measured.total for entry in memory]
        return dict(zip(self.settings.active, totals, strict=False))


def _sentence(error: EngineError) -> str:
    return f"{error.message} {error.hint}".strip()
