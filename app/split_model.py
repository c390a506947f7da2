"""The split panel without its widgets: what is chosen, what is known, and what follows from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from app.plan_source import PlannerFactory, PlanSource
from app.split_figures import (
    Context,
    RowFigures,
    outside_bytes,
    plan_by_rank,
    rank_colour,
    row_figures,
    shortages,
)
from app.split_settings import (
    SplitSettings,
    default_settings,
    from_dict,
    is_same_load,
    to_dict,
)
from app.split_steps import step_boundary
from engine import (
    DeviceInfo,
    DeviceSnapshot,
    EngineError,
    LoadParams,
    ModelInfo,
    ModelLoaded,
    Plan,
)

LoadState = Literal["empty", "ready", "loading", "loaded"]
TENSOR_NOTCH: Final = 0.01
"""Tensors are cut so finely that a key moves by a percent."""


@dataclass(frozen=True, slots=True)
class SplitPicture:
    """All that the panel shows at a moment.

    Attributes:
        colours: index of the device colour of every rank, shown or not.
        problems: sentences: no plan can be made, or it does not fit.
        n_ctx: context in effect.
        measured: bytes by rank index, while the settings are those that are loaded.
        has_changed: whether the settings differ from those that are loaded.
    """

    settings: SplitSettings
    rows: tuple[RowFigures, ...]
    colours: tuple[int, ...]
    plan: Plan | None
    problems: tuple[str, ...]
    n_ctx: int
    measured: Mapping[int, int]
    can_load: bool
    has_changed: bool


class SplitModel:
    """Holds the settings and everything that their figures depend on.

    Args:
        planner_factory: opens a model file for planning.
    """

    def __init__(self, planner_factory: PlannerFactory) -> None:
        self.settings = SplitSettings()
        self.devices: tuple[DeviceInfo, ...] = ()
        self.loaded: ModelLoaded | None = None
        self.load_state: LoadState = "empty"
        self._plans = PlanSource(planner_factory)
        self._saved: Mapping[str, Any] | None = None
        self._snapshots: tuple[DeviceSnapshot, ...] = ()
        self._outside: dict[str, int] = {}
        self._model_error = ""

    @property
    def info(self) -> ModelInfo | None:
        return self._plans.info

    @property
    def n_ctx_train(self) -> int:
        return self.info.n_ctx_train if self.info else 0

    # what is known

    def set_devices(self, devices: Sequence[DeviceInfo]) -> None:
        """Offer these devices; settings made before are kept for those that are still here."""
        saved = self._saved or (to_dict(self.settings) if self.devices else None)
        self.devices = tuple(devices)
        self.settings = from_dict(saved, devices) if saved else default_settings(devices)
        self._plans.set_free(self._free())

    def set_model(self, info: ModelInfo | None) -> None:
        self._model_error = ""
        try:
            self._plans.open(info)
        except EngineError as error:
            self._model_error = _sentence(error)
        n_ctx = self.settings.n_ctx
        if n_ctx and self.n_ctx_train and n_ctx > self.n_ctx_train:
            self.settings = replace(self.settings, n_ctx=self.n_ctx_train)

    def set_snapshots(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        """Use the latest memory figures; while loading those from before stay."""
        self._snapshots = tuple(snapshots)
        if self.load_state != "loading":
            self._outside = outside_bytes(snapshots, self.loaded)
            self._plans.set_free(self._free())

    def set_state(self, state: LoadState) -> None:
        self.load_state = state
        if state in ("empty", "ready"):
            self.loaded = None

    # what is chosen

    def load_params(self) -> LoadParams:
        """Raises EngineError where there is no device."""
        return self.settings.load_params(self.info.path if self.info else "")

    def change(self, settings: SplitSettings) -> bool:
        """Choose other settings; False where they are the same."""
        if settings == self.settings:
            return False
        self.settings, self._saved = settings, None
        return True

    def to_dict(self) -> dict[str, Any]:
        if not self.devices and self._saved is not None:
            return dict(self._saved)
        return to_dict(self.settings)

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take settings from `to_dict` back, now or when the devices are known."""
        self._saved = data
        if self.devices:
            self.settings = from_dict(data, self.devices)

    def stepped(self, handle: int, notches: int) -> SplitSettings:
        """The settings with a boundary moved by so many notches."""
        notch = TENSOR_NOTCH
        if self.settings.mode == "layer" and self.info:
            notch = 1 / max(1, self.info.n_layer)
        try:
            return step_boundary(self.settings, handle, notches, notch, self._plans.boundary)
        except EngineError:
            position = self.settings.boundary(handle) + notches * notch
            return self.settings.with_boundary(handle, position)

    def split_by_memory(self) -> SplitSettings:
        """The settings with shares in proportion to the memory that each rank could have."""
        free, ranks = self._free(), self.settings.ranks
        n_on = Counter(rank.device for rank in ranks if rank.is_on)
        weights = [free[rank.device] / max(1, n_on[rank.device]) for rank in ranks]
        return self.settings.with_weights(weights)

    # what follows

    def picture(self) -> SplitPicture:
        """Plan, and work out every figure."""
        plan, error = self._plan()
        context = Context(
            devices={device.id: device for device in self.devices},
            snapshots={snapshot.device: snapshot for snapshot in self._snapshots},
            outside=self._outside,
            by_rank=plan_by_rank(self.settings, plan),
        )
        rows = row_figures(self.settings, context)
        indices = range(len(self.settings.ranks))
        has_changed = self._has_changed()
        return SplitPicture(
            settings=self.settings,
            rows=tuple(rows),
            colours=tuple(rank_colour(self.settings, context, i) for i in indices),
            plan=plan,
            problems=(error,) if error else tuple(shortages(rows)),
            n_ctx=plan.n_ctx if plan else self.load_params().context_for(self.n_ctx_train),
            measured={} if has_changed else self._measured(),
            can_load=self.info is not None and not error,
            has_changed=has_changed,
        )

    def _plan(self) -> tuple[Plan | None, str]:
        """The plan, or a sentence why there is none."""
        if self._model_error:
            return None, self._model_error
        try:
            return self._plans.plan(self.settings), ""
        except EngineError as error:
            return None, _sentence(error)

    def _free(self) -> dict[str, int]:
        """Bytes by device that the model could have."""
        return {
            device.id: max(0, device.total_bytes - self._outside[device.id])
            if device.id in self._outside
            else device.free_bytes
            for device in self.devices
        }

    def _has_changed(self) -> bool:
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
