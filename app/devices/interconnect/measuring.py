"""Measurements for the window in a separate process.

They import torch, hold memory on every GPU until the process exits, and can leave a GPU's driver
in a state that is only cleared when the process exits.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence

import engine  # names needed only for measuring are imported on use
from app.core.translation import ENGLISH, language, tr, use_language
from app.devices.interconnect.interconnect import measure_links
from engine import DeviceInfo, EngineError, list_devices, program_command, tie_to_parent

log = logging.getLogger(__name__)

COMMAND = program_command("app.devices.interconnect.measuring")

MAX_S = 600.0  # time limit per measurement, in seconds; it may compile kernels for several GPUs


def measure_apart(
    devices: Sequence[DeviceInfo], say: Callable[[str], None], is_stopped: Callable[[], bool]
) -> None:
    """Run `measure_links` in another process, which is killed if `is_stopped` returns True.

    Raises:
        EngineError: the process cannot be started, crashed or hung.
    """
    names = [device.id for device in devices if device.usable]
    request = {"devices": names, "language": language()}
    step = tr("startup")
    try:
        with engine.TrialProcess(COMMAND, request, {}) as child:
            for message in child.messages(MAX_S, MAX_S):
                if is_stopped():
                    return
                if isinstance(message, str):
                    log.warning("measuring ended early (%s): %s", message, child.said())
                    what = tr("Measuring ended early ({why}); the last step was: {step}")
                    raise EngineError(
                        what.format(why=message, step=step),
                        tr("Earlier measurements are kept. Measure again."),
                    )
                step = str(message.get("said", ""))
                say(step)
    except OSError as error:
        why = error.strerror or str(error)
        what = tr("Measuring failed: {why}.").format(why=why)
        raise EngineError(what, tr("Try again.")) from error


def main() -> None:
    """Measure the devices listed on standard input."""
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
