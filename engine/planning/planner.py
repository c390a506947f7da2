"""The planner of one file: plans, predicted work, handle positions and what fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from engine.formats.gguf.reader import GGUFFile
from engine.model.architectures.info import ModelInfo, describe
from engine.planning.draft.mtp_file import mtp_path, with_mtp_file
from engine.planning.evaluation.evaluator import Evaluation, Evaluator
from engine.planning.evaluation.fit import Fit, Room
from engine.planning.evaluation.handle_positions import Positions, positions_of
from engine.planning.tensor_map import PlacementMap, placement_map

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.planning.plan import Plan


MAX_KNOWN = 64
"""Most evaluations kept: views of a split ask for the same one again."""


class Planner:
    """Planner of one file's splits, fast enough to follow a drag.

    Attributes:
        info: facts about the model.

    Raises:
        ModelFileError: the file is missing or is no GGUF.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile.open(path)
        self._open = ExitStack()
        self._open.callback(self._file.close)
        self._evaluators: dict[str, Evaluator] = {}  # by the path of a file with an MTP block
        self._known: dict[object, Evaluation] = {}
        self.info: ModelInfo = describe(self._file)

    def plan(self, params: LoadParams, free_bytes: Mapping[str, int] | None = None) -> Plan:
        """Predict bytes per rank; see `Evaluator.evaluate`."""
        return self.evaluate(params, free_bytes).plan

    def evaluate(
        self, params: LoadParams, free_bytes: Mapping[str, int] | None = None
    ) -> Evaluation:
        """Predict bytes and work per rank; see `Evaluator.evaluate`."""
        key = params, None if free_bytes is None else frozenset(free_bytes.items())
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            found = self._known[key] = self._evaluator(params).evaluate(params, free_bytes)
        return found

    def _evaluator(self, params: LoadParams) -> Evaluator:
        path = mtp_path(self._file, params)
        if path not in self._evaluators:
            whole = self._open.enter_context(with_mtp_file(self._file, path))
            self._evaluators[path] = Evaluator(whole)
        return self._evaluators[path]

    def positions(
        self, params: LoadParams, handle: int, free_bytes: Mapping[str, int] | None = None
    ) -> Positions:
        """Return the positions of the handle between ranks `handle` and `handle` + 1.

        Raises:
            ModelFileError: see `Evaluator.evaluate`.
            SplitError: the present split is invalid.
        """
        dims = self._evaluator(params).dims(params)
        return positions_of(params, handle, dims, lambda asked: self.plan(asked, free_bytes))

    def placement(self, params: LoadParams) -> PlacementMap:
        """Return the ranks of every tensor; see `placement_map`."""
        return placement_map(self._evaluator(params).file, params)

    def fit(self, rooms: Sequence[Room]) -> Fit:
        """Return the finder of splits and contexts that fit on these devices."""
        return Fit(self.plan, rooms, self.info.n_ctx_train, self.info.n_layer)

    def close(self) -> None:
        """Close the files."""
        self._open.close()
