"""Files beside a model: how they are found, and blocks that a model takes from one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING

from engine.gguf.tensors import split_name

if TYPE_CHECKING:
    from pathlib import Path

    from engine.gguf.metadata import Metadata
    from engine.gguf.reader import GGUFFile
    from engine.gguf.tensors import TensorInfo

Stamp = tuple[int, int]
"""Time of the last change of a file or folder in ns, and its size in bytes."""


def stamp_of(path: Path) -> Stamp:
    """Return what changes with a file or folder; zeros where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def files_beside(model: Path, mark: str, *, is_first: bool = False) -> list[Path]:
    """Return GGUF files in a model's folder that have a mark in their names.

    The one whose name is most like the model's, apart from the mark, comes first.

    Args:
        mark: part of a name in lower case.
        is_first: whether names have to begin with it.
    """

    def is_one(name: str) -> bool:
        found = name.startswith(mark) if is_first else mark in name
        return found and name.endswith(".gguf")

    def likeness(path: Path) -> tuple[int, str]:
        plain = path.name.lower().replace(mark, "").strip("-_.")
        alike = commonprefix((plain, model.name.lower()))  # noqa: RUF071 of characters
        return -len(alike), path.name

    try:
        found = [path for path in model.parent.iterdir() if is_one(path.name.lower())]
    except OSError:
        return []
    return sorted(found, key=likeness)


def with_block_of(
    file: GGUFFile, other: GGUFFile, layer: int, more: Mapping[str, TensorInfo]
) -> GGUFFile:
    """Return a model's file with the block `layer` of another file as its last one.

    The result can be read as long as both are open. Its metadata is the model's, but for the number
    of blocks and the entries of the added one.

    Args:
        layer: number of the block in both files: that of the model's blocks without it.
        more: further tensors of the other file, by their names in the result.
    """
    arch = file.meta.architecture
    kept = {n: t for n, t in file.tensors.items() if not _is_from(n, layer)}
    added = {n: t for n, t in other.tensors.items() if _is_from(n, layer, layer + 1)} | dict(more)
    changed: dict[str, int | Sequence[float]] = {
        f"{arch}.block_count": layer + 1,
        f"{arch}.nextn_predict_layers": 1,
    }
    for key in list(file.meta.keys()):
        if key.startswith(f"{arch}.") and _is_by_layer(file.meta, key, layer):
            entry = other.meta.get(key)
            entry = entry[layer] if isinstance(entry, list) and len(entry) > layer else entry
            if isinstance(entry, int | float):
                changed[key] = [*file.meta.get(key), entry]
    return file.joined(kept, other, added, file.meta.changed(changed))


def _is_from(name: str, first: int, stop: int | None = None) -> bool:
    """Return whether a tensor belongs to a block from `first` on, and before `stop`."""
    block = split_name(name)
    return block is not None and first <= block[0] and (stop is None or block[0] < stop)


def _is_by_layer(meta: Metadata, key: str, n_layer: int) -> bool:
    """Return whether a key has one number for each of the model's blocks."""
    return meta.array_length(key) == n_layer and not isinstance(meta.get(key, limit=1)[0], str)
