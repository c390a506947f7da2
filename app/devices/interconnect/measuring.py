"""Measurements for the window, in a process of their own.

They take torch, memory of every GPU for as long as a process lasts, and sometimes a GPU's driver
into a state that only the end of the process ends: nothing of that shall happen to the window.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence

import engine  # for names that only measuring needs, which are resolved when they are used
from app.core.translation import ENGLISH, language, tr, use_language
from app.devices.interconnect.interconnect import measure_links
from engine import DeviceInfo, EngineError, list_devices, program_command, tie_to_parent

log = logging.getLogger(__name__)

COMMAND = program_command("app.devices.interconnect.measuring")
"""Command line of the process."""

MAX_S = 600.0
"""Longest time for one measurement, in seconds; kernels for several GPUs may be compiled in it."""


def measure_apart(
    devices: Sequence[DeviceInfo], say: Callable[[str], None], is_stopped: Callable[[], bool]
) -> None:
    """Measure as `measure_links` does, in another process, which ends where it is stopped.

    Raises:
        EngineError: the process cannot be started, or ended or hung in a measurement.
    """
    names = [device.id for device in devices if device.usable]  # others' are left out there
    request = {"devices": names, "language": language()}
    doing = tr("its start")
    try:
        with engine.TrialProcess(COMMAND, request, {}) as child:
            for message in child.messages(MAX_S, MAX_S):
                if is_stopped():
                    return
                if isinstance(message, str):
                    log.warning("measuring has ended (%s): %s", message, child.said())
                    what = tr("Measuring ended early ({why}); the last step was: {step}")
                    raise EngineError(
                        what.format(why=message, step=doing),
                        tr("What was measured before is kept. Measure again."),
                    )
                doing = str(message.get("said", ""))
                say(doing)
    except OSError as error:
        why = error.strerror or str(error)
        what = tr("Nothing can be measured: {why}.").format(why=why)
        raise EngineError(what, tr("Try again.")) from error


def main() -> None:
    """Measure the devices that standard input names."""
    tie_to_parent()
    request = json.loads(sys.stdin.readline())
    use_language(request.get("language", ENGLISH))
    wanted = request["devices"]
    measure_links([device for device in list_devices() if device.id in wanted], _say)


def _say(sentence: str) -> None:
    sys.stdout.write(json.dumps({"said": sentence}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
