"""The command that builds packages: `packaging/build TARGET ...`, see packaging/README.md."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from making.appdir import build_appdir
from making.debian import build_deb
from making.flatpak import build_flatpak
from making.macos.image import build_macos
from making.project import ROOT, Project
from making.tarball import build_tarball
from making.tree import make_tree
from making.windows.setup import build_windows

TARGETS = {
    "appdir": build_appdir,
    "deb": build_deb,
    "flatpak": build_flatpak,
    "tarball": build_tarball,
    "tree": lambda tree, _out, _project: tree,
}
"""Functions that make each target of Linux from a tree."""

OTHER_SYSTEMS = {"macos": build_macos, "windows": build_windows}
"""Functions that make the targets whose trees differ."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Build what other people install.")
    known = sorted([*TARGETS, *OTHER_SYSTEMS])
    parser.add_argument(
        "targets", nargs="+", choices=known, metavar="TARGET", help=", ".join(known)
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the results")
    parser.add_argument(
        "--python", type=Path,
        help="prefix of the CPython to pack; if none is given, the one that builds, and for other "
        "systems the one in packaging/python.toml",
    )  # fmt: skip
    parser.add_argument(
        "--effort", type=int, default=6, choices=range(10), metavar="0-9",
        help="how hard archives are compressed; 0 is quick, for tries (default: 6)",
    )  # fmt: skip
    args = parser.parse_args()
    project = Project.read(args.effort)
    out = args.out.absolute()
    if not OTHER_SYSTEMS.keys() >= set(args.targets):
        tree = out / "tandem"
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        make_tree(tree, project, args.python or Path(sys.base_prefix))
    for target in args.targets:
        if target in OTHER_SYSTEMS:
            result = OTHER_SYSTEMS[target](out, project, args.python)
        else:
            result = TARGETS[target](tree, out, project)
        sys.stdout.write(f"{result}\n")


if __name__ == "__main__":
    main()
