"""The kernels as Python functions, compiled when first asked for, once for all models.

`x_bytes`, where it occurs, is how many bytes an activation has: see `engine.cpu.kernels.panels`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from llvmlite import ir

from engine.cpu.kernels import (
    dequantise,
    experts,
    float_gemv,
    fused_gemv,
    jit,
    pack,
    panels,
    quantised_gemm,
)
from engine.cpu.kernels.fastcall import Kernel, bind
from engine.cpu.kernels.isa import chosen
from engine.quants.layout import LAYOUTS


def callable_at(address: int, arguments: Iterable[str]) -> Kernel:
    """A kernel that takes a team and 64-bit integers; other threads run while it does."""
    return bind(address, 1 + len(tuple(arguments)), holds_gil=False)


@cache
def quantise_address(x_bytes: int) -> int:
    """Of the kernel in `engine.cpu.kernels.panels`."""
    isa = chosen()
    found = jit.addresses_by_source(
        f"panels-{x_bytes}", isa, ["quantise"], lambda m: panels.build(m, isa, x_bytes)
    )
    return found["quantise"]


def quantise(x_bytes: int) -> Kernel:
    """See `engine.cpu.kernels.panels`."""
    return callable_at(quantise_address(x_bytes), panels.ARGUMENTS)


@cache
def _product(type_number: int, x_bytes: int) -> dict[str, int]:
    isa, layout = chosen(), LAYOUTS[type_number]

    def build(module: ir.Module) -> None:
        quantised_gemm.build(module, isa, layout, x_bytes)

    names = ["multiply", "multiply_piece"]
    return jit.addresses_by_source(f"product-{type_number}-{x_bytes}", isa, names, build)


@cache
def multiply(type_number: int, x_bytes: int) -> Kernel:
    """See `engine.cpu.kernels.quantised_gemm`."""
    return callable_at(_product(type_number, x_bytes)["multiply"], quantised_gemm.ARGUMENTS)


def multiply_piece(type_number: int, x_bytes: int) -> int:
    """The address of a piece of that kernel, for `multiply_all`."""
    return _product(type_number, x_bytes)["multiply_piece"]


@cache
def _together() -> dict[str, int]:
    return jit.addresses_by_source("together", chosen(), fused_gemv.NAMES, fused_gemv.build)


@cache
def multiply_all() -> Kernel:
    """See `engine.cpu.kernels.fused_gemv`."""
    return callable_at(_together()["multiply_all"], fused_gemv.ARGUMENTS)


@cache
def multiply_gated() -> Kernel:
    """See `engine.cpu.kernels.fused_gemv`."""
    return callable_at(_together()["multiply_gated"], fused_gemv.GATED)


@cache
def quantise_groups(x_bytes: int) -> Kernel:
    """See `engine.cpu.kernels.experts`."""
    isa, name = chosen(), "quantise_groups"

    def build(module: ir.Module) -> None:
        experts.build_quantise(module, isa, x_bytes)

    found = jit.addresses_by_source(f"expert-panels-{x_bytes}", isa, [name], build)
    return callable_at(found[name], experts.QUANTISE)


@cache
def multiply_groups(type_number: int, x_bytes: int) -> Kernel:
    """See `engine.cpu.kernels.experts`."""
    isa, layout, name = chosen(), LAYOUTS[type_number], "multiply_groups"

    def build(module: ir.Module) -> None:
        experts.build_multiply(module, isa, layout, x_bytes)

    found = jit.addresses_by_source(f"experts-{type_number}-{x_bytes}", isa, [name], build)
    return callable_at(found[name], experts.MULTIPLY)


@cache
def _rows(type_number: int) -> dict[str, int]:
    isa, layout, names = chosen(), LAYOUTS[type_number], ["lookup", "bf16_rows"]
    return jit.addresses_by_source(
        f"rows-{type_number}", isa, names, lambda m: dequantise.build(m, isa, layout)
    )


@cache
def lookup(type_number: int) -> Kernel:
    """See `engine.cpu.kernels.dequantise`."""
    return callable_at(_rows(type_number)["lookup"], dequantise.LOOKUP)


@cache
def bf16_rows(type_number: int) -> Kernel:
    """See `engine.cpu.kernels.dequantise`."""
    return callable_at(_rows(type_number)["bf16_rows"], dequantise.BF16_ROWS)


@cache
def pack_rows(type_number: int) -> Kernel:
    """See `engine.cpu.kernels.pack`."""
    found = jit.addresses_by_source(
        f"pack-{type_number}", chosen(), ["pack"], lambda m: pack.build(m, type_number)
    )
    return callable_at(found["pack"], pack.ARGUMENTS)


@cache
def multiply_plain(kind: str) -> Kernel:
    """See `engine.cpu.kernels.float_gemv`."""
    isa = chosen()
    found = jit.addresses_by_source(
        f"plain-{kind}", isa, ["multiply"], lambda m: float_gemv.build(m, isa, kind)
    )
    return callable_at(found["multiply"], float_gemv.ARGUMENTS)
