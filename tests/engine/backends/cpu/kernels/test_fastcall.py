"""Bound kernels may outlive the interpreter's shutdown."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from engine.backends.cpu.kernels.running.fastcall import bind
sys.kept = bind(0, 2, holds_gil=True)  # freed last
"""

FREED_MEMORY_IS_FILLED = {"PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "2"}
"""Settings of Python and glibc: freed memory is filled with 2, the flag for a method of a class."""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc fills freed memory")
def test_a_kernel_that_is_freed_last_does_not_crash_the_exit() -> None:
    environment = {**os.environ, **FREED_MEMORY_IS_FILLED}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
