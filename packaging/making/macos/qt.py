"""Qt for macOS without what Tandem does not use."""

from __future__ import annotations

from pathlib import Path

from making.files import keep_only
from making.macos.binaries import loaded_libraries
from making.qt import MODULES, keep_languages

PLUGINS = (
    "platforms/libqcocoa.dylib", "platforms/libqoffscreen.dylib", "platforms/libqminimal.dylib",
    "styles/libqmacstyle.dylib", "imageformats/libqsvg.dylib", "imageformats/libqjpeg.dylib",
    "imageformats/libqico.dylib", "iconengines/libqsvgicon.dylib",
)  # fmt: skip


def prune_qt(pyside: Path) -> None:
    """Remove from an installed PySide6 what Tandem never loads on macOS."""
    qt = pyside / "Qt"
    modules = {pyside / f"{name}.abi3.so" for name in MODULES if name != "QtDBus"}
    plugins = {qt / "plugins" / name for name in PLUGINS}
    library = set(pyside.glob("libpyside6.abi3*.dylib"))
    keep_only(pyside, modules | library | {qt, pyside / "support"} | set(pyside.glob("*.py")))
    keep_only(qt, {qt / "lib", qt / "plugins", qt / "translations"})
    keep_only(qt / "plugins", {path.parent for path in plugins})
    for folder in (qt / "plugins").iterdir():
        keep_only(folder, plugins)
    keep_languages(qt / "translations")
    keep_only(qt / "lib", _frameworks(qt / "lib", modules | plugins | library))


def _frameworks(folder: Path, users: set[Path]) -> set[Path]:
    """Return the frameworks of a folder that files load, directly or through others."""
    waiting, kept = list(users), set[Path]()
    while waiting:
        for name in loaded_libraries(waiting.pop()):
            program = Path(name).name
            framework = folder / f"{program}.framework"
            if framework not in kept and framework.is_dir():
                kept.add(framework)
                waiting.append(framework / "Versions" / "A" / program)
    return kept
