"""Settings of all tests: their processes, Triton's interpreter, and where kernels are kept.

A system without the libraries of Qt is told so before anything else.
"""

import os
import sys
import tempfile

import pytest

from app.process.qt_libraries import missing_qt_library

os.environ.setdefault("TRITON_INTERPRET", "1")  # read where anything imports Triton, as torch may

try:
    import PySide6.QtWidgets  # noqa: F401 only tried, before pytest-qt and other conftests do
except ImportError as error:
    if missing := missing_qt_library(error):
        sys.exit(f"{missing} {missing.hint}")
    raise

MOST_WORKERS = 4
"""Largest number of processes that share the tests: models compute with several threads each."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the same options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Share the tests out between processes, where the command line names no number of them.

    `-n 0` and `-p no:xdist` run all in this process.
    """
    options = config.option
    if not hasattr(options, "numprocesses") or hasattr(config, "workerinput"):
        return
    if options.numprocesses is None and not options.tx:
        options.numprocesses = default_workers(config)
    if options.numprocesses and options.dist == "no":
        options.dist = "worksteal"  # neighbours stay together, so that they share their fixtures


def default_workers(config: pytest.Config) -> int:
    """Return the number of processes for this run; 0 runs the tests in pytest's own.

    That is enough for files or tests that are named one by one. Tests on a GPU measure it, and a
    debugger needs the terminal.
    """
    are_files = all(".py" in argument for argument in config.args)
    if are_files or config.option.usepdb or config.option.markexpr == "gpu":
        return 0
    return min(os.cpu_count() or 1, MOST_WORKERS)


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled kernels with pytest's own cache: compiling them takes longer than most tests.

    Processes that share the tests, and programs that tests start, inherit the setting.
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
