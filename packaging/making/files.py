"""Files of packages: their hashes, their sizes, and what is deleted of what others have packed."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path


def hash_of(path: Path, kind: str = "sha256") -> str:
    """Return the hash of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)  # a folder above it may have been deleted


def delete_matching(folder: Path, patterns: Iterable[str]) -> None:
    """Delete what patterns of `Path.glob` find in a folder."""
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            delete(path)


def keep_only(folder: Path, kept: set[Path]) -> None:
    """Delete from a folder what is not among the kept files and folders."""
    for path in folder.iterdir():
        if path not in kept:
            delete(path)


def check_size(package: Path, most_bytes: int = 120 * 10**6) -> None:
    """Check that a package is small enough to be downloaded.

    Raises:
        SystemExit: it is larger.
    """
    n_bytes = package.stat().st_size
    if n_bytes > most_bytes:
        raise SystemExit(f"{package.name} has {n_bytes} bytes, more than {most_bytes}.")
