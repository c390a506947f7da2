"""File with the results of checks on this machine's GPUs, such as whether our kernels work there.

A check takes seconds, or may crash the program, so each runs only once. The key of a verdict
contains the card, its driver, the versions of PyTorch, Triton and Tandem, the launcher, and a hash
of all GPU code. If an entry is missing or damaged, the check is repeated.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeVar

from engine.hardware.backend_choice import chosen_launcher, triton_version
from engine.hardware.devices.torch_builds import find_torch_build
from engine.hardware.devices.types import DeviceInfo
from engine.util.codec import WrongValue, read_value
from engine.util.files import cache_folder, read_json, write_json
from engine.util.sanitize import package_version

FILE_NAME = "cards.json"

WHOLE_CARD = "card"
"""Name of the check for whether kernels work on a card at all."""

TRIES_AGAIN = "'tandem devices --measure' repeats the test"

MAX_CARDS = 12
"""Maximum number of keys in the file; the most recently written ones are kept."""

MAX_CHECKS = 1000
"""Maximum number of verdicts per key; the most recently written ones are kept."""

MAX_WHY = 200
"""Maximum length of a verdict's reason, in characters."""

GPU_CODE = Path(__file__).parents[1] / "backends" / "gpu"
"""Folder with all code for GPUs: kernels, and code that packs data for them or launches them."""

Outcome = Literal["passed", "wrong", "hung", "crashed"]
"""Result of a check: correct numbers; wrong numbers or an error; a hang; a crash."""

T = TypeVar("T")

_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class CardVerdict:
    """Result of a check on a card.

    Attributes:
        outcome: the result.
        why: observed fault, as the end of a sentence; "" if the check passed.
        date: day of the check, such as 2026-03-01; "" if unknown.
    """

    outcome: Outcome
    why: str = ""
    date: str = ""

    @property
    def passed(self) -> bool:
        """Whether all numbers were correct."""
        return self.outcome == "passed"


class CardRecords:
    """Verdicts on this machine's cards.

    A check is named by free text, such as "card" or "product Q4_K gemv 1 row".

    Args:
        path: path of the file; None keeps the verdicts in memory only.

    Several threads and programs may use it. If two programs write at the same time, one wins, and
    the other's check is repeated.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._cards = _read(path)

    @classmethod
    def of_user(cls) -> CardRecords:
        """Return the records in the user's cache folder."""
        folder = cache_folder()
        return cls(folder / FILE_NAME if folder else None)

    def find(self, key: str, what: str) -> CardVerdict | None:
        """Return the verdict of a check; None if it has not run, or only with other versions.

        Args:
            key: see `card_key`.
            what: name of the check.
        """
        return self._cards.get(key, {}).get(what)

    def keep(self, key: str, what: str, verdict: CardVerdict) -> None:
        """Save the verdict of a check."""
        self.keep_all(key, {what: verdict})

    def keep_all(self, key: str, verdicts: Mapping[str, CardVerdict]) -> None:
        """Save the verdicts of several checks, by their names, and write the file once."""
        self._change(key, verdicts, ())

    def forget(self, key: str, *whats: str) -> None:
        """Delete the verdicts of some checks, so that they run again."""
        self._change(key, {}, whats)

    def _change(self, key: str, found: Mapping[str, CardVerdict], gone: tuple[str, ...]) -> None:
        """Change a key's entries in the current content of the file."""
        with _lock:
            cards = _read(self._path) or self._cards
            checks = cards.pop(key, {})
            for what in (*found, *gone):
                checks.pop(what, None)
            checks.update(found)
            cards[key] = _last(checks, MAX_CHECKS)
            self._cards = _last(cards, MAX_CARDS)
            document = {
                card: {what: [v.outcome, v.why[:MAX_WHY], v.date] for what, v in known.items()}
                for card, known in self._cards.items()
            }
            write_json(self._path, document)


def card_key(info: DeviceInfo) -> str:
    """Return the key for a GPU's verdicts: everything that may affect whether kernels work."""
    build = find_torch_build()
    return " | ".join((
        f"{info.name} {info.compute_capability or info.arch}".strip(), f"driver {info.driver}",
        f"torch {_torch_version()} {build.cuda or build.hip}".strip(),
        f"triton {triton_version()} {chosen_launcher()}".strip(),
        f"tandem {package_version()} {gpu_code_hash()}",
    ))  # fmt: skip


def card_problems(
    devices: Iterable[DeviceInfo], records: CardRecords | None = None
) -> dict[str, str]:
    """Return why our kernels are not used on some GPUs, as the end of a sentence, by id.

    Args:
        devices: any devices.
        records: the verdicts to look in; the user's by default.
    """
    records, found = records or CardRecords.of_user(), dict[str, str]()
    for info in devices:
        verdict = None if info.kind == "cpu" else records.find(card_key(info), WHOLE_CARD)
        if verdict is not None and not verdict.passed:
            found[info.id] = f"{verdict.why}, tested on {verdict.date}; {TRIES_AGAIN}"
    return found


@cache
def gpu_code_hash() -> str:
    """Return a hash of the source of all GPU code; "" if there are only compiled files."""
    sources = sorted(GPU_CODE.rglob("*.py"))
    found = hashlib.sha256()
    for path in sources:
        found.update(path.relative_to(GPU_CODE).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16] if sources else ""


@cache
def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _last(entries: Mapping[str, T], most: int) -> dict[str, T]:
    return dict(list(entries.items())[-most:])


def _read(path: Path | None) -> dict[str, dict[str, CardVerdict]]:
    """Return all valid entries in a file: verdicts by check, by key."""
    document = read_json(path)
    if not isinstance(document, dict):
        return {}
    return {
        key: {what: made for what, entry in checks.items() if (made := _verdict(entry))}
        for key, checks in document.items()
        if isinstance(checks, dict)
    }


def _verdict(entry: object) -> CardVerdict | None:
    try:
        return CardVerdict(*read_value(tuple[Outcome, str, str], entry))
    except WrongValue:
        return None
