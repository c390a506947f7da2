"""The version of Tandem that is installed; imports neither torch nor Qt."""

from __future__ import annotations

from importlib import metadata


def package_version() -> str:
    """Return Tandem's version; "" where it runs from a folder without being installed."""
    try:
        return metadata.version("tandem-llm")
    except metadata.PackageNotFoundError:
        return ""
