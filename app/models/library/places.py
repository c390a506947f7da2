"""Folders in which programs keep model files; they are only ever read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from app.core.translation import tr_later

YOUR_FOLDERS: Final = tr_later("Your folders")
"""Name of the folders that a person has chosen, in place of a program's."""

OPENED: Final = tr_later("Opened")
"""Name of models that were opened and lie in no such folder, in place of a program's."""

Layout = Literal["files", "hub", "ollama", "file"]
"""Arrangement of a place: files in folders, Hugging Face's cache, Ollama's manifests, one file."""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder that may hold models, or one model file.

    Attributes:
        program: name of the program that keeps it, as people know it.
    """

    path: Path
    program: str
    layout: Layout = "files"


def known_places(
    own: Iterable[str | Path] = (),
    home: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Place]:
    """Return the folders that exist: a person's own first, then those of other programs.

    Each is named once, also where several programs use it.

    Args:
        own: folders that the person has chosen.
        home: the person's home folder; None asks the system.
    """
    found = [Place(Path(path).expanduser(), YOUR_FOLDERS) for path in own]
    if home is None:
        try:
            home = Path.home()
        except RuntimeError:  # a user without a home
            return _existing(found)
    get = environment.get
    cache = Path(get("XDG_CACHE_HOME") or home / ".cache")
    hub = get("HF_HUB_CACHE") or get("HUGGINGFACE_HUB_CACHE")
    hubs = [Path(hub)] if hub else []
    hubs.append(Path(get("HF_HOME") or cache / "huggingface") / "hub")
    found += [Place(path, "Hugging Face", "hub") for path in hubs]
    lm_studio = (home / ".lmstudio" / "models", cache / "lm-studio" / "models")
    found += [Place(path, "LM Studio") for path in lm_studio]
    ollama = [Path(custom)] if (custom := get("OLLAMA_MODELS")) else []
    ollama += [home / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
    found += [Place(path, "Ollama", "ollama") for path in ollama]
    llama = [Path(custom)] if (custom := get("LLAMA_CACHE")) else []
    llama.append(cache / "llama.cpp")
    found += [Place(path, "llama.cpp") for path in llama]
    jan = Path(get("XDG_CONFIG_HOME") or home / ".config") / "Jan" / "data" / "llamacpp" / "models"
    return _existing([*found, Place(jan, "Jan")])


def opened_models(paths: Iterable[str | Path]) -> list[Place]:
    """Return model files that were opened and are still there."""
    return [Place(Path(path), OPENED, "file") for path in paths if Path(path).is_file()]


def _existing(places: Iterable[Place]) -> list[Place]:
    """Return the places that are folders, each once."""
    found: dict[tuple[int, int], Place] = {}
    for place in places:
        try:
            status = place.path.stat()
            if place.path.is_dir():
                found.setdefault((status.st_dev, status.st_ino), place)
        except OSError:
            continue  # it does not exist, or may not be read
    return list(found.values())
