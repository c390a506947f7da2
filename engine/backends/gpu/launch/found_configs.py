"""File of the kernel configurations that searches found, beside that of the machine's speeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.backends.gpu.launch.configs import RULES, Config, Key
from engine.util.json_file import cache_folder, read_json, write_json
from engine.util.version import package_version

FILE_NAME = "kernels.json"

LARGEST = 1 << 20
"""Largest number that a configuration may hold."""


def configs_file() -> Path | None:
    """Return the path in the user's cache folder; None on a system without such a folder."""
    folder = cache_folder()
    return folder / FILE_NAME if folder else None


def read_configs(path: Path | None) -> dict[Key, Config]:
    """Return all valid entries that this version of Tandem wrote."""
    document = read_json(path)
    if not isinstance(document, dict) or document.get("version") != package_version():
        return {}
    entries = document.get("configs")
    found: dict[Key, Config] = {}
    for entry in entries if isinstance(entries, list) else []:
        made = _made(entry)
        if made is not None:
            found[made[0]] = made[1]
    return found


def save_configs(path: Path | None, found: Mapping[Key, Config]) -> None:
    """Add configurations to the file; they replace entries of the same keys."""
    everything = {**read_configs(path), **found}
    configs = [
        {
            "maker": maker, "capability": capability, "n_sm": n_sm, "kernel": kernel,
            "facts": dict(facts), "config": dict(config),
        }
        for (maker, capability, n_sm, kernel, facts), config in everything.items()
    ]  # fmt: skip
    write_json(path, {"version": package_version(), "configs": configs})


def _made(entry: Any) -> tuple[Key, Config] | None:
    """Return an entry's key and configuration; None if a field is missing or of another type."""
    if not isinstance(entry, dict):
        return None
    maker, kernel, facts = entry.get("maker"), entry.get("kernel"), entry.get("facts")
    capability, n_sm, config = entry.get("capability"), entry.get("n_sm"), entry.get("config")
    if maker not in ("nvidia", "amd") or kernel not in RULES:
        return None
    if not isinstance(capability, int) or not isinstance(n_sm, int):
        return None
    if not isinstance(facts, dict) or not isinstance(config, dict):
        return None
    if not all(type(n) is int and 0 <= n <= LARGEST for n in (*facts.values(), *config.values())):
        return None
    return (maker, capability, n_sm, str(kernel), tuple(sorted(facts.items()))), config
