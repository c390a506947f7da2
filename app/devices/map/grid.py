"""A model's map as rows, columns and cells of tensors; no Qt.

Rows are blocks and columns are kinds of tensors. Small tensors that every rank holds (norms,
routers) share the last column. The first and last rows are the ends of the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from app.core.translation import tr, tr_later
from app.core.units import size_text

if TYPE_CHECKING:
    from engine import PlacementMap, TensorPlace

Part = tuple[int | None, str]
"""Block index (None at the ends of the model) and part name; see `TensorPlace`."""

Overrides = tuple[tuple[str, str], ...]

IN_BLOCK: Final[Mapping[str, str]] = {
    "attention": r"attn_",
    "recurrent": r"(ssm|shortconv)",
    "ffn": r"ffn_(gate|up|down)\.",
    "experts": r"ffn_.*_exps\.",
    "shared": r"ffn_.*_shexp\.",
}
"""Pattern for a part's tensor names, after the prefix "blk.N."."""

AT_ENDS: Final[Mapping[str, str]] = {"embedding": r"^token_embd\.", "output": r"^output\."}
"""Pattern for the tensor names in a part at the ends of the model."""

BLOCKS: Final = re.compile(r"\^blk\\\.(\d+|\(\d+(?:\|\d+)*\))\\\.(.*)")


def pins_of(overrides: Sequence[tuple[str, str]]) -> dict[Part, str]:
    """Return the target of each pinned part."""
    found: dict[Part, str] = {}
    for pattern, target in overrides:
        for part in parts_of(pattern):
            found[part] = target
    return found


def parts_of(pattern: str) -> tuple[Part, ...]:
    """Return the parts selected by a pattern that this module wrote; none for other patterns."""
    for end, written in AT_ENDS.items():
        if pattern == written:
            return ((None, end),)
    match = BLOCKS.fullmatch(pattern)
    if match is None:
        return ()
    name = next((name for name, written in IN_BLOCK.items() if written == match[2]), None)
    if name is None:
        return ()
    return tuple((int(block), name) for block in match[1].strip("()").split("|"))


def with_pins(
    overrides: Sequence[tuple[str, str]], parts: Iterable[Part], target: str | None
) -> Overrides:
    """Return the overrides with `parts` pinned to `target`, or unpinned if it is None."""
    pins = pins_of(overrides)
    for part in parts:
        pins.pop(part, None)
        if target is not None:
            pins[part] = target
    others = tuple(entry for entry in overrides if not parts_of(entry[0]))
    return others + _written(pins)


def is_pinned(name: str, part: Part, overrides: Sequence[tuple[str, str]]) -> bool:
    """Return whether an override determines a movable tensor's device."""
    return any(
        part in parts_of(pattern) or (not parts_of(pattern) and re.search(pattern, name))
        for pattern, _ in overrides
    )


def _written(pins: Mapping[Part, str]) -> Overrides:
    """Return the pins as overrides, one per part name and target."""
    blocks: dict[tuple[str, str], list[int]] = defaultdict(list)
    ends: list[tuple[str, str]] = []
    for (block, part), target in pins.items():
        if block is None:
            ends.append((AT_ENDS[part], target))
        else:
            blocks[part, target].append(block)
    found = [(_pattern(part, numbers), target) for (part, target), numbers in blocks.items()]
    return (*sorted(ends), *sorted(found))


def _pattern(part: str, blocks: Iterable[int]) -> str:
    numbers = [str(block) for block in sorted(blocks)]
    shown = numbers[0] if len(numbers) == 1 else f"({'|'.join(numbers)})"
    return rf"^blk\.{shown}\.{IN_BLOCK[part]}"


PARTS: Final = ("attention", "recurrent", "ffn", "experts", "shared")
PART_TITLES: Final = {
    "attention": tr_later("attention"),
    "recurrent": tr_later("recurrent layer"),
    "ffn": "FFN",
    "experts": tr_later("experts"),
    "shared": tr_later("shared expert"),
    "embedding": tr_later("embedding"),
    "output": tr_later("output head"),
}
STEMS: Final = ("q", "k", "v", "qkv", "gate", "up", "gate_up", "down", "output")
"""Suffixes of tensor names, in the order of their columns within a part."""

REST: Final = tr_later("norms, rest")  # column title for tensors that every rank holds
INPUT_ROW, OUTPUT_ROW = "emb", "head"


@dataclass(frozen=True, slots=True)
class Cell:
    """The tensors of one kind in one block, with their bytes per rank."""

    row: int
    column: int
    span: int  # in columns
    tensors: tuple[TensorPlace, ...]
    ranks: tuple[int, ...]
    is_shared: bool  # each of the block's ranks holds a full copy
    is_pinned: bool  # an override determines the device

    @property
    def parts(self) -> frozenset[Part]:
        """The parts that the tensors belong to; a part is always pinned as a whole."""
        return frozenset((t.block, t.part) for t in self.tensors if t.part)


@dataclass(frozen=True, slots=True)
class Grid:
    """The whole map: row and column titles, and cells by row and first column."""

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)


def grid_of(found: PlacementMap, overrides: Sequence[tuple[str, str]]) -> Grid:
    """Arrange a model's tensors in rows and columns."""
    inside = [tensor for tensor in found.tensors if tensor.block is not None]
    columns = _columns(inside)
    at = {column: index for index, column in enumerate(columns)}
    shared: dict[tuple[int, int], list[TensorPlace]] = {}
    for tensor in inside:
        assert tensor.block is not None
        shared.setdefault((tensor.block + 1, at[_column(tensor)]), []).append(tensor)
    cells = {place: _cell(*place, 1, group, overrides) for place, group in shared.items()}
    ends = [tensor for tensor in found.tensors if tensor.block is None]
    last = found.n_layer + 1
    for row, is_output in ((0, False), (last, True)):
        mine = [tensor for tensor in ends if tensor.name.startswith("output") is is_output]
        for cell in _end_cells(row, mine, max(1, len(columns)), overrides):
            cells[cell.row, cell.column] = cell
    rows = (INPUT_ROW, *map(str, range(found.n_layer)), OUTPUT_ROW)
    return Grid(rows, tuple(map(_title, columns)) or ("",), cells)


def _column(tensor: TensorPlace) -> str:
    return tensor.stem.partition(".")[0] if tensor.part else REST


def _columns(tensors: Iterable[TensorPlace]) -> list[str]:
    parts: dict[str, str] = {}
    for tensor in tensors:
        parts.setdefault(_column(tensor), tensor.part)

    def place(column: str) -> tuple[int, int]:
        if column == REST:
            return len(PARTS), 0
        name = column.removesuffix("_exps").removesuffix("_shexp").partition("_")[2]
        return PARTS.index(parts[column]), STEMS.index(name) if name in STEMS else len(STEMS)

    return sorted(parts, key=place)


def _title(column: str) -> str:
    return tr(column) if column == REST else column.replace("_", " ")


def _end_cells(
    row: int, tensors: Sequence[TensorPlace], n_columns: int, overrides: Sequence[tuple[str, str]]
) -> list[Cell]:
    """Return the cells of a row at an end of the model; the largest tensor fills the row."""
    if not tensors:
        return []
    ordered = sorted(tensors, key=lambda tensor: -tensor.n_bytes)
    n_cells = min(len(ordered), n_columns)
    groups = [[tensor] for tensor in ordered[: n_cells - 1]] + [ordered[n_cells - 1 :]]
    first = n_columns - n_cells + 1
    spans = [first] + [1] * (n_cells - 1)
    columns = [0, *range(first, n_columns)]
    return [
        _cell(row, column, span, group, overrides)
        for column, span, group in zip(columns, spans, groups, strict=True)
    ]


def _cell(
    row: int, column: int, span: int, tensors: Sequence[TensorPlace],
    overrides: Sequence[tuple[str, str]],
) -> Cell:  # fmt: skip
    ranks = tuple(map(sum, zip(*(tensor.ranks for tensor in tensors), strict=True)))
    movable = [tensor for tensor in tensors if tensor.part]
    pinned = any(is_pinned(t.name, (t.block, t.part), overrides) for t in movable)
    return Cell(row, column, span, tuple(tensors), ranks, not movable, pinned)


# texts


def tensor_text(tensor: TensorPlace) -> str:
    """Return a tensor as "blk.3.attn_q.weight · Q4_K · 4096 × 4096 · 9.0 MiB"."""
    shape = " × ".join(map(str, tensor.shape))
    return f"{tensor.name} · {tensor.type} · {shape} · {size_text(tensor.n_bytes)}"


def cell_lines(cell: Cell, most: int = 3) -> list[str]:
    """Return at most `most` lines, one per tensor in a cell; the smallest share the last line."""
    if len(cell.tensors) <= most:
        return [tensor_text(tensor) for tensor in cell.tensors]
    largest = sorted(cell.tensors, key=lambda tensor: -tensor.n_bytes)[: most - 1]
    rest = [tensor for tensor in cell.tensors if tensor not in largest]
    size = size_text(sum(tensor.n_bytes for tensor in rest))
    text = tr("and {n} smaller ones · {size}").format(n=len(rest), size=size)
    return [*map(tensor_text, largest), text]


def ranks_text(cell: Cell, labels: Sequence[str]) -> str:
    """Return the bytes per rank as "GPU 0 4.5 MiB (50 %) · GPU 1 4.5 MiB (50 %)"."""
    total = max(1, sum(tensor.n_bytes for tensor in cell.tensors))
    shown = [
        f"{label} {size_text(n_bytes)} ({n_bytes / total:.0%})".replace("%)", " %)")
        for label, n_bytes in zip(labels, cell.ranks, strict=True)
        if n_bytes
    ]
    return " · ".join([*shown, tr("pinned")] if cell.is_pinned else shown)


def spoken_text(cell: Cell, title: str, labels: Sequence[str]) -> str:
    """Return a cell as a sentence for screen readers."""
    block = cell.tensors[0].block
    where = tr("Input and output") if block is None else tr("Block {block}").format(block=block)
    names = title if block is not None else ", ".join(tensor.name for tensor in cell.tensors)
    return f"{where}, {names}: {ranks_text(cell, labels)}"


def parts_text(parts: Iterable[Part]) -> str:
    """Return selected parts as "experts of 3 blocks, output head"."""
    counts: dict[str, int] = {}
    blocks: dict[str, int | None] = {}
    for block, part in parts:
        counts[part] = counts.get(part, 0) + 1
        blocks[part] = block
    texts = []
    for part, n in counts.items():
        title, block = tr(PART_TITLES[part]), blocks[part]
        if block is None:
            texts.append(title)
        else:
            text = tr("{part} of block {block}") if n == 1 else tr("{part} of {n} blocks")
            texts.append(text.format(part=title, block=block, n=n))
    return ", ".join(texts)
