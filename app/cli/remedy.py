"""The command that makes a GPU usable, for a Tandem whose PyTorch is not pip's as well."""

from __future__ import annotations

from app.setup.engine_pack.activation import has_own_engine

OF_PIP = "pip "


def remedy_here(command: str) -> str:
    """Return what to run in place of a command of pip's where an engine pack has PyTorch."""
    return "tandem engine" if command.startswith(OF_PIP) and not has_own_engine() else command
