"""What holds for all tests: Qt can be imported, and compiled kernels stay out of user folders."""

import os
import sys
import tempfile

import pytest

from app.process.qt_libraries import missing_qt_library

try:
    import PySide6.QtWidgets  # noqa: F401 only tried, before pytest-qt and other conftests do
except ImportError as error:
    if missing := missing_qt_library(error):
        sys.exit(f"{missing} {missing.hint}")
    raise


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled kernels with pytest's own cache: compiling them takes longer than most tests.

    Programs that tests start inherit the setting.
    """
    if "TANDEM_KERNEL_CACHE" in os.environ:
        return
    cache = getattr(config, "cache", None)
    folder = cache.mkdir("kernels") if cache else tempfile.mkdtemp(prefix="tandem-kernels-")
    os.environ["TANDEM_KERNEL_CACHE"] = str(folder)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute exactly: in F32, with dequantised weights."""
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
