"""The processor's own clock, which compiled code reads in about ten nanoseconds."""

from __future__ import annotations

import ctypes
import time
from functools import cache

from llvmlite import ir

from engine.cpu.kernels import jit
from engine.cpu.kernels.isa import chosen
from engine.cpu.kernels.values import I64, Code, Value, function

CALIBRATION_S = 0.01
"""Time over which the length of a tick is measured."""


def now(code: Code) -> Value:
    """Ticks since some moment; always 0 on processors whose clock is not known here."""
    family = code.builder.module.triple.split("-")[0]
    if family in ("x86_64", "amd64"):
        return code.call("llvm.readcyclecounter", I64)  # counts evenly, whatever the frequency
    if family in ("aarch64", "arm64"):  # that intrinsic may read what programs must not
        return _register(code, "cntvct_el0")
    return code.number(0)


def _register(code: Code, name: str) -> Value:
    """What is in a register of the processor."""
    module, intrinsic = code.builder.module, "llvm.read_volatile_register.i64"
    kind = ir.FunctionType(I64, [ir.MetaDataType()])
    read = module.globals.get(intrinsic) or ir.Function(module, kind, intrinsic)
    named = module.add_metadata([ir.MetaDataString(module, name)])
    return Value(code, code.builder.call(read, [named]))


@cache
def tick_s() -> float | None:
    """Seconds from tick to tick, measured once; None where no clock is known."""
    address = jit.addresses_by_source("clock", chosen(), ["read"], build)["read"]
    read = ctypes.CFUNCTYPE(ctypes.c_int64)(address)
    begun, first = time.perf_counter(), read()
    time.sleep(CALIBRATION_S)
    seconds, ticks = time.perf_counter() - begun, read() - first
    return seconds / ticks if ticks else None


def build(module: ir.Module) -> None:
    """`read()`, the ticks now."""
    code, _ = function(module, "read", 0, I64)
    code.builder.ret(now(code).raw)
