"""The macOS target: Tandem.app, and on macOS the disk image that people get."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from making.cpython import fetch_python
from making.files import check_size
from making.macos.bundle import make_bundle
from making.project import ROOT, Project, output


def build_macos(out: Path, project: Project, python: Path | None) -> Path:
    """Make the bundle, and the image where this is macOS; return the path of the result.

    Args:
        python: the CPython to pack, for checks of the bundle, whose folder says so; None for that
            of packaging/python.toml.

    Raises:
        SystemExit: a part is missing, or the image is too large.
    """
    mark = "-for-checking-only" if python else ""
    folder = out / f"macos{mark}"
    shutil.rmtree(folder, ignore_errors=True)
    app = folder / "Tandem.app"
    make_bundle(app, project, python or fetch_python("macos-aarch64", out / "python"))
    if sys.platform != "darwin":
        return app
    image = out / f"Tandem-{project.version}-macos-arm64{mark}.dmg"
    output(str(ROOT / "packaging" / "macos" / "make_dmg"), str(app), str(image))
    check_size(image)
    return image
