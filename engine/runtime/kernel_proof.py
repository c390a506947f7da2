"""Check of our kernels on the GPUs that a model will use, before it is planned."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import date

import torch

from engine.errors import EngineError, OutOfDeviceMemory, Sentence, clause
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

START_S = 120.0
"""Seconds that the child has to import torch."""

STEP_S = 120.0
"""Seconds for one check, including the compilation of its kernels."""


def verdict_on(info: DeviceInfo, records: CardRecords | None = None) -> CardVerdict | None:
    """Return whether kernels work on a GPU, from the verdict on disk or else a new trial.

    Args:
        info: the GPU.
        records: store for verdicts; the user's by default.

    Returns:
        None if no trial was possible.
    """
    records, key = records or CardRecords.of_user(), card_key(info)
    verdict = records.find(key, WHOLE_CARD)
    if verdict is None:
        verdict = try_card(info)
        if verdict is not None:
            records.keep(key, WHOLE_CARD, verdict)
    return verdict


def try_card(
    info: DeviceInfo, *, command: Sequence[str] = COMMAND, start_s: float = START_S,
    step_s: float = STEP_S,
) -> CardVerdict | None:  # fmt: skip
    """Test kernels on a GPU in a child process, which is killed if it stops responding.

    Args:
        info: the GPU.
        command: command line of the child.
        start_s: timeout, in seconds, before its first step.
        step_s: timeout, in seconds, for later steps.

    Returns:
        None if the child did not start, or its result says nothing about the kernels.
    """
    log.info("testing kernels on %s (%s) in a child process", info.id, info.name)
    try:
        with TrialProcess(command, {"device": "cuda:0"}, only_shown(info)) as child:
            return _verdict(child, start_s, step_s)
    except OSError as error:
        log.warning("%s could not be tested in a child process: %s", info.id, error)
        return None


def _verdict(child: TrialProcess, start_s: float, step_s: float) -> CardVerdict | None:
    step, today = "", date.today().isoformat()
    for message in child.messages(start_s, step_s):
        if isinstance(message, str):
            log.warning("testing kernels failed: %s; its output: %s", message, child.said())
            if not step:
                return None
            if message == HUNG:
                why = Sentence(
                    "a test program was still testing {step} after {n:.0f} s", n=step_s, step=step
                )
                return CardVerdict("hung", why, today)
            why = Sentence(
                "a test program stopped while testing {step} ({message})",
                step=step,
                message=message,
            )
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
    """Return the environment variables for a process that sees only this GPU, as cuda:0."""
    return variables_for({info.id: info.uuid}, on_hip=bool(torch.version.hip))


UNSET = Sentence("Unset the environment variable {variable}.", variable=VARIABLE)
"""Remedy if the slower backend was chosen on purpose."""

NEEDED_BYTES = 64 << 20
"""Bytes that the test needs in addition to loaded models, mostly for kernel code."""


def prove_kernels(names: Iterable[str]) -> Fallbacks:
    """Check that our kernels compute correctly on GPUs; refuse kernels on GPUs where they do not.

    Args:
        names: ids of the devices that have parts of a model.

    Returns:
        The model's list of fallbacks. A GPU without usable kernels computes with the torch
        reference.
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
    """Test our kernels on GPUs again in child processes, regardless of the verdicts on disk.

    Args:
        devices: any devices; the CPU is skipped, and so are all GPUs if no kernels would be used.

    Returns:
        Problems, as ends of sentences, by GPU id; all other GPUs passed or could not be tested.
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
    """Return why kernels do not work on a GPU, tested once in a child process; "" if they work."""
    from engine.backends.gpu.launch.own_launcher import prepare  # needs Triton

    info = next((info for info in list_devices() if info.id == name), None)
    if info is None:
        return _problem_here(name)
    try:
        prepare()
    except EngineError as error:  # a problem with this machine, not the GPU
        return clause(str(error))
    records = CardRecords.of_user()
    if verdict_on(info, records) is None:
        return _problem_here(name)
    return card_problems([info], records).get(name, "")


def _problem_here(name: str) -> str:
    from engine.backends.gpu.self_test import problem_of  # needs Triton

    try:
        return problem_of(torch.device(name))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        free = free_bytes([name])[name]
        doing = Sentence("to test its kernels")
        raise OutOfDeviceMemory(name, free + NEEDED_BYTES, free, doing) from None


def _report_choice(name: str, found: Fallbacks) -> None:
    backend = chosen_backend()
    if why := refused_kernels().get(name):
        found.report("kernels", [name], why)
    elif backend == "reference":
        why = Sentence("{variable} is set to {backend}", variable=VARIABLE, backend=backend)
        found.report("kernels", [name], why, UNSET)
    elif not kernels_for(name):
        remedy = Sentence("Run: {remedy}", remedy=f"pip install {triton_package()}")
        found.report("kernels", [name], Sentence("Triton is not installed"), remedy)
    elif not captures_tokens():
        why = Sentence("{variable} is set to {backend}", variable=VARIABLE, backend=backend)
        found.report("graph", [name], why, UNSET)
