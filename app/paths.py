"""Where Tandem keeps its files; the only module that asks the system for places.

`TANDEM_HOME` replaces them all by one folder (tests, portable use).
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from PySide6.QtCore import QStandardPaths

HOME_VARIABLE = "TANDEM_HOME"


def data_dir() -> Path:
    """What a person made: chats."""
    return _place(QStandardPaths.StandardLocation.AppDataLocation)


def config_dir() -> Path:
    """What a person chose: settings."""
    return _place(QStandardPaths.StandardLocation.AppConfigLocation)


def chats_dir() -> Path:
    return data_dir() / "chats"


def chat_caches_dir() -> Path:
    """What can be computed again: the engine's caches of chats."""
    return _place(QStandardPaths.StandardLocation.CacheLocation) / "chat-caches"


def settings_file() -> Path:
    return config_dir() / "settings.json"


def demo_model() -> Path | None:
    """The bundled model, or None in an installation without it."""
    path = Path(str(resources.files("resources"))) / "demo" / "tandem-demo.gguf"
    return path if path.is_file() else None


def _place(location: QStandardPaths.StandardLocation) -> Path:
    home = os.environ.get(HOME_VARIABLE)
    return Path(home) if home else Path(QStandardPaths.writableLocation(location))
