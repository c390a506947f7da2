"""Finds the form of a sentence, takes it apart and puts it together in the window's language."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Final

from app.core.engine_sentences.forms import (
    DEVICE_FORMS,
    ERROR_FORMS,
    MORE_FORMS,
    PART_FORMS,
    PROBLEM_FORMS,
    SPEED_FORMS,
    SPLIT_FORMS,
    SYSTEM_FORMS,
    WHY_FORMS,
)
from app.core.translation import english, tr
from app.core.units import decimal

FORMS: Final = (*SPEED_FORMS, *ERROR_FORMS)
"""Sentences as the engine makes them; the first that fits is taken."""

NUMBERS: Final = frozenset(
    ("part", "rate", "prompts", "other_rate", "other_prompts", "size", "needed", "prose", "quoting")
)
"""What is filled in and is a number, in the window with the decimal sign of its language."""

PHRASES: Final = frozenset(("device", "devices", "gpus", "others", "way"))
"""What is filled in and has words: devices, or where guesses come from."""

CLOSED: Final = {
    "split": SPLIT_FORMS, "more": MORE_FORMS, "part_of_model": PART_FORMS, "why": WHY_FORMS,
}  # fmt: skip
"""What is filled in and has one of these forms, and no other."""

OPEN: Final = {"problem": (*PROBLEM_FORMS, *SYSTEM_FORMS)}
"""What is filled in and may have one of these forms."""

_LIST = re.compile(r"(, | and | \(\d+ %\))")

_NAME = re.compile(r"\{(\w+)\}")

SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def translated(text: str) -> str:
    """Return sentences of the engine in the window's language, as far as their forms are known."""
    parts = SENTENCE_END.split(text)
    known = [_in_form(part, FORMS) for part in parts]
    if None in known and (whole := _in_form(text, FORMS)) is not None:
        return whole  # a form of several sentences, or a file's name that looks like two
    return " ".join(found or part for found, part in zip(known, parts, strict=True))


def system_reason(text: str) -> str:
    """Return an error of the system in the window's language, if it is one that is known."""
    return _in_form(text, SYSTEM_FORMS) or text


def _in_form(text: str, forms: Sequence[str]) -> str | None:
    """Return a text in the window's language; None if it has none of these forms."""
    for form in forms:
        found = pattern(english(form)).fullmatch(text)
        if found is not None:
            values = found.groupdict()
            return tr(form).format(**{name: _filled(name, v) for name, v in values.items()})
    return None


def _filled(name: str, value: str) -> str:
    """Return what stands in the place of a name."""
    if forms := CLOSED.get(name) or OPEN.get(name):
        return _in_form(value, forms) or value
    if name in PHRASES:
        between = {" and ": tr(" and ")}
        parts = enumerate(_LIST.split(value))
        return "".join(
            between.get(part, part) if n % 2 else _in_form(part, DEVICE_FORMS) or part
            for n, part in parts
        )
    return decimal(value) if name in NUMBERS else value


@cache
def pattern(form: str) -> re.Pattern[str]:
    """Return what fits the sentences of a form, with a group for each name."""
    parts = _NAME.split(form)
    places = (
        f"(?P<{part}>{_filling(part)})" if n % 2 else re.escape(part)
        for n, part in enumerate(parts)
    )
    return re.compile("".join(places))


def _filling(name: str) -> str:
    """Return the pattern of what stands in the place of a name, and not of what follows it."""
    if name in NUMBERS:
        return r"[\d.]+(?: (?:%|[KMGT]i?B))?"
    if name in CLOSED:
        return "|".join(_shape(english(form)) for form in CLOSED[name])
    if name == "gpus":  # in sentences that are told apart by these signs
        return "[^;:.]+?"
    return "[^;]+?" if name in PHRASES else ".+?"


def _shape(form: str) -> str:
    """Return the pattern of a form without groups."""
    parts = enumerate(_NAME.split(form))
    return "".join(f"(?:{_filling(part)})" if n % 2 else re.escape(part) for n, part in parts)
