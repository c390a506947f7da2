"""Fields of settings classes: their metadata, and the validation that uses it.

Metadata keys: `title` and `help` (strings), `kind` (int, float, bool, str, tuple for strings or
dict for numbers by token id), `min` and `max` (inclusive range), `soft_max` (end of a slider, if
smaller), `step`, `lowest` (what the smallest value means, if it is not an amount), `has_lines` (one
string per line), `is_long` (several lines), and `choices` for a field with a few named values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from math import inf, isnan
from numbers import Integral, Real
from typing import Any, TypeVar

from engine.errors import EngineError, Sentence, either

T = TypeVar("T")


def number(
    default: T,
    title: str,
    help: str,  # noqa: A002 - the metadata key of the same name
    *,
    bounds: tuple[float, float],
    step: float,
    soft_max: float | None = None,
    kind: type[int] | type[float] = float,
    lowest: str = "",
) -> T:
    """Return a field for a number.

    Args:
        bounds: smallest and largest value.
        soft_max: upper end of a slider, if below the maximum.
        lowest: what the smallest value means, if it is not an amount.
    """
    metadata = {"title": title, "help": help, "kind": kind, "step": step}
    metadata |= {"min": bounds[0], "max": bounds[1]}
    if soft_max is not None:
        metadata["soft_max"] = soft_max
    if lowest:
        metadata["lowest"] = lowest
    result: T = field(default=default, metadata=metadata)
    return result


def texts(
    default: tuple[str, ...], title: str, help: str, *, has_lines: bool = False  # noqa: A002
) -> tuple[str, ...]:  # fmt: skip
    """Return a field for a list of strings.

    Args:
        has_lines: whether each string is entered on a separate line.
    """
    metadata = {"title": title, "help": help, "kind": tuple, "has_lines": has_lines}
    result: tuple[str, ...] = field(default=default, metadata=metadata)
    return result


def text(title: str, help: str, *, is_long: bool = False) -> str:  # noqa: A002
    """Return a field for a string that is empty by default.

    Args:
        is_long: whether the string may have several lines.
    """
    metadata = {"title": title, "help": help, "kind": str, "is_long": is_long}
    result: str = field(default="", metadata=metadata)
    return result


def validate_fields(settings: Any) -> None:
    """Check every field of a dataclass against its metadata; convert numbers to their kind.

    Numpy numbers, and ints given for floats, are converted, so that equal settings compare equal
    and serialise to the same JSON.

    Raises:
        EngineError: a value is wrong; the error names the field, the accepted values and the value.
    """
    for spec in fields(settings):
        value = getattr(settings, spec.name)
        if value is None and spec.default is None:
            continue
        object.__setattr__(settings, spec.name, _checked(spec.name, value, spec.metadata))


def _checked(name: str, value: Any, metadata: Mapping[str, Any]) -> Any:
    kind = metadata["kind"]
    if kind in (int, float):
        return _checked_number(name, value, metadata)
    if kind is tuple:
        return _checked_strings(name, value)
    if kind is dict:
        return _checked_biases(name, value)
    if not isinstance(value, kind):
        expected = Sentence("true or false") if kind is bool else Sentence("a string")
        raise rejected(name, expected, value)
    choices = metadata.get("choices")
    if choices and value not in choices:
        raise rejected(name, either([f"'{choice}'" for choice in choices]), value)
    return value


def _checked_number(name: str, value: Any, metadata: Mapping[str, Any]) -> int | float:
    kind, low, high = metadata["kind"], metadata["min"], metadata["max"]
    is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # false for NaN as well
        if kind is int:
            expected = Sentence("a whole number from {low} to {high}", low=low, high=high)
        else:
            expected = Sentence("a number from {low} to {high}", low=str(low), high=str(high))
        raise rejected(name, expected, value)
    number: int | float = kind(value)
    return number


def _checked_strings(name: str, value: Any) -> tuple[str, ...]:
    """Check a tuple or list of strings (JSON has no tuples); a single string is refused."""
    is_list = isinstance(value, tuple | list)
    if not is_list or not all(isinstance(text, str) and text for text in value):
        raise rejected(name, Sentence("a list of non-empty strings"), value)
    return tuple(value)


def _checked_biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Check a mapping from token ids to numbers, or pairs of these (JSON keys are strings)."""
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        found = tuple((int(token), float(bias)) for token, bias in pairs)
    except (TypeError, ValueError):
        found = ((-1, 0.0),)
    if any(token < 0 or isnan(bias) or bias == inf for token, bias in found):
        raise rejected(name, Sentence("numbers by token id"), value)
    return found


def rejected(name: str, expected: str, value: Any) -> EngineError:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    text = "The setting '{name}' must be {expected}, not {value}."
    return EngineError(text, name=name, expected=expected, value=shown)
