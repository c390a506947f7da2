"""The file with search results: the last one for each model, context, machine and goal."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.arguments import params_document, params_from
from engine.errors import EngineError, paragraph
from engine.hardware.devices.catalog import require_devices
from engine.planning.saved_plans import model_key
from engine.planning.search.results import Trial, TuneResult, reason_for_best, reason_for_drafts
from engine.planning.speed.forecast import device_set
from engine.util.codec import read_document
from engine.util.files import cache_folder, read_json, write_json

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.planning.planner import Planner
    from engine.planning.speed.forecast import Forecaster

FILE_NAME = "tunings.json"
MAX_RESULTS = 64
"""Maximum number of results in the file; older ones are dropped."""

Key = tuple[str, int, str, str]
"""Model hash, context, device set and goal name."""


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
        """Save a result, replacing an earlier one for the same model, context, devices and goal."""
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
            path: current path of the model.
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
    """Return the last search result for this model, context and devices; None if there is none.

    Args:
        params: parameters as for a search.
        file: the results to look in; None means this user's.

    Raises:
        EngineError: the model's file or a device cannot be used.
    """
    n_ctx, key = planner.plan(params).n_ctx, model_key(params.path)
    devices = device_set_of(params, forecaster)
    return (file or TuneFile.of_user()).find(key.hash, n_ctx, devices, goal, params.path)


def device_set_of(params: LoadParams, forecaster: Forecaster) -> str:
    """Return the key under which results for these devices are saved.

    Raises:
        NoDevice: a device does not exist on this machine.
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
    """Return a result, without the model's path, as a JSON-ready dictionary."""
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
    return {**asdict(trial), "params": params_document(trial.params)}


def result_from(document: object, path: str) -> TuneResult | None:
    """Return the result in a JSON document; None if damaged or from another version.

    Args:
        path: path of the model.
    """
    try:
        assert isinstance(document, dict)
        params = [params_from(trial["params"], path) for trial in document["trials"]]
        trials = [
            {**trial, "params": {**trial["params"], "path": path}} for trial in document["trials"]
        ]
        result = read_document(TuneResult, {**document, "trials": trials})
        checked = zip(result.trials, params, strict=True)
        result = replace(result, trials=tuple(replace(one, params=own) for one, own in checked))
        if not _is_sound(result):
            return None
        # composed again, because the file does not keep templates
        reasons = reason_for_best(result.trials, result.goal), reason_for_drafts(result.drafts)
        return replace(result, reason=paragraph(*reasons))
    except (
        AssertionError, AttributeError, ArithmeticError, LookupError, TypeError, ValueError,
        EngineError,
    ):  # fmt: skip
        return None


def _is_sound(result: TuneResult) -> bool:
    ran = [trial.sample for trial in result.trials if trial.sample is not None]
    return (result.best is None or result.best in range(len(result.trials))) and all(
        speeds and min(speeds) > 0 for one in ran for speeds in (one.prefill_ts, one.decode_ts)
    )
