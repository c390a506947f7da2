"""The planner of the chosen model, and what it says about settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Protocol

from app.split.settings import SplitSettings
from engine import Evaluation, LoadParams, ModelInfo, Plan, Positions

MAX_KNOWN: Final = 64
"""Handles and modes whose positions are remembered."""
FREE_STEP: Final = 256 << 20
"""Free memory is told in such steps (bytes), so that its flicker does not ask for new plans."""


class SplitPlanner(Protocol):
    """What is used of `engine.Planner`."""

    info: ModelInfo

    def evaluate(
        self, params: LoadParams, free_bytes: Mapping[str, int] | None = None
    ) -> Evaluation:
        """Raises EngineError where the split cannot be made."""
        ...

    def positions(
        self, params: LoadParams, handle: int, free_bytes: Mapping[str, int] | None = None
    ) -> Positions:
        """Raises EngineError where the present split cannot be made."""
        ...

    def close(self) -> None: ...


PlannerFactory = Callable[[str], SplitPlanner]


class PlanSource:
    """Evaluates splits of one model at a time and remembers the last.

    Args:
        factory: opens a model file, as `engine.Planner` does.
    """

    def __init__(self, factory: PlannerFactory) -> None:
        self._factory = factory
        self._planner: SplitPlanner | None = None
        self._known: tuple[LoadParams, Evaluation] | None = None
        self._positions: dict[tuple[LoadParams, int], Positions] = {}
        self._free: dict[str, int] = {}
        self.info: ModelInfo | None = None

    @property
    def free(self) -> Mapping[str, int]:
        """Free bytes by device, as plans are made with."""
        return self._free

    def open(self, info: ModelInfo | None) -> None:
        """Use this model from now on.

        Raises:
            EngineError: no plan can be made for it.
        """
        if self._planner is not None:
            self._planner.close()
        self.info, self._planner = info, None
        self._forget()
        if info is not None:
            self._planner = self._factory(info.path)

    def set_free(self, free: Mapping[str, int]) -> None:
        """Free bytes by device: they decide how weights are held."""
        rounded = {device: size // FREE_STEP * FREE_STEP for device, size in free.items()}
        if rounded != self._free:
            self._free = rounded
            self._forget()

    def evaluate(self, settings: SplitSettings) -> Evaluation | None:
        """What these settings would take; None without a model.

        Raises:
            EngineError: the split cannot be made.
        """
        if self._planner is None or self.info is None:
            return None
        params = settings.load_params(self.info.path)
        if self._known is None or self._known[0] != params:
            self._known = params, self._planner.evaluate(params, self._free)
        return self._known[1]

    def plan(self, settings: SplitSettings) -> Plan | None:
        """Where the bytes go; see `evaluate`."""
        evaluation = self.evaluate(settings)
        return evaluation.plan if evaluation else None

    def positions(self, settings: SplitSettings, handle: int) -> Positions | None:
        """Where the boundary after active rank number `handle` can go; None without a model.

        While it moves they are the same, and what was looked at once is known.

        Raises:
            EngineError: the present split cannot be made.
        """
        if self._planner is None or self.info is None:
            return None
        params = settings.load_params(self.info.path)
        at_end = settings.with_boundary(handle, 1.0).shares  # the same wherever the handle is
        key = replace(params, split=tuple(round(share, 9) for share in at_end)), handle
        if key not in self._positions:
            if len(self._positions) >= MAX_KNOWN:
                self._positions.clear()
            self._positions[key] = self._planner.positions(params, handle, self._free)
        return self._positions[key]

    def boundary(self, settings: SplitSettings, handle: int) -> float:
        """Where a boundary really lands, 0 to 1; where it was asked to be without a model."""
        plan = self.plan(settings)
        if plan is None:
            return settings.boundary(handle)
        return sum(device.effective for device in plan.devices[: handle + 1])

    def _forget(self) -> None:
        self._known = None
        self._positions.clear()
