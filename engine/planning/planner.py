"""The planner for one file: plans, predicted work, handle positions and remedies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.formats.gguf.reader import GGUFFile
from engine.formats.gguf.tensors import split_name
from engine.model.architectures.declare import declare
from engine.model.architectures.description import ModelInfo
from engine.model.architectures.info import describe
from engine.model.sharding.shares import part_of
from engine.planning.draft import mtp_path, with_mtp_file
from engine.planning.evaluation.evaluator import Evaluation, Evaluator
from engine.planning.evaluation.fit import Fit, Room
from engine.planning.evaluation.handle_positions import Positions, positions_of
from engine.planning.footprint import packed_bytes, slot_pieces

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.model.layers.module import Slot
    from engine.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor and the ranks that hold it.

    Attributes:
        block: number of its block; None at the model's ends.
        stem: name within the block, such as "attn_q.weight"; at the ends, the whole name.
        part: part of the model that overrides can move: "attention", "recurrent", "ffn", "experts",
            "shared", "embedding" or "output"; "" for tensors that all ranks in a block hold.
        ranks: bytes that each rank reads from it, in rank order.
    """

    name: str
    block: int | None
    stem: str
    part: str
    type: str
    shape: tuple[int, ...]
    n_bytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacementMap:
    """All tensors in a split model, in forward pass order."""

    devices: tuple[str, ...]
    n_layer: int
    tensors: tuple[TensorPlace, ...]


def placement_map(file: GGUFFile, params: LoadParams) -> PlacementMap:
    """Return the ranks of every tensor in `file` under the split in `params`.

    Raises:
        ModelFileError: the architecture is unknown, or a tensor is missing or misshapen.
        SplitError: the split is impossible.
    """
    declaration = declare(file, params)
    n_ranks = len(declaration.devices)
    known: dict[object, tuple[int, ...]] = {}
    recurrent = declaration.hp.recurrent
    places = tuple(_place(slot, n_ranks, recurrent, known) for slot in declaration.slots)
    return PlacementMap(declaration.devices, declaration.hp.n_layer, places)


def _place(
    slot: Slot, n_ranks: int, recurrent: Sequence[bool], known: dict[object, tuple[int, ...]]
) -> TensorPlace:
    tensor = slot.tensor
    key = slot.placement, tensor.shape, tensor.type.number  # keys repeat from block to block
    ranks = known.get(key)
    if ranks is None:
        ranks = known[key] = tuple(
            sum(packed_bytes(slot, piece) for piece in slot_pieces(slot, rank))
            for rank in range(n_ranks)
        )
    block, stem = split_name(tensor.name) or (None, tensor.name)
    _, part = part_of(tensor.name, recurrent) or (block, "")
    return TensorPlace(
        tensor.name, block, stem, part, tensor.type.name, tensor.shape, tensor.n_bytes, ranks
    )


MAX_KNOWN = 64
"""Maximum number of cached evaluations; views of a split request the same one repeatedly."""


class Planner:
    """Planner for one file's splits, fast enough to follow a drag.

    Raises:
        ModelFileError: the file is missing or not a GGUF.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile.open(path)
        self._open = ExitStack()
        self._open.callback(self._file.close)
        self._evaluators: dict[str, Evaluator] = {}  # by the path of the file with MTP blocks
        self._known: dict[object, Evaluation] = {}
        self.info: ModelInfo = describe(self._file)

    def plan(self, params: LoadParams, free_bytes: Mapping[str, int] | None = None) -> Plan:
        """Predict the bytes per rank; see `Evaluator.evaluate`."""
        return self.evaluate(params, free_bytes).plan

    def evaluate(
        self, params: LoadParams, free_bytes: Mapping[str, int] | None = None
    ) -> Evaluation:
        """Predict the bytes and work per rank; see `Evaluator.evaluate`."""
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
            SplitError: the current split is invalid.
        """
        dims = self._evaluator(params).dims(params)
        return positions_of(params, handle, dims, lambda moved: self.plan(moved, free_bytes))

    def placement(self, params: LoadParams) -> PlacementMap:
        """Return the ranks of every tensor; see `placement_map`."""
        return placement_map(self._evaluator(params).file, params)

    def fit(self, rooms: Sequence[Room]) -> Fit:
        """Return a finder for splits and contexts that fit on these devices."""
        return Fit(self.plan, rooms, self.info.n_ctx_train, self.info.n_layer)

    def close(self) -> None:
        """Close the files."""
        self._open.close()
