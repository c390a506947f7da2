"""The bench of the host's time starts every launch of a pass once in each way."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_launches_take_less_time_than_through_triton() -> None:
    """Triton's search takes three to five times as long as ours; the bar leaves room for noise."""
    folder = str(Path(os.environ["TANDEM_KERNEL_CACHE"]) / "triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.host_time", "--rows", "512", "--blocks", "4"],
        cwd=ROOT, env={**os.environ, "TRITON_CACHE_DIR": folder, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "512 rows: 55 launches" in done.stdout
    each = [float(us) for us in re.findall(r"([\d.]+) us each launch", done.stdout)]
    tritons, ours = each[:2]
    assert 0 < 2 * ours < tritons
