"""Where the reference data lies: models with logits, vocabularies, templates, broken files."""

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def golden_root() -> Path:
    return Path(os.environ.get("TANDEM_GOLDEN", REPO.parent / "shared" / "golden"))


def golden_path(*parts: str) -> Path:
    """The path of a reference file; skips the test when the set is not on this machine."""
    path = golden_root().joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no reference data at {path} (set TANDEM_GOLDEN to its folder)")
    return path
