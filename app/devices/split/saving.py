"""Split settings to JSON and back, whatever a settings file contains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from app.devices.split.settings import (
    GGUF_SUFFIX,
    MAX_BATCH,
    MAX_DRAFT_VOCAB,
    MAX_PARALLEL,
    MAX_ROPE_BASE,
    MAX_ROPE_FACTOR,
    MAX_TEMPLATE,
    MAX_THREADS,
    MODES,
    OWN_BLOCK,
    RankSettings,
    SplitSettings,
    default_settings,
    ensure_on,
)
from engine import (
    LEAST_DRAFT_VOCAB,
    MMPROJ_KINDS,
    MOST_DRAFTED,
    PEER_MODES,
    ROPE_SCALINGS,
    DeviceInfo,
    kv_types,
)

MAX_CONTEXT: Final = 1 << 24
MAX_BLOCKS: Final = 1 << 16
MAX_BYTES: Final = 1 << 50
MAX_OVERRIDES: Final = 4096


def to_dict(settings: SplitSettings) -> dict[str, Any]:
    """Return the settings as a JSON-ready dictionary; devices are named by their `key`."""
    keys = {rank.device: rank.key for rank in settings.ranks}
    return {
        "mode": settings.mode,
        "single": settings.single,
        "ranks": [
            {
                "device": rank.key,
                "on": rank.is_on,
                "share": rank.share,
                "locked": rank.is_locked,
                "joins": rank.joins,
            }
            for rank in settings.ranks
        ],
        "n_ctx": settings.n_ctx,
        "parallel": settings.parallel,
        "checkpoint_bytes": settings.checkpoint_bytes,
        "kv_type": settings.kv_type,
        "cpu_threads": settings.cpu_threads,
        "reserve": {keys.get(device, device): size for device, size in settings.reserve},
        "n_cpu_blocks": settings.n_cpu_blocks,
        "n_cpu_moe": settings.n_cpu_moe,
        "kv_on_host": settings.kv_on_host,
        "p2p": settings.p2p,
        "n_batch": settings.n_batch,
        "fast_prompts": settings.fast_prompts,
        "n_draft": settings.n_draft,
        "draft_path": settings.draft_path,
        "draft_vocab": settings.draft_vocab,
        "mmproj": settings.mmproj,
        "mmproj_device": keys.get(settings.mmproj_device, settings.mmproj_device),
        "rope_scaling": settings.rope_scaling,
        "rope_factor": settings.rope_factor,
        "rope_base": settings.rope_base,
        "chat_template": settings.chat_template,
        "overrides": [[parts, keys.get(place, place)] for parts, place in settings.overrides],
    }


def from_dict(data: Mapping[str, Any], devices: Sequence[DeviceInfo]) -> SplitSettings:
    """Return the settings of a `to_dict`, in its order, for the devices that are here now.

    Devices that are gone are dropped, new ones come last and are off. Invalid entries of `data`
    get their default: the file may be damaged or from another version.
    """
    settings = _with_saved_ranks(default_settings(devices), data.get("ranks"))
    mode, single = data.get("mode"), data.get("single")
    places = {rank.key: rank.device for rank in settings.ranks}
    return replace(
        settings,
        mode=mode if mode in MODES else settings.mode,
        single=_whole(single, 0, len(settings.ranks) - 1) or 0,
        n_ctx=_whole(data.get("n_ctx"), 1, MAX_CONTEXT),
        parallel=_whole(data.get("parallel"), 1, MAX_PARALLEL) or 1,
        checkpoint_bytes=_whole(data.get("checkpoint_bytes"), 0, MAX_BYTES),
        kv_type=_kv_type(data.get("kv_type")) or settings.kv_type,
        cpu_threads=_whole(data.get("cpu_threads"), 1, MAX_THREADS),
        reserve=tuple(sorted(_reserve(data.get("reserve"), places))),
        n_cpu_blocks=_whole(data.get("n_cpu_blocks"), 0, MAX_BLOCKS) or 0,
        n_cpu_moe=_whole(data.get("n_cpu_moe"), 0, MAX_BLOCKS) or 0,
        kv_on_host=data.get("kv_on_host") is True,
        p2p=next((mode for mode in PEER_MODES if mode == data.get("p2p")), settings.p2p),
        n_batch=_whole(data.get("n_batch"), 1, MAX_BATCH),
        fast_prompts=data.get("fast_prompts") is True,
        n_draft=_n_draft(data.get("n_draft"), settings.n_draft),
        draft_path=_draft_path(data.get("draft_path")),
        draft_vocab=_whole(data.get("draft_vocab"), LEAST_DRAFT_VOCAB, MAX_DRAFT_VOCAB) or 0,
        mmproj=_mmproj(data.get("mmproj")),
        mmproj_device=_encoder_device(data.get("mmproj_device"), places),
        rope_scaling=next((kind for kind in ROPE_SCALINGS if kind == data.get("rope_scaling")), ""),
        rope_factor=_at_least_one(data.get("rope_factor"), MAX_ROPE_FACTOR),
        rope_base=_at_least_one(data.get("rope_base"), MAX_ROPE_BASE),
        chat_template=_template(data.get("chat_template")),
        overrides=tuple(_overrides(data.get("overrides"), places))[:MAX_OVERRIDES],
    )


def _with_saved_ranks(settings: SplitSettings, saved: object) -> SplitSettings:
    known = [rank.key for rank in settings.ranks]
    entries = [
        entry
        for entry in (saved if isinstance(saved, list) else [])
        if isinstance(entry, Mapping) and entry.get("device") in known
    ]
    if not entries:
        return settings
    settings = settings.with_cpu_ranks(sum(entry["device"] == "cpu" for entry in entries) or 1)
    left, ranks = list(settings.ranks), []
    for entry in entries:
        found = next((rank for rank in left if rank.key == entry["device"]), None)
        if found is not None:
            left.remove(found)
            ranks.append(_rank(found, entry))
    ranks += [replace(rank, is_on=False, share=0.0) for rank in left]
    return replace(settings, ranks=ensure_on(tuple(ranks))).renormalised()


def _rank(rank: RankSettings, entry: Mapping[str, Any]) -> RankSettings:
    is_on, joins = entry.get("on") is True, entry.get("joins")
    return replace(
        rank,
        is_on=is_on,
        share=_share(entry.get("share")) * is_on,
        is_locked=is_on and entry.get("locked") is True,
        joins=joins if isinstance(joins, bool) else rank.joins,
    )


def _n_draft(saved: object, default: int) -> int:
    return 0 if saved == 0 else _whole(saved, 1, MOST_DRAFTED) or default


def _draft_path(saved: object) -> str:
    return OWN_BLOCK if saved == OWN_BLOCK else _gguf_path(saved)


def _mmproj(saved: object) -> str:
    return next((kind for kind in MMPROJ_KINDS if kind == saved), "") or _gguf_path(saved) or "auto"


def _encoder_device(saved: object, places: Mapping[str, str]) -> str:
    return places.get(saved, "auto") if isinstance(saved, str) else "auto"


def _gguf_path(saved: object) -> str:
    is_file = isinstance(saved, str) and saved.lower().endswith(GGUF_SUFFIX)
    return str(saved) if is_file else ""


def _reserve(saved: object, places: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    for key, value in saved.items() if isinstance(saved, Mapping) else ():
        size = _whole(value, 1, MAX_BYTES)
        if key in places and size:
            yield places[key], size


def _overrides(saved: object, places: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the overrides whose device still exists; rank numbers are kept unchecked."""
    for entry in saved if isinstance(saved, list) else ():
        is_pair = isinstance(entry, list) and len(entry) == 2
        if not is_pair or not all(isinstance(text, str) for text in entry):
            continue
        parts, place = entry
        if place in places:
            yield parts, places[place]
        elif place.startswith("#"):
            yield parts, place


def _share(value: object) -> float:
    if not isinstance(value, int | float):
        return 0.0
    return float(min(1.0, max(0.0, value)))  # NaN gives 0; a huge int has no float, hence min first


def _kv_type(value: object) -> str:
    """Return a KV type as it is always written, "" for what is none."""
    try:
        return str(kv_types(value)) if isinstance(value, str) else ""
    except ValueError:
        return ""


def _template(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= MAX_TEMPLATE else ""


def _at_least_one(value: object, most: float) -> float:
    """Return a number from 1 to `most`; 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 1 <= value <= most else 0.0  # type: ignore[operator,arg-type]


def _whole(value: object, low: int, high: int) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and low <= value <= high else None  # type: ignore[operator,return-value]
