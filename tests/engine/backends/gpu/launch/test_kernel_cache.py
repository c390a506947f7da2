"""Kernels that cannot be kept are in a temporary folder, which is deleted soon."""

import os
import subprocess
import sys
from pathlib import Path

COMPILER = """
from engine.backends.gpu.launch.kernel_cache import use_cache
(use_cache("sm90", "3.7") / "kernel").touch()
print("compiling", flush=True)
input()
"""


def compiling(temporary: Path, cache: Path) -> "subprocess.Popen[str]":
    """Start a process with a kernel in a temporary folder, as its cache is not writable."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMPILER],
        env={
            **os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary),
            "TANDEM_KERNEL_CACHE": str(cache), "TRITON_CACHE_DIR": "",
        },
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    return process


def test_what_a_killed_process_compiled_is_swept_by_the_next(tmp_path: Path) -> None:
    temporary, cache = tmp_path / "tmp", tmp_path / "no folder"
    temporary.mkdir()
    cache.touch()
    with compiling(temporary, cache) as first:
        (left,) = temporary.iterdir()
        first.kill()
    assert (left / "kernel").exists()
    with compiling(temporary, cache) as second:
        (folder,) = temporary.iterdir()
        assert folder != left
        second.communicate("\n")
    assert second.returncode == 0
    assert list(temporary.iterdir()) == []
