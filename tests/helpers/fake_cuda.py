"""A fake driver of NVIDIA, which records its calls and computes nothing."""

import ctypes
from collections.abc import Callable
from typing import Any

SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "f32": 4, "b64": 8,
         "u64": 8, "f64": 8}  # fmt: skip
"""Size of each of PTX's types in bytes."""

OPT_IN_BYTES = 227 << 10
"""Largest shared memory of a block in bytes, if asked for."""


class FakeCuda:
    """Stand-in for the driver library that ctypes opens.

    Args:
        parameter_bytes: returns the sizes of a kernel's parameters, from its name; None for a
            driver that does not tell these.
        failing: name of the function that fails, and its error code.

    Attributes:
        calls: names of the called functions, in order.
        started: launches: kernel, grid, threads, shared memory, stream and the parameters' bytes.
        functions: handle of the kernel of each launch.
        attributes: attributes of functions that were set: number and value.
        context: number of the device whose context the thread has; None for none.
    """

    def __init__(
        self,
        parameter_bytes: Callable[[str], list[int]] | None = None,
        failing: tuple[str, int] = ("", 0),
    ) -> None:
        self.calls: list[str] = []
        self.started: list[tuple[str, tuple[int, ...], int, int, int, list[bytes]]] = []
        self.functions: list[int] = []
        self.attributes: list[tuple[int, int]] = []
        self.context: int | None = None
        self._parameter_bytes = parameter_bytes
        self._failing = failing
        self._names: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        if name == "cuFuncGetParamInfo" and self._parameter_bytes is None:
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == self._failing[0]:
                return self._failing[1]
            return getattr(self, f"_{name}", lambda *args: 0)(*args)

        return call

    def _cuGetErrorString(self, code: Any, text: Any) -> int:  # noqa: N802 as all below: CUDA's
        text._obj.value = f"made-up error {code.value}".encode()
        return 0

    def _cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = None if self.context is None else 77
        return 0

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        context._obj.value = 77
        self.context = device.value
        return 0

    def _cuCtxGetDevice(self, device: Any) -> int:  # noqa: N802
        device._obj.value = self.context
        return 0

    def _cuModuleLoadData(self, module: Any, code: Any) -> int:  # noqa: N802
        assert code.value.startswith(b"\x7fELF"), "a cubin"
        module._obj.value = 1000 + len(self._names)
        return 0

    def _cuModuleGetFunction(self, function: Any, module: Any, name: Any) -> int:  # noqa: N802
        self._names.append(name.value.decode())
        function._obj.value = len(self._names)
        return 0

    def _cuFuncGetAttribute(self, value: Any, number: Any, function: Any) -> int:  # noqa: N802
        value._obj.value = {0: 1024, 1: 16, 3: 8, 4: 40}[number.value]
        return 0

    def _cuFuncSetAttribute(self, function: Any, number: Any, value: Any) -> int:  # noqa: N802
        self.attributes.append((number.value, value.value))
        return 0

    def _cuDeviceGetAttribute(self, value: Any, number: Any, device: Any) -> int:  # noqa: N802
        value._obj.value = OPT_IN_BYTES if number.value == 97 else 48 << 10
        return 0

    def _cuFuncGetParamInfo(self, function: Any, n: Any, offset: Any, size: Any) -> int:  # noqa: N802
        sizes = self._sizes(function.value)
        if n.value >= len(sizes):
            return 1
        size._obj.value = sizes[n.value]
        return 0

    def _cuLaunchKernel(self, function: Any, *args: Any) -> int:  # noqa: N802
        if self.context is None:
            return 201
        *dims, shared, stream, addresses, extra = args
        assert extra is None
        assert all(type(x) is int for x in (*dims, shared)), "ctypes makes C ints of these"
        sizes = self._sizes(function.value)
        found = [ctypes.string_at(addresses[n], size) for n, size in enumerate(sizes)]
        name = self._names[function.value - 1]
        self.functions.append(function.value)
        self.started.append((name, tuple(dims[:3]), dims[3], shared, stream.value or 0, found))
        return 0

    def _sizes(self, function: int) -> list[int]:
        return self._parameter_bytes(self._names[function - 1]) if self._parameter_bytes else []
