"""Starting Triton's kernels without the part of Triton that needs a C compiler and Python.h.

Triton asks an object for all that it must know of the device, to load what it compiled and to
start it. `OwnDriver` is such an object for NVIDIA's GPUs, written with ctypes. Compiling, and which
variant of a kernel serves which arguments, stay Triton's own business.
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
"""What Triton's scalar types are in memory."""

SCRATCH = ("*i8", "*i8")
"""Behind its own parameters, each kernel has two addresses of memory for itself."""


def parameter_types(signature: Mapping[str, str]) -> list[tuple[int, Any]]:
    """Of a kernel's arguments, those that it is started with: their places and types in memory.

    Args:
        signature: of all arguments in order, in Triton's words; what a kernel was compiled for is
            a "constexpr", which it does not read.

    Raises:
        ValueError: an argument is of a kind that nothing here can pass.
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
    """Starts one compiled kernel; Triton makes and calls it.

    Args:
        source: what it was compiled from, with its signature.
        metadata: what the compiler says of it.
        current_device: the number of the device that it is started on.

    Raises:
        ValueError: it is of a kind that our kernels are not.
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
        """Start it; the parameters are Triton's.

        Args:
            x, y, z: programs in each direction.
            packed, about, on_enter, on_exit: what Triton's own launcher takes besides.
            args: all arguments in order, also those that it was compiled for.

        Raises:
            EngineError: the driver refuses it.
            ValueError: the compiled kernel has other parameters than its signature says.
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
        """Compare with what the compiled code itself says of its parameters."""
        sizes = self._api.parameter_bytes(function)
        ours = [ctypes.sizeof(kind) for _, kind in self._types] + [8] * len(SCRATCH)
        if sizes is not None and list(sizes) != ours[: len(sizes)]:
            raise ValueError(f"{self._name} takes parameters of {list(sizes)} bytes, not {ours}")


def _value(argument: Any) -> Any:
    """A number, or a tensor's address."""
    return argument.data_ptr() if hasattr(argument, "data_ptr") else argument


def _scratch(n_bytes: int) -> torch.Tensor | None:
    """Memory for a kernel itself; torch gives it to others only in the order of the stream."""
    return torch.empty(n_bytes, dtype=torch.uint8, device="cuda") if n_bytes else None


class OwnUtils:
    """What Triton asks a device's driver for, under Triton's names."""

    def __init__(self, api: CudaApi) -> None:
        self._api = api

    def load_binary(
        self, name: str, code: bytes, shared_bytes: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """See `CudaApi.load`."""
        return self._api.load(name, code, shared_bytes, device)

    def unload_module(self, module: int) -> None:
        """See `CudaApi.unload`."""
        self._api.unload(module)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Under the names that Triton's own driver has for them."""
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
    """Serves as Triton's active driver, under the names of Triton's own."""

    def __init__(self, api: CudaApi) -> None:
        self._api = api
        self.utils = OwnUtils(api)

    def launcher_cls(self, source: Any, metadata: Any) -> OwnLauncher:
        """What starts a compiled kernel."""
        return OwnLauncher(self._api, source, metadata, self.get_current_device)

    def get_current_target(self) -> Any:
        """What kernels are compiled for: torch's current device."""
        make_target = import_module("triton.backends.compiler").GPUTarget
        major, minor = self.get_device_capability()
        return make_target("cuda", 10 * major + minor, WARP)

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        """As torch has it."""
        return torch.cuda.get_device_capability(device)

    def get_current_device(self) -> int:
        """The number of torch's current device."""
        return torch.cuda.current_device()

    def set_current_device(self, device: int) -> None:
        """Make it torch's current device."""
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int) -> int:
        """The address of torch's current stream."""
        return int(torch.cuda.current_stream(device).cuda_stream)

    def get_active_torch_device(self) -> torch.device:
        """torch's current device."""
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        """torch's module for the device."""
        return torch.cuda

    def assemble_tensormap_to_arg(self, about: object, args: Sequence[Any]) -> Sequence[Any]:
        """What older versions of Triton do with descriptors of tensors: our kernels have none."""
        return args
