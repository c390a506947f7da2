"""Check of our kernels on the GPUs that a model will use, before it is planned."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import date

import torch

from engine.errors import EngineError, OutOfDeviceMemory
from engine.hardware.backend_choice import (
    VARIABLE,
    allow_kernels,
    captures_tokens,
    chosen_backend,
    has_triton,
    kernels_for,
    refuse_kernels,
    refused_kernels,
    triton_package,
)
from engine.hardware.card_records import (
    WHOLE_CARD,
    CardRecords,
    CardVerdict,
    card_key,
    card_problems,
)
from engine.hardware.devices.catalog import list_devices
from engine.hardware.devices.types import DeviceInfo
from engine.hardware.devices.visibility import variables_for
from engine.hardware.fallbacks import OF_THIS_PROCESS, Fallbacks
from engine.hardware.torch_devices import free_bytes, is_out_of_memory
from engine.hardware.trial_process import HUNG, TrialProcess
from engine.util.programs import program_command

log = logging.getLogger(__name__)

COMMAND = program_command("engine.backends.gpu.self_test")
"""Command of the child."""

START_S = 120.0
"""Seconds for the child to import torch."""

STEP_S = 120.0
"""Seconds for one check, which compiles its kernels first."""


def verdict_on(info: DeviceInfo, records: CardRecords | None = None) -> CardVerdict | None:
    """Return whether kernels work on a GPU: the verdict on disk, else that of a trial made now.

    Args:
        info: the GPU.
        records: place for verdicts; the user's by default.

    Returns:
        None if no trial could be made.
    """
    records, key = records or CardRecords.of_user(), card_key(info)
    verdict = records.find(key, WHOLE_CARD)
    if verdict is None:
        verdict = try_card(info)
        if verdict is not None:
            records.keep(key, WHOLE_CARD, verdict)
    return verdict


def try_card(
    info: DeviceInfo,
    *,
    command: Sequence[str] = COMMAND,
    start_s: float = START_S,
    step_s: float = STEP_S,
) -> CardVerdict | None:
    """Test kernels on a GPU in a child process, which is killed when it falls silent.

    Args:
        info: the GPU.
        command: command line of the child.
        start_s: seconds it may be silent before its first step.
        step_s: seconds it may be silent later.

    Returns:
        None if the child did not start, or found something that says nothing about the kernels.
    """
    log.info("testing kernels on %s (%s) in a process of its own", info.id, info.name)
    try:
        with TrialProcess(command, {"device": "cuda:0"}, only_shown(info)) as child:
            return _verdict(child, start_s, step_s)
    except OSError as error:
        log.warning("%s could not be tested in a child process: %s", info.id, error)
        return None


def _verdict(child: TrialProcess, start_s: float, step_s: float) -> CardVerdict | None:
    """Return what a child finds, or in which step it failed; None if it does not get that far."""
    step, today = "", date.today().isoformat()
    for message in child.messages(start_s, step_s):
        if isinstance(message, str):
            log.warning("testing kernels failed: %s; its output: %s", message, child.said())
            if not step:
                return None
            if message == HUNG:
                why = f"a test program did not end within {step_s:.0f} s in {step}"
                return CardVerdict("hung", why, today)
            why = f"a test program ended in the middle of {step} ({message})"
            return CardVerdict("crashed", why, today)
        if "begin" in message:
            step = str(message["begin"])
        elif "refused" in message:
            log.warning("kernels could not be tested: %s", message["refused"])
            return None
        elif problem := str(message.get("problem", "")):
            return CardVerdict("crashed" if message.get("has_fault") else "wrong", problem, today)
        elif "problem" in message:
            return CardVerdict("passed", "", today)
    return None


def only_shown(info: DeviceInfo) -> Mapping[str, str]:
    """Return the environment variables for a process that sees one GPU alone, as cuda:0."""
    return variables_for({info.id: info.uuid}, on_hip=bool(torch.version.hip))


UNSET = f"Unset the environment variable {VARIABLE}."
"""Sentence on what helps where a person chose the slower way."""

NEEDED_BYTES = 64 << 20
"""Bytes that the test needs beside what is loaded, mostly for the code of kernels."""


def prove_kernels(names: Iterable[str]) -> Fallbacks:
    """Check that our kernels compute correctly on GPUs; refuse them where they do not.

    Args:
        names: ids of the devices that hold parts of a model.

    Returns:
        The model's list of what makes these GPUs slower. A GPU whose kernels are refused, or that
        has none, computes with the torch reference.
    """
    names = tuple(dict.fromkeys(names))
    gpus = [name for name in names if name != "cpu"]
    with_kernels = {name for name in names if kernels_for(name) == "gpu"}
    found = Fallbacks({*gpus, *with_kernels}, OF_THIS_PROCESS)
    for name in gpus:
        if kernels_for(name) and (problem := _problem_of(name)):
            refuse_kernels(name, problem)
        _report_choice(name, found)
    return found


def prove_cards(devices: Iterable[DeviceInfo]) -> Mapping[str, str]:
    """Test our kernels on GPUs in child processes again, whatever is known of them.

    Args:
        devices: any devices; the CPU is skipped, and all are where no kernels would be used.

    Returns:
        What is wrong, as the end of a sentence, by the id of the GPU; the others passed, or could
        not be tested.
    """
    records, uses_kernels = CardRecords.of_user(), has_triton() and chosen_backend() != "reference"
    gpus = [info for info in devices if info.kind != "cpu" and uses_kernels]
    for info in gpus:
        records.forget(card_key(info), WHOLE_CARD)
    for info in gpus:  # equal cards share a verdict
        verdict = verdict_on(info, records)
        if verdict is not None and verdict.passed:
            allow_kernels(info.id)
    return card_problems(gpus, records)


def _problem_of(name: str) -> str:
    """Return why kernels must not be used on a GPU, as the end of a sentence; "" if they may.

    The card is tested in a child process once, or in this one where that is not possible.

    Raises:
        OutOfDeviceMemory: it has no memory left.
        RuntimeError: it is lost to this process.
    """
    from engine.backends.gpu.launch.own_launcher import prepare  # needs Triton

    info = next((info for info in list_devices() if info.id == name), None)
    if info is None:
        return _problem_here(name)
    try:
        prepare()
    except EngineError as error:  # is said of this machine, not of the card
        return str(error).rstrip(".")
    records = CardRecords.of_user()
    if verdict_on(info, records) is None:
        return _problem_here(name)
    return card_problems([info], records).get(name, "")


def _problem_here(name: str) -> str:
    """Test kernels on a GPU in this process; see `_problem_of`."""
    from engine.backends.gpu.self_test import problem_of  # needs Triton

    try:
        return problem_of(torch.device(name))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        free = free_bytes([name])[name]
        raise OutOfDeviceMemory(name, free + NEEDED_BYTES, free, "to test its kernels") from None


def _report_choice(name: str, found: Fallbacks) -> None:
    """Report why a GPU computes without our kernels, or starts them one by one."""
    backend = chosen_backend()
    if why := refused_kernels().get(name):
        found.report("kernels", [name], why)
    elif backend == "reference":
        found.report("kernels", [name], f"{VARIABLE} is set to {backend}", UNSET)
    elif not kernels_for(name):
        package = triton_package()
        found.report("kernels", [name], "Triton is not installed", f"Run: pip install {package}")
    elif not captures_tokens():
        found.report("graph", [name], f"{VARIABLE} is set to {backend}", UNSET)
