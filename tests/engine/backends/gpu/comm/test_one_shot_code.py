"""Compilers leave packets as they were written: whole, in order, read each time."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine.backends.gpu.offline import run_offline

OLDEST = pytest.param("sm_75", marks=pytest.mark.slow)
QUICK = "sm_90", "gfx1100"

N_OTHER = 2
"""Number of members in the compiled kernels."""


def code(target: str) -> dict[str, Any]:
    """Return facts of the code for a target; one process makes them for all quick ones."""
    return _compiled(QUICK if target in QUICK else (target,))[target]


@cache
def _compiled(targets: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    folder = str(Path(os.environ["TANDEM_KERNEL_CACHE"]) / "triton")
    module = "tests.engine.backends.gpu.comm.one_shot_code"
    return dict(run_offline(module, *targets, TRITON_CACHE_DIR=folder))


@pytest.mark.parametrize("target", [OLDEST, "sm_90"])
def test_packets_on_nvidia(target: str) -> None:
    found = code(target)
    assert found["strong"] == [
        "ld.volatile.global.b64",  # headers and the host's word
        "ld.volatile.global.v2.b64",
        "st.relaxed.sys.global.v2.b64",
    ]
    assert found["looped"] == found["polls"] >= 3 * found["n_pair"], "read again in each turn"
    assert found["early"] == found["writes"] >= N_OTHER * found["n_pair"], "written before"
    assert found["clocks"] == 1
    assert found["weak"] == 0
    assert found["whole"] == found["stores"] >= found["writes"], "word and flag at once"


@pytest.mark.parametrize("target", [OLDEST, "sm_90"])
def test_different_gpus_have_the_same_bits(target: str) -> None:
    """The hidden state passes through a norm, and ranks compare its bits."""
    assert code(target)["rough"] == []


@pytest.mark.parametrize("target", [OLDEST, *QUICK])
def test_ranks_with_nothing_norm_as_others_do(target: str) -> None:
    """They add in the same order: expert routing depends on the last bit."""
    with_own, without = code(target)["norms"]
    assert with_own == without
    assert len(with_own) == 1


def test_packets_on_amd() -> None:
    found = code("gfx1100")
    assert found["looped"] == found["polls"] >= 2 * 3 * found["n_pair"]
    assert found["early"] == found["writes"] >= N_OTHER * found["n_pair"]
    assert found["weak"] == 0
