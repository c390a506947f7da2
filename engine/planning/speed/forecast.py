"""Forecast: the speed of an evaluated split, from facts on devices and links, and earlier runs."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from zlib import crc32

from engine.hardware.backend_choice import simulate_gpus
from engine.hardware.cuda_api import use_overheads
from engine.hardware.devices.catalog import list_devices
from engine.hardware.devices.topology import read_topology
from engine.hardware.devices.types import CPU, DeviceInfo, far_id, is_cpu, local_id, machine_of
from engine.load_params import PEER_MODES, PeerMode
from engine.planning.evaluation.fit import Room
from engine.planning.speed.facts import CACHE, DeviceFacts, Prediction, WeightRate
from engine.planning.speed.links import Links
from engine.planning.speed.machine_file import (
    MachineFile,
    known_facts,
    known_links,
    use_measured_overheads,
)
from engine.planning.speed.speed_model import SpeedModel
from engine.util.files import cache_folder, read_json, write_json
from engine.util.sanitize import package_version

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.planning.evaluation.evaluator import Evaluation
    from engine.planning.speed.rigs import Rig

FILE_NAME = "calibration.json"
MAX_SUBJECTS, MAX_RATIOS, MAX_LETTERS = 256, 9, 2000
"""Limits for the file: subjects, ratios per subject, characters per string."""

MIN_RATIO, MAX_RATIO = 1e-3, 1e3
"""Bounds of a ratio; anything outside is a mistake, not a measurement."""

MAX_OF_ONE = 2.0
"""Largest correction factor from a single run, which another program may have slowed down."""

DECODE, PREFILL = "decode", "prefill"


@dataclass(frozen=True, slots=True)
class Subject:
    """The kind of run that a ratio belongs to.

    Attributes:
        devices: kinds of its devices in ascending order; see `device_kind`.
        test: `DECODE` or `PREFILL`.
        about: anything else that affects the prediction error, such as the model's quantisation.
    """

    devices: tuple[str, ...]
    test: str
    about: str = ""


def device_kind(device: DeviceInfo) -> str:
    """Return a key shared by equal devices; a new driver or version of Tandem changes it."""
    return f"{device.name} {device.driver or device.n_cores} {package_version()}"


def device_set(devices: Sequence[DeviceInfo]) -> str:
    """Return a key for all ranks' devices; a new driver or version of Tandem changes it."""
    names = (f"{d.name} {d.driver or d.n_cores}" for d in devices)
    return " + ".join([*names, package_version()])


class Calibration:
    """Ratios of measured to predicted time in this user's earlier runs, for correcting predictions.

    All splits over the same kinds of devices share one factor, whichever split was measured;
    otherwise, a split measured while another program was busy would lose to one that never ran. The
    factor is the median of the last few ratios and the factor before them, so that a single run
    never decides.

    Thread-safe. Several programs may share the file: each re-reads it before adding a ratio; if two
    write simultaneously, one ratio is lost.

    Args:
        path: path of the file; None keeps the ratios in memory.
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
        """Add a run's ratio; implausible ratios are ignored."""
        ratio = measured_s / predicted_s if predicted_s > 0 else 0.0
        if not _is_ratio(ratio) or not _is_subject(subject):
            return
        with self._lock:
            if self._path is not None:
                self._ratios = _read(self._path) or self._ratios
            earlier = self._ratios.pop(subject, ())
            self._ratios[subject] = (*earlier, ratio)[-MAX_RATIOS:]
            while len(self._ratios) > MAX_SUBJECTS:
                del self._ratios[next(iter(self._ratios))]  # the oldest
            write_json(self._path, _document(self._ratios))

    def factor(self, subject: Subject) -> float:
        """Return the ratio of measured to predicted time; 1 if nothing was measured.

        Runs that share a kind of device are applied first, then other models on exactly these
        kinds, then this subject; each group moves the factor.
        """
        some: list[float] = []
        same_devices: list[float] = []
        with self._lock:
            own = self._ratios.get(subject, ())
            for other, ratios in self._ratios.items():
                if other.test == subject.test and other != subject:
                    if other.devices == subject.devices:
                        same_devices += ratios
                    elif {*other.devices} & {*subject.devices}:
                        some += ratios
        return math.exp(_moved(_moved(_moved(0.0, some), same_devices), own))

    def corrected(self, subject: Subject, prediction: Prediction) -> Prediction:
        """Return a prediction scaled by the subject's factor."""
        factor = self.factor(subject)
        return prediction if factor == 1.0 else prediction.scaled(factor)


def _moved(before: float, ratios: Sequence[float]) -> float:
    # in logarithms; the factor so far counts as one of the ratios
    middle = median([before, *map(math.log, ratios)])
    most = math.log(MAX_OF_ONE) if len(ratios) == 1 else math.inf
    return min(max(middle, before - most), before + most)


def _read(path: Path | None) -> dict[Subject, tuple[float, ...]]:
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
                found[subject] = good[-MAX_RATIOS:]
    return dict(list(found.items())[-MAX_SUBJECTS:])


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
    return MIN_RATIO <= value <= MAX_RATIO  # false for NaN as well


def _is_subject(subject: Subject) -> bool:
    texts = *subject.devices, subject.test, subject.about
    return all(isinstance(text, str) and len(text) <= MAX_LETTERS for text in texts)


PROMPT_TOKENS = 512
"""Default length of the predicted prompt."""

CACHED_BYTES, CACHED = 128 << 20, " in cache"
"""Weight bytes that may fit into a CPU's caches, and the mark for such runs: they read much faster,
so larger models learn nothing from them."""

MAX_MODELS = 16
"""Maximum number of cached speed models."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted times for a prompt in an empty cache, and for one token after it."""

    prefill: Prediction
    decode: Prediction


class Forecaster:
    """Forecaster of one machine's speeds that learns from runs on it. Not thread-safe.

    Args:
        links: the links in the default peer mode.
        calibration: ratios from earlier runs; None for simulated devices.
    """

    def __init__(
        self, devices: Sequence[DeviceInfo], facts: Mapping[str, DeviceFacts], links: Links,
        calibration: Calibration | None = None, by_mode: Mapping[PeerMode, Links] | None = None,
    ) -> None:  # fmt: skip
        self.devices = {device.id: device for device in devices}
        self._facts = facts
        self._links = links
        self._by_mode = by_mode or {}
        self._calibration = calibration
        self._kinds = _kinds(devices, facts)
        self._models: dict[tuple[object, ...], SpeedModel] = {}

    @classmethod
    def of_machine(cls) -> Forecaster:
        """Return the forecaster for this machine, with all earlier measurements and ratios."""
        simulate_gpus(False)
        devices, file = list_devices(), MachineFile.of_user()
        use_measured_overheads(devices, file)
        facts = {device.id: known_facts(device, file) for device in devices}
        topology = read_topology()
        by_mode = {mode: known_links(devices, topology, file, mode) for mode in PEER_MODES}
        return cls(devices, facts, by_mode["auto"], Calibration.of_user(), by_mode)

    @classmethod
    def of_rig(cls, rig: Rig) -> Forecaster:
        """Return the forecaster for a simulated machine; planning then assumes that machine."""
        use_overheads({})
        simulate_gpus(True)
        return cls(rig.devices, rig.facts, rig.links)

    def on_machine(self, number: int) -> Forecaster:
        """Return the forecaster for one of the machines, with its local device ids."""
        mine = [
            replace(device, id=local_id(device.id))
            for device in self.devices.values()
            if machine_of(device.id) == number
        ]
        facts = {
            local_id(device): replace(found, device=local_id(device))
            for device, found in self._facts.items()
            if machine_of(device) == number
        }
        calibration = self._calibration if number == 0 else None
        by_mode = {mode: links.on_machine(number) for mode, links in self._by_mode.items()}
        return Forecaster(mine, facts, self._links.on_machine(number), calibration, by_mode)

    @property
    def free_bytes(self) -> dict[str, int]:
        """Free memory by device."""
        return {device.id: device.free_bytes for device in self.devices.values()}

    @property
    def rooms(self) -> list[Room]:
        """Memory that a plan may use on each usable device."""
        return [
            Room(device.id, device.free_bytes, self._facts[device.id].bytes_per_s)
            for device in self.devices.values()
            if device.usable
        ]

    def sum_s(self, devices: Sequence[str], n_bytes: float) -> float:
        """Return the seconds that an all-reduce of `n_bytes` takes over ranks on these devices."""
        return self._links.all_reduce_s(devices, n_bytes)

    def forecast(
        self, evaluation: Evaluation, params: LoadParams, quant: str = "",
        n_prompt: int | None = None,
    ) -> Forecast | None:  # fmt: skip
        """Predict the speed of an evaluated split; None if one of its devices is unknown.

        Args:
            quant: the model's quantisation, by which calibration distinguishes models.
            n_prompt: prompt tokens; None means `PROMPT_TOKENS`, or fewer if the context is short.
        """
        speed = self._speed(evaluation, params)
        if speed is None:
            return None
        n = max(1, min(n_prompt or PROMPT_TOKENS, evaluation.plan.n_ctx - 1))
        prefill = speed.prefill(evaluation.load, n, min(evaluation.plan.n_batch, n))
        decode = speed.decode(evaluation.load, n)
        if self._calibration is not None:
            subject = self._subject(evaluation, quant)
            prefill = self._calibration.corrected(subject(PREFILL), prefill)
            decode = self._calibration.corrected(subject(DECODE), decode)
        return Forecast(prefill, decode)

    def learn_prefill(
        self, evaluation: Evaluation, params: LoadParams, quant: str, n_tokens: int, seconds: float,
        position: int = 0,
    ) -> None:  # fmt: skip
        """Learn from a prompt that was computed after `position` cached tokens."""
        speed = self._speed(evaluation, params)
        if speed is None or self._calibration is None or n_tokens < 1:
            return
        n_batch = min(evaluation.plan.n_batch, n_tokens)
        predicted = speed.prefill(evaluation.load, n_tokens, n_batch, position)
        subject = self._subject(evaluation, quant)(PREFILL)
        self._calibration.note(subject, predicted.seconds, seconds)

    def learn_decode(
        self, evaluation: Evaluation, params: LoadParams, quant: str, seconds: float,
        position: int = 0,
    ) -> None:  # fmt: skip
        """Learn from the mean time per token after `position` other tokens."""
        speed = self._speed(evaluation, params)
        if speed is None or self._calibration is None:
            return
        predicted = speed.decode(evaluation.load, position)
        subject = self._subject(evaluation, quant)(DECODE)
        self._calibration.note(subject, predicted.seconds, seconds)

    def _speed(self, evaluation: Evaluation, params: LoadParams) -> SpeedModel | None:
        ids = tuple(device.device for device in evaluation.plan.devices)
        if any(device not in self._facts for device in ids):
            return None
        key = ids, params.cpu_threads, params.kv_on_host, params.p2p
        found = self._models.get(key)
        if found is None:
            if len(self._models) >= MAX_MODELS:
                self._models.clear()
            facts = [self._facts[device] for device in ids]
            links = self._by_mode.get(params.p2p, self._links)
            if params.kv_on_host:
                facts = [with_cache_on_host(of_one, links) for of_one in facts]
            found = self._models[key] = SpeedModel(facts, links, params.cpu_threads)
        return found

    def _subject(self, evaluation: Evaluation, quant: str) -> Callable[[str], Subject]:
        # all splits of a model over the same devices have the same subject
        kinds = {self._kinds[device.device] for device in evaluation.plan.devices}
        if evaluation.plan.file_bytes < CACHED_BYTES:
            kinds = {kind + CACHED for kind in kinds}
        devices = tuple(sorted(kinds))
        return lambda test: Subject(devices, test, quant)


def _kinds(devices: Sequence[DeviceInfo], facts: Mapping[str, DeviceFacts]) -> dict[str, str]:
    # with a checksum of the facts: a ratio means nothing for predictions from other facts
    by_kind: dict[str, list[dict[str, object]]] = {}
    for device in devices:
        if device.id in facts:
            by_kind.setdefault(device_kind(device), []).append(asdict(facts[device.id]))
    marks = {
        kind: f"{kind} ({crc32(json.dumps(found, sort_keys=True).encode()):08x})"
        for kind, found in by_kind.items()
    }
    return {device.id: marks[device_kind(device)] for device in devices if device.id in facts}


def with_cache_on_host(facts: DeviceFacts, links: Links) -> DeviceFacts:
    """Return a device's facts if its KV cache is in host memory, which a GPU reads over PCIe."""
    if is_cpu(facts.device):
        return facts
    host = far_id(machine_of(facts.device), CPU)
    slot = links.between(facts.device, host).bytes_per_s
    return replace(
        facts, rates={**facts.rates, CACHE: WeightRate(slot, slot, facts.rate(CACHE).flop_per_s)}
    )
