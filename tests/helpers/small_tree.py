"""The least folder that packages would hold: a Python, and packages with hardly any code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

MIT = "Permission is hereby granted, free of charge, to any person obtaining a copy of this. " * 3
APACHE = (
    "Apache License\n  Version 2.0, January 2004\n\n  TERMS AND CONDITIONS FOR USE\n\n"
    + "  The terms.\n" * 20
    + "  of your accepting any such warranty or additional liability.\n\n"
    + "  END OF TERMS AND CONDITIONS\n\n  Copyright 2024-2026 Ada Example\n"
)
INNER = {
    "components": [
        {
            "name": "ring", "version": "0.17.1", "purl": "pkg:cargo/ring@0.17.1?download_url=x",
            "licenses": [{"expression": "Apache-2.0 AND ISC"}],
        },
        {"name": "ring", "version": "0.17.1", "purl": "pkg:cargo/ring@0.17.1?other=y"},
    ]
}  # fmt: skip


def add_package(
    site: Path, name: str, licence: str = "License-Expression: MIT", **files: str
) -> Path:
    """Add a package with an empty module.

    Args:
        files: further files of its metadata, by name with "__" for ".".

    Returns:
        The folder of its metadata.
    """
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir(parents=True)
    head = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{licence}\n"
    (folder / "METADATA").write_text(head)
    _write(folder, {key.replace("__", "."): text for key, text in files.items()})
    # A newer importlib.metadata leaves out what a RECORD names and no file is there for.
    _write(site, {f"{name}/__init__.py": ""})
    rows = [f"{path.relative_to(site).as_posix()},," for path in sorted(folder.rglob("*.*"))]
    (folder / "RECORD").write_text("\n".join([f"{name}/__init__.py,,", *rows]) + "\n")
    return folder


def small_tree(folder: Path) -> Path:
    """Make the tree."""
    site = folder / "site"
    add_package(site, "PySide6_Essentials", "License: LGPL-3.0-only")
    add_package(
        site, "fast", "License-Expression: Apache-2.0",
        **{"licenses/LICENSE__txt": APACHE, "sboms/fast__cyclonedx__json": json.dumps(INNER)},
    )  # fmt: skip
    add_package(site, "tiny", LICENSE__txt=f"Copyright (c) 2020 Bob\n\n{MIT}")
    python = folder / "python"
    header = '#define PY_VERSION              "3.11.99"\n'
    _write(
        python,
        {
            "lib/python3.11/LICENSE.txt": "PYTHON SOFTWARE FOUNDATION LICENSE " * 9,
            "include/python3.11/patchlevel.h": header,
        },
    )
    return folder


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
