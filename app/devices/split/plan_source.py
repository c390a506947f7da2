"""Plans of the selected model, with the last ones remembered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import engine
from app.devices.split.settings import SplitSettings
from engine import LoadParams, ModelInfo

if TYPE_CHECKING:
    from engine import Evaluation, Plan, Planner, Positions

MAX_KNOWN: Final = 64
"""Number of (parameters, handle) pairs whose positions are remembered."""
FREE_STEP: Final = 256 << 20
"""Step in bytes to which free memory is rounded, so that its flicker needs no new plans."""


PlannerFactory = Callable[[str], "Planner"]
"""Opens the model file at a path for planning."""


def open_planner(path: str) -> Planner:
    """Open a model file with the engine's planner."""
    return engine.Planner(path)


class PlanSource:
    """Plans splits of one model at a time.

    Args:
        factory: opens a model file, as `engine.Planner` does.

    Attributes:
        info: the selected model.
    """

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
        """Free bytes by device id that plans are made with, in steps of `FREE_STEP`."""
        return self._free

    def open(self, info: ModelInfo | None) -> None:
        """Use another model, or none.

        Raises:
            EngineError: no plan can be made for the model.
        """
        if self._planner is not None:
            self._planner.close()
        self.info, self._planner = info, None
        self._forget()
        if info is not None:
            self._planner = self._take(info.path) or self._factory(info.path)

    def offer(self, path: str, planner: Planner | None) -> None:
        """Give a planner of a file to the next `open`; for other threads, which read headers."""
        with self._lock:
            old, self._offered = self._offered, (path, planner) if planner else None
        if old is not None:
            old[1].close()

    def _take(self, path: str) -> Planner | None:
        """Return what was offered for a file, if anything."""
        with self._lock:
            if self._offered is None or self._offered[0] != path:
                return None
            (_, planner), self._offered = self._offered, None
            return planner

    def set_free(self, free: Mapping[str, int]) -> None:
        """Set the free bytes by device id; they decide how weights are stored."""
        rounded = {device: size // FREE_STEP * FREE_STEP for device, size in free.items()}
        if rounded != self._free:
            self._free = rounded
            self._forget()

    def evaluate(self, settings: SplitSettings) -> Evaluation | None:
        """Return what the settings take; None without a model.

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
        """Return the bytes on each device; see `evaluate`."""
        evaluation = self.evaluate(settings)
        return evaluation.plan if evaluation else None

    def positions(self, settings: SplitSettings, handle: int) -> Positions | None:
        """Return where the boundary after active rank number `handle` can be; None without a model.

        The positions stay the same while the boundary moves, so they are remembered.

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
        """Return where a boundary is in the plan, 0 to 1; without a model, in the settings."""
        plan = self.plan(settings)
        if plan is None:
            return settings.boundary(handle)
        return sum(device.effective for device in plan.devices[: handle + 1])

    def _forget(self) -> None:
        self._known = None
        self._positions.clear()
