"""Conversion of what callers pass to `engine.api` into the fields of `LoadParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.config.load import ControlVector
from engine.devices.selection import parse_devices, parse_target
from engine.errors import SplitError


def device_names(devices: Sequence[str] | str) -> tuple[str, ...]:
    """Return the device of each rank, such as "cuda:0".

    Raises:
        NoDevice: a name is not one of a device.
    """
    return tuple(parse_devices(devices))


def shares(split: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return the relative share of each rank; None stays None: even shares.

    Raises:
        SplitError: the split is not a list of numbers.
    """
    if split is None:
        return None
    try:
        return tuple(float(share) for share in split)
    except (TypeError, ValueError):
        raise SplitError(f"The split {split!r} is not a list of numbers.") from None


def override_pairs(overrides: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return pairs of a pattern on tensor names and a device, or a rank such as "#0".

    Raises:
        NoDevice: a target is neither a device nor a rank.
    """
    return tuple((pattern, parse_target(target)) for pattern, target in overrides)


def scaled_vectors(vectors: Sequence[tuple[str | Path, float]]) -> tuple[ControlVector, ...]:
    """Return control vectors from pairs of a file and a factor.

    Raises:
        EngineError: a factor is not a finite number.
    """
    return tuple(ControlVector(str(path), float(scale)) for path, scale in vectors)


def reserve_pairs(reserve: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return pairs of a device and the bytes to keep free there.

    Raises:
        NoDevice: a name is not one of a device.
    """
    return tuple((parse_devices(device)[0], n_bytes) for device, n_bytes in reserve.items())
