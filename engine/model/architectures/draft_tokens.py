"""Tokens that a shortened head of an MTP block guesses: its tensor `d2t`, draft to target ids.

Row i of the head belongs to the token with the i-th id of the tensor. A file has one of them for
all its heads, as the name has no number of a block (`MODEL_TENSOR.D2T` in the package `gguf`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import InvalidGGUF

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensors import TensorInfo

MAP = "d2t"
"""Last part of the tensor's name, which some files follow by ".weight"."""


DTYPES = {"I32": "<i4", "I64": "<i8"}
"""numpy's names of the types that such a list may have."""


def draft_map(file: GGUFFile) -> TensorInfo | None:
    """Return the tensor of a file that maps rows of a shortened head to tokens; None without.

    Raises:
        InvalidGGUF: there are several.
    """
    found = [tensor for name, tensor in file.tensors.items() if is_named(name, MAP)]
    if len(found) > 1:
        raise InvalidGGUF(
            file.path, f"{found[0].name} and {found[1].name} both name the tokens of its MTP heads"
        )
    return found[0] if found else None


def is_named(name: str, last: str) -> bool:
    """Return whether the last part of a tensor's name is `last`, but for ".weight"."""
    return name.removesuffix(".weight").rpartition(".")[-1] == last


def draft_tokens(file: GGUFFile, n_vocab: int) -> Sequence[int]:
    """Return the token of each row of an MTP block's head; none where it has all of them in order.

    Raises:
        InvalidGGUF: the ids are no whole numbers, some are of no token, or there are several lists.
    """
    tensor = draft_map(file)
    if tensor is None:
        return ()
    dtype = DTYPES.get(tensor.type.name)
    if dtype is None or tensor.n_rows != 1:
        raise InvalidGGUF(file.path, f"the tensor {tensor.name} is no list of tokens")
    ids: list[int] = file.raw(tensor).read().view(np.dtype(dtype)).tolist()
    if not all(0 <= token < n_vocab for token in ids):
        raise InvalidGGUF(file.path, f"the tensor {tensor.name} names tokens that there are not")
    return ids
