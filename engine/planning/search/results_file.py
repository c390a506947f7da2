"""The file of search results: the last one of each model, context, machine and goal."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.arguments import params_document, params_from
from engine.errors import EngineError
from engine.hardware.devices.catalog import require_devices
from engine.hardware.fallbacks import Fallback
from engine.planning.saved_plans import model_key
from engine.planning.search.results import (
    DraftTrial,
    Goal,
    Region,
    Sample,
    Speeds,
    Trial,
    TuneResult,
)
from engine.planning.speed.forecast import device_set
from engine.util.files import cache_folder, read_json, write_json

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.planning.planner import Planner
    from engine.planning.speed.forecast import Forecaster

FILE_NAME = "tunings.json"
MAX_RESULTS = 64
"""Most results in the file; older ones are dropped."""

Key = tuple[str, int, str, str]
"""Hash of the model, context, device set and name of the goal."""


class TuneFile:
    """The results of this user's searches.

    Args:
        path: path of the file; None keeps the results in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._documents = _read(path)

    @classmethod
    def of_user(cls) -> TuneFile:
        """Return the results in the user's cache folder."""
        folder = cache_folder()
        return cls(folder / FILE_NAME if folder else None)

    def keep(self, result: TuneResult) -> None:
        """Save a result, replacing an earlier one of the same model, context, devices and goal."""
        with self._lock:
            if self._path is not None:
                self._documents = _read(self._path) or self._documents
            key = result.model_hash, result.n_ctx, result.device_set, result.goal.name
            self._documents.pop(key, None)
            self._documents[key] = result_document(result)
            while len(self._documents) > MAX_RESULTS:
                del self._documents[next(iter(self._documents))]  # the oldest
            write_json(self._path, {"results": list(self._documents.values())})

    def find(
        self, model_hash: str, n_ctx: int, device_set: str, goal: str, path: str
    ) -> TuneResult | None:
        """Return an earlier result; None if there is none.

        Args:
            path: path that the model has now.
        """
        with self._lock:
            document = self._documents.get((model_hash, n_ctx, device_set, goal))
        return None if document is None else result_from(document, path)


def last_result(
    planner: Planner,
    params: LoadParams,
    forecaster: Forecaster,
    goal: str = "chat",
    file: TuneFile | None = None,
) -> TuneResult | None:
    """Return the last search's result for this model, context and devices; None if none is known.

    Args:
        params: parameters as for a search.
        file: the results to look in; None is this user's.

    Raises:
        EngineError: the model's file or a device cannot be used.
    """
    n_ctx, key = planner.plan(params).n_ctx, model_key(params.path)
    devices = device_set_of(params, forecaster)
    return (file or TuneFile.of_user()).find(key.hash, n_ctx, devices, goal, params.path)


def device_set_of(params: LoadParams, forecaster: Forecaster) -> str:
    """Return the key of these devices under which results are saved.

    Raises:
        NoDevice: a device does not exist here.
    """
    known = list(forecaster.devices.values())
    return device_set(require_devices(params.all_devices, known))


def _read(path: Path | None) -> dict[Key, Mapping[str, Any]]:
    document = read_json(path)
    entries = document.get("results") if isinstance(document, dict) else None
    found: dict[Key, Mapping[str, Any]] = {}
    for entry in entries if isinstance(entries, list) else ():
        result = result_from(entry, "")
        if result is not None:
            key = result.model_hash, result.n_ctx, result.device_set, result.goal.name
            found[key] = entry
    return found


def result_document(result: TuneResult) -> dict[str, Any]:
    """Return a result without the model's path as a JSON-ready dictionary."""
    plain = {
        spec.name: getattr(result, spec.name)
        for spec in fields(result)
        if spec.name not in ("goal", "trials", "regions", "drafts")
    }
    return {
        **plain,
        "goal": asdict(result.goal),
        "regions": [asdict(region) for region in result.regions],
        "trials": [_trial_document(trial) for trial in result.trials],
        "drafts": [asdict(draft) for draft in result.drafts],
    }


def _trial_document(trial: Trial) -> dict[str, Any]:
    return {
        "params": params_document(trial.params),
        "shares": trial.shares,
        "sample": None if trial.sample is None else asdict(trial.sample),
        "predicted": None if trial.predicted is None else asdict(trial.predicted),
        "predicted_reason": trial.predicted_reason,
        "problem": trial.problem,
        "is_final": trial.is_final,
    }


def result_from(document: object, path: str) -> TuneResult | None:
    """Return a result from its JSON; None where that is damaged or of another version.

    Args:
        path: path of the model.
    """
    try:
        assert isinstance(document, dict)
        values = dict(document)
        values["goal"] = Goal(**values["goal"])
        values["regions"] = tuple(
            Region(**{**region, "devices": tuple(region["devices"])})
            for region in values["regions"]
        )
        values["trials"] = tuple(_trial(trial, path) for trial in values["trials"])
        others = values.pop("others", ())  # files of earlier versions have none
        values["others"] = tuple((str(device), float(load)) for device, load in others)
        drafts = values.pop("drafts", ())
        values["drafts"] = tuple(
            DraftTrial(str(d["way"]), *_positive((d["prose_ts"], d["quoting_ts"]))) for d in drafts
        )
        result = TuneResult(**values)
        return result if _is_sound(result) else None
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError, EngineError):
        return None


def _trial(document: Mapping[str, Any], path: str) -> Trial:
    sample, predicted = document["sample"], document["predicted"]
    return Trial(
        params_from(document["params"], path),
        _positive(document["shares"]),
        None if sample is None else _sample(sample),
        None if predicted is None else Speeds(*_positive([predicted[k] for k in SPEEDS])),
        str(document["predicted_reason"]),
        str(document["problem"]),
        bool(document["is_final"]),
    )


def _sample(document: Mapping[str, Any]) -> Sample:
    values = dict(document)
    fallbacks = values.pop("fallbacks", ())  # files of earlier versions have none
    numbers = {name: _positive(value) for name, value in values.items()}
    return Sample(**numbers, fallbacks=tuple(_fallback(found) for found in fallbacks))


def _fallback(document: Mapping[str, Any]) -> Fallback:
    why, helps = str(document["why"]), str(document["help"])
    return Fallback(document["kind"], tuple(map(str, document["devices"])), why, helps)


SPEEDS = ("prefill_ts", "decode_ts")


def _positive(values: Any) -> tuple[float, ...]:
    """Return the values as numbers that are finite and not negative.

    Raises:
        ValueError: one is not.
    """
    numbers = tuple(float(value) for value in values)
    if not all(isfinite(number) and number >= 0 for number in numbers):
        raise ValueError
    return numbers


def _is_sound(result: TuneResult) -> bool:
    texts = (result.model_name, result.model_hash, result.device_set, result.reason, result.when)
    ran = (trial.sample for trial in result.trials if trial.sample is not None)
    return (
        all(isinstance(text, str) for text in (*texts, result.goal.name))
        and isinstance(result.n_ctx, int)
        and (result.best is None or result.best in range(len(result.trials)))
        and all(
            values and min(values) > 0
            for sample in ran
            for values in (sample.prefill_ts, sample.decode_ts)
        )
    )
