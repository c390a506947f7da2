"""The planner of the chosen model, asked once per question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from app.split_settings import SplitSettings
from engine import LoadParams, ModelInfo, Plan

MAX_PLANS: Final = 512
FREE_STEP: Final = 256 << 20
"""Free memory is told in such steps (bytes), so that its flicker does not ask for new plans."""


class PlannerLike(Protocol):
    """What is used of `engine.Planner`."""

    def plan(self, params: LoadParams, free_bytes: Mapping[str, int] | None = None) -> Plan:
        """Raises EngineError where the split cannot be made."""
        ...

    def close(self) -> None: ...


PlannerFactory = Callable[[str], PlannerLike]


class PlanSource:
    """Evaluates plans for one model at a time and remembers them while it stays.

    Args:
        factory: opens a model file, as `engine.Planner` does.
    """

    def __init__(self, factory: PlannerFactory) -> None:
        self._factory = factory
        self._planner: PlannerLike | None = None
        self._plans: dict[LoadParams, Plan] = {}
        self._free: dict[str, int] = {}
        self.info: ModelInfo | None = None

    def open(self, info: ModelInfo | None) -> None:
        """Use this model from now on.

        Raises:
            EngineError: no plan can be made for it.
        """
        if self._planner is not None:
            self._planner.close()
        self.info, self._planner = info, None
        self._plans.clear()
        if info is not None:
            self._planner = self._factory(info.path)

    def set_free(self, free: Mapping[str, int]) -> None:
        """Free bytes by device: they decide how weights are held."""
        rounded = {device: size // FREE_STEP * FREE_STEP for device, size in free.items()}
        if rounded != self._free:
            self._free = rounded
            self._plans.clear()

    def plan(self, settings: SplitSettings) -> Plan | None:
        """The plan for these settings; None without a model.

        Raises:
            EngineError: the split cannot be made.
        """
        if self._planner is None or self.info is None:
            return None
        params = settings.load_params(self.info.path)
        if params not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[params] = self._planner.plan(params, self._free)
        return self._plans[params]

    def boundary(self, settings: SplitSettings, handle: int) -> float:
        """Where a boundary really lands, 0 to 1; where it was asked to be without a model."""
        plan = self.plan(settings)
        if plan is None:
            return settings.boundary(handle)
        return sum(device.effective for device in plan.devices[: handle + 1])
