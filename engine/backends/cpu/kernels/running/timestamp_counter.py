"""The processor's timestamp counter, which compiled code reads in about ten nanoseconds."""

from __future__ import annotations

import ctypes
import time
from functools import cache

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.language.values import I64, Code, Value, function
from engine.backends.cpu.kernels.running import jit

CALIBRATION_S = 0.01
"""Time over which the length of a tick is measured, in seconds."""


def now(code: Code) -> Value:
    """Write a read of the counter, in ticks; always 0 on processors whose counter is not known."""
    family = code.builder.module.triple.split("-")[0]
    if family in ("x86_64", "amd64"):
        return code.call("llvm.readcyclecounter", I64)  # at a constant rate
    if family in ("aarch64", "arm64"):  # the intrinsic may read a forbidden counter
        return _register(code, "cntvct_el0")
    return code.number(0)


def _register(code: Code, name: str) -> Value:
    """Write a read of a processor register by name."""
    module, intrinsic = code.builder.module, "llvm.read_volatile_register.i64"
    kind = ir.FunctionType(I64, [ir.MetaDataType()])
    read = module.globals.get(intrinsic) or ir.Function(module, kind, intrinsic)
    named = module.add_metadata([ir.MetaDataString(module, name)])
    return Value(code, code.builder.call(read, [named]))


@cache
def tick_s() -> float | None:
    """Return the length of a tick in seconds, measured once; None where no counter is known."""
    address = jit.addresses_by_source("clock", chosen(), ["read"], build)["read"]
    read = ctypes.CFUNCTYPE(ctypes.c_int64)(address)
    begun, first = time.perf_counter(), read()
    time.sleep(CALIBRATION_S)
    seconds, ticks = time.perf_counter() - begun, read() - first
    return seconds / ticks if ticks else None


def build(module: ir.Module) -> None:
    """Write `read()`: returns the counter, in ticks."""
    code, _ = function(module, "read", 0, I64)
    code.builder.ret(now(code).raw)
