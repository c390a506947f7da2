"""Control vectors: directions that are added to the residual stream to steer a model.

The files are llama.cpp's: architecture "controlvector", one tensor `direction.N` (n_embd,) for each
layer N after which it is added; layer 0 has none. Several files add up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidGGUF
from engine.formats.gguf.reader import GGUFFile

if TYPE_CHECKING:
    from engine.load_params import ControlVector

Direction = NDArray[np.float32]
"""Direction that is added to the residual stream, (n_embd,)."""

DTYPES: dict[str, np.dtype[np.floating]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
"""Types that directions may have in a file, by their GGUF names."""

NAME = re.compile(r"direction\.(\d{1,5})")
"""Name of a direction's tensor; the group is the number of its layer."""


def read_control_vectors(
    vectors: Sequence[ControlVector], layers: tuple[int, int] | None, n_embd: int, n_layer: int
) -> Mapping[int, Direction]:
    """Return the sum of control vectors: the direction of each layer, by the layer's number.

    Layers without a direction are absent.

    Args:
        vectors: control vector files and their scales.
        layers: first and last layer to steer, both included; None for all.
        n_embd: size of the model's residual stream.
        n_layer: number of the model's layers.

    Raises:
        ModelFileError: a file is missing, or is no control vector for such a model.
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
    """Return the directions of one file, by layer.

    Raises:
        InvalidGGUF: the file is no control vector for such a model.
    """
    if file.meta.architecture != "controlvector":
        raise InvalidGGUF(
            file.path,
            f"it is no control vector but a '{file.meta.architecture}' file",
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
                f"its {name} ({tensor.type.name}, {tensor.shape}) does not fit a model of "
                f"{n_layer} layers with {n_embd} numbers per token",
                "Control vectors work with the model they were made for.",
            )
        values = file.raw(tensor).read().view(DTYPES[tensor.type.name]).astype(np.float32)
        if not np.isfinite(values).all():
            raise InvalidGGUF(file.path, f"its {name} has values that are no numbers")
        found[layer] = values.reshape(n_embd)
    if not found:
        raise InvalidGGUF(file.path, "it has no directions")
    return found
