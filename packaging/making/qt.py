"""Qt without what Tandem does not use: of 234 MB, some 110 remain."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from making.files import keep_only
from making.libraries import needed_libraries

MODULES = ("QtCore", "QtGui", "QtWidgets", "QtNetwork", "QtSvg", "QtDBus")
"""Modules of PySide6 that Tandem or a plugin it needs imports."""

PLUGINS = (
    "platforms/*xcb*", "platforms/*wayland*", "platforms/*offscreen*", "platforms/*minimal.*",
    "platformthemes/*portal*", "platforminputcontexts/*compose*", "platforminputcontexts/*ibus*",
    "xcbglintegrations", "wayland-decoration-client",
    "wayland-graphics-integration-client/*wayland-egl*", "wayland-shell-integration/*xdg-shell*",
    "imageformats/*qsvg*", "imageformats/*qjpeg*", "imageformats/*qico*", "iconengines",
)  # fmt: skip
"""Plugins by folder, or by pattern where only some of a folder are needed."""

LANGUAGES = ("de",)
"""Languages whose texts of Qt's own dialogs are kept, as far as the window speaks them."""


def prune_qt(pyside: Path) -> None:
    """Remove from an installed PySide6 what Tandem never loads."""
    kept = set(pyside.glob("*.py")) | {pyside / "support", pyside / "Qt"}
    kept |= {pyside / f"{name}.abi3.so" for name in MODULES}
    kept |= set(pyside.glob("libpyside6.abi3.so*"))
    keep_only(pyside, kept)
    qt = pyside / "Qt"
    keep_only(qt, {qt / "plugins", qt / "lib", qt / "translations"})
    plugins = {path for pattern in PLUGINS for path in _matching(qt / "plugins", pattern)}
    for path in sorted((qt / "plugins").rglob("*.so")):
        if path not in plugins:
            path.unlink()
    for folder in (qt / "plugins").iterdir():
        if not any(folder.iterdir()):
            folder.rmdir()
    keep_languages(qt / "translations")
    _keep_libraries(qt / "lib", [*pyside.glob("*.so*"), *sorted(plugins)])


def keep_languages(texts: Path) -> None:
    """Remove from a folder of Qt's translations what Tandem's window does not speak."""
    keep_only(texts, {texts / f"qtbase_{language}.qm" for language in LANGUAGES})


def _matching(plugins: Path, pattern: str) -> Iterable[Path]:
    folder, _, name = pattern.partition("/")
    return (plugins / folder).glob(name or "*.so")


def _keep_libraries(folder: Path, users: list[Path]) -> None:
    """Keep the libraries that the users load, directly or through others."""
    waiting, kept = list(users), set[str]()
    while waiting:
        for name in needed_libraries(waiting.pop()):
            if name not in kept and (folder / name).exists():
                kept.add(name)
                waiting.append(folder / name)
    kept |= {(folder / name).resolve().name for name in kept}
    keep_only(folder, {folder / name for name in kept})
