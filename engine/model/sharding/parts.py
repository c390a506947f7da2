"""Lists the parts of a model and how finely each can be cut, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.model.sharding.split import COLUMN_UNIT, BlockDims


@dataclass(frozen=True, slots=True)
class SplitPart:
    """One part of a model, and how finely it can be cut.

    Attributes:
        name: name for people, such as "attention".
        n_layer: number of blocks that have the part.
        n_pieces: number of pieces that it can be cut into, in each block.
        unit: smallest piece in words, such as "32 columns".
    """

    name: str
    n_layer: int
    n_pieces: int
    unit: str


def split_parts(blocks: Sequence[BlockDims], n_vocab: int) -> tuple[SplitPart, ...]:
    """Return the parts of a model with these blocks, in the order of a forward pass.

    Where blocks differ, the coarsest cut counts.
    """
    kinds: tuple[tuple[str, str, Callable[[BlockDims], int]], ...] = (
        ("attention", "a head", lambda d: d.n_head),
        ("recurrent layer", "a head", lambda d: 0 if d.state_unit > 1 else d.n_state_head),
        (
            "recurrent layer", f"{COLUMN_UNIT} channels",
            lambda d: -(-d.n_state_head // d.state_unit) if d.state_unit > 1 else 0,
        ),
        ("FFN", f"{COLUMN_UNIT} columns", lambda d: _columns(d.n_ff)),
        ("experts", f"{COLUMN_UNIT} columns of every expert", lambda d: _columns(d.n_ff_exp)),
        ("shared expert", f"{COLUMN_UNIT} columns", lambda d: _columns(d.n_ff_shexp)),
    )  # fmt: skip
    parts = []
    for name, unit, pieces_of in kinds:
        pieces = [n for block in blocks if (n := pieces_of(block))]
        if pieces:
            parts.append(SplitPart(name, len(pieces), min(pieces), unit))
    return (*parts, SplitPart("vocabulary", 0, n_vocab, "a row"))


def _columns(n: int) -> int:
    return -(-n // COLUMN_UNIT)
