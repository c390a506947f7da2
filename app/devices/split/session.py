"""State of the split panel: settings, resulting figures, undo, and load requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.core.translation import error_text
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
from app.devices.split.planning import (
    FitAnswer,
    FitFinder,
    FitQuestion,
    PlannerFactory,
    PlanSource,
    SpeedSource,
    first_plan,
    open_planner,
)
from app.devices.split.saving import from_dict, to_dict
from app.devices.split.settings import (
    SplitSettings,
    default_settings,
    is_same_load,
    resplit_params,
    settings_for,
)
from app.devices.split.speed import MachineFactory, MachineFacts, this_machine
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

LARGE_CHANGE = 0.01  # fraction of a device's memory; larger changes are shown immediately

SMALL_EVERY = 4
"""Readings per update for smaller changes, which occur in nearly every reading."""

MAX_INT: Final = 2**31 - 1  # maximum of a Qt signal's int; a damaged file may claim more context

MAX_STEPS: Final = 200  # number of changes that can be undone


class SettingsHistory:
    """Undo and redo stacks for the settings."""

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
        """Start a gesture such as a drag; all its changes form one undo step."""
        self._is_in_gesture, self._is_noted = True, False

    def end(self) -> None:
        """End the gesture."""
        self._is_in_gesture = False

    def note(self, now: SplitSettings) -> None:
        """Push `now` onto the undo stack, before it changes."""
        self._after.clear()
        if self._is_in_gesture and self._is_noted:
            return
        self._is_noted = True
        self._before.append(now)
        del self._before[:-MAX_STEPS]

    def undo(self, now: SplitSettings) -> SplitSettings:
        """Return the settings before the last change, or `now` if there are none."""
        return self._step(self._before, self._after, now)

    def redo(self, now: SplitSettings) -> SplitSettings:
        """Return the settings that the last `undo` reverted, or `now` if there are none."""
        return self._step(self._after, self._before, now)

    def clear(self) -> None:
        """Clear both stacks."""
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
    """Devices, shares and context for the next load, and the resulting figures; uses no widgets.

    At most one plan is computed and shown per iteration of the event loop, no matter how many
    mouse events a drag sends.

    Attributes:
        settings: current settings, excluding a drag that has not been planned yet.
        devices: all devices, usable or not.
        speed: predicted and measured speed.
    """

    pictured = Signal(object)  # SplitPicture of the current settings
    settings_changed = Signal()  # by the user
    devices_changed = Signal(object)  # tuple of DeviceInfo
    model_changed = Signal(int)  # training context length; 0 if unknown
    block_changed = Signal(bool)  # whether the model may have an MTP block
    state_changed = Signal(str)  # LoadState
    progressed = Signal(float)  # completed fraction of the load, 0 to 1
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
        self._server = ""  # name of the server that runs the model
        self._factory = planner_factory
        self._plans = PlanSource(planner_factory)
        self._saved: Mapping[str, Any] | None = None
        self._snapshots: tuple[DeviceSnapshot, ...] = ()
        self._pictured: tuple[DeviceSnapshot, ...] = ()
        self._n_unpictured = 0  # readings since `_pictured`
        self._outside: dict[str, int] = {}
        self._overhead: dict[str, int] = {}
        self._model_error = ""
        self._fit: FitAnswer | None = None
        self._suggested = SplitSettings(), ""
        self._suggested_context: int | None = None  # for the selected model
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
        """The model's training context length times the RoPE factor; 0 if unknown."""
        n_ctx = self.info.n_ctx_train if self.info else 0
        return round(n_ctx * max(1.0, self.settings.rope_factor))

    @property
    def is_busy(self) -> bool:
        """Whether the engine is loading or splitting the model."""
        return self.load_state in ("loading", "applying")

    # devices, model, engine

    def set_devices(
        self, devices: Sequence[DeviceInfo], machine: MachineFacts | None = None
    ) -> None:
        """Replace the devices; the settings of those that remain are kept.

        Args:
            machine: facts about the devices; if None, these are looked up on first use.
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
        """Plan for another model, or for none."""
        self._finder.ask(None)
        is_other = info is not None and (self.info is None or self.info.path != info.path)
        self._model_error = self._server = ""
        self._fit = None
        self.speed.forget()
        try:
            self._plans.open(info)
        except EngineError as error:
            self._model_error = error_text(error)
        if is_other:  # the settings refer to the previous model's blocks and tensors
            self._suggested = SplitSettings(), ""
            self.history.clear()
            n_ctx = self.settings.n_ctx
            kept = None if n_ctx == self._suggested_context else n_ctx
            self._suggested_context = None
            self.settings = self.settings.for_another_model(kept)
        n_ctx = self.settings.n_ctx
        if n_ctx and self.n_ctx_train and n_ctx > self.n_ctx_train:
            self.settings = replace(self.settings, n_ctx=self.n_ctx_train)
        self.model_changed.emit(min(info.n_ctx_train, MAX_INT) if info else 0)
        self.block_changed.emit(info is None or info.has_mtp)
        self._schedule()

    def set_elsewhere(self, server: str) -> None:
        """Stop planning, because the server with this name runs the selected model."""
        self.set_model(None)
        self.set_state("empty")
        self._server = server

    def set_snapshots(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        """Use new readings; memory use is not updated while a model loads."""
        self._snapshots = tuple(snapshots)
        if not self.is_busy:
            self._outside = outside_bytes(snapshots, self.loaded, self._overhead)
            self._plans.set_free(self.free_bytes())
        self._n_unpictured += 1
        part = 0.0 if self._n_unpictured >= SMALL_EVERY else LARGE_CHANGE
        pairs = zip_longest(self._pictured, snapshots)
        if any(readings_differ(*pair, part) for pair in pairs):  # showing costs more than comparing
            self._pictured, self._n_unpictured = tuple(snapshots), 0
            self._schedule()

    def set_state(self, state: LoadState) -> None:
        """Set the model's state in the engine."""
        self.load_state = state
        if state in ("empty", "ready"):
            self.loaded = None
        if state in ("empty", "ready", "loading"):
            self.speed.forget()
        self.state_changed.emit(state)
        self._schedule()

    def set_loaded(self, loaded: ModelLoaded) -> None:
        """Set the loaded model; its measured figures are shown next to the predicted ones."""
        self.set_state("loaded")
        self.loaded, self._loaded_at = loaded, time.monotonic()
        self.speed.forget()
        evaluation, _ = self._evaluation()
        self._overhead = evaluation.plan.overhead() if evaluation else {}

    def note_answer(self, finished: Finished) -> None:
        """Compare an answer with its prediction if the current split computed all of it."""
        seconds = finished.timings.first_token_s + finished.timings.decode_s
        evaluation, _ = self._evaluation()
        is_whole = self.loaded is not None and time.monotonic() - seconds >= self._loaded_at
        if self.loaded is not None and is_whole and evaluation and not self.has_changed():
            quant = self.loaded.info.quant
            self.speed.note_answer(finished, evaluation, self._params(), quant)
        self._schedule()

    def read_speeds(self) -> None:
        """Reload the device and link measurements and use them for predictions."""
        self.speed.set_devices(self.devices)
        self._schedule()

    def free_bytes(self) -> dict[str, int]:
        """Return the number of bytes available to the model, by device id."""
        return {
            device.id: max(0, device.total_bytes - self._outside[device.id])
            if device.id in self._outside
            else device.free_bytes
            for device in self.devices
        }

    def stop(self) -> None:
        """Stop searching for fits and stop emitting figures."""
        self._finder.stop()
        self._timer.stop()

    # load parameters

    def load_params(self) -> LoadParams:
        """Return the load parameters for the current settings.

        Raises:
            EngineError: there are no devices.
        """
        self._place_dragged()
        return self._params()

    def resplit_params(self) -> LoadParams | None:
        """Return the parameters for a live split, or None if a reload is required."""
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
        """Return the settings as a JSON-serializable dict."""
        self._place_dragged()
        if not self.devices and self._saved is not None:
            return dict(self._saved)
        return to_dict(self.settings)

    def restore(self, data: Mapping[str, Any]) -> None:
        """Use settings saved by `to_dict`, as soon as the devices are known."""
        self._saved = data
        self.history.clear()
        if self.devices:
            self.settings = from_dict(data, self.devices)
        self._schedule()

    # suggestions

    def tune_devices(self) -> tuple[str, ...]:
        """Return the devices to tune: the active ranks' if there are several, otherwise all."""
        ranks = self.settings.ranks
        on = tuple(rank.device for rank in ranks if rank.is_on)
        return on if len(on) > 1 else tuple(rank.device for rank in ranks)

    def forecasters(self) -> Callable[[], Forecaster] | None:
        """Return a factory of forecasters for another thread, or None if there are no devices."""
        return self.speed.another() if self.devices else None

    def suggest(self, choice: Choice) -> None:
        """Use the suggested devices and split, and show the reason; keep all other settings."""
        if self.settings.n_ctx is None:
            self._suggested_context = choice.params.n_ctx
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
        """Return a function that suggests a split for a model, to be called on another thread.

        It also opens a planner and computes the first plan, so that `set_model` is fast.
        """
        is_chosen = self.info is None and self.history.can_undo  # before selecting a model
        forecaster = None if is_chosen else self.speed.another()
        free, settings, factory = dict(self._plans.free), self.settings, self._factory

        def suggest(info: ModelInfo) -> Choice | None:
            planner, choice = first_plan(info, settings, free, factory, forecaster)
            self._plans.offer(info.path, planner)
            return choice

        return suggest

    @property
    def _chosen_because(self) -> str:
        suggested, reason = self._suggested
        return reason if self.settings == suggested else ""

    # user changes

    def change(self, settings: SplitSettings) -> None:
        """Switch to other settings; undoable."""
        self._schedule()  # even if unchanged: a control may show a rejected value
        if settings != self.settings:
            self.history.note(self.settings)
            self.settings, self._saved = settings, None
            self.settings_changed.emit()

    def choose(self, params: LoadParams) -> None:
        """Switch to settings that load `params`; undoable."""
        self.change(settings_for(self.settings, params))

    def set_overrides(self, overrides: tuple[tuple[str, str], ...]) -> None:
        """Override the split's choice of device for some tensors; undoable."""
        self.change(replace(self.settings, overrides=overrides))

    def split_by_memory(self) -> None:
        """Set shares proportional to each rank's free memory."""
        free = self.free_bytes()
        self._split_by({d: max(0, size - self.settings.reserved(d)) for d, size in free.items()})

    def split_by_speed(self) -> None:
        """Set shares proportional to each rank's memory bandwidth."""
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
        """Move a boundary by `notches` of its possible positions."""
        self.change(self._plans.stepped(self.settings, handle, notches))

    def drag(self, handle: int, position: float) -> None:
        """Move a boundary towards `position`, 0 to 1, in the next iteration of the event loop."""
        self._dragged = handle, position
        self._schedule()

    def begin_gesture(self) -> None:
        """Make all changes until `end_gesture` a single undo step."""
        self.history.begin()

    def end_gesture(self) -> None:
        """End the gesture."""
        self._place_dragged()
        self.history.end()

    def undo(self) -> None:
        """Undo the most recent change."""
        self._go(self.history.undo)

    def redo(self) -> None:
        """Redo the most recently undone change."""
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
        """Request a live split if possible, otherwise a load."""
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
        """Return the fit question for the current settings, or None if there is no model."""
        if self.info is None or self._model_error or not self.settings.ranks:
            return None
        speeds = self.speed.machine.bytes_per_s
        rooms = tuple((d, size, speeds.get(d, 1.0)) for d, size in self._plans.free.items())
        return FitQuestion(self._params(), rooms, self.n_ctx_train, self.info.n_layer)

    def picture(self) -> SplitPicture:
        """Compute the plan and all figures."""
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
        if self._model_error:
            return None, self._model_error
        try:
            return self._plans.evaluate(self.settings), ""
        except EngineError as error:
            return None, error_text(error)

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
