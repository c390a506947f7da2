"""Compiled kernels as Python functions, each compiled at its first use, once for all models.

`type_number` is the number of a GGML type; `x_bytes` the number of bytes of a quantised activation
(`kernels.products.panels`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.packing import dequantise, file_pack, file_read, pack
from engine.backends.cpu.kernels.products import (
    experts,
    float_gemm,
    fused_gemv,
    gemm,
    int16_gemm,
    panel_packing,
    quantised_gemm,
)
from engine.backends.cpu.kernels.running import jit
from engine.backends.cpu.kernels.running.fastcall import Kernel, bind
from engine.formats.quants.layout import LAYOUTS


def callable_at(address: int, arguments: Iterable[str]) -> Kernel:
    """Bind a kernel of a pool and these arguments; a call releases Python's lock."""
    return bind(address, 1 + len(tuple(arguments)), holds_gil=False)


@cache
def quantise_address(x_bytes: int) -> int:
    """Return the address of the kernel of `panel_packing`."""
    isa = chosen()
    found = jit.addresses_by_source(
        f"panels-{x_bytes}",
        isa,
        ["quantise"],
        lambda m: panel_packing.build(m, isa, panel_packing.format_of(isa, x_bytes)),
    )
    return found["quantise"]


@cache
def _product(type_number: int, x_bytes: int) -> dict[str, int]:
    isa, layout = chosen(), LAYOUTS[type_number]

    def build(module: ir.Module) -> None:
        quantised_gemm.build(module, isa, layout, x_bytes)

    names = ["multiply", "multiply_piece"]
    return jit.addresses_by_source(f"quantised-gemm-{type_number}-{x_bytes}", isa, names, build)


@cache
def multiply(type_number: int, x_bytes: int) -> Kernel:
    """Return the kernel of `quantised_gemm` that multiplies by a matrix of a GGML type."""
    return callable_at(_product(type_number, x_bytes)["multiply"], gemm.ARGUMENTS)


def multiply_piece(type_number: int, x_bytes: int) -> int:
    """Return the address of the function of one piece of `multiply`, for `multiply_all`."""
    return _product(type_number, x_bytes)["multiply_piece"]


@cache
def _fused() -> dict[str, int]:
    return jit.addresses_by_source("fused-gemv", chosen(), fused_gemv.NAMES, fused_gemv.build)


@cache
def multiply_all() -> Kernel:
    """Return the kernel of `fused_gemv` that multiplies the same tokens by several matrices."""
    return callable_at(_fused()["multiply_all"], fused_gemv.ARGUMENTS)


@cache
def multiply_gated() -> Kernel:
    """Return the kernel of `fused_gemv` that multiplies by gate and up, then activates."""
    return callable_at(_fused()["multiply_gated"], fused_gemv.GATED)


@cache
def quantise_groups(x_bytes: int) -> Kernel:
    """Return the kernel of `experts` that quantises each expert's rows."""
    isa, name = chosen(), "quantise_groups"

    def build(module: ir.Module) -> None:
        experts.build_quantise(module, isa, x_bytes)

    found = jit.addresses_by_source(f"expert-panels-{x_bytes}", isa, [name], build)
    return callable_at(found[name], experts.QUANTISE)


@cache
def multiply_groups(type_number: int, x_bytes: int) -> Kernel:
    """Return the kernel of `experts` that multiplies rows by the matrices of their experts."""
    isa, layout, name = chosen(), LAYOUTS[type_number], "multiply_groups"

    def build(module: ir.Module) -> None:
        experts.build_multiply(module, isa, layout, x_bytes)

    found = jit.addresses_by_source(f"experts-{type_number}-{x_bytes}", isa, [name], build)
    return callable_at(found[name], experts.MULTIPLY)


@cache
def _expert_ffn(x_bytes: int) -> dict[str, int]:
    isa = chosen()

    def build(module: ir.Module) -> None:
        experts.build_ffn(module, isa, x_bytes)

    return jit.addresses_by_source(f"expert-ffn-{x_bytes}", isa, experts.FFN_NAMES, build)


def pack_each_address(x_bytes: int) -> int:
    """Return the address of the kernel of `experts` that packs each token by itself."""
    return _expert_ffn(x_bytes)["pack_each"]


@cache
def feed_experts(x_bytes: int) -> Kernel:
    """Return the kernel of `experts` that computes the FFNs of experts."""
    return callable_at(_expert_ffn(x_bytes)["feed"], experts.FFN_ARGUMENTS)


@cache
def _rows(type_number: int) -> dict[str, int]:
    isa, layout, names = chosen(), LAYOUTS[type_number], ["lookup", "bf16_rows"]
    return jit.addresses_by_source(
        f"dequantise-{type_number}", isa, names, lambda m: dequantise.build(m, isa, layout)
    )


@cache
def lookup(type_number: int) -> Kernel:
    """Return the kernel of `dequantise` that dequantises single rows."""
    return callable_at(_rows(type_number)["lookup"], dequantise.LOOKUP)


@cache
def bf16_rows(type_number: int) -> Kernel:
    """Return the kernel of `dequantise` that dequantises tiles of rows to BF16."""
    return callable_at(_rows(type_number)["bf16_rows"], dequantise.BF16_ROWS)


@cache
def _packers(type_number: int) -> dict[str, int]:
    return jit.addresses_by_source(
        f"file-pack-{type_number}",
        chosen(),
        ["pack", "pack_file"],
        lambda module: file_pack.build(module, chosen(), type_number),
    )


@cache
def pack_rows(type_number: int) -> Kernel:
    """Return the kernel of `pack` that packs rows in memory into planes."""
    return callable_at(_packers(type_number)["pack"], pack.ARGUMENTS)


@cache
def pack_file(type_number: int) -> Kernel:
    """Return the kernel of `file_pack` that packs rows of a file into planes."""
    return callable_at(_packers(type_number)["pack_file"], file_pack.ARGUMENTS)


@cache
def read_file() -> Kernel:
    """Return the kernel of `file_read` that reads a part of a file into memory."""
    name = "read_file"
    found = jit.addresses_by_source("file-read", chosen(), [name], file_read.build)
    return callable_at(found[name], file_read.ARGUMENTS)


@cache
def multiply_plain(kind: str, *, transposed: bool = False) -> Kernel:
    """Return the kernel of `float_gemm` that multiplies by an unquantised matrix."""
    isa, names = chosen(), float_gemm.NAMES
    found = jit.addresses_by_source(
        f"float-gemm-{kind}", isa, names, lambda m: float_gemm.build(m, isa, kind)
    )
    return callable_at(found[names[transposed]], float_gemm.ARGUMENTS)


@cache
def quantise_int16_address() -> int:
    """Return the address of the kernel of `panel_packing` for matrices of int16."""
    isa, name = chosen(), "quantise"
    found = jit.addresses_by_source(
        "int16-panels", isa, [name], lambda m: panel_packing.build(m, isa, panel_packing.INT16)
    )
    return found[name]


@cache
def _int16_product() -> dict[str, int]:
    isa, names = chosen(), ["multiply", "multiply_piece"]
    return jit.addresses_by_source("int16-gemm", isa, names, lambda m: int16_gemm.build(m, isa))


@cache
def multiply_int16() -> Kernel:
    """Return the kernel of `int16_gemm`."""
    return callable_at(_int16_product()["multiply"], gemm.ARGUMENTS)


def multiply_int16_piece() -> int:
    """Return the address of the function of one piece of `multiply_int16`."""
    return _int16_product()["multiply_piece"]
