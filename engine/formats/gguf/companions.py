"""Files beside a model: how they are found, and blocks that a model takes from one of them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from os.path import commonprefix
from sys import maxsize
from typing import TYPE_CHECKING

from engine.formats.gguf.tensors import split_name

if TYPE_CHECKING:
    from pathlib import Path

    from engine.formats.gguf.metadata import Metadata
    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensors import TensorInfo

Stamp = tuple[int, int]
"""Time of the last change of a file or folder in ns, and its size in bytes."""

MTP_MARK = "mtp-"
"""Beginning of the names of files that hold nothing but a model's MTP blocks."""


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


def with_blocks_of(
    file: GGUFFile, other: GGUFFile, layers: range, more: Mapping[str, TensorInfo],
    without: Container[str] = (),
) -> GGUFFile:  # fmt: skip
    """Return a model's file with blocks of another file as its last ones.

    The result can be read as long as both are open. Its metadata is the model's, but for the number
    of blocks and the entries of the added ones.

    Args:
        layers: numbers of the blocks in both files: behind those of the model's blocks.
        more: further tensors of the other file, by their names in the result.
        without: names of tensors of the model that belong to its own last blocks.
    """
    arch, n_layer = file.meta.architecture, layers.start
    behind = range(n_layer, maxsize)
    kept = {n: t for n, t in file.tensors.items() if n not in without and not _is_in(n, behind)}
    added = {n: t for n, t in other.tensors.items() if _is_in(n, layers)} | dict(more)
    changed: dict[str, int | Sequence[float]] = {
        f"{arch}.block_count": layers.stop,
        f"{arch}.nextn_predict_layers": len(layers),
    }
    for key in list(file.meta.keys()):
        if key.startswith(f"{arch}.") and _is_by_layer(file.meta, key, n_layer):
            entry = other.meta.get(key)
            entries = entry if isinstance(entry, list) else [entry] * layers.stop
            entries = entries[n_layer : layers.stop]
            if len(entries) == len(layers) and all(isinstance(x, int | float) for x in entries):
                changed[key] = [*file.meta.get(key), *entries]
    return file.joined(kept, other, added, file.meta.changed(changed))


def _is_in(name: str, layers: range) -> bool:
    """Return whether a tensor belongs to one of some blocks."""
    block = split_name(name)
    return block is not None and block[0] in layers


def _is_by_layer(meta: Metadata, key: str, n_layer: int) -> bool:
    """Return whether a key has one number for each of the model's blocks."""
    return meta.array_length(key) == n_layer and not isinstance(meta.get(key, limit=1)[0], str)
