"""Weights and activations of unquantised products: how they are loaded and multiplied."""

from __future__ import annotations

from typing import ClassVar, Protocol

from llvmlite import ir

from engine.cpu.kernels.isa import Isa
from engine.cpu.kernels.values import FLOATS, I16, I32, LANES, Code, Value, vector


class Operands(Protocol):
    """Kind of a product's operands.

    Attributes:
        weight_bytes: bytes of a weight.
        x_bytes: bytes of an activation.
        step: number of columns that are multiplied at once.
    """

    @property
    def weight_bytes(self) -> int: ...
    @property
    def x_bytes(self) -> int: ...
    @property
    def step(self) -> int: ...

    def weights(self, code: Code, address: Value, n: Value | None = None) -> Value:
        """Load `step` weights, or the first n and zeros, in the form that `add` takes."""
        ...

    def numbers(self, code: Code, address: Value, n: Value | None = None) -> Value:
        """Load `step` activations, or the first n and zeros, in the form that `add` takes."""
        ...

    def add(self, code: Code, weights: Value, numbers: Value, total: Value) -> Value:
        """Return the 16 partial sums in `total` with the products of a step added."""
        ...


class FloatOperands:
    """F16, BF16 or F32 weights, widened to F32, times F32 activations.

    Args:
        kind: type of the weights, "f16", "bf16" or "f32".
    """

    x_bytes, step = 4, LANES

    def __init__(self, isa: Isa, kind: str) -> None:
        self._isa = isa
        self._kind = kind
        self.weight_bytes = 4 if kind == "f32" else 2

    def weights(self, code: Code, address: Value, n: Value | None = None) -> Value:
        stored = _loaded(code, address, FLOATS if self._kind == "f32" else vector(I16), n)
        if self._kind == "f16":
            return self._isa.f16_to_f32(code, stored)
        if self._kind == "bf16":
            return (stored.to(vector(I32), signed=False) << 16).bitcast(FLOATS)
        return stored

    def numbers(self, code: Code, address: Value, n: Value | None = None) -> Value:
        return _loaded(code, address, FLOATS, n)

    def add(self, code: Code, weights: Value, numbers: Value, total: Value) -> Value:
        return code.fma(weights, numbers, total)


class Bf16Dots:
    """BF16 weights times BF16 activations in pairs, for processors with `vdpbf16ps`."""

    weight_bytes = x_bytes = 2
    step = 2 * LANES

    instruction: ClassVar[str] = "llvm.x86.avx512bf16.dpbf16ps.512"

    def weights(self, code: Code, address: Value, n: Value | None = None) -> Value:
        return _loaded(code, address, vector(I16, self.step), n)

    numbers = weights

    def add(self, code: Code, weights: Value, numbers: Value, total: Value) -> Value:
        kind = vector(BF16, self.step)
        pairs = weights.bitcast(kind), numbers.bitcast(kind)
        return code.call(self.instruction, FLOATS, total, *pairs)


class BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


BF16 = BFloat16()


def _loaded(code: Code, address: Value, kind: ir.VectorType, n: Value | None) -> Value:
    """Load a vector, or its first n elements and zeros."""
    return code.load(address, kind) if n is None else code.load_part(address, kind, n)


def rounded_bf16(code: Code, values: Value) -> Value:
    """Round F32 numbers to BF16 (as i16), to nearest and ties to even, by one instruction."""
    kind = vector(BF16, values.kind.count)
    return Value(code, code.builder.fptrunc(values.raw, kind)).bitcast(vector(I16, kind.count))
