"""Ranks without a share, by which machines that are left out stay among those that have joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from app.core.translation import tr
from engine import LoadParams, SplitError, far_id, is_cpu, machine_of

IDLE_DEVICE = "cpu"
"""Device of such a rank on its machine, where it takes no memory and computes nothing."""


def with_idle_ranks(params: LoadParams, n_machines: int) -> LoadParams:
    """Return parameters in which each machine has a rank: one without a share where it had none.

    Raises:
        SplitError: parts go to a device that is none of the ranks', as on a single machine.
    """
    used = {machine_of(device) for device in params.devices}
    left_out = [number for number in range(n_machines) if number not in used]
    if not left_out:
        return params
    if params.all_devices != params.devices:
        raise SplitError(
            tr("Whole blocks and experts can only go to a CPU of other machines that takes part."),
            tr("Switch it on in the split, or leave them to GPUs."),
        )
    ranks = [(_machine(params, rank), rank) for rank in range(len(params.devices))]
    all_ranks = sorted([*ranks, *((number, None) for number in left_out)], key=itemgetter(0))
    devices = [
        far_id(number, IDLE_DEVICE) if rank is None else params.devices[rank]
        for number, rank in all_ranks
    ]
    return _moved(params, [rank for _, rank in all_ranks], devices)


def without_idle_ranks(params: LoadParams) -> LoadParams:
    """Return parameters without the ranks that `with_idle_ranks` has added."""
    machines = [machine_of(device) for device in params.devices]
    shares = params.split or (1.0,) * len(machines)
    kept: list[int | None] = [
        i
        for i, device in enumerate(params.devices)
        if shares[i] or not is_cpu(device) or machines.count(machines[i]) > 1
    ]
    if not kept or len(kept) == len(machines):
        return params
    return _moved(params, kept, [params.devices[i] for i in kept if i is not None])


def _machine(params: LoadParams, rank: int) -> int:
    """Return the machine of a rank."""
    return machine_of(params.devices[rank])


def _moved(params: LoadParams, places: Sequence[int | None], devices: Sequence[str]) -> LoadParams:
    """Return parameters with other ranks: the old number of each, or None for an idle one."""
    shares = params.split or (1.0,) * len(params.devices)
    new = {old: number for number, old in enumerate(places) if old is not None}
    groups = _moved_groups(params.group_sizes, places) if params.group_sizes else params.groups
    return replace(
        params,
        devices=tuple(devices),
        split=tuple(0.0 if old is None else shares[old] for old in places),
        groups=groups,
        overrides=tuple(
            (pattern, f"#{new[int(target[1:])]}" if target.startswith("#") else target)
            for pattern, target in params.overrides
        ),
    )


def _moved_groups(sizes: Sequence[int], places: Sequence[int | None]) -> tuple[int, ...]:
    """Return the sizes of the groups, of which an idle rank joins the one that it stands in."""
    of = [group for group, size in enumerate(sizes) for _ in range(size)]
    labels: list[float] = []
    for i, old in enumerate(places):
        behind = [of[other] for other in places[i:] if other is not None]
        before = [of[other] for other in places[:i] if other is not None]
        if old is not None:
            labels.append(of[old])
        elif before and behind and before[-1] == behind[0]:
            labels.append(before[-1])
        else:
            labels.append(-1 - i)
    return tuple(len(list(run)) for _, run in groupby(labels))
