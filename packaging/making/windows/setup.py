"""setup.exe: the Windows tree packed by makensis, and what it holds checked."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from making.cpython import fetch_python
from making.files import check_size
from making.project import ROOT, Project, output
from making.windows.launchers import version_numbers, write_ico
from making.windows.tree import make_windows_tree

SOURCES = ROOT / "packaging" / "windows"
ENTRY = re.compile(r"^Path = (.+)$", re.MULTILINE)
OF_INSTALLER = ("uninstall.exe",)


def build_windows(out: Path, project: Project, python: Path | None) -> Path:
    """Make the tree and pack it; return the path of setup.exe, beside which is a list of its files.

    Args:
        python: the CPython to pack, for checks of setup.exe, whose name says so; None for that of
            packaging/python.toml.

    Raises:
        SystemExit: a part is missing, or setup.exe is too large.
    """
    mark = "-for-checking-only" if python else ""
    tree = out / f"windows{mark}" / "Tandem"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    make_windows_tree(tree, project, python or fetch_python("windows-x86_64", out / "python"))
    setup = out / f"Tandem-{project.version}-windows-x86_64-setup{mark}.exe"
    return build_setup(tree, setup, project)


def build_setup(tree: Path, setup: Path, project: Project) -> Path:
    """Pack a tree, and write what setup.exe holds into a list beside it.

    Raises:
        SystemExit: it does not hold the tree, or is too large.
    """
    with tempfile.TemporaryDirectory() as work:
        icon = Path(work) / "tandem.ico"
        write_ico(ROOT / "resources" / "tandem.svg", icon)
        output("makensis", "-V2", "-WX", "-INPUTCHARSET", "UTF8",
               *definitions(tree, setup, icon, project), str(SOURCES / "setup.nsi"))  # fmt: skip
    names = packed_names(setup)
    check_setup(setup, names, tree)
    setup.with_suffix(".contents.txt").write_text("".join(f"{name}\n" for name in names))
    return setup


def definitions(tree: Path, setup: Path, icon: Path, project: Project) -> list[str]:
    """Return what setup.nsi is told."""
    files = [path for path in tree.rglob("*") if path.is_file()]
    told = {
        "VERSION": project.version,
        "VERSION_NUMBERS": ".".join(version_numbers(project.version)),
        "COMPRESSOR": "lzma" if project.effort else "zlib",
        "TREE": tree.resolve(),
        "OUT": setup.resolve(),
        "ICON": icon,
        "KIB": sum(path.stat().st_size for path in files) // 1024,
        "LONGEST": 1 + max(len(str(path.relative_to(tree))) for path in files),
    }
    return [f"-D{name}={value}" for name, value in told.items()]


def packed_names(setup: Path) -> list[str]:
    """Return the names of the files that a setup.exe installs."""
    listing = output("7z", "l", "-slt", str(setup)).partition("----------")[2]
    return sorted(name for name in ENTRY.findall(listing) if not name.startswith("$PLUGINSDIR"))


def check_setup(setup: Path, names: list[str], tree: Path) -> None:
    """Check that a setup.exe holds what was to be packed, and is small enough.

    Raises:
        SystemExit: it is not so.
    """
    wanted = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    found = set(names) - set(OF_INSTALLER)
    if found != wanted:
        raise SystemExit(
            f"{setup.name} lacks {sorted(wanted - found)[:5]} and has {sorted(found - wanted)[:5]}."
        )
    check_size(setup)
