"""Program that prints facts about a Python environment as one line of JSON.

It runs in that environment, so it imports nothing from Tandem and supports Python 3.7.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import sysconfig

NAMES = ("torch", "llvmlite", "tokenizers")


def version_of(name: str) -> str:
    """Return a distribution's version if it can be imported, else ""."""
    try:
        from importlib import metadata  # new in 3.8

        return metadata.version(name) if importlib.util.find_spec(name) else ""
    except Exception:  # noqa: BLE001 environments may raise anything
        return ""


def folders() -> list[str]:
    """Return the folders with installed libraries, except the standard library and this folder."""
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
    """Print the facts."""
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
