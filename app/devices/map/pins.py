"""Pins: parts of a model that a person put on one device, as overrides of the engine.

An override is (regular expression on tensor names, device id or "#rank number"). Overrides written
here are recognised as pins again. Others (typed by a person, taken from a plan) are kept unchanged,
before the pins, which therefore win.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

Part = tuple[int | None, str]
"""Block number (None at the ends of the model) and name of a part, as in `TensorPlace`."""

Overrides = tuple[tuple[str, str], ...]

IN_BLOCK: Final[Mapping[str, str]] = {
    "attention": r"attn_",
    "recurrent": r"(ssm|shortconv)",
    "ffn": r"ffn_(gate|up|down)\.",
    "experts": r"ffn_.*_exps\.",
    "shared": r"ffn_.*_shexp\.",
}
"""Pattern for the tensor names of a part, after "blk.N."."""

AT_ENDS: Final[Mapping[str, str]] = {"embedding": r"^token_embd\.", "output": r"^output\."}
"""Pattern for the tensor names of a part at the ends of the model."""

BLOCKS: Final = re.compile(r"\^blk\\\.(\d+|\(\d+(?:\|\d+)*\))\\\.(.*)")


def pins_of(overrides: Sequence[tuple[str, str]]) -> dict[Part, str]:
    """Return the target of every pinned part."""
    found: dict[Part, str] = {}
    for pattern, target in overrides:
        for part in parts_of(pattern):
            found[part] = target
    return found


def parts_of(pattern: str) -> tuple[Part, ...]:
    """Return the parts that a pattern of this module selects; none for any other pattern."""
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
    """Return the overrides with `parts` pinned to `target`, or unpinned if that is None."""
    pins = pins_of(overrides)
    for part in parts:
        pins.pop(part, None)
        if target is not None:
            pins[part] = target
    others = tuple(entry for entry in overrides if not parts_of(entry[0]))
    return others + _written(pins)


def is_pinned(name: str, part: Part, overrides: Sequence[tuple[str, str]]) -> bool:
    """Return whether an override decides the device of a tensor that can be moved."""
    return any(
        part in parts_of(pattern) or (not parts_of(pattern) and re.search(pattern, name))
        for pattern, _ in overrides
    )


def _written(pins: Mapping[Part, str]) -> Overrides:
    """Return the pins as overrides, with one for all blocks whose same part has one target."""
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
