"""Conversion of what callers pass to `engine.api` into `LoadParams`, and what can change there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.errors import SplitError
from engine.hardware.devices.catalog import parse_devices, parse_target
from engine.load_params import ControlVector, LoadParams

KEPT_BY_A_SPLIT = (
    "path", "n_ctx", "parallel", "checkpoint_bytes", "n_batch", "kv_type", "control_vectors",
    "control_layers", "rope_scaling", "rope_factor", "rope_base", "chat_template", "fast_prompts",
    "draft", "draft_max", "draft_vocab", "mmproj",
)  # fmt: skip
"""Settings of a load that a loaded model keeps when it is split anew."""

NOTHING: Mapping[str, int] = MappingProxyType({})
"""An empty mapping that nobody can fill: the default of `reserve`."""


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


def split_otherwise(
    params: LoadParams,
    split: Sequence[float] | None,
    devices: Sequence[str] | str | None,
    split_mode: str | None,
    overrides: Sequence[tuple[str, str]] | None,
) -> LoadParams:
    """Return parameters of a load with another split; None leaves all but the shares as they are.

    Raises:
        EngineError: a value makes no sense.
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
    """Check that a loaded model can be split anew as is wanted.

    Raises:
        SplitError: a setting differs that a loaded model keeps.
    """
    for name in KEPT_BY_A_SPLIT:
        if getattr(wanted, name) != getattr(params, name):
            raise SplitError(
                f"A loaded model can be split anew, but its '{name}' cannot change.",
                "Load it again for that.",
            )
