"""Weights and activations of unquantised products: how they are loaded and multiplied."""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.values import FLOATS, I16, I32, LANES, Code, Value, vector


class FloatOperands:
    """F16, BF16 or F32 weights, widened to F32, times F32 activations.

    Args:
        kind: type of the weights, "f16", "bf16" or "f32".

    Attributes:
        weight_bytes: bytes of a weight.
        x_bytes: bytes of an activation.
        step: number of columns that are multiplied at once.
    """

    x_bytes, step = 4, LANES

    def __init__(self, isa: Isa, kind: str) -> None:
        self._isa = isa
        self._kind = kind
        self.weight_bytes = 4 if kind == "f32" else 2

    def weights(self, code: Code, address: Value, n: Value | None = None) -> Value:
        """Load `step` weights, or the first n and zeros, as F32."""
        stored = _loaded(code, address, FLOATS if self._kind == "f32" else vector(I16), n)
        if self._kind == "f16":
            return self._isa.f16_to_f32(code, stored)
        if self._kind == "bf16":
            return (stored.to(vector(I32), signed=False) << 16).bitcast(FLOATS)
        return stored

    def numbers(self, code: Code, address: Value, n: Value | None = None) -> Value:
        """Load `step` activations, or the first n and zeros."""
        return _loaded(code, address, FLOATS, n)

    def add(self, code: Code, weights: Value, numbers: Value, total: Value) -> Value:
        """Return the 16 partial sums in `total` with the products of a step added."""
        return code.fma(weights, numbers, total)


def _loaded(code: Code, address: Value, kind: ir.VectorType, n: Value | None) -> Value:
    """Load a vector, or its first n elements and zeros."""
    return code.load(address, kind) if n is None else code.load_part(address, kind, n)
