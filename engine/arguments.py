"""Load parameters from keyword arguments and JSON, and checks for re-splits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.errors import EngineError, SplitError
from engine.hardware.devices.catalog import parse_devices, parse_target
from engine.load_params import LOAD_OPTIONS, ControlVector, LoadParams
from engine.util.codec import WrongValue, read_document

MAX_ENTRIES = 4096
"""Maximum number of entries in a list."""


def device_names(devices: Sequence[str] | str) -> tuple[str, ...]:
    """Return the device id of each rank, such as "cuda:0".

    Raises:
        NoDevice: a name is not that of a device.
    """
    return tuple(parse_devices(devices))


def shares(split: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return the relative share of each rank; None, for even shares, stays None.

    Raises:
        SplitError: the split is not a list of numbers.
    """
    if split is None:
        return None
    try:
        return tuple(float(share) for share in split)
    except (TypeError, ValueError):
        raise SplitError("The split {split} is not a list of numbers.", split=repr(split)) from None


def override_pairs(overrides: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return pairs of a pattern for tensor names and a device, or a rank as in "#0".

    Raises:
        NoDevice: a target is neither a device nor a rank.
    """
    return tuple((pattern, parse_target(target)) for pattern, target in overrides)


def scaled_vectors(vectors: Sequence[tuple[str | Path, float]]) -> tuple[ControlVector, ...]:
    """Return control vectors for pairs of a file and a factor.

    Raises:
        EngineError: a factor is not a finite number.
    """
    return tuple(ControlVector(str(path), float(scale)) for path, scale in vectors)


def reserve_pairs(reserve: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return pairs of a device and the number of bytes to keep free on it.

    Raises:
        NoDevice: a name is not that of a device.
    """
    return tuple((parse_devices(device)[0], n_bytes) for device, n_bytes in reserve.items())


CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "devices": device_names,
    "split": shares,
    "overrides": override_pairs,
    "control_vectors": scaled_vectors,
    "groups": lambda groups: None if groups is None else tuple(groups),
    "reserve": reserve_pairs,
    "draft": str,
    "mmproj": str,
}
"""Converters for settings that callers may pass as types other than those in `LoadParams`."""


def params_of(path: str | Path, options: Mapping[str, Any]) -> LoadParams:
    """Return load parameters from keyword arguments.

    Raises:
        EngineError: a value is invalid.
        TypeError: an argument is unknown.
    """
    values = {
        name: CONVERTED[name](value) if name in CONVERTED else value
        for name, value in options.items()
    }
    return LoadParams(str(path), **values)


def split_otherwise(
    params: LoadParams,
    split: Sequence[float] | None,
    devices: Sequence[str] | str | None,
    split_mode: str | None,
    overrides: Sequence[tuple[str, str]] | None,
) -> LoadParams:
    """Return load parameters with another split; None keeps a value, but makes `split` even.

    Raises:
        EngineError: a value is invalid.
    """
    changes: dict[str, Any] = {"split": shares(split)}
    if devices is not None:
        changes["devices"] = device_names(devices)
    if split_mode is not None:
        changes["split_mode"] = split_mode
    if overrides is not None:
        changes["overrides"] = override_pairs(overrides)
    return replace(params, **changes)


def check_kept(params: LoadParams, wanted: LoadParams) -> None:
    """Check that a re-split can change a loaded model from `params` to `wanted`.

    Raises:
        SplitError: a setting differs that a re-split cannot change.
    """
    kept = ("path", *(name for name, option in LOAD_OPTIONS.items() if option.is_kept))
    for name in kept:
        if getattr(wanted, name) != getattr(params, name):
            raise SplitError(
                "'{name}' cannot be changed by re-splitting a loaded model.",
                "Load the model again to change it.",
                name=name,
            )


def params_document(params: LoadParams) -> dict[str, Any]:
    """Return all fields except the model's path as a JSON-ready dictionary."""
    document = {name: getattr(params, name) for name in LOAD_OPTIONS}
    document["control_vectors"] = [
        {"path": vector.path, "scale": vector.scale} for vector in params.control_vectors
    ]
    return document


def params_from(document: object, path: str) -> LoadParams:
    """Return the parameters in a JSON document; missing fields get their defaults.

    Args:
        path: path of the model.

    Raises:
        EngineError: the document is not an object, or has an unknown field or invalid value.
    """
    if not isinstance(document, Mapping):
        raise EngineError("These are not settings for loading a model.")
    unknown = set(document) - set(LOAD_OPTIONS)
    if unknown:
        raise EngineError(
            "The setting '{name}' is not known.",
            "It may come from a newer version.",
            name=str(min(unknown, key=str))[:60],
        )
    if any(
        isinstance(value, list | tuple) and len(value) > MAX_ENTRIES for value in document.values()
    ):
        raise EngineError("A setting cannot have more than {n} values.", n=MAX_ENTRIES)
    try:
        params = read_document(LoadParams, {**document, "path": path})
    except WrongValue as error:
        name = re.split(r"[.\[]", error.path)[0]
        shown = str(document[name])[:60]
        raise EngineError(
            "The setting '{name}' cannot be {value!r}.", name=name, value=shown
        ) from None
    named = {name: check(getattr(params, name)) for name, check in NAMING_DEVICES.items()}
    return replace(params, **named)


NAMING_DEVICES: Mapping[str, Callable[[Any], Any]] = {
    "devices": lambda names: tuple(parse_devices([name])[0] for name in names),
    "overrides": override_pairs,
    "reserve": lambda pairs: tuple((parse_devices([name])[0], n) for name, n in pairs),
}
"""Checks for settings that name devices."""
