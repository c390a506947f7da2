"""Product and packing kernels as Python functions, compiled on first use.

`type_number` is a GGML type's id; `x_bytes` is the number of bytes per quantised activation
(`kernels.products.panels`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial

from engine.backends.cpu.kernels.language.isa import chosen
from engine.backends.cpu.kernels.packing import dequantise, file_pack, pack
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
    """Bind a kernel that takes a pool and these arguments; calls release the GIL."""
    return bind(address, 1 + len(tuple(arguments)), holds_gil=False)


def _compile(name: str, names: Sequence[str], build: jit.Build) -> dict[str, int]:
    return jit.addresses_by_source(name, chosen(), names, build)


@cache
def quantise_address(x_bytes: int) -> int:
    """Return the address of the kernel in `panel_packing`."""
    isa = chosen()
    build = partial(panel_packing.build, isa=isa, panel=panel_packing.format_of(isa, x_bytes))
    return _compile(f"panels-{x_bytes}", ["quantise"], build)["quantise"]


@cache
def quantise_int16_address() -> int:
    """Return the address of the kernel in `panel_packing` for int16 matrices."""
    build = partial(panel_packing.build, isa=chosen(), panel=panel_packing.INT16)
    return _compile("int16-panels", ["quantise"], build)["quantise"]


@cache
def _product(type_number: int, x_bytes: int) -> dict[str, int]:
    layout = LAYOUTS[type_number]
    build = partial(quantised_gemm.build, isa=chosen(), layout=layout, x_bytes=x_bytes)
    name = f"quantised-gemm-{type_number}-{x_bytes}"
    return _compile(name, ["multiply", "multiply_piece"], build)


@cache
def multiply(type_number: int, x_bytes: int) -> Kernel:
    """Return the kernel in `quantised_gemm` for a GGML type."""
    return callable_at(_product(type_number, x_bytes)["multiply"], gemm.ARGUMENTS)


def multiply_piece(type_number: int, x_bytes: int) -> int:
    """Return the address of the piece function of `multiply`, for use in `multiply_all`."""
    return _product(type_number, x_bytes)["multiply_piece"]


@cache
def _int16_product() -> dict[str, int]:
    build = partial(int16_gemm.build, isa=chosen())
    return _compile("int16-gemm", ["multiply", "multiply_piece"], build)


@cache
def multiply_int16() -> Kernel:
    """Return the kernel in `int16_gemm`."""
    return callable_at(_int16_product()["multiply"], gemm.ARGUMENTS)


def multiply_int16_piece() -> int:
    """Return the address of the piece function of `multiply_int16`."""
    return _int16_product()["multiply_piece"]


@cache
def _fused() -> dict[str, int]:
    return _compile("fused-gemv", fused_gemv.NAMES, fused_gemv.build)


@cache
def multiply_all() -> Kernel:
    """Return the kernel in `fused_gemv` that multiplies the same tokens by several matrices."""
    return callable_at(_fused()["multiply_all"], fused_gemv.ARGUMENTS)


@cache
def multiply_gated() -> Kernel:
    """Return the kernel in `fused_gemv` that multiplies by gate and up, then activates."""
    return callable_at(_fused()["multiply_gated"], fused_gemv.GATED)


@cache
def quantise_groups(x_bytes: int) -> Kernel:
    """Return the kernel in `experts` that quantises each expert's rows."""
    name, build = "quantise_groups", partial(experts.build_quantise, isa=chosen(), x_bytes=x_bytes)
    return callable_at(_compile(f"expert-panels-{x_bytes}", [name], build)[name], experts.QUANTISE)


@cache
def multiply_groups(type_number: int, x_bytes: int) -> Kernel:
    """Return the kernel in `experts` that multiplies rows by their experts' matrices."""
    layout, name = LAYOUTS[type_number], "multiply_groups"
    build = partial(experts.build_multiply, isa=chosen(), layout=layout, x_bytes=x_bytes)
    found = _compile(f"experts-{type_number}-{x_bytes}", [name], build)
    return callable_at(found[name], experts.MULTIPLY)


@cache
def _expert_ffn(x_bytes: int) -> dict[str, int]:
    build = partial(experts.build_ffn, isa=chosen(), x_bytes=x_bytes)
    return _compile(f"expert-ffn-{x_bytes}", experts.FFN_NAMES, build)


def pack_each_address(x_bytes: int) -> int:
    """Return the address of the kernel in `experts` that packs each token into its own panel."""
    return _expert_ffn(x_bytes)["pack_each"]


@cache
def feed_experts(x_bytes: int) -> Kernel:
    """Return the kernel in `experts` that computes the experts' FFNs."""
    return callable_at(_expert_ffn(x_bytes)["feed"], experts.FFN_ARGUMENTS)


@cache
def _rows(type_number: int) -> dict[str, int]:
    build = partial(dequantise.build, isa=chosen(), layout=LAYOUTS[type_number])
    return _compile(f"dequantise-{type_number}", ["lookup", "bf16_rows"], build)


@cache
def lookup(type_number: int) -> Kernel:
    """Return the kernel in `dequantise` that dequantises single rows."""
    return callable_at(_rows(type_number)["lookup"], dequantise.LOOKUP)


@cache
def bf16_rows(type_number: int) -> Kernel:
    """Return the kernel in `dequantise` that dequantises tiles of rows to BF16."""
    return callable_at(_rows(type_number)["bf16_rows"], dequantise.BF16_ROWS)


@cache
def _packers(type_number: int) -> dict[str, int]:
    build = partial(file_pack.build, isa=chosen(), type_number=type_number)
    return _compile(f"file-pack-{type_number}", ["pack", "pack_file"], build)


@cache
def pack_rows(type_number: int) -> Kernel:
    """Return the kernel in `pack` that packs rows from memory into planes."""
    return callable_at(_packers(type_number)["pack"], pack.ARGUMENTS)


@cache
def pack_file(type_number: int) -> Kernel:
    """Return the kernel in `file_pack` that packs rows from a file into planes."""
    return callable_at(_packers(type_number)["pack_file"], file_pack.ARGUMENTS)


@cache
def read_file() -> Kernel:
    """Return the kernel in `file_pack` that reads part of a file into memory."""
    name = "read_file"
    found = _compile("file-read", [name], file_pack.build_read)
    return callable_at(found[name], file_pack.READ_ARGUMENTS)


@cache
def multiply_plain(kind: str, *, transposed: bool = False) -> Kernel:
    """Return the kernel in `float_gemm` that multiplies by an unquantised matrix."""
    build = partial(float_gemm.build, isa=chosen(), kind=kind)
    found = _compile(f"float-gemm-{kind}", float_gemm.NAMES, build)
    return callable_at(found[float_gemm.NAMES[transposed]], float_gemm.ARGUMENTS)
