"""Qt for Windows without what Tandem does not use."""

from __future__ import annotations

from pathlib import Path

from making.files import keep_only
from making.qt import MODULES, keep_languages
from making.windows.binaries import loaded_libraries

PLUGINS = (
    "platforms/qwindows.dll", "platforms/qoffscreen.dll", "platforms/qminimal.dll",
    "styles/qmodernwindowsstyle.dll", "imageformats/qsvg.dll", "imageformats/qjpeg.dll",
    "imageformats/qico.dll", "iconengines/qsvgicon.dll",
)  # fmt: skip


def prune_qt(pyside: Path) -> None:
    """Remove from an installed PySide6 what Tandem never loads on Windows."""
    modules = {pyside / f"{name}.pyd" for name in MODULES if name != "QtDBus"}
    plugins = {pyside / "plugins" / name for name in PLUGINS}
    texts = pyside / "translations"
    folders = {pyside / "plugins", texts, pyside / "support"}
    kept = _with_libraries(pyside, modules | plugins)
    keep_only(pyside, kept | folders | set(pyside.glob("*.py")))
    keep_only(pyside / "plugins", {path.parent for path in plugins})
    for folder in (pyside / "plugins").iterdir():
        keep_only(folder, plugins)
    keep_languages(texts)


def _with_libraries(folder: Path, users: set[Path]) -> set[Path]:
    """Return files, and the libraries of a folder that they load, directly or through others."""
    present = {path.name.lower(): path for path in folder.glob("*.dll")}
    waiting, kept = list(users), set(users)
    while waiting:
        for name in loaded_libraries(waiting.pop()):
            if name in present and present[name] not in kept:
                kept.add(present[name])
                waiting.append(present[name])
    return kept
