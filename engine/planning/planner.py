"""What a front end asks: plans of one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.gguf import GGUFFile
from engine.models.info import ModelInfo, describe
from engine.planning.evaluation.evaluator import Evaluation, Evaluator
from engine.planning.evaluation.fit import Fit, Room
from engine.planning.evaluation.handle_positions import Positions, positions_of
from engine.planning.tensor_map import PlacementMap, placement_map

if TYPE_CHECKING:
    from engine.config import LoadParams
    from engine.planning.plan import Plan


MAX_KNOWN = 64
"""Evaluations that are remembered: what shows a split asks again for the same one."""


class Planner:
    """Evaluates plans for one file, fast enough to follow a drag.

    Raises:
        ModelFileError: the file is missing or is no GGUF.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile.open(path)
        self._evaluator = Evaluator(self._file)
        self._known: dict[object, Evaluation] = {}
        self.info: ModelInfo = describe(self._file)

    def plan(self, params: LoadParams, free_bytes: Mapping[str, int] | None = None) -> Plan:
        """Predict bytes per rank; see `Evaluator.evaluate`."""
        return self.evaluate(params, free_bytes).plan

    def evaluate(
        self, params: LoadParams, free_bytes: Mapping[str, int] | None = None
    ) -> Evaluation:
        """Predict bytes per rank and what each has to do; see `Evaluator.evaluate`."""
        key = params, None if free_bytes is None else frozenset(free_bytes.items())
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            found = self._known[key] = self._evaluator.evaluate(params, free_bytes)
        return found

    def positions(
        self, params: LoadParams, handle: int, free_bytes: Mapping[str, int] | None = None
    ) -> Positions:
        """Where the handle between ranks `handle` and `handle` + 1 can go.

        Raises:
            ModelFileError: as `plan`.
            SplitError: the present split is none.
        """
        dims = self._evaluator.dims(params)
        return positions_of(params, handle, dims, lambda asked: self.plan(asked, free_bytes))

    def placement(self, params: LoadParams) -> PlacementMap:
        """Where every tensor goes; see `placement_map`."""
        return placement_map(self._file, params)

    def fit(self, rooms: Sequence[Room]) -> Fit:
        """What fits on these devices, and what to do where something does not."""
        return Fit(self.plan, rooms, self.info.n_ctx_train, self.info.n_layer)

    def close(self) -> None:
        self._file.close()
