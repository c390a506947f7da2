"""Settings of all tests: their processes, Triton's interpreter, and where kernels are kept.

A system without the libraries of Qt is told so before anything else. Where PySide6 or pytest-qt is
not installed at all, as on a server with GPUs, the tests of the window are left out.
"""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from app.core.process.environment import missing_qt_library
from engine.hardware.backend_choice import simulate_gpus
from tests.helpers.gpu_run import is_gpu_run, may_have_gpu_tests, overlooked, place

os.environ.setdefault("TRITON_INTERPRET", "1")  # read where anything imports Triton, as torch may

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell's job in the background ignores Ctrl+C, and so would programs that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as `nohup` leaves it

HAS_QT = find_spec("PySide6") is not None and find_spec("pytestqt") is not None

if HAS_QT:
    try:
        import PySide6.QtWidgets  # noqa: F401 only tried, before pytest-qt and other conftests do
    except ImportError as error:
        if missing := missing_qt_library(error):
            sys.exit(f"{missing} {missing.hint}")
        raise
else:
    collect_ignore = ["app", "soak"]

PLUGINS = {"pytest-qt": "qt_api", "timeout": "timeout"}
"""A setting of pyproject.toml by the plugin that knows it."""

MAX_WORKERS = 4
"""Largest number of processes that share the tests: models compute with several threads each."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Make pytest know the settings of plugins that are not installed; they have no effect."""
    for plugin, setting in PLUGINS.items():
        if not pluginmanager.has_plugin(plugin):
            parser.addini(setting, f"setting of {plugin}, which is not installed")


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
        # neighbours stay together, so that they share their fixtures; on a GPU the order counts
        options.dist = "load" if is_gpu_run(config) else "worksteal"


def default_workers(config: pytest.Config) -> int:
    """Return the number of processes for this run; 0 runs the tests in pytest's own.

    That is enough for files or tests that are named one by one. Tests on a GPU measure it, and a
    debugger needs the terminal.
    """
    are_files = all(".py" in argument for argument in config.args)
    if are_files or config.option.usepdb or is_gpu_run(config):
        return 0
    return min(os.cpu_count() or 1, MAX_WORKERS)


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled kernels with pytest's own cache: compiling them takes longer than most tests.

    Processes that share the tests, and programs that tests start, inherit the setting.
    """
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, without effect")
    if is_gpu_run(config):
        config.option.continue_on_collection_errors = True  # one file less is no reason to stop
    if "TANDEM_KERNEL_CACHE" in os.environ:
        return
    cache = getattr(config, "cache", None)
    folder = cache.mkdir("kernels") if cache else Path(tempfile.mkdtemp(prefix="tandem-kernels-"))
    with suppress(PermissionError):
        folder.chmod(0o700)  # others could put code there
    os.environ["TANDEM_KERNEL_CACHE"] = str(folder)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without tests for a GPU out of a run on one."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    is_left_out = is_gpu_run(config) and is_test and not may_have_gpu_tests(collection_path)
    return True if is_left_out else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Collect no garbage among what lives until the end: tests, modules, and what they import.

    Python would search these millions of objects again and again, also wherever a test collects
    its own garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        session.config.add_cleanup(gc.unfreeze)  # what ends with the process says so if it cannot


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin a run on a GPU with the tests that tell most about a card, for it may be cut short.

    Raises:
        pytest.UsageError: a file has tests for a GPU, and a run on one would leave it out.
    """
    for path in overlooked(items):
        raise pytest.UsageError(f"tests/helpers/gpu_run.py overlooks the GPU tests in {path}")
    if is_gpu_run(config):
        items.sort(key=lambda item: ("alone" in item.keywords, place(item.path)))


@pytest.fixture(autouse=True)
def no_simulated_gpus() -> Iterator[None]:
    """Plan for this machine again after a test of a rig."""
    yield
    simulate_gpus(False)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute exactly: in F32, with dequantised weights."""
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
