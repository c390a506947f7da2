"""Fixtures for kernels: tested on the CPU, where Triton interprets them."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*.py"]
else:
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # so that ranks may share a GPU


def pytest_report_header() -> str | None:
    missing = importlib.util.find_spec("triton") is None
    return "no kernels for GPUs are tested: there is no Triton for this system" if missing else None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Device of the kernels: the CPU, which interprets them, and with `-m gpu` the first GPU.

    Run `TRITON_INTERPRET=0 pytest -m gpu` for the GPU.
    """
    name: str = request.param
    return name
