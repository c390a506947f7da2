"""Which GPUs CUDA shows to this process, by the variables that it reads when it starts.

CUDA's rules: the entries of CUDA_VISIBLE_DEVICES are numbers or beginnings of UUIDs; the first that
fits no GPU, or more than one, ends the list; naming a GPU twice hides all (CUDA C++ Programming
Guide, "CUDA Environment Variables"). Numbers count in the order that CUDA_DEVICE_ORDER asks for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["order_problem", "visible", "visible_problem"]

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"
NONE = ("", "-1", "NoDevFiles")
"""Entries that people and programs write to hide GPUs; the last one is SLURM's."""


def visible(uuids: Sequence[str], value: str | None) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows, in its order, as indices into `uuids`.

    Args:
        uuids: of all GPUs in PCI order.
        value: of the variable; None where it is not set.
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


def visible_problem(uuids: Sequence[str], value: str | None) -> str:
    """What is wrong with CUDA_VISIBLE_DEVICES, in a sentence; "" where it shows all that it names.

    Args: as of `visible`.
    """
    if value is None:
        return ""
    seen: list[int] = []
    for entry in _entries(value):
        found = _find_gpus(uuids, entry)
        if entry in NONE:
            return ""
        if len(found) != 1:
            return f"{VISIBLE} is '{value}': {_why_none(uuids, entry, found)}, which ends the list."
        if found[0] in seen:
            return f"{VISIBLE} is '{value}': it names GPU {found[0]} twice, which hides all GPUs."
        seen += found
    return ""


def order_problem(n_gpu: int) -> str:
    """Why it is not known which GPU a number of CUDA_VISIBLE_DEVICES means; "" where it is.

    In any other order than that of the bus it depends on what CUDA thinks of the GPUs' speed.
    """
    order = os.environ.get(ORDER, PCI_ORDER)
    if n_gpu < 2 or order == PCI_ORDER or not has_numbers(os.environ.get(VISIBLE)):
        return ""
    return (
        f"{VISIBLE} has numbers and {ORDER} is {order}, so that nobody but CUDA knows which GPUs "
        f"are meant; set {ORDER} to {PCI_ORDER}, or name the GPUs by their UUIDs."
    )


def has_numbers(value: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES names a GPU by its number."""
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
    """Why an entry names no GPU."""
    if entry.startswith("MIG-"):
        return f"'{entry}' is a part of a GPU, which Tandem cannot use"
    if found:
        return f"{len(found)} GPUs have UUIDs that begin with '{entry}'"
    if _is_number(entry):
        n = len(uuids)
        return f"there is no GPU {entry}, as {n} {'is' if n == 1 else 'are'} here"
    if entry.startswith("GPU-"):
        return f"no GPU here has a UUID that begins with '{entry}'"
    return f"'{entry}' is neither a number nor a UUID of a GPU"
