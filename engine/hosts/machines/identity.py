"""What must be alike on all machines: Tandem, PyTorch and the model's file."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.formats.gguf.identity import model_hash
from engine.formats.gguf.reader import GGUFFile
from engine.util.version import package_version


def machine_facts() -> dict[str, str]:
    """Return the name of this machine, and versions that must be alike."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {
        "name": socket.gethostname(),
        "Tandem": package_version(),
        "PyTorch": torch.partition("+")[0],
        "byte order": sys.byteorder,
    }


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return why a machine cannot join, as a sentence; "" if it can."""
    for what in ("Tandem", "PyTorch", "byte order"):
        own, other = ours.get(what, ""), str(theirs.get(what, ""))[:40]
        if own != other:
            return f"It has {what} {other or '?'}, and this machine {own or '?'}."
    return ""


def file_facts(path: str) -> dict[str, Any]:
    """Return what tells a model's file from others, whatever it is called.

    Raises:
        EngineError: it cannot be read.
    """
    with GGUFFile.open(Path(path)) as file:
        n_bytes = sum(tensor.n_bytes for tensor in file.tensors.values())
        return {"bytes": n_bytes, "hash": model_hash(file)}


def file_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return how a machine's file differs from machine 0's, as a sentence; "" if it does not."""
    if theirs.get("bytes") != ours["bytes"]:
        sizes = f"{theirs.get('bytes')} bytes of weights instead of {ours['bytes']}"
        return f"It has another file: {sizes}."
    if theirs.get("hash") != ours["hash"]:
        return "It has another file of the same size: the header or samples of the weights differ."
    return ""


def checked_path(path: str) -> str:
    """Return a path as an absolute one.

    Raises:
        EngineError: there is no such file.
    """
    if not Path(path).is_file():
        raise EngineError(f"There is no file {path}.", "Name this machine's copy with --model.")
    return str(Path(path).resolve())
