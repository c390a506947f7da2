"""First trial of our kernels on a card, in a child process, and its verdict, which is kept.

A driver that hangs and a kernel that takes its process's GPU along must not take Tandem with them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import date

import torch

from engine.hardware.card_records import WHOLE_CARD, CardRecords, CardVerdict, card_key
from engine.hardware.devices.types import DeviceInfo
from engine.hardware.devices.visibility import variables_for
from engine.hardware.trial_process import HUNG, TrialProcess
from engine.util.programs import program_command

log = logging.getLogger(__name__)

COMMAND = program_command("engine.backends.gpu.self_test_program")
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
