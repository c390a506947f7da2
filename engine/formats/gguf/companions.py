"""Files next to a model: finding them, and adding blocks from one of them to the model."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from os.path import commonprefix
from sys import maxsize
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidGGUF, Sentence
from engine.formats.gguf.reader import GGUFFile
from engine.formats.gguf.tensors import split_name

if TYPE_CHECKING:
    from pathlib import Path

    from engine.formats.gguf.metadata import Metadata
    from engine.formats.gguf.tensors import TensorInfo
    from engine.load_params import ControlVector

Stamp = tuple[int, int]
"""Modification time of a file or folder in ns, and its size in bytes."""

MTP_MARK = "mtp-"
"""File name prefix for files that contain only a model's MTP blocks."""


def stamp_of(path: Path) -> Stamp:
    """Return a value that changes with a file or folder; zeros if it does not exist."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def files_beside(model: Path, mark: str, *, is_first: bool = False) -> list[Path]:
    """Return GGUF files in a model's folder with a mark in their names, most similar names first.

    Args:
        mark: part of a name, in lower case.
        is_first: whether names must start with the mark.
    """

    def is_one(name: str) -> bool:
        has_mark = name.startswith(mark) if is_first else mark in name
        return has_mark and name.endswith(".gguf")

    def likeness(path: Path) -> tuple[int, str]:
        plain = path.name.lower().replace(mark, "").strip("-_.")
        common = commonprefix((plain, model.name.lower()))  # noqa: RUF071 of characters
        return -len(common), path.name

    try:
        found = [path for path in model.parent.iterdir() if is_one(path.name.lower())]
    except OSError:
        return []
    return sorted(found, key=likeness)


def with_blocks_of(
    file: GGUFFile, other: GGUFFile, layers: range, more: Mapping[str, TensorInfo],
    without: Container[str] = (),
) -> GGUFFile:  # fmt: skip
    """Return a model's file with blocks from another file added after its own.

    The result can be read as long as both files are open. Its metadata is the model's, except for
    the number of blocks and the entries for the added ones.

    Args:
        layers: numbers of the added blocks in both files, following the model's own.
        more: further tensors from the other file, by their names in the result.
        without: names of tensors in the model that belong to its own last blocks.
    """
    arch, n_layer = file.meta.architecture, layers.start
    later = range(n_layer, maxsize)
    kept = {n: t for n, t in file.tensors.items() if n not in without and not _is_in(n, later)}
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
    block = split_name(name)
    return block is not None and block[0] in layers


def _is_by_layer(meta: Metadata, key: str, n_layer: int) -> bool:
    return meta.array_length(key) == n_layer and not isinstance(meta.get(key, limit=1)[0], str)


Direction = NDArray[np.float32]
"""Direction that is added to the residual stream; its shape is (n_embd,)."""

DTYPES: dict[str, np.dtype[np.floating]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
"""Types that directions may have, by GGUF name."""

NAME = re.compile(r"direction\.(\d{1,5})")
"""Name of a direction's tensor; the group is its layer number."""


def read_control_vectors(
    vectors: Sequence[ControlVector], layers: tuple[int, int] | None, n_embd: int, n_layer: int
) -> Mapping[int, Direction]:
    """Return the sum of control vectors as one direction per affected layer, by layer number.

    Args:
        layers: first and last layer to steer, inclusive; None for all.

    Raises:
        ModelFileError: a file is missing, or is not a control vector for such a model.
    """
    total: dict[int, Direction] = {}
    for vector in vectors:
        with GGUFFile.open(vector.path) as file:
            for layer, direction in _directions(file, n_embd, n_layer).items():
                scaled = direction * np.float32(vector.scale)
                total[layer] = total[layer] + scaled if layer in total else scaled
    first, last = layers or (1, n_layer - 1)
    return {layer: total[layer] for layer in sorted(total) if first <= layer <= last}


def _directions(file: GGUFFile, n_embd: int, n_layer: int) -> dict[int, Direction]:
    if file.meta.architecture != "controlvector":
        raise InvalidGGUF(
            file.path,
            Sentence("it is not a control vector but a '{name}' file", name=file.meta.architecture),
            "Pick a GGUF with the architecture 'controlvector'.",
        )
    found = {}
    for name, tensor in file.tensors.items():
        match = NAME.fullmatch(name)
        layer = int(match[1]) if match else 0
        if layer == 0:
            continue
        if tensor.shape != (n_embd,) or tensor.type.name not in DTYPES or layer >= n_layer:
            raise InvalidGGUF(
                file.path,
                Sentence(
                    "its {name} ({type}, {shape}) does not fit a model with {n} layers and {width}"
                    " values per token",
                    name=name, type=tensor.type.name, shape=str(tensor.shape), n=n_layer,
                    width=n_embd,
                ),
                "Control vectors work only with the model they were made for.",
            )  # fmt: skip
        values = file.raw(tensor).read().view(DTYPES[tensor.type.name]).astype(np.float32)
        if not np.isfinite(values).all():
            problem = Sentence("its {name} has infinite values or NaN", name=name)
            raise InvalidGGUF(file.path, problem)
        found[layer] = values.reshape(n_embd)
    if not found:
        raise InvalidGGUF(file.path, "it contains no directions")
    return found
