"""The program that measures for the window: devices as a line of JSON in, one for each step out.

Run as `python -m app.devices.interconnect.measuring_program`; see `interconnect.measuring`.
"""

from __future__ import annotations

import json
import sys

from app.core.translation import ENGLISH, use_language
from app.devices.interconnect.links import measure_links
from engine import list_devices, tie_to_parent


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
