"""Parts of a model that a person put on one device, as the engine's overrides say it.

An override is (regular expression on tensor names, device or "#rank"). Those that are written here
are recognised again; others (typed by a person, taken from a plan) are kept as they are, before
the pins, which therefore win.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

Part = tuple[int | None, str]
"""A block (None at the ends of the model) and a part of it, as `TensorPlace` calls them."""

Overrides = tuple[tuple[str, str], ...]

IN_BLOCK: Final[Mapping[str, str]] = {
    "attention": r"attn_",
    "recurrent": r"(ssm|shortconv)",
    "ffn": r"ffn_(gate|up|down)\.",
    "experts": r"ffn_.*_exps\.",
    "shared": r"ffn_.*_shexp\.",
}
"""What the names of a part's tensors begin with, behind "blk.N."."""

AT_ENDS: Final[Mapping[str, str]] = {"embedding": r"^token_embd\.", "output": r"^output\."}
BLOCKS: Final = re.compile(r"\^blk\\\.(\d+|\(\d+(?:\|\d+)*\))\\\.(.*)")


def pins_of(overrides: Sequence[tuple[str, str]]) -> dict[Part, str]:
    """The target of every part that is pinned."""
    found: dict[Part, str] = {}
    for pattern, target in overrides:
        for part in parts_of(pattern):
            found[part] = target
    return found


def parts_of(pattern: str) -> tuple[Part, ...]:
    """The parts that a pattern of this module stands for; none for any other pattern."""
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
    """The same with some parts on `target`, or, if that is None, where the split puts them."""
    pins = pins_of(overrides)
    for part in parts:
        pins.pop(part, None)
        if target is not None:
            pins[part] = target
    others = tuple(entry for entry in overrides if not parts_of(entry[0]))
    return others + _written(pins)


def is_pinned(name: str, part: Part, overrides: Sequence[tuple[str, str]]) -> bool:
    """Whether a tensor that can be moved is where an override wants it."""
    return any(
        part in parts_of(pattern) or (not parts_of(pattern) and re.search(pattern, name))
        for pattern, _ in overrides
    )


def _written(pins: Mapping[Part, str]) -> Overrides:
    """One override for all blocks of which the same part goes to the same place."""
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
