"""Builds packages: `packaging/build TARGET`, see packaging/README.md."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from making.debian import build_deb
from making.project import ROOT, Project
from making.tree import make_tree


def main() -> None:
    parser = argparse.ArgumentParser(description="Build what other people install.")
    parser.add_argument("target", choices=["tree", "deb"])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the results")
    parser.add_argument(
        "--python", type=Path, default=Path(sys.base_prefix),
        help="prefix of the CPython to pack; the one that builds if none is given",
    )  # fmt: skip
    args = parser.parse_args()
    project = Project.read()
    tree = args.out / "tandem"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    make_tree(tree, project, args.python)
    result = build_deb(tree, args.out, project) if args.target == "deb" else tree
    sys.stdout.write(f"{result}\n")


if __name__ == "__main__":
    main()
