"""The files and folders that the app keeps, and the bundled model.

All of them lie below one folder if `TANDEM_HOME` names one (tests, portable use).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from engine import tandem_folder

DEVICES = frozenset(
    ("con", "prn", "aux", "nul", *(f"{kind}{n}" for kind in ("com", "lpt") for n in range(10)))
)
"""Names that are no files on Windows, whatever their suffix."""

NOWHERE = Path("/tandem")
"""Folder of a user without a home: it cannot be written, and the window says so."""


def is_device_name(name: str) -> bool:
    """Return whether a name is no file on Windows."""
    return name.partition(".")[0].strip().casefold() in DEVICES


def chats_dir() -> Path:
    """Return the folder of the chats."""
    return _folder("data") / "chats"


def chat_folders_file() -> Path:
    """Return the file of the folders in which chats are, and of pinned chats."""
    return _folder("data") / "chat-folders.json"


def chat_index_file() -> Path:
    """Return the file of the chats' index, which can be made again from the chats."""
    return _folder("cache") / "chats.sqlite"


def chat_caches_dir() -> Path:
    """Return the folder of the KV caches of chats, which can be computed again."""
    return _folder("cache") / "chat-caches"


def settings_file() -> Path:
    """Return the file of the settings."""
    return _folder("config") / "settings.json"


def api_keys_file() -> Path:
    """Return the file of servers that have API keys, and of the keys that no keyring has."""
    return _folder("config") / "api-keys.json"


def tool_servers_file() -> Path:
    """Return the file of the servers of tools that the person has added."""
    return _folder("config") / "tool-servers.json"


def tool_secrets_file() -> Path:
    """Return the file of the secrets of those servers that no keyring has."""
    return _folder("config") / "tool-secrets.json"


def log_file() -> Path:
    """Return the file of the window's log."""
    return _folder("cache") / "log" / "window.log"


def downloads_dir() -> Path:
    """Return the folder of what is known of downloads that are not done."""
    return _folder("data") / "downloads"


def models_dir() -> Path:
    """Return the folder of downloaded models, unless the person has chosen another."""
    return _folder("data") / "models"


def engines_dir() -> Path:
    """Return the folder of the packs with which the engine computes.

    Not with the other data on Windows, where those may be copied to a server at each log-off.
    """
    return _folder("config" if sys.platform == "win32" else "data") / "engines"


def history_file() -> Path | None:
    """Return the file of messages typed in `tandem chat`; None for a user without a home."""
    folder = tandem_folder("data")
    return folder and folder / "typed-messages"


def demo_model() -> Path | None:
    """Return the bundled model; None in an installation without it."""
    path = Path(__file__).resolve().parents[2] / "resources" / "demo" / "tandem-demo.gguf"
    return path if path.is_file() else None


def _folder(kind: Literal["cache", "config", "data"]) -> Path:
    return tandem_folder(kind) or NOWHERE
