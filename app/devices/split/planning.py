"""Plans and predicted speed for the selected model, its longest context, and its first split.

A plan takes less than a frame, so it is computed on the GUI thread; the last two need many plans
and run on other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot

import engine
from app.core.background import LatestJob
from app.devices.split.settings import SplitSettings
from app.devices.split.speed import MachineFactory, MachineFacts, this_machine
from engine import (
    LOAD_DEFAULTS,
    SHARED_LOAD_OPTIONS,
    DeviceInfo,
    EngineError,
    Finished,
    LoadParams,
    ModelInfo,
    is_cpu,
)

if TYPE_CHECKING:
    from engine import Choice, Evaluation, Forecast, Forecaster, Plan, Planner, Positions, Remedy

MAX_KNOWN: Final = 64  # maximum number of cached `Positions`, keyed by parameters and handle
FREE_STEP: Final = 256 << 20
"""Free memory is rounded down to a multiple of this, so that small changes need no new plans."""


PlannerFactory = Callable[[str], "Planner"]  # path of the model file


def open_planner(path: str) -> Planner:
    """Open a model file with the engine's planner."""
    return engine.Planner(path)


class PlanSource:
    """Plans splits for one model at a time."""

    def __init__(self, factory: PlannerFactory) -> None:
        self._factory = factory
        self._planner: Planner | None = None
        self._lock = threading.Lock()
        self._offered: tuple[str, Planner] | None = None
        self._known: tuple[LoadParams, Evaluation] | None = None
        self._positions: dict[tuple[LoadParams, int], Positions] = {}
        self._free: dict[str, int] = {}
        self.info: ModelInfo | None = None

    @property
    def free(self) -> Mapping[str, int]:
        """Free bytes by device id, in steps of `FREE_STEP`."""
        return self._free

    def open(self, info: ModelInfo | None) -> None:
        """Switch to another model, or to none.

        Raises:
            EngineError: the model cannot be planned.
        """
        if self._planner is not None:
            self._planner.close()
        self.info, self._planner = info, None
        self._forget()
        if info is not None:
            self._planner = self._take(info.path) or self._factory(info.path)

    def offer(self, path: str, planner: Planner | None) -> None:
        """Provide a planner that the next `open` of its file will use; thread-safe."""
        with self._lock:
            old, self._offered = self._offered, (path, planner) if planner else None
        if old is not None:
            old[1].close()

    def _take(self, path: str) -> Planner | None:
        with self._lock:
            if self._offered is None or self._offered[0] != path:
                return None
            (_, planner), self._offered = self._offered, None
            return planner

    def set_free(self, free: Mapping[str, int]) -> None:
        """Set the free bytes by device id; they affect how weights are stored."""
        rounded = {device: size // FREE_STEP * FREE_STEP for device, size in free.items()}
        if rounded != self._free:
            self._free = rounded
            self._forget()

    def evaluate(self, settings: SplitSettings) -> Evaluation | None:
        """Evaluate the settings; return None if there is no model.

        Raises:
            EngineError: the model cannot be split this way.
        """
        if self._planner is None or self.info is None:
            return None
        params = settings.load_params(self.info.path)
        if self._known is None or self._known[0] != params:
            self._known = params, self._planner.evaluate(params, self._free)
        return self._known[1]

    def plan(self, settings: SplitSettings) -> Plan | None:
        """Return the plan from `evaluate`."""
        evaluation = self.evaluate(settings)
        return evaluation.plan if evaluation else None

    def positions(self, settings: SplitSettings, handle: int) -> Positions | None:
        """Return the possible positions of a boundary, or None if there is no model.

        Moving the boundary does not change these positions, so they are cached.

        Args:
            handle: index of the active rank before the boundary.

        Raises:
            EngineError: the model cannot be split this way.
        """
        if self._planner is None or self.info is None:
            return None
        params = settings.load_params(self.info.path)
        at_end = settings.with_boundary(handle, 1.0).shares  # the same wherever the handle is now
        key = replace(params, split=tuple(round(share, 9) for share in at_end)), handle
        if key not in self._positions:
            if len(self._positions) >= MAX_KNOWN:
                self._positions.clear()
            self._positions[key] = self._planner.positions(params, handle, self._free)
        return self._positions[key]

    def boundary(self, settings: SplitSettings, handle: int) -> float:
        """Return a boundary's position in the plan, or in the settings if there is no model."""
        plan = self.plan(settings)
        if plan is None:
            return settings.boundary(handle)
        return sum(device.effective for device in plan.devices[: handle + 1])

    def dragged(self, settings: SplitSettings, handle: int, position: float) -> SplitSettings:
        """Return the settings with a boundary at the possible position nearest to `position`."""
        with suppress(EngineError):  # if planning fails, any position is allowed
            positions = self.positions(settings, handle)
            if positions is not None and settings.can_move(handle):
                return settings.with_split(positions[positions.nearest(position)].split)
        return settings.with_boundary(handle, position)

    def stepped(self, settings: SplitSettings, handle: int, notches: int) -> SplitSettings:
        """Return the settings with a boundary moved by `notches` of its possible positions."""
        if not settings.can_move(handle):
            return settings
        with suppress(EngineError):
            positions = self.positions(settings, handle)
            if positions is not None:
                index = positions.nearest(self.boundary(settings, handle))
                if abs(notches) >= len(positions):
                    index = len(positions) - 1 if notches > 0 else 0
                else:
                    for _ in range(abs(notches)):
                        index = positions.after(index) if notches > 0 else positions.before(index)
                return settings.with_split(positions[index].split)
        return settings.with_boundary(handle, settings.boundary(handle) + notches / 100)

    def _forget(self) -> None:
        self._known = None
        self._positions.clear()


MIN_TOKENS = 16  # tokens; speeds are not learned from shorter answers


class SpeedSource:
    """Predicts the speed of splits and compares the predictions with actual answers.

    Attributes:
        n_past: number of tokens in the context.
        measured: speed of the last answer with this model and split, in tokens/s; 0 for none.
        expected: predicted speed of that answer times the gain from draft tokens; 0 if unknown.
    """

    def __init__(self, factory: MachineFactory = this_machine) -> None:
        self._factory = factory
        self._devices: tuple[DeviceInfo, ...] = ()
        self._machine: MachineFacts | None = None
        self.forget()

    def forget(self) -> None:
        """Reset the figures from the last answer."""
        self.n_past = 0
        self.measured = self.expected = 0.0

    @property
    def machine(self) -> MachineFacts:
        """Facts about the devices, looked up on first use."""
        if self._machine is None:
            self._machine = self._factory(self._devices)
        return self._machine

    def another(self) -> Callable[[], engine.Forecaster]:
        """Return a factory of forecasters for these devices, for another thread."""
        factory, devices = self._factory, self._devices
        return lambda: factory(devices).forecaster

    def set_devices(
        self, devices: Sequence[DeviceInfo], machine: MachineFacts | None = None
    ) -> None:
        """Use these devices; if `machine` is None, facts about them are looked up on first use."""
        self._devices = tuple(devices)
        self._machine = machine

    def forecast(self, evaluation: Evaluation, params: LoadParams, quant: str) -> Forecast | None:
        """Predict the speed with the current context, or with a default prompt if it is empty.

        Returns:
            The forecast, or None if a device's speed is unknown.
        """
        return self.machine.forecaster.forecast(evaluation, params, quant, self.n_past or None)

    def is_measured(self, devices: Sequence[str]) -> bool:
        """Return whether all of these devices were measured on this machine."""
        return set(devices) <= self.machine.measured

    def note_answer(
        self, finished: Finished, evaluation: Evaluation, params: LoadParams, quant: str
    ) -> None:
        """Compare an answer with its prediction; learn from the answer if it is long enough.

        Predictions assume no draft tokens, and the gain from draft tokens is only an estimate. So
        a prediction between the speeds with and without draft tokens stays as it is; any other
        one moves towards the nearer speed.
        """
        usage, rate = finished.usage, finished.timings.decode_per_s
        self.n_past = usage.prompt_tokens + usage.completion_tokens
        if rate <= 0:
            return
        self.measured, self.expected = rate, 0.0
        plain = finished.plain_per_s
        if usage.completion_tokens < MIN_TOKENS or not plain:
            return
        forecaster = self.machine.forecaster
        middle = usage.prompt_tokens + usage.completion_tokens // 2
        forecast = forecaster.forecast(evaluation, params, quant, middle)
        if forecast is None:
            return
        predicted = forecast.decode.tokens_per_s
        self.expected = predicted * rate / plain
        nearest = min(max(predicted, min(plain, rate)), max(plain, rate))
        forecaster.learn_decode(evaluation, params, quant, 1 / nearest, middle)


Rooms = tuple[tuple[str, int, float], ...]  # device id, free bytes, read speed in bytes/s


@dataclass(frozen=True, slots=True)
class FitQuestion:
    """A load whose longest context and remedies are sought; `n_ctx_train` is 0 if unknown."""

    params: LoadParams
    rooms: Rooms
    n_ctx_train: int
    n_layer: int


@dataclass(frozen=True, slots=True)
class FitAnswer:
    """The longest context that fits (None if the split is impossible), and remedies."""

    question: FitQuestion
    n_ctx: int | None
    remedies: tuple[Remedy, ...]


class _StoppedError(Exception):
    pass


def find_out(
    question: FitQuestion, factory: PlannerFactory, stopped: threading.Event
) -> FitAnswer | None:
    """Answer a question with a new planner; return None if `stopped` is set."""
    try:
        with closing(factory(question.params.path)) as planner:
            return _answer(question, planner, stopped)
    except _StoppedError:
        return None
    except (EngineError, OSError):
        return FitAnswer(question, None, ())


def _answer(question: FitQuestion, planner: Planner, stopped: threading.Event) -> FitAnswer:
    def plan(params: LoadParams, free: Mapping[str, int]) -> Plan:
        if stopped.is_set():
            raise _StoppedError
        return planner.evaluate(params, free).plan

    rooms = [engine.Room(*room) for room in question.rooms]
    fit = engine.Fit(plan, rooms, question.n_ctx_train, question.n_layer)
    n_ctx = fit.largest_context(question.params)
    return FitAnswer(question, n_ctx, tuple(fit.remedies(question.params)))


def first_plan(
    info: ModelInfo,
    settings: SplitSettings,
    free_bytes: Mapping[str, int],
    factory: PlannerFactory,
    forecaster: Callable[[], Forecaster] | None,
) -> tuple[Planner | None, Choice | None]:
    """Open a model file and plan its first split.

    Args:
        forecaster: see `suggestion`; None keeps the split in `settings`.

    Returns:
        The planner, or None if the file cannot be planned; and the chosen split, if any.
    """
    try:
        planner = factory(info.path)
    except (EngineError, OSError):
        return None, None
    chosen = None
    if forecaster is not None:
        chosen = suggestion(info, settings, free_bytes, planner, forecaster)
    with suppress(EngineError, OSError):  # reported when the split is shown
        planner.evaluate(chosen.params if chosen else settings.load_params(info.path), free_bytes)
    return planner, chosen


def suggestion(
    info: ModelInfo,
    settings: SplitSettings,
    free_bytes: Mapping[str, int],
    planner: Planner,
    forecaster: Callable[[], Forecaster],
) -> Choice | None:
    """Choose the devices and the split for a model.

    All other parameters are taken from `settings`. If these set no context length, it is the
    longest that fits comfortably.

    Args:
        forecaster: creates a forecaster that no other thread uses.

    Returns:
        The choice, or None if the model cannot be planned.
    """
    if not settings.ranks:
        return None
    params = settings.load_params(info.path)
    own = {n: LOAD_DEFAULTS[n] for n, one in SHARED_LOAD_OPTIONS.items() if one.of_model}
    clean = replace(
        params, split=None, split_mode="tensor", groups=None, **own,
        n_ctx=min(params.n_ctx, info.n_ctx_train or params.n_ctx) if params.n_ctx else None,
        mmproj_device=params.mmproj_device if is_cpu(params.mmproj_device) else "auto",
    )  # fmt: skip
    try:
        choice = engine.choose_machines(planner, clean, forecaster(), free_bytes=free_bytes)
        if params.n_ctx is not None:
            return choice
        n_ctx = _comfortable_context(info, choice.params, free_bytes, planner)
        return replace(choice, params=replace(choice.params, n_ctx=n_ctx))
    except (EngineError, OSError):
        return None


def _comfortable_context(
    info: ModelInfo, params: LoadParams, free_bytes: Mapping[str, int], planner: Planner
) -> int | None:
    fit = engine.Fit.comfortable(
        lambda load, free: planner.evaluate(load, free).plan,
        free_bytes, info.n_ctx_train, info.n_layer,
    )  # fmt: skip
    n_ctx = fit.largest_context(params)
    return n_ctx if n_ctx > params.context_for(info.n_ctx_train) else None


PAUSE_MS = 150  # milliseconds without changes to the settings before a search starts


class FitFinder(QObject):
    """Answers the latest question on a thread with its own planner."""

    found = Signal(object)  # FitAnswer

    def __init__(self, planner_factory: PlannerFactory, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._factory = planner_factory
        self._wanted: FitQuestion | None = None
        self._is_stopped = threading.Event()
        self._job = LatestJob("tandem-fit", self)
        self._job.done.connect(self._on_done)
        self._timer = QTimer(self, singleShot=True, interval=PAUSE_MS)
        self._timer.timeout.connect(self._start)

    def ask(self, question: FitQuestion | None) -> None:
        """Answer `question` instead of any earlier one, starting in `PAUSE_MS`; None cancels."""
        if question == self._wanted:
            return
        self._wanted = question
        self._is_stopped.set()
        self._job.drop()
        if question is None:
            self._timer.stop()
        else:
            self._timer.start()

    def stop(self) -> None:
        """Drop the question and wait for the thread."""
        self.ask(None)
        self._job.close()

    @Slot()
    def _start(self) -> None:
        question, factory = self._wanted, self._factory
        if question is not None:
            stopped = self._is_stopped = threading.Event()
            self._job.run(lambda: find_out(question, factory, stopped))

    @Slot(object)
    def _on_done(self, answer: FitAnswer | None) -> None:
        if answer is not None and answer.question == self._wanted:
            self.found.emit(answer)
