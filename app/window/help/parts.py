"""What Tandem is made of besides packages: Tandem itself, Python, Qt, the font."""

from __future__ import annotations

import platform
import sys
import sysconfig
from pathlib import Path

from PySide6.QtCore import QLibraryInfo, qVersion

from app.core.translation import tr
from app.window.help.licences import (
    FONT_VERSION,
    PACKAGE,
    PYTHON_TEXTS,
    QT_TEXTS,
    ROOT,
    TEXTS,
    Component,
    packages,
)
from engine import package_version

QT_SOURCES = "https://download.qt.io/official_releases/qt/"
PYSIDE_SOURCES = "https://code.qt.io/cgit/pyside/pyside-setup.git/"


def all_components() -> list[Component]:
    """Return all that Tandem is made of; work for a thread."""
    return [_tandem(), _qt(), _python(), _font(), *_system_libraries(), *packages()]


def _tandem() -> Component:
    notice = tr("Tandem with its icons and its demo model.")
    files = (
        ROOT / "LICENSE",
        *sorted(ROOT.glob(f"{PACKAGE.replace('-', '_')}-*/licenses/LICENSE")),
    )
    return Component("Tandem", package_version(), "MIT", _present(files)[:1], notice)


def _qt() -> Component:
    """Return Qt, with what its licence wants people to be told."""
    version = qVersion() or ""
    folder = QLibraryInfo.path(QLibraryInfo.LibraryPath.LibrariesPath)
    notice = "\n\n".join(
        (
            tr(
                "Tandem uses Qt {version} and Qt for Python under the GNU Lesser General Public"
                " License, version 3, which stands below, as does the GNU General Public License"
                " that it refers to. Qt is © The Qt Company Ltd. and other contributors."
            ).format(version=version),
            tr(
                "Qt is linked dynamically: its libraries are files of their own, unchanged, in"
                " {folder}."
            ).format(folder=folder),
            tr(
                "You may replace them by a Qt of your own: close Tandem, put libraries of Qt"
                " {version} or a compatible version, under the same names, in the place of these,"
                " and start Tandem again. QT_PLUGIN_PATH names a folder of other plugins. You may"
                " take Tandem apart as far as that is needed to find mistakes in such changes."
            ).format(version=version),
            tr(
                "The sources of Qt are at {qt}, those of Qt for Python at {pyside}, each in the"
                " version named here."
            ).format(qt=QT_SOURCES, pyside=PYSIDE_SOURCES),
        )
    )
    return Component("Qt", version, "LGPL-3.0-only", _kept(QT_TEXTS), notice)


def _python() -> Component:
    library = Path(sysconfig.get_path("stdlib"))
    prefix = Path(sys.base_prefix)
    debian = Path(f"/usr/share/doc/python{sys.version_info.major}.{sys.version_info.minor}")
    own = _present((library / "LICENSE.txt", prefix / "LICENSE.txt", debian / "copyright"))[:1]
    files = (*own, *_kept(PYTHON_TEXTS))
    return Component("Python", platform.python_version(), "PSF-2.0", files)


def _font() -> Component:
    files = _present((ROOT / "resources" / "fonts" / "OFL.txt",))
    return Component("Inter", FONT_VERSION, "OFL-1.1", files)


def _system_libraries() -> list[Component]:
    """Return the libraries of a Linux system that some packages bring along."""
    files = tuple(sorted((ROOT.parent / "lib" / "licences").glob("*.txt")))
    if not files:
        return []
    names = ", ".join(file.stem for file in files)
    return [Component(tr("Libraries of the system"), "", tr("see the texts"), files, names)]


def _kept(names: tuple[str, ...]) -> tuple[Path, ...]:
    return _present(tuple(TEXTS / f"{name}.txt" for name in names))


def _present(files: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple(file for file in files if file.is_file())
