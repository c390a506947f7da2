"""Checks of what ranks bring to a collective: equal shapes, and equal bits where they must be.

Every rank sees the values of all others and judges them alike, so all end with the same error or
none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from engine.errors import CommError

DeviceName = Callable[[int], str]
"""Function that returns the device name of a rank; "" if it is not known."""


def check_fit(
    values: Mapping[int, Tensor], name: DeviceName, *, all_but_last: bool = False
) -> None:
    """Check that all values have one shape and type.

    Args:
        values: value of each rank, by rank.
        name: returns the device name of a rank.
        all_but_last: whether the last dimension may differ.

    Raises:
        CommError: a value differs from those of most ranks; names its rank.
    """
    stop = -1 if all_but_last else None
    first, *others = values.values()
    if all(x.shape[:stop] == first.shape[:stop] and x.dtype is first.dtype for x in others):
        return
    kinds = {rank: (x.shape[:stop], x.dtype) for rank, x in values.items()}
    given = {rank: f"{tuple(x.shape)} of {x.dtype}" for rank, x in values.items()}
    odd, most, other = _odd_one(kinds, name)
    raise CommError(
        odd, f"has given numbers {given[odd]} where {other} gave {given[most]}", name(odd)
    )


def check_alike(values: Mapping[int, Tensor], name: DeviceName) -> None:
    """Check that all values have the same bits.

    Args:
        values: value of each rank, by rank; 4-byte numbers in the host's memory.
        name: returns the device name of a rank.

    Raises:
        CommError: the bits differ from those of most ranks; names the rank.
    """
    first, *others = values.items()
    bits = first[1].view(torch.int32)
    if all(torch.equal(x.view(torch.int32), bits) for _, x in others):
        return
    check_same({rank: x.numpy().tobytes() for rank, x in values.items()}, name)


def check_same(held: Mapping[int, Hashable], name: DeviceName) -> None:
    """Check that all ranks hold equal values.

    Args:
        held: value of each rank, or its check sum, by rank.
        name: returns the device name of a rank.

    Raises:
        CommError: a rank holds something else than most; names the rank.
    """
    if len(set(held.values())) <= 1:
        return
    odd, _, other = _odd_one(held, name)
    problem = f"has computed other numbers than {other} from the same ones"
    if len(held) == 2:
        problem = f"and {other} have computed different numbers from the same ones"
    raise CommError(odd, problem, name(odd))


def _odd_one(kinds: Mapping[int, Hashable], name: DeviceName) -> tuple[int, int, str]:
    """Return the first rank outside the majority, the majority's first rank, and a text naming it.

    If two ranks differ, nobody can tell which one is wrong; then the second one counts as odd.
    """
    ranks_of: dict[Hashable, list[int]] = defaultdict(list)
    for rank, kind in kinds.items():
        ranks_of[kind].append(rank)
    most = max(ranks_of.values(), key=len)  # of equally large sets the first
    odd = next(rank for rank in kinds if rank not in most)
    return odd, most[0], f"{name(most[0])} (rank {most[0]})".lstrip()
