"""Conversion of split settings to JSON and back; a settings file may contain anything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from app.devices.split.settings import (
    GGUF_SUFFIX,
    MODES,
    OWN_BLOCK,
    WINDOW_OPTIONS,
    RankSettings,
    SplitSettings,
    default_settings,
    ensure_on,
)
from engine import DeviceInfo, LoadOption, kv_types

MAX_BYTES: Final = 1 << 50
MAX_OVERRIDES: Final = 4096


def to_dict(settings: SplitSettings) -> dict[str, Any]:
    """Return the settings as a JSON-serializable dict; devices are identified by `key`."""
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
        **{name: getattr(settings, name) for name in WINDOW_OPTIONS},
        "reserve": {keys.get(device, device): size for device, size in settings.reserve},
        "mmproj_device": keys.get(settings.mmproj_device, settings.mmproj_device),
        "overrides": [[parts, keys.get(place, place)] for parts, place in settings.overrides],
    }


def from_dict(data: Mapping[str, Any], devices: Sequence[DeviceInfo]) -> SplitSettings:
    """Return the settings that `to_dict` saved, in the saved order, for the present devices.

    Missing devices are dropped; new ones come last and are off. Invalid entries in `data` are
    replaced by defaults, because the file may be damaged or from another version.
    """
    settings = _with_saved_ranks(default_settings(devices), data.get("ranks"))
    mode, single = data.get("mode"), data.get("single")
    places = {rank.key: rank.device for rank in settings.ranks}
    return replace(
        settings,
        mode=mode if mode in MODES else settings.mode,
        single=_whole(single, 0, len(settings.ranks) - 1) or 0,
        **{
            name: getattr(settings, name)
            if (value := _read(name, data.get(name))) is None
            else value
            for name in WINDOW_OPTIONS
        }
        | {
            "reserve": tuple(sorted(_reserve(data.get("reserve"), places))),
            "mmproj_device": _encoder_device(data.get("mmproj_device"), places),
            "overrides": tuple(_overrides(data.get("overrides"), places))[:MAX_OVERRIDES],
        },
    )


def _read(name: str, value: object) -> Any:
    """Return the value of a setting, or None if it is missing or invalid."""
    if name == "kv_type":
        return _kv_type(value)
    if name == "draft_path":
        return OWN_BLOCK if value == OWN_BLOCK else _gguf_path(value)
    option = WINDOW_OPTIONS[name]
    if option.kind is bool:
        return value if isinstance(value, bool) else None
    if option.kind in (int, float):
        return _number(option, value)
    if option.choices:
        known = next((one for one in option.choices if one == value), None)
        return known if known is not None or not option.may_be_file else _gguf_path(value)
    is_text = isinstance(value, str) and (option.high is None or len(value) <= option.high)
    return value if is_text else None


def _number(option: LoadOption, value: object) -> float | None:
    kinds = int if option.kind is int else int | float
    if not isinstance(value, kinds) or isinstance(value, bool):
        return None
    high = min(one for one in (option.soft_high, option.high, math.inf) if one is not None)
    may_be_zero = option.may_be_zero and value == 0
    return option.kind(value) if may_be_zero or option.low <= value <= high else None


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


def _encoder_device(saved: object, places: Mapping[str, str]) -> str:
    return places.get(saved, "auto") if isinstance(saved, str) else "auto"


def _gguf_path(saved: object) -> str | None:
    is_file = isinstance(saved, str) and saved.lower().endswith(GGUF_SUFFIX)
    return str(saved) if is_file else None


def _reserve(saved: object, places: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    for key, value in saved.items() if isinstance(saved, Mapping) else ():
        size = _whole(value, 1, MAX_BYTES)
        if key in places and size:
            yield places[key], size


def _overrides(saved: object, places: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the overrides whose device still exists; rank numbers are not checked."""
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
    return float(min(1.0, max(0.0, value)))  # NaN becomes 0; min comes first as huge ints overflow


def _kv_type(value: object) -> str | None:
    """Return a KV cache type in its canonical spelling."""
    try:
        return str(kv_types(value)) if isinstance(value, str) else None
    except ValueError:
        return None


def _whole(value: object, low: int, high: int) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and low <= value <= high else None  # type: ignore[operator,return-value]
