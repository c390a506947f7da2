"""The GPUs this process can use: those selected by environment variables, except stopped ones.

CUDA's rules: the entries in CUDA_VISIBLE_DEVICES are numbers or UUID prefixes; the first entry that
matches no GPU, or more than one, ends the list; naming a GPU twice hides all (CUDA C++ Programming
Guide, "CUDA Environment Variables"). CUDA_DEVICE_ORDER sets the order in which GPUs are numbered.

HIP reads the same kind of list from HIP_VISIBLE_DEVICES or else CUDA_VISIBLE_DEVICES; it numbers
the GPUs that ROCR_VISIBLE_DEVICES leaves, in that order (ROCm's documentation, "GPU isolation
techniques").

After a fault in a computation, a GPU stops working for the process: its state in CUDA or HIP, the
*context*, belongs to the process and does not survive such a fault.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from engine.errors import DeviceStopped, Sentence, listed

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
HIP_VISIBLE, ROCR_VISIBLE = "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
PCI_ORDER = "PCI_BUS_ID"
NONE = ("", "-1", "NoDevFiles")
"""Entries that hide all GPUs; the last one comes from SLURM."""


def visible(uuids: Sequence[str], value: str | None) -> list[int]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, in its order, as indices into `uuids`.

    Args:
        uuids: UUIDs of all GPUs in PCI order.
    """
    if value is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for entry in _entries(value):
        found = _find_gpus(uuids, entry)
        if len(found) != 1:
            break
        if found[0] in shown:
            return []
        shown += found
    return shown


def hip_visible(uuids: Sequence[str]) -> list[int]:
    """Return the GPUs that HIP shows to this process, in its order, as indices into `uuids`."""
    left = visible(uuids, os.environ.get(ROCR_VISIBLE))
    return [left[index] for index in visible([uuids[i] for i in left], _hip_value())]


def hip_visible_problem(uuids: Sequence[str]) -> str:
    """Return the error in HIP's variables as a sentence; "" if there is none. See `hip_visible`."""
    rocr = os.environ.get(ROCR_VISIBLE)
    left = [uuids[index] for index in visible(uuids, rocr)]
    return visible_problem(uuids, rocr, ROCR_VISIBLE) or visible_problem(
        left, _hip_value(), _hip_variable()
    )


def hiding_variables(*, on_hip: bool) -> str:
    """Return the variables that select GPUs, with their values: "CUDA_VISIBLE_DEVICES is '1'"."""
    names = (ROCR_VISIBLE, _hip_variable()) if on_hip else (VISIBLE,)
    found = [
        Sentence("{name} is '{value}'", name=name, value=os.environ[name])
        for name in names
        if name in os.environ
    ]
    return listed(found) if found else ""


def variables_for(uuids: Mapping[str, str], *, on_hip: bool) -> dict[str, str]:
    """Return the variables that make a child process see only these GPUs, in this order.

    Args:
        uuids: UUID of each GPU by id; "" if unknown.
        on_hip: whether torch was built for AMD GPUs.
    """
    if not on_hip and all(uuids.values()):
        return {VISIBLE: ",".join(uuids.values())}
    value = _hip_value() if on_hip else os.environ.get(VISIBLE)
    entries = None if value is None else _entries(value)
    numbers = [int(name.partition(":")[2]) for name in uuids]
    chosen = [str(number) if entries is None else entries[number] for number in numbers]
    variables = (HIP_VISIBLE, VISIBLE) if on_hip else (VISIBLE,)  # PyTorch requires equal values
    return dict.fromkeys(variables, ",".join(chosen))


def _hip_variable() -> str:
    return HIP_VISIBLE if HIP_VISIBLE in os.environ else VISIBLE


def _hip_value() -> str | None:
    return os.environ.get(_hip_variable())


def visible_problem(uuids: Sequence[str], value: str | None, variable: str = VISIBLE) -> str:
    """Return the error in a list of GPUs as a sentence; "" if every entry is valid."""
    if value is None:
        return ""
    seen: list[int] = []
    for entry in _entries(value):
        found = _find_gpus(uuids, entry)
        if entry in NONE:
            return ""
        if len(found) != 1:
            return Sentence(
                "{variable} is '{value}': {why}, which ends the list.",
                variable=variable, value=value, why=_why_none(uuids, entry, found),
            )  # fmt: skip
        if found[0] in seen:
            return Sentence(
                "{variable} is '{value}': it names GPU {n} twice, which hides all GPUs.",
                variable=variable, value=value, n=found[0],
            )  # fmt: skip
        seen += found
    return ""


def order_problem(n_gpu: int) -> str:
    """Return why numbers in CUDA_VISIBLE_DEVICES are ambiguous, as a sentence; "" if they are not.

    In any order but that of the PCI bus, numbers depend on CUDA's own ranking of GPUs by speed.
    """
    order = os.environ.get(ORDER, PCI_ORDER)
    if n_gpu < 2 or order == PCI_ORDER or not has_numbers(os.environ.get(VISIBLE)):
        return ""
    return Sentence(
        "{variable} contains numbers and {order} is {value}, so only CUDA can tell which GPUs are"
        " meant; set {order} to {wanted}, or name the GPUs by UUID.",
        variable=VISIBLE, order=ORDER, value=order, wanted=PCI_ORDER,
    )  # fmt: skip


def has_numbers(value: str | None) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES names a GPU by its number."""
    return any(_is_number(entry) for entry in _entries(value or ""))


def _entries(value: str) -> list[str]:
    return [entry.strip() for entry in value.split(",")]


def _is_number(entry: str) -> bool:
    return entry.isascii() and entry.isdigit()


def _find_gpus(uuids: Sequence[str], entry: str) -> list[int]:
    if _is_number(entry):
        return [int(entry)] if int(entry) < len(uuids) else []
    if not entry.startswith("GPU-"):
        return []
    return [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]


def _why_none(uuids: Sequence[str], entry: str, found: Sequence[int]) -> Sentence:
    if entry.startswith("MIG-"):
        return Sentence("'{entry}' is a part of a GPU (MIG), which Tandem cannot use", entry=entry)
    if found:
        return Sentence("{n} GPUs have UUIDs that start with '{entry}'", n=len(found), entry=entry)
    if _is_number(entry):
        return Sentence(
            "there is no GPU {entry}, as only {n} is present"
            if len(uuids) == 1
            else "there is no GPU {entry}, as only {n} are present",
            entry=entry,
            n=len(uuids),
        )
    if entry.startswith("GPU-"):
        return Sentence("no GPU has a UUID that starts with '{entry}'", entry=entry)
    return Sentence("'{entry}' is neither a number nor a GPU's UUID", entry=entry)


_stopped: dict[str, str] = {}


def mark_stopped(device: str, why: str) -> None:
    """Record that a GPU has stopped working for the rest of this process.

    Args:
        why: the driver's report, as the end of a sentence; only the first report is kept.
    """
    _stopped.setdefault(device, why)


def stopped_gpus() -> Mapping[str, str]:
    """Return the driver's report on each GPU that has stopped working, by id."""
    return _stopped


def require_running(device: str) -> None:
    """Check that a device has not stopped working.

    Raises:
        DeviceStopped: the device has stopped working.
    """
    if device in _stopped:
        raise DeviceStopped(device, _stopped[device])
