"""Comparison of load parameters, and split settings made from them."""

from __future__ import annotations

from dataclasses import replace

from app.devices.split.settings import (
    MODES,
    OWN_BLOCK,
    Mode,
    RankSettings,
    SplitSettings,
    normalised,
)
from engine import SHARED_LOAD_OPTIONS, LoadParams, is_cpu, machine_of


def is_same_load(first: LoadParams, second: LoadParams, n_ctx_train: int) -> bool:
    """Return whether both load the same model in the same way, up to rounding of the shares."""
    return _load_key(first, n_ctx_train) == _load_key(second, n_ctx_train)


def resplit_params(wanted: LoadParams, loaded: LoadParams, n_ctx_train: int) -> LoadParams | None:
    """Return the parameters that give a loaded model the wanted split.

    None where more than the split differs, so that the model has to be loaded again.
    """
    if wanted.context_for(n_ctx_train) != loaded.context_for(n_ctx_train):
        return None
    if any(getattr(wanted, name) != getattr(loaded, name) for name in NEEDING_A_LOAD):
        return None
    if _drafter(wanted) != _drafter(loaded):
        return None
    if set(map(machine_of, wanted.all_devices)) != set(map(machine_of, loaded.all_devices)):
        return None  # other machines have to begin
    return replace(
        wanted,
        n_ctx=loaded.n_ctx,
        control_vectors=loaded.control_vectors,
        control_layers=loaded.control_layers,
    )


def _load_key(params: LoadParams, n_ctx_train: int) -> tuple[object, ...]:
    n_ranks, n_gpus = len(params.devices), sum(not is_cpu(d) for d in set(params.all_devices))
    shares = normalised(params.split or [1.0] * n_ranks)
    return (
        params.path,
        params.devices,
        params.split_mode if n_ranks > 1 else "",
        params.group_sizes if n_ranks > 1 else (),
        tuple(round(share, 6) for share in shares),
        params.context_for(n_ctx_train),
        tuple(getattr(params, name) for name in SHARED_LOAD_OPTIONS if name not in SPECIAL),
        params.n_draft,
        _drafter(params),
        params.mmproj_device if params.mmproj != "off" else "",
        params.p2p if n_gpus > 1 else "",
    )


SPECIAL = ("n_ctx", "mmproj_device", "p2p")
"""Settings that matter only sometimes."""

NEEDING_A_LOAD = (
    "path", "n_draft", "mmproj_device",
    *(name for name, one in SHARED_LOAD_OPTIONS.items() if one.is_kept and name != "n_ctx"),
)  # fmt: skip
"""Settings that a loaded model keeps, so that it has to be loaded again for other ones."""


def _drafter(params: LoadParams) -> str:
    """Return what guesses tokens beside the text, as `SplitSettings.draft_path` has it."""
    return OWN_BLOCK if params.draft == OWN_BLOCK else params.draft_path


def settings_for(settings: SplitSettings, params: LoadParams) -> SplitSettings:
    """Return settings that load `params`, as far as their devices are here; no rank is locked.

    Ranks that take part keep the places that they have together, in the order of `params`.
    """
    settings = settings.with_cpu_ranks(max(1, params.devices.count("cpu")))
    places: list[int] = []
    for device in params.devices:
        free = (i for i in range(len(settings.ranks)) if i not in places)
        found = next((i for i in free if settings.ranks[i].device == device), None)
        if found is not None:
            places.append(found)
    if not places:
        return settings
    is_whole = len(places) == len(params.devices)
    shares = normalised((is_whole and params.split) or [1.0] * len(places))
    starts = {sum(params.group_sizes[:n]) for n in range(len(params.group_sizes))}
    ranks = [replace(rank, is_on=False, share=0.0, is_locked=False) for rank in settings.ranks]
    for number, (target, source) in enumerate(zip(sorted(places), places, strict=True)):
        old = settings.ranks[source]
        joins = number not in starts if starts and is_whole else settings.ranks[target].joins
        ranks[target] = RankSettings(old.device, old.key, True, shares[number], joins=joins)
    mode: Mode = "single"
    if len(places) > 1:
        mode = next((m for m in MODES if m == params.split_mode), "tensor")
    return replace(
        settings,
        ranks=tuple(ranks),
        mode=mode,
        single=min(places),
        n_draft=params.n_draft,
        draft_path=_drafter(params),
        **{name: getattr(params, name) for name in SHARED_LOAD_OPTIONS}
        | {"reserve": tuple(sorted(params.reserve))},
    )
