"""CUDA driver functions that load and launch kernels, called through ctypes.

Names, numbers and structures come from cuda.h ("CUDA Driver API").
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

from engine.errors import EngineError
from engine.hardware.devices.types import is_cpu

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

INVALID_VALUE, OUT_OF_MEMORY, NO_CONTEXT = 1, 2, 201
PEER_ACCESS_ALREADY_ENABLED = 704
"""Values of CUresult."""

FUNCTION_SHARED_BYTES, FUNCTION_LOCAL_BYTES, FUNCTION_REGISTERS, FUNCTION_THREADS = 1, 3, 4, 0
FUNCTION_MOST_DYNAMIC_SHARED_BYTES = 8
"""Values of CUfunction_attribute."""

PREFER_SHARED = 1
"""CU_FUNC_CACHE_PREFER_SHARED."""

DEVICE_SHARED_BYTES, DEVICE_SHARED_BYTES_OPT_IN = 8, 97
DEVICE_REGISTERS, DEVICE_WARP, DEVICE_CLOCK, DEVICE_PROCESSORS = 12, 10, 13, 16
DEVICE_MEMORY_CLOCK, DEVICE_BUS_WIDTH = 36, 37
"""Values of CUdevice_attribute."""

PLAIN_SHARED_BYTES = 48 << 10
"""Maximum shared memory for a kernel that does not opt in to more."""


class CudaCallError(EngineError):
    """Error from a driver function, with its CUresult."""

    def __init__(
        self, message: str, hint: str, error_code: int, **values: str | int | float
    ) -> None:
        super().__init__(message, hint, **values)
        self.error_code = error_code


class LoadedKernel(NamedTuple):
    """A kernel loaded on a device."""

    module: int
    function: int
    n_registers: int
    n_spills: int
    n_threads: int


class CudaApi:
    """The CUDA driver.

    Args:
        library: the driver as loaded by ctypes, or a stand-in.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("cuInit", c_uint(0))

    @classmethod
    def open(cls) -> CudaApi:
        """Return this system's driver.

        Raises:
            EngineError: there is no driver, or it cannot be initialised.
        """
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise EngineError(
                "NVIDIA's driver library {name} cannot be opened ({problem}).",
                "Install the NVIDIA driver, or set TANDEM_BACKEND=reference.",
                name=LIBRARY,
                problem=str(error),
            ) from error
        return cls(library)

    def load(self, name: str, code: bytes, shared_bytes: int, device: int) -> LoadedKernel:
        """Load a compiled kernel.

        Args:
            code: the compiled code, a cubin.
            shared_bytes: dynamic shared memory per launch.

        Raises:
            EngineError: the driver refuses the kernel.
        """
        self.enter(device)
        module, function = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), c_char_p(code))
        self._call("cuModuleGetFunction", byref(function), module, c_char_p(name.encode()))
        if shared_bytes > PLAIN_SHARED_BYTES:
            most = self.device_attribute(DEVICE_SHARED_BYTES_OPT_IN, device)
            most -= self._function_attribute(FUNCTION_SHARED_BYTES, function)
            self._call("cuFuncSetCacheConfig", function, c_int(PREFER_SHARED))
            self._call(
                "cuFuncSetAttribute", function, c_int(FUNCTION_MOST_DYNAMIC_SHARED_BYTES),
                c_int(most),
            )  # fmt: skip
        return LoadedKernel(
            module.value or 0,
            function.value or 0,
            self._function_attribute(FUNCTION_REGISTERS, function),
            self._function_attribute(FUNCTION_LOCAL_BYTES, function) // 4,
            self._function_attribute(FUNCTION_THREADS, function),
        )

    def unload(self, module: int) -> None:
        """Free a module loaded by `load`."""
        self._call("cuModuleUnload", c_void_p(module))

    def parameter_bytes(self, function: int) -> tuple[int, ...] | None:
        """Return the size of each kernel parameter; None for drivers older than CUDA 12.4."""
        if not hasattr(self._library, "cuFuncGetParamInfo"):
            return None
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while True:
            failed = self._library.cuFuncGetParamInfo(
                c_void_p(function), c_size_t(len(sizes)), byref(offset), byref(size)
            )
            if failed == INVALID_VALUE:
                return tuple(sizes)
            self.check("cuFuncGetParamInfo", failed)
            sizes.append(size.value)

    @property
    def launch_kernel(self) -> Callable[..., int]:
        """The driver function cuLaunchKernel; the device's context must be current."""
        found: Callable[..., int] = self._library.cuLaunchKernel
        return found

    def allocate(self, n_bytes: int, device: int) -> int:
        """Allocate zeroed memory on a device and return its address.

        Unlike with PyTorch's segments, peers can be given access to this memory.

        Raises:
            EngineError: the driver refuses, perhaps for lack of memory.
        """
        address = c_uint64()
        with self._on(device):
            self._call("cuMemAlloc_v2", byref(address), c_size_t(n_bytes))
        try:
            self.clear(address.value, n_bytes, device)
        except EngineError:
            self.free(address.value, device)
            raise
        return address.value

    def clear(self, address: int, n_bytes: int, device: int) -> None:
        """Fill memory from `allocate` with zeros, and wait until that is done."""
        with self._on(device):
            self._call("cuMemsetD8_v2", c_uint64(address), c_ubyte(0), c_size_t(n_bytes))
            self._call("cuCtxSynchronize")

    def free(self, address: int, device: int) -> None:
        """Free memory from `allocate`."""
        with self._on(device):
            self._call("cuMemFree_v2", c_uint64(address))

    def allow_peer(self, device: int, peer: int) -> None:
        """Let kernels on a device access a peer's memory.

        Raises:
            EngineError: the device cannot access the peer's memory.
        """
        context = c_void_p()
        with self._on(peer):
            self._call("cuCtxGetCurrent", byref(context))
        with self._on(device):
            failed = self._library.cuCtxEnablePeerAccess(context, c_uint(0))
            if failed != PEER_ACCESS_ALREADY_ENABLED:
                self.check("cuCtxEnablePeerAccess", failed)

    def host_address(self, address: int, device: int) -> int:
        """Return mapped host memory's address for kernels on a device (it differs on Windows)."""
        found = c_uint64()
        with self._on(device):
            self._call("cuMemHostGetDevicePointer_v2", byref(found), c_void_p(address), c_uint(0))
        return found.value

    def device_attribute(self, number: int, device: int) -> int:
        """Return a device attribute, given its number in CUdevice_attribute."""
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), c_int(number), c_int(device))
        return value.value

    def _function_attribute(self, number: int, function: c_void_p) -> int:
        value = c_int()
        self._call("cuFuncGetAttribute", byref(value), c_int(number), function)
        return value.value

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        # restores the thread's current context, on which PyTorch relies
        before = c_void_p()
        self._call("cuCtxGetCurrent", byref(before))
        self.enter(device)
        try:
            yield
        finally:
            self._call("cuCtxSetCurrent", before)

    def enter(self, device: int) -> None:
        """Make a device's primary context, which torch also uses, current on this thread."""
        context, current = c_void_p(), c_int(-1)
        self._call("cuCtxGetCurrent", byref(context))
        if context.value:
            self._call("cuCtxGetDevice", byref(current))
        if current.value != device:
            self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
            self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *args: Any) -> None:
        self.check(name, getattr(self._library, name)(*args))

    def check(self, name: str, failed: int) -> None:
        """Raise `CudaCallError` if the driver function `name` returned an error."""
        if failed:
            text = c_char_p()
            self._library.cuGetErrorString(c_int(failed), byref(text))
            why = text.value.decode(errors="replace") if text.value else "an unknown error"
            raise CudaCallError(
                "NVIDIA's driver reports '{why_not}' ({name}: {number}).",
                "Load the model again; if that fails too, restart Tandem.",
                failed, why_not=why, name=name, number=failed,
            )  # fmt: skip


CUDA_OVERHEAD_BYTES = 500 << 20
"""Bytes that CUDA and its libraries are assumed to take on a GPU before any computation, if not
measured; they take 300 to 600 MB, depending on driver and card."""

MIN_OVERHEAD, MAX_OVERHEAD = 64 << 20, 4 << 30
"""Bounds of a plausible measurement; in some containers, drivers report nonsense."""

_measured: dict[str, int] = {}


def overhead_bytes(device: str) -> int:
    """Return the bytes that a device's runtime itself takes; 0 for the CPU."""
    return 0 if is_cpu(device) else _measured.get(device, CUDA_OVERHEAD_BYTES)


def use_overheads(measured: Mapping[str, int]) -> None:
    """From now on, plan with these bytes, by GPU id, and with the default for all other GPUs."""
    _measured.clear()
    _measured.update(measured)


def is_overhead(n_bytes: int) -> bool:
    """Return whether a measurement is plausible."""
    return MIN_OVERHEAD <= n_bytes <= MAX_OVERHEAD
