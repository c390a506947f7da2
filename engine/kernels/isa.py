"""What differs between processors: how bytes are multiplied and looked up, and what LLVM may use.

Every kind of processor has a class; `chosen` finds the best one here. `TANDEM_CPU` names another,
which tests do to try the lesser ones; one that this processor lacks is refused.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

from llvmlite import binding as llvm

from engine.errors import EngineError
from engine.kernels.values import F16, F32, I1, I8, I16, I32, INTS, LANES, LINE, Code, Value, vector

EVERY_FOURTH = [range(part, 4 * LANES, 4) for part in range(4)]


class Isa:
    """Plain operations that LLVM has on every processor.

    Attributes:
        name: for `TANDEM_CPU`.
        cpu: LLVM's name of a processor, for what it may use; "" for the one it runs on.
        features: what LLVM shall use beyond or without, in its own words.
        signed_bytes: weights of eight bits are multiplied as signed numbers; else as unsigned ones.
        n_tokens: how many tokens a matrix is multiplied with at once at most, a power of two; what
            the registers hold.
    """

    name: ClassVar[str] = "generic"
    cpu: ClassVar[str] = ""
    features: ClassVar[str] = ""
    signed_bytes: ClassVar[bool] = True
    n_tokens: ClassVar[int] = 4

    def dot(self, code: Code, total: Value, weights: Value, x: Value, *, small: bool) -> Value:
        """total (16 × i32) += four bytes of weights times four signed bytes of x, for each row.

        Args:
            weights, x: 64 bytes.
            small: weights are at most 63; else they are as `signed_bytes` says.
        """
        products = weights.to(vector(I16, 64), signed=not small) * x.to(vector(I16, 64))
        for part in EVERY_FOURTH:
            total = total + products.pick(part).to(INTS)
        return total

    def lookup(self, code: Code, table: Sequence[int], indices: Value) -> Value:
        """For each of 64 bytes below 16, the entry of a table of 16 bytes."""
        found = code.constant(LINE, table[0])
        for index, entry in enumerate(table[1:], 1):
            found = code.where(indices.equals(index), code.constant(LINE, entry), found)
        return found

    def halves(self, code: Code, bits: Value) -> Value:
        """F16 numbers (as i16) as F32, by the exponent's own arithmetic; infinities excepted."""
        wide = bits.to(vector(I32, bits.kind.count), signed=False)
        kind = vector(F32, bits.kind.count)
        size = ((wide & 0x7FFF) << 13).bits(kind) * 2.0**112
        return (size.bits(wide.kind) | ((wide & 0x8000) << 16)).bits(kind)


class Avx2(Isa):
    """Pairs of bytes are multiplied and added in 16 bits, which may not overflow."""

    name = "avx2"
    cpu = "x86-64-v3"

    def dot(self, code: Code, total: Value, weights: Value, x: Value, *, small: bool) -> Value:
        parts = []
        for half in (range(32), range(32, 64)):
            w, v = weights.pick(half), x.pick(half)
            if not small:  # |w| ≤ 128 is unsigned; its sign moves to x
                v = code.call("llvm.x86.avx2.psign.b", v.kind, v, w)
                w = code.call("llvm.abs.v32i8", w.kind, w, code.constant(I1, 0))
            pairs = code.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), w, v)
            ones = code.constant(vector(I16, 16), 1)
            parts.append(code.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), pairs, ones))
        return total + parts[0].pick(range(16), parts[1])

    def lookup(self, code: Code, table: Sequence[int], indices: Value) -> Value:
        both = code.table(vector(I8, 32), [*table, *table])
        parts = [
            code.call("llvm.x86.avx2.pshuf.b", both.kind, both, indices.pick(half))
            for half in (range(32), range(32, 64))
        ]
        return parts[0].pick(range(64), parts[1])

    def halves(self, code: Code, bits: Value) -> Value:
        n = bits.kind.count
        return bits.bits(vector(F16, n)).to(vector(F32, n))


class AvxVnni(Avx2):
    """Four bytes are multiplied and added in 32 bits at once, for eight rows."""

    name = "avxvnni"
    cpu = "alderlake"
    signed_bytes = False

    def dot(self, code: Code, total: Value, weights: Value, x: Value, *, small: bool) -> Value:
        parts = []
        for lanes in (range(8), range(8, 16)):
            values = [v.bits(INTS).pick(lanes) for v in (total, weights, x)]
            parts.append(code.call("llvm.x86.avx512.vpdpbusd.256", values[0].kind, *values))
        return parts[0].pick(range(16), parts[1])


class Avx512(Avx2):
    """The same for sixteen rows."""

    name = "avx512"
    features = "-prefer-256-bit"
    signed_bytes = False
    n_tokens = 8
    cpu = "cascadelake"

    def dot(self, code: Code, total: Value, weights: Value, x: Value, *, small: bool) -> Value:
        values = [v.bits(INTS) for v in (total, weights, x)]
        return code.call("llvm.x86.avx512.vpdpbusd.512", INTS, *values)

    def lookup(self, code: Code, table: Sequence[int], indices: Value) -> Value:
        all_lanes = code.table(LINE, [*table] * 4)
        return code.call("llvm.x86.avx512.pshuf.b.512", LINE, all_lanes, indices)


class Neon(Isa):
    """Four signed bytes are multiplied and added in 32 bits, for four rows."""

    name = "neon"
    features = "+neon,+dotprod"

    def dot(self, code: Code, total: Value, weights: Value, x: Value, *, small: bool) -> Value:
        parts = []
        for first in range(0, LANES, 4):
            part = range(4 * first, 4 * first + 16)
            sums = total.pick(range(first, first + 4))
            both = weights.pick(part), x.pick(part)
            parts.append(code.call("llvm.aarch64.neon.sdot.v4i32.v16i8", sums.kind, sums, *both))
        halves = [parts[n].pick(range(8), parts[n + 1]) for n in (0, 2)]
        return halves[0].pick(range(16), halves[1])

    def lookup(self, code: Code, table: Sequence[int], indices: Value) -> Value:
        entries = code.table(vector(I8, 16), table)
        parts = [
            code.call("llvm.aarch64.neon.tbl1.v16i8", entries.kind, entries, indices.pick(part))
            for part in (range(n, n + 16) for n in range(0, 64, 16))
        ]
        halves = [parts[n].pick(range(32), parts[n + 1]) for n in (0, 2)]
        return halves[0].pick(range(64), halves[1])

    def halves(self, code: Code, bits: Value) -> Value:
        n = bits.kind.count
        return bits.bits(vector(F16, n)).to(vector(F32, n))


ISAS: tuple[type[Isa], ...] = (Avx512, AvxVnni, Avx2, Neon, Isa)
"""Best first."""

NEEDS = {
    "avx512": ("avx512vnni", "avx512vl", "avx512bw"),
    "avxvnni": ("avxvnni",),
    "avx2": ("avx2", "fma", "f16c"),
    "neon": ("dotprod",),
    "generic": (),
}
"""What LLVM must find in a processor."""


def supported() -> tuple[Isa, ...]:
    """The kinds that this processor can do, best first."""
    found = llvm.get_host_cpu_features()
    if platform.machine().lower() in ("arm64", "aarch64") and platform.system() == "Darwin":
        found["dotprod"] = True  # all of Apple's have it; older LLVM do not say
    return tuple(kind() for kind in ISAS if all(found.get(need) for need in NEEDS[kind.name]))


@cache
def chosen() -> Isa:
    """The kind that kernels are made for.

    Raises:
        EngineError: `TANDEM_CPU` names none, or one that this processor is not.
    """
    wanted, here = os.environ.get("TANDEM_CPU", ""), supported()
    if not wanted:
        return here[0]
    for isa in here:
        if isa.name == wanted:
            return isa
    names = ", ".join(isa.name for isa in here)
    raise EngineError(
        f"TANDEM_CPU is {wanted!r}, which is no kind of this processor.",
        f"Set it to one of {names}.",
    )
