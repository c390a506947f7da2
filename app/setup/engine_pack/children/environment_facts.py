"""The program by which a Python environment tells what it has, as a line of JSON.

It runs in that environment, so it imports nothing of Tandem, and Pythons from 3.7 on take it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import sysconfig

NAMES = ("torch", "llvmlite", "tokenizers")


def version_of(name: str) -> str:
    """Return the version of a distribution that can be imported; "" for any other."""
    try:
        from importlib import metadata  # 3.7 has none

        return metadata.version(name) if importlib.util.find_spec(name) else ""
    except Exception:  # noqa: BLE001 whatever a strange environment raises
        return ""


def folders() -> list[str]:
    """Return the folders of installed libraries, without Python's own and that of this file."""
    own = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    own.add(os.path.dirname(os.path.realpath(__file__)))
    return [
        path
        for path in sys.path
        if os.path.isdir(path)
        and os.path.realpath(path) not in own
        and os.path.basename(path) != "lib-dynload"
    ]


def main() -> None:
    """Write the facts; the program's main function."""
    facts = {
        "python": ".".join(map(str, sys.version_info[:2])),
        "kind": sys.implementation.name,
        "is_64_bit": sys.maxsize > 2**32,
        "folders": folders(),
        "versions": {name: version_of(name) for name in NAMES},
    }
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
