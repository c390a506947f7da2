"""GPUs whose context is lost to this process: every call of CUDA reports the fault again."""

import types

import pytest
import torch

from engine.hardware.devices import visibility as stopped
from tests.helpers.fake_nvml import FakeDriver, install, three_gpus

ASSERT = (
    "CUDA error: device-side assert triggered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call."
)
"""Message of PyTorch for a lost context."""


def fault(message: str = ASSERT, code: int | None = None) -> torch.AcceleratorError:
    """Return the error that PyTorch raises."""
    error = torch.AcceleratorError(message)
    if code is not None:
        error.error_code = code  # type: ignore[attr-defined]
    return error


def forget_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no GPU be marked as stopped, now and after the test."""
    monkeypatch.setattr(stopped, "_stopped", {})


def install_dead_cards(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeDriver, list[str]]:
    """Install three GPUs that NVML shows and of which CUDA only reports a fault.

    Returns:
        The driver, and the names of the functions of `torch.cuda` that were called, in order.
    """
    forget_stopped(monkeypatch)
    driver, called = install(three_gpus(), monkeypatch), list[str]()

    def dead(name: str) -> object:
        def call(*args: object, **options: object) -> object:
            called.append(name)
            raise fault()

        return call

    for name in dir(torch.cuda):
        made = getattr(torch.cuda, name)
        is_function = callable(made) and not name.startswith("_") and not _is_error(made)
        if is_function and getattr(made, "__module__", "").startswith("torch."):
            monkeypatch.setattr(torch.cuda, name, dead(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(driver.gpus))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=None)
    )
    return driver, called


def _is_error(made: object) -> bool:
    return isinstance(made, type) and issubclass(made, BaseException)
