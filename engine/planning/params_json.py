"""`LoadParams` as JSON and back: for saved plans and results, which people may edit or damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from math import isfinite
from typing import Any, TypeVar

from engine.errors import EngineError
from engine.hardware.devices.selection import parse_devices, parse_target
from engine.load_params import ControlVector, LoadParams

T = TypeVar("T")

MOST_ENTRIES = 4096
"""Most entries of a list; more devices or overrides are a mistake."""


def params_document(params: LoadParams) -> dict[str, Any]:
    """Return all fields but the model's path as a JSON-ready dictionary."""
    document = {
        spec.name: getattr(params, spec.name) for spec in fields(params) if spec.name != "path"
    }
    document["control_vectors"] = [
        {"path": vector.path, "scale": vector.scale} for vector in params.control_vectors
    ]
    return document


def params_from(document: object, path: str) -> LoadParams:
    """Return the parameters from their JSON; missing fields have their defaults.

    Args:
        path: path of the model.

    Raises:
        EngineError: it is something else, has a field that this version does not know, or has a
            value that makes no sense.
    """
    if not isinstance(document, Mapping):
        raise EngineError("There are no settings for loading a model.")
    unknown = set(document) - set(READERS)
    if unknown:
        raise EngineError(
            f"The setting '{str(min(unknown, key=str))[:60]}' is not known.",
            "It may come from a newer version.",
        )
    values = {}
    for name, value in document.items():
        try:
            values[name] = READERS[name](value)
        except (TypeError, ValueError, KeyError):
            raise EngineError(f"The setting '{name}' cannot be {str(value)[:60]!r}.") from None
    return LoadParams(path, **values)


def _optional(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else read(value)


def _many(read: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    def read_all(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list | tuple) or len(value) > MOST_ENTRIES:
            raise TypeError
        return tuple(read(item) for item in value)

    return read_all


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise TypeError
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _pair(value: Any) -> tuple[Any, Any]:
    first, second = _many(lambda item: item)(value)
    return first, second


def _override(value: Any) -> tuple[str, str]:
    pattern, target = _pair(value)
    return _text(pattern), parse_target(_text(target))


def _reserve(value: Any) -> tuple[str, int]:
    device, n_bytes = _pair(value)
    return _device(device), _whole(n_bytes)


def _layers(value: Any) -> tuple[int, int]:
    first, last = _pair(value)
    return _whole(first), _whole(last)


def _device(value: Any) -> str:
    return parse_devices([_text(value)])[0]


def _vector(value: Any) -> ControlVector:
    return ControlVector(_text(value["path"]), _number(value["scale"]))


READERS: Mapping[str, Callable[[Any], Any]] = {
    "devices": _many(_device),
    "split": _optional(_many(_number)),
    "split_mode": _text,
    "n_ctx": _optional(_whole),
    "overrides": _many(_override),
    "kv_type": _text,
    "cpu_threads": _optional(_whole),
    "n_batch": _optional(_whole),
    "control_vectors": _many(_vector),
    "control_layers": _optional(_layers),
    "groups": _optional(_many(_whole)),
    "n_cpu_blocks": _whole,
    "n_cpu_moe": _whole,
    "kv_on_host": _flag,
    "reserve": _many(_reserve),
    "p2p": _text,
    "rope_scaling": _text,
    "rope_factor": _number,
    "rope_base": _number,
    "chat_template": _text,
    "fast_prompts": _flag,
    "parallel": _whole,
    "checkpoint_bytes": _optional(_whole),
    "draft": _text,
    "draft_max": _whole,
    "draft_vocab": _whole,
    "mmproj": _text,
    "mmproj_device": _text,
    "machines": _many(_whole),
    "machine_link": _text,
}
