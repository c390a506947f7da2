"""Modules that computing on a CPU must not import, and the setting of Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_gguf import least_gguf, tiny_gguf

CODE = """
import sys
from engine import SamplingParams, load_model
with load_model(sys.argv[1], n_ctx=32) as model:
    list(model.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)))
wrong = ("triton", "torch._dynamo", "torch._inductor", "engine.backends.gpu")
sys.exit(", ".join(name for name in wrong if name in sys.modules) or None)
"""


def test_the_cpu_needs_no_compiler_of_torch(tmp_path: Path) -> None:
    """Torch's compilers take seconds to import, and the first answer would wait for that."""
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0")
    command = [sys.executable, "-c", CODE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_interpreter_is_a_setting_of_its_own(tmp_path: Path) -> None:
    """Nobody has to know how Triton is told to interpret."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("there is no Triton for this system")
    path = least_gguf(tmp_path / "m.gguf")
    code = "import sys; from engine import load_model; load_model(sys.argv[1], n_ctx=8).close()"
    environment = {**os.environ, "TANDEM_BACKEND": "interpreter"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
