"""A model's file that is cut short while it is read is a sentence, and does not end the process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cut_loads import N_POINTS
from tests.helpers.tiers import slow
from tests.helpers.tiny_gguf import tiny_gguf

CUT = [
    "ModelFileError",
    "cut.gguf became shorter while it was being read.",
    "Copy or download it again.",
]


def outcomes(path: Path, n_ranks: int, backend: str) -> list[list[str]]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.helpers.cut_loads", str(path), str(n_ranks)],
        capture_output=True, text=True, check=False, env={**os.environ, "TANDEM_BACKEND": backend},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found: list[list[str]] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize(("backend", "n_ranks"), [("", 2), *slow(("", 1), ("reference", 1))])
def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, backend: str, n_ranks: int) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=3, n_embd=256, n_ff=512, quant="Q8_0")
    *loads, written, resplit, again = outcomes(path, n_ranks, backend)
    assert loads == [CUT] * N_POINTS
    assert written[1] == "cut.gguf was changed while it was being read."
    assert resplit[:2] == CUT[:2]
    assert "load the model again" in resplit[2]
    assert again[0], "a model without weights is closed"
