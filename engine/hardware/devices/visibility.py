"""Which GPUs this process can use: those that variables show, less those that have stopped.

CUDA's rules: the entries of CUDA_VISIBLE_DEVICES are numbers or prefixes of UUIDs; the first that
fits no GPU, or more than one, ends the list; naming a GPU twice hides all (CUDA C++ Programming
Guide, "CUDA Environment Variables"). Numbers count in the order that CUDA_DEVICE_ORDER sets.

HIP knows the same kind of list, as HIP_VISIBLE_DEVICES or, without that, CUDA_VISIBLE_DEVICES; it
counts the GPUs that ROCR_VISIBLE_DEVICES has left, in that one's order (ROCm's documentation, "GPU
isolation techniques").

A GPU stops after a fault in a computation: CUDA's and HIP's state of a GPU, the *context*, belongs
to the process and survives no such fault.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from engine.errors import DeviceStopped

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
HIP_VISIBLE, ROCR_VISIBLE = "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
PCI_ORDER = "PCI_BUS_ID"
NONE = ("", "-1", "NoDevFiles")
"""Entries that people and programs write to hide all GPUs; the last one is SLURM's."""


def visible(uuids: Sequence[str], value: str | None) -> list[int]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES shows, in its order, as indices into `uuids`.

    Args:
        uuids: UUIDs of all GPUs in PCI order.
        value: value of the variable; None where it is not set.
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
    """Return the GPUs that HIP shows to this process, in its order, as indices into `uuids`.

    Args:
        uuids: UUIDs of all GPUs in the driver's order.
    """
    left = visible(uuids, os.environ.get(ROCR_VISIBLE))
    return [left[index] for index in visible([uuids[i] for i in left], _hip_value())]


def hip_visible_problem(uuids: Sequence[str]) -> str:
    """Return what is wrong with HIP's variables, as a sentence; see `hip_visible`."""
    rocr = os.environ.get(ROCR_VISIBLE)
    left = [uuids[index] for index in visible(uuids, rocr)]
    return visible_problem(uuids, rocr, ROCR_VISIBLE) or visible_problem(
        left, _hip_value(), _hip_variable()
    )


def hiding_variables(*, on_hip: bool) -> str:
    """Return which variables choose GPUs, such as "CUDA_VISIBLE_DEVICES is '1'"."""
    names = (ROCR_VISIBLE, _hip_variable()) if on_hip else (VISIBLE,)
    return " and ".join(f"{name} is '{os.environ[name]}'" for name in names if name in os.environ)


def variables_for(uuids: Mapping[str, str], *, on_hip: bool) -> dict[str, str]:
    """Return the variables that show these GPUs alone, in this order, to a child process.

    Args:
        uuids: UUID of each GPU by id; "" where it is not known.
        on_hip: whether torch was built for AMD's GPUs.
    """
    if not on_hip and all(uuids.values()):
        return {VISIBLE: ",".join(uuids.values())}
    value = _hip_value() if on_hip else os.environ.get(VISIBLE)
    entries = None if value is None else _entries(value)
    numbers = [int(name.partition(":")[2]) for name in uuids]
    chosen = [str(number) if entries is None else entries[number] for number in numbers]
    variables = (HIP_VISIBLE, VISIBLE) if on_hip else (VISIBLE,)  # PyTorch wants both alike
    return dict.fromkeys(variables, ",".join(chosen))


def _hip_variable() -> str:
    return HIP_VISIBLE if HIP_VISIBLE in os.environ else VISIBLE


def _hip_value() -> str | None:
    return os.environ.get(_hip_variable())


def visible_problem(uuids: Sequence[str], value: str | None, variable: str = VISIBLE) -> str:
    """Return what is wrong with a list of GPUs, as a sentence; "" if it shows all it names.

    Args:
        uuids, value: see `visible`.
        variable: name of the variable that has the list.
    """
    if value is None:
        return ""
    seen: list[int] = []
    for entry in _entries(value):
        found = _find_gpus(uuids, entry)
        if entry in NONE:
            return ""
        if len(found) != 1:
            return (
                f"{variable} is '{value}': {_why_none(uuids, entry, found)}, which ends the list."
            )
        if found[0] in seen:
            return f"{variable} is '{value}': it names GPU {found[0]} twice, which hides all GPUs."
        seen += found
    return ""


def order_problem(n_gpu: int) -> str:
    """Return why it is unknown which GPU a number of CUDA_VISIBLE_DEVICES means; "" if it is known.

    In any order but that of the PCI bus it depends on CUDA's own ranking of the GPUs by speed.
    """
    order = os.environ.get(ORDER, PCI_ORDER)
    if n_gpu < 2 or order == PCI_ORDER or not has_numbers(os.environ.get(VISIBLE)):
        return ""
    return (
        f"{VISIBLE} has numbers and {ORDER} is {order}, so only CUDA knows which GPUs are meant; "
        f"set {ORDER} to {PCI_ORDER}, or name the GPUs by their UUIDs."
    )


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


def _why_none(uuids: Sequence[str], entry: str, found: Sequence[int]) -> str:
    """Return why an entry names no GPU."""
    if entry.startswith("MIG-"):
        return f"'{entry}' is a part of a GPU (MIG), which Tandem cannot use"
    if found:
        return f"{len(found)} GPUs have UUIDs that begin with '{entry}'"
    if _is_number(entry):
        n = len(uuids)
        return f"there is no GPU {entry}, as {n} {'is' if n == 1 else 'are'} here"
    if entry.startswith("GPU-"):
        return f"no GPU here has a UUID that begins with '{entry}'"
    return f"'{entry}' is neither a number nor a UUID of a GPU"


_stopped: dict[str, str] = {}


def mark_stopped(device: str, why: str) -> None:
    """Note that a GPU has stopped working, for the rest of this process.

    Args:
        device: id of the GPU.
        why: what the driver reports, as the end of a sentence; the first report counts.
    """
    _stopped.setdefault(device, why)


def stopped_gpus() -> Mapping[str, str]:
    """Return what the driver reported for each GPU that has stopped working, by id."""
    return _stopped


def require_running(device: str) -> None:
    """Check that a device has not stopped working.

    Raises:
        DeviceStopped: it has.
    """
    if device in _stopped:
        raise DeviceStopped(device, _stopped[device])
