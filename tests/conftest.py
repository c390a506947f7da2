"""What holds for all tests: kernels that are compiled for them stay out of the user's folders."""

import os
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled kernels with pytest's own cache: compiling them takes longer than most tests.

    Programs that tests start inherit the setting.
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
