"""The version of Tandem that is installed; imports neither torch nor Qt."""

from __future__ import annotations

from functools import cache


@cache  # reading it takes milliseconds, and predictions of speed ask for it each time
def package_version() -> str:
    """Return Tandem's version; "" where it runs from a folder without being installed."""
    from importlib import metadata  # late: the window does not need it to show

    try:
        return metadata.version("tandem-llm")
    except metadata.PackageNotFoundError:
        return ""
