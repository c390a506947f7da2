"""Runs of the tests on a GPU (`-m gpu`), where only PyTorch, Triton and pytest may be installed."""

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.gpu_run import ORDER, TESTS, overlooked, place

REPO = TESTS.parent

ABSENT = (
    "PySide6", "shiboken6", "pyqtgraph", "pytestqt", "pytest_timeout", "xdist", "hypothesis",
    "transformers", "regex", "safetensors", "markdown_it",
)  # fmt: skip
"""Packages that a server with GPUs may lack."""

SOME = {
    "tests/engine/backends/gpu/matmul/test_gemv.py",
    "tests/engine/backends/gpu/decode/test_token_stream.py",
    "tests/engine/formats/quants/test_dequantise_gpu.py", "tests/engine/parallel/test_transfers.py",
}  # fmt: skip
"""Some files with tests for a GPU, also outside `engine/backends/gpu`."""

ALONE = (
    "tests/engine/hardware/devices/test_gpu_identity.py",
    "tests/engine/backends/gpu/comm/test_one_shot_gpu.py",
    "tests/engine/backends/gpu/test_virtual_gpus.py",
    "tests/engine/runtime/interconnect/test_trial.py",
)  # fmt: skip
"""Files with tests that no other process may disturb."""


class FakeItem:
    """A test of a file, with one mark."""

    def __init__(self, path: Path, mark: str) -> None:
        self.path, self._mark = path, mark

    def get_closest_marker(self, name: str) -> str | None:
        return self._mark if name == self._mark else None


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run pytest in a process that has none of the packages in `ABSENT`."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))"
    (folder / "sitecustomize.py").write_text(hide)
    env = {
        **os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{REPO}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments],
        cwd=REPO, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_all_gpu_tests_are_found_without_qt_and_plugins_in_order(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "gpu", "--collect-only")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "::" in line]
    files = list(dict.fromkeys(line.partition("::")[0] for line in lines))
    assert set(files) >= SOME
    assert files[0].endswith("test_self_test.py")
    assert set(files[-len(ALONE) :]) == set(ALONE), "they need the GPU for themselves"


def test_what_needs_no_window_runs_without_qt_and_plugins(tmp_path: Path) -> None:
    done = run(tmp_path, "tests/engine/formats/gguf/test_types.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_order_names_files_that_exist() -> None:
    paths = list(TESTS.rglob("test_*.py"))
    assert {place(path) for path in paths} == set(range(len(ORDER) + 1))


def test_a_file_that_a_gpu_run_would_overlook_is_told(tmp_path: Path) -> None:
    path = tmp_path / "test_cards.py"
    path.write_text("pytestmark = [MARKS['gpu']]")
    items = [FakeItem(path, "gpu"), FakeItem(tmp_path / "test_other.py", "slow")]
    assert overlooked(items) == [path]
    path.write_text("pytestmark = pytest.mark.gpu")
    assert overlooked(items) == []
