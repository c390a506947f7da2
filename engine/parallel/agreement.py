"""Whether ranks give what fits each other: numbers of one shape, and the same where they must be.

Every rank sees what all others show, and judges it alike; so all end with the same error, or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from engine.errors import CommError

Name = Callable[[int], str]


def check_fit(values: Mapping[int, Tensor], name: Name, *, all_but_last: bool = False) -> None:
    """Make sure that values are of one shape and type.

    Args:
        values: what ranks show.
        name: the device of a rank.
        all_but_last: the last dimension may differ.

    Raises:
        CommError: names the rank whose value differs from those of most.
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


def check_alike(values: Mapping[int, Tensor], name: Name) -> None:
    """Make sure that values have the same bits; numbers of the host, in 4 bytes each.

    Raises:
        CommError: names the rank whose bits differ from those of most.
    """
    first, *others = values.items()
    bits = first[1].view(torch.int32)
    if all(torch.equal(x.view(torch.int32), bits) for _, x in others):
        return
    check_same({rank: x.numpy().tobytes() for rank, x in values.items()}, name)


def check_same(held: Mapping[int, Hashable], name: Name) -> None:
    """Make sure that ranks hold the same.

    Raises:
        CommError: names the rank that holds something else than most.
    """
    if len(set(held.values())) <= 1:
        return
    odd, _, other = _odd_one(held, name)
    problem = f"has computed other numbers than {other} from the same ones"
    if len(held) == 2:
        problem = f"and {other} have computed different numbers from the same ones"
    raise CommError(odd, problem, name(odd))


def _odd_one(kinds: Mapping[int, Hashable], name: Name) -> tuple[int, int, str]:
    """The first rank that is not with the most, and the first of these, which is named too.

    Of two nobody can tell which one is wrong; then it is the one further behind.
    """
    ranks_of: dict[Hashable, list[int]] = defaultdict(list)
    for rank, kind in kinds.items():
        ranks_of[kind].append(rank)
    most = max(ranks_of.values(), key=len)  # the first ones of as many
    odd = next(rank for rank in kinds if rank not in most)
    return odd, most[0], f"{name(most[0])} (rank {most[0]})".lstrip()
