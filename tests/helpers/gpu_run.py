"""Runs of the tests on a GPU (`-m gpu`): which files have such tests, and in which order.

A machine with a GPU may lack what only other tests need, so other files are not even imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import pytest

TESTS = Path(__file__).resolve().parents[1]

ORDER = (
    "self_test", "gemv", "attention", "kv_write", "matmul/test_dequantise", "tile_gemm",
    "unquantised", "elementwise", "quantise", "rope", "token_stream", "test_sampling", "experts",
    "routing", "recurrent", "weights", "pack", "weight_loader",
)  # fmt: skip
"""Parts of files' names, those first that tell most about a card; all others come last."""


class Marked(Protocol):
    """A collected test, as pytest has it."""

    path: Path

    def get_closest_marker(self, name: str) -> object: ...


def is_gpu_run(config: pytest.Config) -> bool:
    """Return whether tests on a GPU are asked for, such as by `-m "gpu and not alone"`."""
    return re.match(r"gpu\b", config.option.markexpr) is not None


def may_have_gpu_tests(path: Path) -> bool:
    """Return whether a file of tests has any for a GPU, without importing it.

    They are marked, or take the fixture `device` of `tests/engine/backends/gpu/conftest.py`.
    """
    text = path.read_text(encoding="utf-8")
    is_below = path.is_relative_to(TESTS / "engine" / "backends" / "gpu")
    return "mark.gpu" in text or (is_below and "device: str" in text)


def place(path: Path) -> int:
    """Return the place of a file among those of a run; files with equal ones keep their order."""
    name = path.with_suffix("").as_posix()
    return next((at for at, part in enumerate(ORDER) if part in name), len(ORDER))


def overlooked(items: Iterable[Marked]) -> list[Path]:
    """Return the files with tests for a GPU that `may_have_gpu_tests` denies."""
    found = {item.path for item in items if item.get_closest_marker("gpu")}
    return sorted(path for path in found if not may_have_gpu_tests(path))
