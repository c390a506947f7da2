"""Saved plans: named settings for loading a model, with their measured speed.

A plan refers to a model by its hash, whatever its file is called, and to devices by UUID, so that
it means the same GPUs even if one is moved or added. Each model's plans are in one file; a damaged
file is set aside, never overwritten.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.arguments import params_document, params_from
from engine.errors import EngineError, reason_of
from engine.formats.gguf.reader import GGUFFile, model_hash
from engine.load_params import LoadParams
from engine.model.architectures.info import describe
from engine.util.codec import WrongValue, read_document
from engine.util.files import MAX_BYTES, read_file, read_json, replace_json, tandem_folder

if TYPE_CHECKING:
    from engine.hardware.devices.types import DeviceInfo
    from engine.planning.planner import Planner

VERSION = 1
KIND = "tandem plan"
FOLDER = "plans"
MAX_PLANS, MAX_LETTERS = 256, 100
"""Maximum number of plans per model, and maximum length of a name in characters."""

AUTO_PLAN = "auto"
"""Reserved name for the fastest plan that fits."""


@dataclass(frozen=True, slots=True)
class PlanBadge:
    """Measured speed of a plan.

    Attributes:
        prefill_ts, decode_ts: tokens per second in prefill and decode.
        n_ctx: context length it was measured with, in tokens.
        when: time of the measurement, in UTC, in ISO 8601 format.
    """

    prefill_ts: float = field(metadata={"min": 0})
    decode_ts: float = field(metadata={"min": 0})
    n_ctx: int
    when: str


@dataclass(frozen=True, slots=True)
class DeviceRef:
    """A device that a plan refers to.

    Attributes:
        id, name: id and name of the device when the plan was saved.
        uuid: UUID of a GPU; "" for the CPU.
    """

    id: str
    uuid: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan with a name.

    Attributes:
        name: name of the plan.
        params: parameters to load the model with; the path is empty, and devices have the ids they
            had when the plan was saved.
        devices: all devices that the plan names.
        badge: measured speed; None until it is measured.
    """

    name: str
    params: LoadParams
    devices: tuple[DeviceRef, ...] = ()
    badge: PlanBadge | None = None

    @classmethod
    def of(
        cls,
        name: str,
        params: LoadParams,
        devices: Sequence[DeviceInfo],
        badge: PlanBadge | None = None,
    ) -> SavedPlan:
        """Create a plan.

        Args:
            devices: devices of this machine.

        Raises:
            EngineError: the name cannot be used.
        """
        known = {device.id: device for device in devices}
        named = [*params.all_devices, *(device for device, _ in params.reserve)]
        refs = tuple(
            DeviceRef(device, known[device].uuid, known[device].name)
            if device in known
            else DeviceRef(device)
            for device in dict.fromkeys(named)
        )
        return cls(checked_name(name), replace(params, path=""), refs, badge)

    def resolved(self, path: str, devices: Sequence[DeviceInfo]) -> LoadParams:
        """Return the parameters with the current ids of the plan's devices.

        Args:
            path: path of the model.
            devices: devices of this machine.

        Raises:
            EngineError: a device in the plan does not exist on this machine.
        """
        now = {ref.id: _found(ref, devices, self.name) for ref in self.devices}
        params = self.params
        return replace(
            params,
            path=path,
            devices=tuple(now.get(device, device) for device in params.devices),
            overrides=tuple((regex, now.get(to, to)) for regex, to in params.overrides),
            reserve=tuple((now.get(device, device), n) for device, n in params.reserve),
        )


def _found(ref: DeviceRef, devices: Sequence[DeviceInfo], plan: str) -> str:
    """Return the current id of a device."""
    for device in devices:
        if device.uuid == ref.uuid if ref.uuid else device.id == ref.id:
            return device.id
    name = f"{ref.name} ({ref.id})" if ref.name else ref.id
    raise EngineError(
        "The plan '{plan}' needs {device}, which is not available.",
        "Choose another plan, or save this one again.",
        plan=plan,
        device=name,
    )


def checked_name(name: str) -> str:
    """Return a name with its spaces normalised.

    Raises:
        EngineError: the name is empty, too long, reserved or not printable.
    """
    plain = " ".join(name.split())
    if (
        not plain
        or len(plain) > MAX_LETTERS
        or not plain.isprintable()
        or plain.lower() == AUTO_PLAN
    ):
        raise EngineError(
            "'{name}' cannot be the name of a plan.",
            "Use up to {n} characters; '{reserved}' is reserved.",
            name=plain[:60],
            n=MAX_LETTERS,
            reserved=AUTO_PLAN,
        )
    return plain


@dataclass(frozen=True, slots=True)
class ModelKey:
    """Identity of the model that plans belong to.

    Attributes:
        hash: hash of the model's contents; "" if unknown.
        name: name given in its file.
        n_bytes: size of its weights.
    """

    hash: str
    name: str
    n_bytes: int

    @property
    def file_name(self) -> str:
        """Name of the file with the model's plans."""
        unique = self.hash or hashlib.sha256(f"{self.name} {self.n_bytes}".encode()).hexdigest()
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-.")[:40] or "model"
        return f"{readable}-{unique[:16]}.json"


def model_key(path: str | Path) -> ModelKey:
    """Return the identity of the model in a file.

    Raises:
        ModelFileError: the file is missing or is not a GGUF.
    """
    with GGUFFile.open(path) as file:
        info = describe(file)
        return ModelKey(model_hash(file), info.name, info.n_bytes)


class PlanStore:
    """The saved plans of all models, in files in `folder`. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    @classmethod
    def of_user(cls) -> PlanStore:
        """Return the plans of this user.

        Raises:
            EngineError: there is no folder to keep plans in.
        """
        folder = tandem_folder("data")
        if folder is None:
            raise EngineError("There is no folder for saved plans.", "Set TANDEM_HOME to a folder.")
        return cls(folder / FOLDER)

    def plans(self, model: ModelKey) -> list[SavedPlan]:
        """Return the intact plans of a model, sorted by name."""
        with self._lock:
            return self._read(model)

    def find(self, model: ModelKey, name: str) -> SavedPlan:
        """Return the plan with this name, ignoring case.

        Raises:
            EngineError: there is no such plan.
        """
        found = self.plans(model)
        for plan in found:
            if plan.name.casefold() == " ".join(name.split()).casefold():
                return plan
        names = ", ".join(f"'{plan.name}'" for plan in found)
        raise EngineError(
            "{model} has no plan named '{name}'.",
            "It has {names}." if names else "Save one with: tandem plan MODEL --save NAME.",
            model=model.name,
            name=name[:60],
            names=names,
        )

    def save(self, model: ModelKey, plan: SavedPlan) -> None:
        """Save a plan, replacing any plan with the same name.

        Raises:
            EngineError: the file cannot be written.
        """
        with self._lock:
            others = [p for p in self._read(model) if p.name.casefold() != plan.name.casefold()]
            if len(others) >= MAX_PLANS:
                raise EngineError(
                    "{model} already has {n} plans.", "Delete some.", model=model.name, n=MAX_PLANS
                )
            self._write(model, [*others, plan])

    def delete(self, model: ModelKey, name: str) -> None:
        """Delete a plan.

        Raises:
            EngineError: there is no such plan, or its file cannot be written.
        """
        plan = self.find(model, name)
        with self._lock:
            self._write(model, [p for p in self._read(model) if p.name != plan.name])

    def _read(self, model: ModelKey) -> list[SavedPlan]:
        document = read_json(self._folder / model.file_name)
        if not isinstance(document, dict) or document.get("version") != VERSION:
            return []
        entries = document.get("plans")
        found: dict[str, SavedPlan] = {}
        for entry in entries if isinstance(entries, list) else ():
            with suppress(EngineError):
                plan = plan_from(entry)
                found.setdefault(plan.name.casefold(), plan)
        return sorted(found.values(), key=lambda plan: plan.name.casefold())

    def _write(self, model: ModelKey, plans: Sequence[SavedPlan]) -> None:
        path = self._folder / model.file_name
        try:
            self._set_aside(path)
            document = {
                "version": VERSION,
                "model": asdict(model),
                "plans": [plan_document(plan) for plan in plans],
            }
            replace_json(path, document)
        except OSError as error:
            raise EngineError(
                "The plans cannot be written to {path}: {problem}.",
                "Free up disk space, or allow writing there, then try again.",
                path=str(path),
                problem=reason_of(error),
            ) from None

    def _set_aside(self, path: Path) -> None:
        """Rename a file that is unreadable or from another version."""
        document = read_json(path)
        is_ours = isinstance(document, dict) and document.get("version") == VERSION
        if not is_ours and path.exists():
            path.replace(path.with_suffix(".set-aside.json"))


def plan_document(plan: SavedPlan) -> dict[str, Any]:
    """Return a plan as a JSON-ready dictionary."""
    return {
        "kind": KIND,
        "version": VERSION,
        "name": plan.name,
        "params": params_document(plan.params),
        "devices": [asdict(ref) for ref in plan.devices],
        "badge": None if plan.badge is None else asdict(plan.badge),
    }


@dataclass(frozen=True, slots=True)
class _SavedFields:
    name: str
    devices: tuple[DeviceRef, ...]
    badge: PlanBadge | None = None


def plan_from(document: object) -> SavedPlan:
    """Return the plan in a JSON document.

    Raises:
        EngineError: the document is not a plan, is damaged, or is from another version.
    """
    if not isinstance(document, Mapping) or document.get("kind") != KIND:
        raise EngineError(
            "This is not a plan.", "Export one with: tandem plans MODEL --export NAME."
        )
    if document.get("version") != VERSION:
        raise EngineError("The plan is from another version of Tandem.", "Save it again.")
    params = params_from(document.get("params"), "")
    try:
        saved = read_document(_SavedFields, document)
    except WrongValue:
        raise EngineError("The plan is damaged.", "Save it again.") from None
    return SavedPlan(checked_name(saved.name), params, saved.devices, saved.badge)


def export_plan(plan: SavedPlan, path: Path) -> None:
    """Write a plan to a file that others can import.

    Raises:
        EngineError: the file cannot be written.
    """
    try:
        replace_json(path, plan_document(plan))
    except OSError as error:
        raise EngineError(
            "{path} cannot be written: {problem}.",
            "Choose another folder, or free up disk space.",
            path=str(path),
            problem=reason_of(error),
        ) from None


def import_plan(path: Path) -> SavedPlan:
    """Read an exported plan.

    Raises:
        EngineError: the file cannot be read, or is not a plan.
    """
    try:
        document = json.loads(read_file(path, MAX_BYTES).decode())
    except OSError as error:
        problem = reason_of(error)
        raise EngineError(
            "{path} cannot be read: {problem}.", path=str(path), problem=problem
        ) from None
    except (ValueError, RecursionError):
        raise EngineError(
            "{path} is not a plan.", "It must be a JSON file.", path=str(path)
        ) from None
    return plan_from(document)


def fastest_plan(
    plans: Sequence[SavedPlan],
    planner: Planner,
    path: str,
    devices: Sequence[DeviceInfo],
    n_ctx: int = 0,
) -> SavedPlan | None:
    """Return the fastest plan that fits into the free memory on this machine.

    Measured plans come first, by decode speed; among the others, the longest context wins. None if
    no plan fits.

    Args:
        path: path of the model.
        devices: devices of this machine.
        n_ctx: minimum context length in tokens.
    """
    free = {device.id: device.free_bytes for device in devices}
    fitting: list[tuple[float, int, SavedPlan]] = []
    for plan in plans:
        with suppress(EngineError):
            found = planner.plan(plan.resolved(path, devices), free)
            if found.n_ctx >= n_ctx and not found.shortages(free):
                speed = plan.badge.decode_ts if plan.badge else 0.0
                fitting.append((speed, found.n_ctx, plan))
    return max(fitting, key=lambda entry: entry[:2])[2] if fitting else None
