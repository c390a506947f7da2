"""The map of a split model: which rank holds how much of every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.formats.gguf.tensors import split_name
from engine.model.architectures.declare import declare
from engine.model.sharding.shares import part_of
from engine.planning.footprint import packed_bytes, slot_pieces

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.load_params import LoadParams
    from engine.model.layers.module import Slot


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor and the ranks that hold it.

    Attributes:
        name: GGUF name.
        block: number of its block; None at the ends of the model.
        stem: its name within the block, such as "attn_q.weight"; the whole name at the ends.
        part: part of the block that overrides can move: "attention", "recurrent", "ffn",
            "experts", "shared", "embedding" or "output"; "" for tensors that all ranks of a block
            hold.
        type: GGML type.
        shape: sizes, slowest dimension first.
        n_bytes: bytes in the file.
        ranks: bytes that each rank reads of it, in rank order.
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
    """All tensors of a split model, in the order of a forward pass.

    Attributes:
        devices: device of each rank; overrides may have added ranks without a share.
        n_layer: number of blocks.
        tensors: all tensors, each with its ranks.
    """

    devices: tuple[str, ...]
    n_layer: int
    tensors: tuple[TensorPlace, ...]


def placement_map(file: GGUFFile, params: LoadParams) -> PlacementMap:
    """Return the ranks of every tensor in `file` under the split in `params`.

    Raises:
        ModelFileError: the architecture is unknown, or a tensor is missing or misshapen.
        SplitError: the split cannot be made.
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
    key = slot.placement, tensor.shape, tensor.type.number  # blocks repeat them
    ranks = known.get(key)
    if ranks is None:
        ranks = known[key] = tuple(_bytes_on(slot, rank) for rank in range(n_ranks))
    block, stem = split_name(tensor.name) or (None, tensor.name)
    _, part = part_of(tensor.name, recurrent) or (block, "")
    return TensorPlace(
        tensor.name, block, stem, part, tensor.type.name, tensor.shape, tensor.n_bytes, ranks
    )


def _bytes_on(slot: Slot, rank: int) -> int:
    return sum(packed_bytes(slot, piece) for piece in slot_pieces(slot, rank))
