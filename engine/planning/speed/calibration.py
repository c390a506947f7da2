"""Ratios of measured to predicted time of earlier runs, kept on disk to correct predictions.

A ratio is measured seconds over uncorrected predicted seconds. All splits over the same kinds of
devices have one factor, whichever of them was measured: else a split that ran beside a busy program
would lose to one that never ran. The median of the last few ratios counts, with what was believed
before them as one more, so that no single run has the last word.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from engine.hardware.devices.types import DeviceInfo
from engine.planning.speed.facts import Prediction
from engine.util.files import cache_folder, read_json, write_json
from engine.util.sanitize import package_version

FILE_NAME = "calibration.json"
MOST_SUBJECTS, MOST_RATIOS, MOST_LETTERS = 256, 9, 2000
"""Most subjects of a file, ratios of a subject, and letters of a text."""

LEAST, MOST = 1e-3, 1e3
"""Bounds of a ratio; others are mistakes, not measurements."""

MOST_OF_ONE = 2.0
"""Largest correction by a single run, as a factor: something else may have slowed it down."""

DECODE, PREFILL = "decode", "prefill"
"""Tests of a subject."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The kind of run that a ratio belongs to.

    Attributes:
        devices: kinds of its devices in ascending order, see `device_kind`.
        test: `DECODE` or `PREFILL`.
        about: anything else on which the error depends, such as the model's quantisation.
    """

    devices: tuple[str, ...]
    test: str
    about: str = ""


def device_kind(device: DeviceInfo) -> str:
    """Return what equal devices have in common; a new driver or version of Tandem changes it."""
    return f"{device.name} {device.driver or device.n_cores} {package_version()}"


def device_set(devices: Sequence[DeviceInfo]) -> str:
    """Return a key of all ranks' devices; a new driver or version of Tandem changes it."""
    names = (f"{d.name} {d.driver or d.n_cores}" for d in devices)
    return " + ".join([*names, package_version()])


class Calibration:
    """The ratios of this user's runs.

    Args:
        path: path of the file; None keeps them in memory only.

    Several threads may use it, and several programs one file: each writes what it finds there and
    the new ratio; at worst one of two that are written at once is lost.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._ratios = _read(path)

    @classmethod
    def of_user(cls) -> Calibration:
        """Return the ratios in the user's cache folder."""
        folder = cache_folder()
        return cls(folder / FILE_NAME if folder else None)

    def note(self, subject: Subject, predicted_s: float, measured_s: float) -> None:
        """Add the ratio of a run; nonsense is ignored."""
        ratio = measured_s / predicted_s if predicted_s > 0 else 0.0
        if not _is_ratio(ratio) or not _is_subject(subject):
            return
        with self._lock:
            if self._path is not None:
                self._ratios = _read(self._path) or self._ratios
            known = self._ratios.pop(subject, ())
            self._ratios[subject] = (*known, ratio)[-MOST_RATIOS:]
            while len(self._ratios) > MOST_SUBJECTS:
                del self._ratios[next(iter(self._ratios))]  # the oldest
            write_json(self._path, _document(self._ratios))

    def factor(self, subject: Subject) -> float:
        """Return the ratio of measured to predicted time; 1 where nothing is known.

        It starts from runs that share a kind of device, is moved by those of other models on just
        these kinds, and then by those of just this subject.
        """
        some: list[float] = []
        alike: list[float] = []
        with self._lock:
            own = self._ratios.get(subject, ())
            for other, ratios in self._ratios.items():
                if other.test == subject.test and other != subject:
                    if other.devices == subject.devices:
                        alike += ratios
                    elif {*other.devices} & {*subject.devices}:
                        some += ratios
        return math.exp(_moved(_moved(_moved(0.0, some), alike), own))

    def corrected(self, subject: Subject, prediction: Prediction) -> Prediction:
        """Return a prediction scaled by the factor of such runs."""
        factor = self.factor(subject)
        return prediction if factor == 1.0 else prediction.scaled(factor)


def _moved(before: float, ratios: Sequence[float]) -> float:
    """Return the logarithm of a factor after these ratios; it counts as one of them."""
    middle = median([before, *map(math.log, ratios)])
    most = math.log(MOST_OF_ONE) if len(ratios) == 1 else math.inf
    return min(max(middle, before - most), before + most)


def _read(path: Path | None) -> dict[Subject, tuple[float, ...]]:
    """Return all entries of a file that make sense, the oldest first."""
    document = read_json(path)
    entries = document.get("ratios") if isinstance(document, dict) else None
    found: dict[Subject, tuple[float, ...]] = {}
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict):
            continue
        devices, ratios = entry.get("devices"), entry.get("values")
        if not isinstance(devices, list) or not isinstance(ratios, list):
            continue
        subject = Subject(tuple(devices), entry.get("test", 0), entry.get("about", 0))
        if _is_subject(subject):
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
    texts = *subject.devices, subject.test, subject.about
    return all(isinstance(text, str) and len(text) <= MOST_LETTERS for text in texts)
