"""All CPU kernels as modules that can be compiled for any processor, and the symbols they need."""

import struct
from collections.abc import Callable, Iterator, Mapping

from gguf.constants import GGMLQuantizationType as Kind
from llvmlite import ir

from engine.backends.cpu.kernels.cache import attention, cache_codec
from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.packing import dequantise, pack
from engine.backends.cpu.kernels.products import (
    experts,
    float_gemm,
    fused_gemv,
    panel_packing,
    quantised_gemm,
)
from engine.backends.cpu.kernels.recurrent import conv, delta_net, state_space
from engine.backends.cpu.kernels.running import fastcall, replay, thread_all_reduce, thread_pool
from engine.backends.cpu.kernels.small import activation, functions, norm, rope, routing
from engine.formats.quants.layout import LAYOUTS
from engine.load_params import kv_types

Build = Callable[[ir.Module], None]

TYPICAL = (Kind.Q2_K, Kind.Q4_K, Kind.Q5_1, Kind.Q6_K, Kind.Q8_0, Kind.IQ4_NL, Kind.MXFP4)
"""One type for each way in which kernels read codes and scales."""

Writer = Callable[[Isa], Build]
"""A function that returns what writes a module for a kind of processor."""


def _for_types(kernel: str, build: Callable[[ir.Module, Isa, Kind], None]) -> dict[str, Writer]:
    """Return a writer of a kernel for each type of `TYPICAL`, by the module's name."""

    def writer(kind: Kind) -> Writer:
        return lambda isa: lambda module: build(module, isa, kind)

    return {f"{kernel}-{kind.name}": writer(kind) for kind in TYPICAL}


def _for_kinds(
    kernel: str, build: Callable[[ir.Module, Isa, str], None], *kinds: str
) -> dict[str, Writer]:
    """Return a writer of a kernel for each kind of numbers, by the module's name."""

    def writer(kind: str) -> Writer:
        return lambda isa: lambda module: build(module, isa, kind)

    return {f"{kernel}-{kind}": writer(kind) for kind in kinds}


MODULES: Mapping[str, Writer] = {
    **_for_types("product", lambda m, isa, kind: quantised_gemm.build(m, isa, LAYOUTS[kind])),
    **_for_types(
        "wide-product", lambda m, isa, kind: quantised_gemm.build(m, isa, LAYOUTS[kind], 2)
    ),
    **_for_types("experts", lambda m, isa, kind: experts.build_multiply(m, isa, LAYOUTS[kind])),
    **_for_types("rows", lambda m, isa, kind: dequantise.build(m, isa, LAYOUTS[kind])),
    **_for_types("pack", lambda m, _, kind: pack.build(m, kind)),
    **_for_kinds("plain", float_gemm.build, "f32", "f16", "bf16"),
    **_for_kinds(
        "attention",
        lambda m, isa, kind: attention.build(m, isa, kv_types(kind)),
        "f16",
        "q8_0",
        "q4_0",
    ),
    **_for_kinds("store", cache_codec.build, "f16", "q8_0", "q4_0"),
    "panels": lambda isa: (
        lambda module: panel_packing.build(module, isa, panel_packing.format_of(isa, 1))
    ),
    "wide-panels": lambda isa: (
        lambda module: panel_packing.build(module, isa, panel_packing.format_of(isa, 2))
    ),
    "expert-panels": lambda isa: lambda module: experts.build_quantise(module, isa),
    "thread_pool": lambda isa: thread_pool._build_work_loop,
    "meeting": lambda isa: thread_all_reduce.build,
    "clock": lambda isa: thread_pool.build,
    "call": lambda isa: lambda module: fastcall._build(module, 3, False),
    "together": lambda isa: fused_gemv.build,
    "replay": lambda isa: replay.build,
    "norm": lambda isa: norm.build,
    "pairwise": lambda isa: functions.build_pairwise,
    "activation": lambda isa: activation.build,
    "rope": lambda isa: rope.build,
    "routing": lambda isa: routing.build,
    "conv-3": lambda isa: lambda module: conv.build(module, 3),
    "conv-4": lambda isa: lambda module: conv.build(module, 4),
    "delta-net": lambda isa: lambda module: delta_net.build(module, isa, by_channel=False),
    "delta-net-by-channel": lambda isa: (
        lambda module: delta_net.build(module, isa, by_channel=True)
    ),
    "state-space": lambda isa: state_space.build,
}
"""Writers of all modules, by the module's name."""

_TYPED = {name for name in MODULES if name.rpartition("-")[2] in {kind.name for kind in TYPICAL}}
LIKE_OTHERS = _TYPED - {"product-Q4_K", "product-IQ4_NL", "pack-Q6_K", "rows-Q6_K"}
"""Names of the modules that are written by the same functions as another module."""

HARMLESS = {"memset", "memcpy", "memmove", "_GLOBAL_OFFSET_TABLE_"}
"""Symbols that every C library has, and one that no library has to have."""


def unresolved(code: bytes) -> set[str]:
    """Return the symbols that an object file needs: ELF or Mach-O, 64 bits, little-endian."""
    names = _of_mach_o(code) if code[:4] == b"\xcf\xfa\xed\xfe" else _of_elf(code)
    return set(names) - HARMLESS


def _of_elf(code: bytes) -> Iterator[str]:
    """Yield the symbols without a section; the tables are those of the System V ABI."""
    assert code[:6] == b"\x7fELF\x02\x01"
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<2H", code, 58)
    sections = [struct.unpack_from("<2I4Q2I2Q", code, table + n * size) for n in range(count)]
    for _, kind, _, _, start, length, link, _, _, _ in sections:
        if kind == 2:  # SHT_SYMTAB
            for at in range(start + 24, start + length, 24):  # the first one is no symbol
                name, _, _, section = struct.unpack_from("<I2BH", code, at)
                if section == 0:
                    yield _text(code, sections[link][4] + name)


def _of_mach_o(code: bytes) -> Iterator[str]:
    """Yield the undefined symbols of LC_SYMTAB without "_" (`mach-o/loader.h`, `nlist.h`)."""
    (n_commands,), at = struct.unpack_from("<I", code, 16), 32
    for _ in range(n_commands):
        command, size = struct.unpack_from("<2I", code, at)
        if command == 2:
            start, count, strings, _ = struct.unpack_from("<4I", code, at + 8)
            for n in range(count):
                name, kind, _, _, _ = struct.unpack_from("<I2BHQ", code, start + 16 * n)
                if kind & 0x0E == 0:
                    yield _text(code, strings + name).removeprefix("_")
        at += size


def _text(code: bytes, start: int) -> str:
    return code[start : code.index(0, start)].decode()
