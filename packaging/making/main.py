"""Builds packages: `packaging/build TARGET`, see packaging/README.md."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from making.appdir import build_appdir
from making.debian import build_deb
from making.flatpak import build_flatpak
from making.project import ROOT, Project
from making.tarball import build_tarball
from making.tree import make_tree

TARGETS = {
    "appdir": build_appdir,
    "deb": build_deb,
    "flatpak": build_flatpak,
    "tarball": build_tarball,
    "tree": lambda tree, _out, _project: tree,
}
"""What makes each target from a tree."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Build what other people install.")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the results")
    parser.add_argument(
        "--python", type=Path, default=Path(sys.base_prefix),
        help="prefix of the CPython to pack; the one that builds if none is given",
    )  # fmt: skip
    parser.add_argument(
        "--effort", type=int, default=6, choices=range(10), metavar="0-9",
        help="how hard archives are compressed; 0 is quick, for tries (default: 6)",
    )  # fmt: skip
    args = parser.parse_args()
    project = Project.read(args.effort)
    out = args.out.absolute()
    tree = out / "tandem"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    make_tree(tree, project, args.python)
    sys.stdout.write(f"{TARGETS[args.target](tree, out, project)}\n")


if __name__ == "__main__":
    main()
