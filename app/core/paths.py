"""The app's files and folders, all below `TANDEM_HOME` if it is set, and the demo model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from engine import tandem_folder

DEVICES = frozenset(
    ("con", "prn", "aux", "nul", *(f"{kind}{n}" for kind in ("com", "lpt") for n in range(10)))
)
"""File names that Windows reserves, with any suffix."""

NOWHERE = Path("/tandem")
"""Folder for users without a home; writing there fails, which the window reports."""


def is_device_name(name: str) -> bool:
    """Return whether Windows reserves a file name for a device."""
    return name.partition(".")[0].strip().casefold() in DEVICES


def chats_dir() -> Path:
    return _folder("data") / "chats"


def chat_folders_file() -> Path:
    """Return the file that stores chat folders and pinned chats."""
    return _folder("data") / "chat-folders.json"


def chat_index_file() -> Path:
    """Return the chat index, which can be rebuilt from the chats."""
    return _folder("cache") / "chats.sqlite"


def chat_caches_dir() -> Path:
    """Return the folder for the chats' KV caches, which can be recomputed."""
    return _folder("cache") / "chat-caches"


def settings_file() -> Path:
    return _folder("config") / "settings.json"


def api_keys_file() -> Path:
    """Return the file with API key names, and with the keys themselves if there is no keyring."""
    return _folder("config") / "api-keys.json"


def tool_servers_file() -> Path:
    """Return the tool servers' configuration file."""
    return _folder("config") / "tool-servers.json"


def tool_secrets_file() -> Path:
    """Return the file for tool servers' secrets that are not in a keyring."""
    return _folder("config") / "tool-secrets.json"


def log_file() -> Path:
    return _folder("cache") / "log" / "window.log"


def downloads_dir() -> Path:
    """Return the folder for the metadata of unfinished downloads."""
    return _folder("data") / "downloads"


def models_dir() -> Path:
    """Return the default folder for downloaded models."""
    return _folder("data") / "models"


def engines_dir() -> Path:
    """Return the folder for engine packs.

    On Windows, it is apart from the data, since roaming profiles are copied to a server at log-off.
    """
    return _folder("config" if sys.platform == "win32" else "data") / "engines"


def history_file() -> Path | None:
    """Return the input history file for `tandem chat`; None for a user without a home."""
    folder = tandem_folder("data")
    return folder and folder / "typed-messages"


def demo_model() -> Path | None:
    """Return the bundled model's file, or None if this installation lacks it."""
    path = Path(__file__).resolve().parents[2] / "resources" / "demo" / "tandem-demo.gguf"
    return path if path.is_file() else None


def _folder(kind: Literal["cache", "config", "data"]) -> Path:
    return tandem_folder(kind) or NOWHERE
