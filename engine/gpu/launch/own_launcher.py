"""Launcher of Triton's kernels that needs neither a C compiler nor Python.h.

Triton has a driver object that describes the device, loads compiled kernels and launches them.
`OwnDriver` is one for NVIDIA's GPUs, written with ctypes. Triton itself still compiles kernels and
chooses the variant for the arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from engine.hardware.cuda_api import (
    DEVICE_BUS_WIDTH,
    DEVICE_CLOCK,
    DEVICE_MEMORY_CLOCK,
    DEVICE_PROCESSORS,
    DEVICE_REGISTERS,
    DEVICE_SHARED_BYTES,
    DEVICE_SHARED_BYTES_OPT_IN,
    DEVICE_WARP,
    CudaApi,
)

WARP = 32

TYPES: Mapping[str, Any] = {
    "i1": ctypes.c_bool, "u1": ctypes.c_bool, "i8": ctypes.c_int8, "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16, "u16": ctypes.c_uint16, "i32": ctypes.c_int32, "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "f32": ctypes.c_float,
    "fp64": ctypes.c_double,
}  # fmt: skip
"""ctypes type of each of Triton's scalar types."""

SCRATCH = ("*i8", "*i8")
"""Types of the two scratch memory addresses that each kernel takes after its own parameters."""


def parameter_types(signature: Mapping[str, str]) -> list[tuple[int, Any]]:
    """Return the position and ctypes type of each argument that a compiled kernel reads.

    Args:
        signature: Triton's type of each argument, in order; constants that the kernel was compiled
            for are "constexpr" and are not read.

    Raises:
        ValueError: an argument's type cannot be passed.
    """
    found: list[tuple[int, Any]] = []
    for place, (name, kind) in enumerate(signature.items()):
        if kind == "constexpr":
            continue
        made = ctypes.c_uint64 if str(kind).startswith("*") else TYPES.get(kind)
        if made is None:
            raise ValueError(f"{name} is of the type {kind}, which cannot be passed to a kernel")
        found.append((place, made))
    return found


class OwnLauncher:
    """Launcher of one compiled kernel; Triton creates and calls it.

    Args:
        source: Triton's source of the kernel, with its signature.
        metadata: the compiler's metadata of the kernel.
        current_device: returns the number of the device to launch on.

    Raises:
        ValueError: the kernel needs a kind of launch that is not implemented here.
    """

    def __init__(
        self, api: CudaApi, source: Any, metadata: Any, current_device: Callable[[], int]
    ) -> None:
        if getattr(metadata, "num_ctas", 1) != 1 or metadata.launch_cooperative_grid:
            raise ValueError(f"{metadata.name} needs clusters or a cooperative start")
        self._api, self._current_device = api, current_device
        self._types = parameter_types(source.signature)
        self._n_threads = WARP * metadata.num_warps
        self._shared_bytes = metadata.shared
        self._scratch_bytes = (metadata.global_scratch_size, metadata.profile_scratch_size)
        self._name = metadata.name
        self._checked: set[int] = set()

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: object, about: object,
        on_enter: object, on_exit: object, *args: Any,
    ) -> None:  # fmt: skip
        """Launch the kernel; the parameters are those of Triton's own launcher.

        Args:
            x, y, z: number of programs in each dimension.
            stream, function: handles of the CUDA stream and of the loaded kernel.
            packed, about, on_enter, on_exit: further parameters of Triton's launcher, unused.
            args: all arguments in order, constants included.

        Raises:
            EngineError: the driver refuses the launch.
            ValueError: the compiled kernel's parameters differ from its signature.
        """
        if 0 in (x, y, z):
            return
        if function not in self._checked:
            self._check(function)
            self._checked.add(function)
        values = [kind(_value(args[place])) for place, kind in self._types]
        scratch = [_scratch(n_bytes * x * y * z) for n_bytes in self._scratch_bytes]
        values += [ctypes.c_uint64(0 if made is None else made.data_ptr()) for made in scratch]
        device = self._current_device()
        self._api.start(
            function, device, (x, y, z), self._n_threads, self._shared_bytes, stream, values
        )

    def _check(self, function: int) -> None:
        """Compare the parameter sizes with those that the compiled code declares."""
        sizes = self._api.parameter_bytes(function)
        ours = [ctypes.sizeof(kind) for _, kind in self._types] + [8] * len(SCRATCH)
        if sizes is not None and list(sizes) != ours[: len(sizes)]:
            raise ValueError(f"{self._name} takes parameters of {list(sizes)} bytes, not {ours}")


def _value(argument: Any) -> Any:
    """Return a number as it is, or a tensor's address."""
    return argument.data_ptr() if hasattr(argument, "data_ptr") else argument


def _scratch(n_bytes: int) -> torch.Tensor | None:
    """Allocate a kernel's scratch memory; torch reuses it only in stream order."""
    return torch.empty(n_bytes, dtype=torch.uint8, device="cuda") if n_bytes else None


class OwnUtils:
    """The driver's utility functions, under Triton's names."""

    def __init__(self, api: CudaApi) -> None:
        self._api = api

    def load_binary(
        self, name: str, code: bytes, shared_bytes: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Load a compiled kernel, see `CudaApi.load`."""
        return self._api.load(name, code, shared_bytes, device)

    def unload_module(self, module: int) -> None:
        """Unload a kernel's module, see `CudaApi.unload`."""
        self._api.unload(module)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the device's properties, named as by Triton's own driver."""
        plain = self._api.device_attribute(DEVICE_SHARED_BYTES, device)
        numbers = {
            "max_num_regs": DEVICE_REGISTERS, "multiprocessor_count": DEVICE_PROCESSORS,
            "warpSize": DEVICE_WARP, "sm_clock_rate": DEVICE_CLOCK,
            "mem_clock_rate": DEVICE_MEMORY_CLOCK, "mem_bus_width": DEVICE_BUS_WIDTH,
        }  # fmt: skip
        return {
            "max_shared_mem": self._api.device_attribute(DEVICE_SHARED_BYTES_OPT_IN, device)
            or plain,
            **{name: self._api.device_attribute(n, device) for name, n in numbers.items()},
        }


class OwnDriver:
    """Triton's active driver object, with the method names of Triton's own."""

    def __init__(self, api: CudaApi) -> None:
        self._api = api
        self.utils = OwnUtils(api)

    def launcher_cls(self, source: Any, metadata: Any) -> OwnLauncher:
        """Return the launcher of a compiled kernel."""
        return OwnLauncher(self._api, source, metadata, self.get_current_device)

    def get_current_target(self) -> Any:
        """Return Triton's target of torch's current device."""
        make_target = import_module("triton.backends.compiler").GPUTarget
        major, minor = self.get_device_capability()
        return make_target("cuda", 10 * major + minor, WARP)

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        """Return the compute capability, as torch has it."""
        return torch.cuda.get_device_capability(device)

    def get_current_device(self) -> int:
        """Return the number of torch's current device."""
        return torch.cuda.current_device()

    def set_current_device(self, device: int) -> None:
        """Make `device` torch's current one."""
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int) -> int:
        """Return the handle of torch's current stream."""
        return int(torch.cuda.current_stream(device).cuda_stream)

    def get_active_torch_device(self) -> torch.device:
        """Return torch's current device."""
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        """Return torch's module for the kind of device."""
        return torch.cuda

    def assemble_tensormap_to_arg(self, about: object, args: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments unchanged; older Tritons replace tensor descriptors, unused here."""
        return args
