"""Compiling kernels for absent GPUs: Triton gets a fake driver.

It needs a separate process, as the tests' process interprets kernels: see `run_offline`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine.backends.gpu.launch import kernel_launch as kernel_launch
from engine.backends.gpu.launch.own_launcher import OwnDriver
from engine.hardware.cuda_api import CudaApi
from tests.helpers.fake_cuda import SIZES, FakeCuda

ROOT = Path(__file__).resolve().parents[4]

ENTRY = re.compile(r"\.entry\s+\w+\s*\((.*?)\)", re.DOTALL)
PARAMETER = re.compile(r"\.param\s+\.(\w+)")

STREAM = 4711
"""Handle of torch's current stream."""

_numbers = itertools.count()


class OfflineDriver(OwnDriver):
    """Triton's driver as on a machine with one such GPU.

    Args:
        target: a `GPUTarget` of Triton.
        library: library with the functions of a fake driver.
    """

    def __init__(self, target: Any, library: FakeCuda | None = None) -> None:
        super().__init__(CudaApi(library or FakeCuda()))
        self._target = target
        self._number = next(_numbers)  # kernels are known by it

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return STREAM


@contextlib.contextmanager
def offline(target: Any, library: FakeCuda | None = None) -> Iterator[None]:
    """Make Triton compile for `target`."""
    from triton.runtime import driver

    driver.set_active(OfflineDriver(target, library))
    try:
        yield
    finally:
        driver._active = None


@contextlib.contextmanager
def on_fake_gpu(target: Any, library: FakeCuda) -> Iterator[None]:
    """Make `launch` use a fake driver, whatever device the tensors are on."""
    with (
        patch.object(Tensor, "get_device", lambda tensor: 0),
        patch.object(torch.cuda, "_exchange_device", lambda device: 0),
        patch.object(torch.cuda, "_maybe_exchange_device", lambda device: 0),
        patch.object(kernel_launch, "current_device", lambda: 0),
        patch.object(kernel_launch, "current_stream", lambda device: STREAM),
        patch.object(kernel_launch, "prepare"),
        patch.object(kernel_launch, "_known", {}),
        offline(target, library),
    ):
        yield


def parameter_bytes(ptx: str) -> list[int]:
    """Return the sizes of a kernel's parameters in bytes, read from its code."""
    (entry,) = ENTRY.findall(ptx)
    return [SIZES[kind] for kind in PARAMETER.findall(entry)]


def run_offline(module: str, *arguments: str, **environment: str) -> Any:
    """Run a module in a process where kernels are compiled; return the JSON it prints last.

    It imports from where this process does, such as another Triton that PYTHONPATH names.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path, **environment}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, env=env, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])
