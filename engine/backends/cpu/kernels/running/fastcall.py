"""Binds kernels as Python functions; calling one takes a sixth of the time of a ctypes call.

This matters because some kernels are as short as a ctypes call. CPython calls a "fastcall" function
with an array of objects. A stub is compiled for each number of arguments; it converts them to
64-bit integers and calls a kernel. It reads the addresses of the kernel and the interpreter's
functions from the bytes object to which it is bound, so its code is the same in every process and
can be cached on disk. It also adds up the time of a pool's kernels, and records calls for replays.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.language.values import I32, I64, VOID, Code, Value, function
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.call_log import MAX_ARGUMENTS, emit_log
from engine.backends.cpu.kernels.running.thread_pool import LOG, TICKS, ThreadPool, now

Kernel = Callable[..., None]
"""Python function that takes integers: a pool's address, then the kernel's arguments."""

BYTES_START = bytes.__basicsize__ - 1
"""Offset of the data in a bytes object."""

METH_FASTCALL = 0x80
"""CPython's flag for the "fastcall" convention."""

INTERPRETER = (
    "PyLong_AsLongLong", "PyErr_Occurred", "PyErr_BadArgument", "PyEval_SaveThread",
    "PyEval_RestoreThread", "PyLong_FromLong",
)  # fmt: skip
"""Interpreter functions that a stub calls; their addresses follow the kernel's, in this order."""


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def bind(address: int, n_arguments: int, *, holds_gil: bool) -> Kernel:
    """Bind a kernel as a Python function that takes `n_arguments` integers.

    Args:
        address: address of a void function that takes 64-bit integers, the first a pool's address.
        n_arguments: number of arguments, including the pool.
        holds_gil: whether calls keep the GIL, for kernels that take a few microseconds.

    Returns:
        A function that raises TypeError or OverflowError if an argument is not a 64-bit integer.
    """
    assert n_arguments <= MAX_ARGUMENTS, "too many arguments for a replay"
    found = (getattr(ctypes.pythonapi, name) for name in INTERPRETER)
    places = (ctypes.cast(function, ctypes.c_void_p).value for function in found)
    known = struct.pack(f"{1 + len(INTERPRETER)}q", address, *places)
    method = _Method(b"kernel", _stub(n_arguments, holds_gil), METH_FASTCALL, None)
    # never freed, as functions read it in their destructor, at exit after this module's globals
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(method))
    make = ctypes.pythonapi["PyCFunction_NewEx"]
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    made: Kernel = make(ctypes.addressof(method), known, None)
    return made


class BoundKernel(NamedTuple):
    """A kernel as two Python functions.

    Attributes:
        with_gil: function that keeps the GIL, for calls that take a few microseconds.
        without_gil: function that releases the GIL.
        address: address of the kernel itself.
    """

    with_gil: Kernel
    without_gil: Kernel
    address: int

    def chosen(self, pool: ThreadPool, *, is_short: bool) -> Kernel:
        """Wake the pool; return `with_gil` for short calls, `without_gil` for others."""
        if is_short:
            return self.with_gil
        pool.wake()
        return self.without_gil


def bind_both(address: int, n_arguments: int) -> BoundKernel:
    """Bind a kernel that takes `n_arguments` integers after the pool, with and without the GIL."""
    with_gil, without_gil = (
        bind(address, 1 + n_arguments, holds_gil=held) for held in (True, False)
    )
    return BoundKernel(with_gil, without_gil, address)


@cache
def _stub(n_arguments: int, holds_gil: bool) -> int:
    return jit.addresses_by_source(
        f"call-{n_arguments}-{'held' if holds_gil else 'free'}",
        chosen(),
        ["call"],
        lambda m: _build(m, n_arguments, holds_gil),
    )["call"]


def _build(module: ir.Module, n_arguments: int, holds_gil: bool) -> None:
    """Emit `call(known, objects, n)`: returns an int object, or 0 after setting an error."""
    code, (known, objects, n) = function(module, "call", 3, I64)
    kernel, as_int, failed, refuse, let_go, take_again, new_int = code.load_array(
        known + BYTES_START, 1 + len(INTERPRETER)
    )
    with code.when(n.differs(n_arguments)):
        code.call_at(refuse, I32)
        code.builder.ret(code.number(0).raw)
    items = code.load_array(objects, n_arguments)
    numbers = [code.call_at(as_int, I64, item) for item in items]
    with code.when(code.call_at(failed, I64).differs(0)):
        code.builder.ret(code.number(0).raw)
    emit_log(code, code.load(numbers[0] + LOG, I64), kernel, numbers)
    if holds_gil:
        _run(code, kernel, numbers)
    else:
        thread = code.call_at(let_go, I64)
        _run(code, kernel, numbers)
        code.call_at(take_again, VOID, thread)
    code.builder.ret(code.call_at(new_int, I64, code.constant(I32, 0)).raw)


def _run(code: Code, kernel: Value, numbers: list[Value]) -> None:
    """Emit a kernel call that adds its time to the pool's."""
    begun, so_far = now(code), numbers[0] + TICKS
    code.call_at(kernel, VOID, *numbers)
    code.store(code.load(so_far, I64) + (now(code) - begun), so_far)
