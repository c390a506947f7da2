"""Settings of the split, what is known of devices and model, and the figures that follow."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.core.translation import tr
from app.devices.split.figures import (
    FigureInputs,
    blocks_by_rank,
    outside_bytes,
    plan_by_rank,
    rank_colour,
    row_figures,
    shortages,
)
from app.devices.split.fit import FitAnswer, FitQuestion, Rooms, first_plan
from app.devices.split.history import SettingsHistory
from app.devices.split.loads import is_same_load, resplit_params, settings_for
from app.devices.split.picture import FitFigures, LoadState, SpeedFigures, SplitPicture
from app.devices.split.plan_source import PlannerFactory, PlanSource
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
    from engine import Choice, Evaluation


class SplitState:
    """The settings and everything that their figures depend on.

    Args:
        planner_factory: opens a model file for planning.
        machine_factory: finds the facts about devices.

    Attributes:
        settings: the present settings.
        devices: all devices, usable or not.
        loaded: the model that is loaded; None if there is none.
        load_state: state of the model in the engine.
        history: undo and redo of the settings.
        speed: predicted and measured speed.
        elsewhere: name of the server that computes the model in use; "" where this machine does.
    """

    def __init__(
        self, planner_factory: PlannerFactory, machine_factory: MachineFactory = this_machine
    ) -> None:
        self.settings = SplitSettings()
        self.devices: tuple[DeviceInfo, ...] = ()
        self.loaded: ModelLoaded | None = None
        self._loaded_at = 0.0
        self.load_state: LoadState = "empty"
        self.elsewhere = ""
        self.history = SettingsHistory()
        self.speed = SpeedSource(machine_factory)
        self._factory = planner_factory
        self._plans = PlanSource(planner_factory)
        self._saved: Mapping[str, Any] | None = None
        self._snapshots: tuple[DeviceSnapshot, ...] = ()
        self._outside: dict[str, int] = {}
        self._overhead: dict[str, int] = {}
        self._model_error = ""
        self._fit: FitAnswer | None = None
        self._suggested = SplitSettings(), ""
        self._own_context: int | None = None  # the one that was suggested for the present model

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

    # what is known

    def set_devices(
        self, devices: Sequence[DeviceInfo], machine: MachineFacts | None = None
    ) -> None:
        """Offer these devices; settings made before are kept for those that are still here."""
        is_chosen = bool(self.devices) and self.settings != default_settings(self.devices)
        saved = self._saved or (to_dict(self.settings) if is_chosen else None)
        self.devices = tuple(devices)
        self.settings = from_dict(saved, devices) if saved else default_settings(devices)
        self.history.clear()
        self.speed.set_devices(devices, machine)
        self._plans.set_free(self.free())

    def read_speeds(self) -> None:
        """Read again what was measured of devices and links."""
        self.speed.set_devices(self.devices)

    def set_model(self, info: ModelInfo | None) -> None:
        """Plan for this model; None is no model."""
        is_other = info is not None and (self.info is None or self.info.path != info.path)
        self._model_error = self.elsewhere = ""
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

    def set_snapshots(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        """Use the latest memory figures; while a model loads, those from before stay."""
        self._snapshots = tuple(snapshots)
        if not self.is_busy:
            self._outside = outside_bytes(snapshots, self.loaded, self._overhead)
            self._plans.set_free(self.free())

    def set_state(self, state: LoadState) -> None:
        """Note what the engine does with the model."""
        self.load_state = state
        if state in ("empty", "ready"):
            self.loaded = None
        if state in ("empty", "ready", "loading"):
            self.speed.forget()

    def set_loaded(self, loaded: ModelLoaded) -> None:
        """Note the model that is loaded now."""
        self.set_state("loaded")
        self.loaded, self._loaded_at = loaded, time.monotonic()
        self.speed.forget()
        evaluation, _ = self._evaluation()
        self._overhead = evaluation.plan.overhead() if evaluation else {}

    def set_fit(self, answer: FitAnswer) -> None:
        """Use an answer on what fits."""
        self._fit = answer

    def note_answer(self, finished: Finished) -> None:
        """Compare an answer with its prediction, if the present split computed all of it."""
        seconds = finished.timings.first_token_s + finished.timings.decode_s
        evaluation, _ = self._evaluation()
        is_whole = self.loaded is not None and time.monotonic() - seconds >= self._loaded_at
        if self.loaded is not None and is_whole and evaluation and not self.has_changed():
            quant = self.loaded.info.quant
            self.speed.note_answer(finished, evaluation, self.load_params(), quant)

    # what is chosen

    def load_params(self) -> LoadParams:
        """Return the parameters of a load with the settings.

        Raises:
            EngineError: there is no device.
        """
        return self.settings.load_params(self.info.path if self.info else "")

    def change(self, settings: SplitSettings) -> bool:
        """Use other settings; return False if they are the same."""
        if settings == self.settings:
            return False
        self.history.note(self.settings)
        self.settings, self._saved = settings, None
        return True

    @property
    def is_busy(self) -> bool:
        """Whether the engine is at work with the settings."""
        return self.load_state in ("loading", "applying")

    def undo(self) -> bool:
        """Undo the last step; return False if there is none."""
        return self._go_to(self.history.undo(self.settings))

    def redo(self) -> bool:
        """Redo what was undone; return False if there is nothing."""
        return self._go_to(self.history.redo(self.settings))

    def _go_to(self, settings: SplitSettings) -> bool:
        is_other = settings != self.settings
        self.settings = settings
        return is_other

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a JSON-ready dictionary."""
        if not self.devices and self._saved is not None:
            return dict(self._saved)
        return to_dict(self.settings)

    def restore(self, data: Mapping[str, Any]) -> None:
        """Use the settings of a `to_dict`, now or when the devices are known."""
        self._saved = data
        self.history.clear()
        if self.devices:
            self.settings = from_dict(data, self.devices)

    def suggest(self, choice: Choice) -> None:
        """Use the suggested devices and split until the person chooses others; keep the rest."""
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

    def settings_of(self, params: LoadParams) -> SplitSettings:
        """Return settings that load `params`."""
        return settings_for(self.settings, params)

    def dragged(self, handle: int, position: float) -> SplitSettings:
        """Return the settings with a boundary at the possible place nearest to `position`."""
        try:
            positions = self._plans.positions(self.settings, handle)
            if positions is not None and self.settings.can_move(handle):
                return self.settings.with_split(positions[positions.nearest(position)].split)
        except EngineError:
            pass  # without a plan, any place is possible
        return self.settings.with_boundary(handle, position)

    def stepped(self, handle: int, notches: int) -> SplitSettings:
        """Return the settings with a boundary moved by `notches` possible places."""
        if not self.settings.can_move(handle):
            return self.settings
        try:
            positions = self._plans.positions(self.settings, handle)
            if positions is None:
                raise EngineError(tr("There is no model to cut."))
            index = positions.nearest(self._plans.boundary(self.settings, handle))
            if abs(notches) >= len(positions):
                index = len(positions) - 1 if notches > 0 else 0
            else:
                for _ in range(abs(notches)):
                    index = positions.after(index) if notches > 0 else positions.before(index)
            return self.settings.with_split(positions[index].split)
        except EngineError:
            position = self.settings.boundary(handle) + notches / 100
            return self.settings.with_boundary(handle, position)

    def split_by_memory(self) -> SplitSettings:
        """Return the settings with shares in proportion to the free memory of each rank."""
        free = self.free()
        return self._by_weight(
            {d: max(0, size - self.settings.reserved(d)) for d, size in free.items()}
        )

    def split_by_speed(self) -> SplitSettings:
        """Return the settings with shares in proportion to each rank's read speed."""
        return self._by_weight(self.speed.machine.bytes_per_s)

    def _by_weight(self, weights: Mapping[str, float]) -> SplitSettings:
        ranks = self.settings.ranks
        n_on = Counter(rank.device for rank in ranks if rank.is_on)
        return self.settings.with_weights(
            [weights.get(rank.device, 0.0) / max(1, n_on[rank.device]) for rank in ranks]
        )

    # what follows

    def resplit_params(self) -> LoadParams | None:
        """Return the parameters for a live split; None where the model has to be loaded again."""
        if self.loaded is None:
            return None
        n_ctx_train = self.loaded.info.n_ctx_train
        return resplit_params(self.load_params(), self.loaded.params, n_ctx_train)

    def fit_question(self) -> FitQuestion | None:
        """Return the question on what fits for the present settings; None without a model."""
        if self.info is None or self._model_error or not self.settings.ranks:
            return None
        return FitQuestion(self.load_params(), self._rooms(), self.n_ctx_train, self.info.n_layer)

    def _rooms(self) -> Rooms:
        speeds = self.speed.machine.bytes_per_s
        return tuple((d, size, speeds.get(d, 1.0)) for d, size in self._plans.free.items())

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
            n_ctx=plan.n_ctx if plan else self.load_params().context_for(self.n_ctx_train),
            measured={} if has_changed else self._measured(),
            can_load=self.info is not None and not error,
            has_changed=has_changed,
            can_apply=has_changed and self.resplit_params() is not None,
            can_undo=self.history.can_undo,
            can_redo=self.history.can_redo,
            speed=self._speed(evaluation, has_changed),
            fit=self._fit_figures(),
            chosen_because=self._chosen_because,
            elsewhere=self.elsewhere,
        )

    def _evaluation(self) -> tuple[Evaluation | None, str]:
        """Return what the settings take, or a sentence on why they cannot be planned."""
        if self._model_error:
            return None, self._model_error
        try:
            return self._plans.evaluate(self.settings), ""
        except EngineError as error:
            return None, _sentence(error)

    def _speed(self, evaluation: Evaluation | None, has_changed: bool) -> SpeedFigures:
        if evaluation is None:
            return SpeedFigures()
        devices = [device.device for device in evaluation.plan.devices]
        quant = self.info.quant if self.info else ""
        return SpeedFigures(
            self.speed.forecast(evaluation, self.load_params(), quant),
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

    def free(self) -> dict[str, int]:
        """Return the bytes that the model could have, by device id."""
        return {
            device.id: max(0, device.total_bytes - self._outside[device.id])
            if device.id in self._outside
            else device.free_bytes
            for device in self.devices
        }

    def has_changed(self) -> bool:
        """Return whether the settings differ from the loaded ones."""
        if self.loaded is None:
            return False
        n_ctx_train = self.loaded.info.n_ctx_train
        return not is_same_load(self.load_params(), self.loaded.params, n_ctx_train)

    def _measured(self) -> dict[int, int]:
        memory = self.loaded.memory if self.loaded else ()
        totals = [entry.measured.total for entry in memory]
        return dict(zip(self.settings.active, totals, strict=False))


def _sentence(error: EngineError) -> str:
    return f"{error.message} {error.hint}".strip()
