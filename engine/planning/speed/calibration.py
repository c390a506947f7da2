"""How real runs differ from what was predicted, kept on disk to correct the next predictions.

A ratio is measured seconds over predicted ones, these without any correction. The median of the
last few counts: one run beside a busy program does not spoil it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from engine.devices.types import DeviceInfo
from engine.json_file import cache_folder, read_json, write_json
from engine.planning.speed.prediction import Prediction

FILE_NAME = "calibration.json"
MOST_SUBJECTS, MOST_RATIOS, MOST_LETTERS = 256, 9, 2000
LEAST, MOST = 1e-3, 1e3
"""Ratios beyond these are mistakes, not measurements."""

DECODE, PREFILL = "decode", "prefill"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a ratio is of.

    Attributes:
        devices: see `device_set`.
        test: `DECODE` or `PREFILL`.
        about: what else predictions may be wrong about, such as the model's quantisation.
    """

    devices: str
    test: str
    about: str = ""


def device_set(devices: Sequence[DeviceInfo]) -> str:
    """A name for the devices of all ranks, with what a new driver or version would change."""
    names = (f"{d.name} {d.driver or d.n_cores}" for d in devices)
    return " + ".join([*names, package_version()])


def package_version() -> str:
    """Of Tandem; "" where it runs from a folder without being installed."""
    try:
        return metadata.version("tandem-llm")
    except metadata.PackageNotFoundError:
        return ""


class Calibration:
    """The ratios of this user's runs.

    Args:
        path: of the file; None keeps them in memory only.

    It may be used from several threads, and several programs may use one file: each writes what it
    has found there and the new ratio, and at worst one of two that are written at once is lost.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._ratios = _read(path)

    @classmethod
    def of_user(cls) -> Calibration:
        """The one in the user's cache folder."""
        folder = cache_folder()
        return cls(folder / FILE_NAME if folder else None)

    def note(self, subject: Subject, predicted_s: float, measured_s: float) -> None:
        """Learn from a run; nonsense is ignored."""
        ratio = measured_s / predicted_s if predicted_s > 0 else 0.0
        if not _is_ratio(ratio) or not _is_subject(subject):
            return
        with self._lock:
            if self._path is not None:
                self._ratios = _read(self._path) or self._ratios
            known = self._ratios.pop(subject, ())
            self._ratios[subject] = (*known, ratio)[-MOST_RATIOS:]
            while len(self._ratios) > MOST_SUBJECTS:
                del self._ratios[next(iter(self._ratios))]  # what was noted longest ago
            write_json(self._path, _document(self._ratios))

    def factor(self, subject: Subject) -> float:
        """How many times as long as predicted it takes; 1 where nothing is known.

        Where nothing is known of just this, whatever is known of the same devices and test counts.
        """
        with self._lock:
            found = self._ratios.get(subject) or [
                ratio
                for other, ratios in self._ratios.items()
                if (other.devices, other.test) == (subject.devices, subject.test)
                for ratio in ratios
            ]
        return median(found) if found else 1.0

    def corrected(self, subject: Subject, prediction: Prediction) -> Prediction:
        """A prediction with what is known of such runs."""
        factor = self.factor(subject)
        return prediction if factor == 1.0 else prediction.scaled(factor)


def _read(path: Path | None) -> dict[Subject, tuple[float, ...]]:
    """All entries of a file that make sense, the oldest first."""
    document = read_json(path)
    entries = document.get("ratios") if isinstance(document, dict) else None
    found: dict[Subject, tuple[float, ...]] = {}
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict):
            continue
        subject = Subject(entry.get("devices", 0), entry.get("test", 0), entry.get("about", 0))
        ratios = entry.get("values")
        if _is_subject(subject) and isinstance(ratios, list):
            good = tuple(float(ratio) for ratio in ratios if _is_ratio(ratio))
            if good:
                found[subject] = good[-MOST_RATIOS:]
    return dict(list(found.items())[-MOST_SUBJECTS:])


def _document(ratios: dict[Subject, tuple[float, ...]]) -> dict[str, Any]:
    return {
        "ratios": [
            {"devices": s.devices, "test": s.test, "about": s.about, "values": values}
            for s, values in ratios.items()
        ]
    }


def _is_ratio(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return LEAST <= value <= MOST  # false for NaN, too


def _is_subject(subject: Subject) -> bool:
    texts = subject.devices, subject.test, subject.about
    return all(isinstance(text, str) and len(text) <= MOST_LETTERS for text in texts)
