"""Fixture of tests in a Tandem that came without torch."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import leave_pack
from tests.helpers.fake_engine_pack import PackScript, no_own_engine


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PackScript]:
    """The script of installations of a Tandem that came without torch."""
    made = no_own_engine(monkeypatch.setattr, tmp_path / "pack", ("cpu", "cuda13"))
    monkeypatch.setattr("engine.suitable_torch", lambda: ("cuda13", "cpu"))
    yield made
    made.go_on.set()
    leave_pack()
