"""What differs between processors: how bytes are multiplied and looked up, and what LLVM may use.

Every kind of processor has a class; `chosen` finds the best one here. `TANDEM_CPU` names another,
which tests do to try the lesser ones; one that this processor lacks is refused.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import ClassVar

from llvmlite import binding as llvm

from engine.cpu.kernels.values import (
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    INTS,
    LANES,
    LINE,
    Code,
    Value,
    vector,
)
from engine.errors import EngineError

LARGEST_ACTIVATION = 127
"""Activations are -127 … 127."""


class Isa:
    """Plain operations that LLVM has on every processor.

    Attributes:
        name: for `TANDEM_CPU`.
        cpu: LLVM's name of what it may use; "" for what all processors of the family have.
        features: what LLVM shall use beyond or without, in its own words.
        needs: what LLVM must find in a processor: all that it may use.
        signed_bytes: weights of eight bits are multiplied as signed numbers; else as unsigned ones.
        n_tokens: how many tokens a matrix is multiplied with at once at most, a power of two; what
            the registers hold.
        part: bytes of a register.
    """

    name: ClassVar[str] = "generic"
    cpu: ClassVar[str] = ""
    features: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    signed_bytes: ClassVar[bool] = False
    n_tokens: ClassVar[int] = 4
    part: ClassVar[int] = 16

    def dots(
        self, code: Code, lines: Sequence[Value], x: Sequence[Sequence[Value]], largest: int
    ) -> list[Value]:
        """Sums of lines of weights times activations: for each token 16 × i32, one for each row.

        Args:
            lines: 64 bytes each, four of every row.
            x: for each token what the lines are multiplied with: i32 of four signed bytes.
            largest: weights are 0 … largest; if it is negative, they are signed, up to -largest.
        """
        zero = code.constant(vector(I32, self.part // 4), 0)
        totals = [[zero] * len(self._parts) for _ in x]
        for number, line in enumerate(lines):
            weights = [line.pick(part) for part in self._parts]
            for token, numbers in enumerate(x):
                spread = code.spread(numbers[number], self.part // 4)
                totals[token] = [
                    self._add(code, total, part, spread)
                    for total, part in zip(totals[token], weights, strict=True)
                ]
        return [concatenated(total) for total in totals]

    @property
    def _parts(self) -> list[range]:
        """Which bytes of a line go to which register."""
        return [range(n, n + self.part) for n in range(0, 4 * LANES, self.part)]

    def _add(self, code: Code, total: Value, weights: Value, x: Value) -> Value:
        """A register's total plus its weights times activations, which are as long as the total.

        Bytes 0 and 2 of each row first, then 1 and 3, so that the sum of two products is in place.
        """
        kind = vector(I16, self.part // 2)
        w, v = weights.bits(kind), x.bits(kind)
        for weight, number in ((w & 255, v << 8), (w >> 8, v)):
            number = Value(code, code.builder.ashr(number.raw, code.constant(kind, 8).raw))
            wide = vector(I32, self.part // 2)
            products = weight.to(wide) * number.to(wide)
            even, odd = (range(n, self.part // 2, 2) for n in range(2))
            total = total + (products.pick(even) + products.pick(odd))
        return total

    def lookup(self, code: Code, table: Sequence[int], indices: Value) -> Value:
        """For each of 64 bytes below 16, the entry of a table of 16 bytes."""
        zero, entries = code.constant(LINE, 0), [code.constant(LINE, entry) for entry in table]
        for bit in (1, 2, 4, 8):
            is_set = code.where((indices & bit).equals(0), zero, zero ^ -1)
            pairs = zip(entries[::2], entries[1::2], strict=True)
            entries = [((even ^ odd) & is_set) ^ even for even, odd in pairs]
        return entries[0]

    def halves(self, code: Code, bits: Value) -> Value:
        """F16 numbers (as i16) as F32, by the exponent's own arithmetic; infinities excepted."""
        wide = bits.to(vector(I32, bits.kind.count), signed=False)
        kind = vector(F32, bits.kind.count)
        size = ((wide & 0x7FFF) << 13).bits(kind) * 2.0**112
        return (size.bits(wide.kind) | ((wide & 0x8000) << 16)).bits(kind)


class Sse4(Isa):
    """Pairs of bytes are multiplied and added in 16 bits, which may not overflow."""

    name = "sse4"
    cpu = "x86-64-v2"
    needs: ClassVar[tuple[str, ...]] = ("ssse3", "sse4.1", "sse4.2", "popcnt", "cx16", "sahf")
    signed_bytes = True

    sign: ClassVar[str] = "llvm.x86.ssse3.psign.b.128"
    add_pairs: ClassVar[str] = "llvm.x86.ssse3.pmadd.ub.sw.128"
    widen: ClassVar[str] = "llvm.x86.sse2.pmadd.wd"
    shuffle: ClassVar[str] = "llvm.x86.ssse3.pshuf.b.128"

    def dots(
        self, code: Code, lines: Sequence[Value], x: Sequence[Sequence[Value]], largest: int
    ) -> list[Value]:
        n_fit = 32767 // (2 * LARGEST_ACTIVATION * abs(largest))  # lines whose sums fit in 16 bits
        groups = [
            self._short_dots(
                code, lines[n : n + n_fit], [numbers[n : n + n_fit] for numbers in x], largest < 0
            )
            for n in range(0, len(lines), n_fit)
        ]
        ones = code.constant(vector(I16, self.part // 2), 1)
        results = []
        for token in range(len(x)):
            total = code.constant(INTS, 0)
            for group in groups:
                kind = vector(I32, self.part // 4)
                sums = [code.call(self.widen, kind, pairs, ones) for pairs in group[token]]
                total = total + concatenated(sums)
            results.append(total)
        return results

    def _short_dots(
        self, code: Code, lines: Sequence[Value], x: Sequence[Sequence[Value]], is_signed: bool
    ) -> list[list[Value]]:
        """For each token and register the sums of even and odd bytes, in 16 bits."""
        zero = code.constant(vector(I16, self.part // 2), 0)
        totals = [[zero] * len(self._parts) for _ in x]
        for number, line in enumerate(lines):
            for n, part in enumerate(self._parts):
                weights = size = line.pick(part)
                if is_signed:  # |w| ≤ 128 is unsigned; its sign moves to x
                    yes = code.constant(I1, 0)
                    size = code.call(f"llvm.abs.v{self.part}i8", weights.kind, weights, yes)
                for token, numbers in enumerate(x):
                    v = code.spread(numbers[number], self.part // 4).bits(weights.kind)
                    if is_signed:
                        v = code.call(self.sign, v.kind, v, weights)
                    pairs = code.call(self.add_pairs, zero.kind, size, v)
                    totals[token][n] = totals[token][n] + pairs
        return totals

    def lookup(self, code: Code, table: Sequence[int], indices: Value) -> Value:
        entries = code.table(vector(I8, self.part), list(table) * (self.part // 16))
        found = [
            code.call(self.shuffle, entries.kind, entries, indices.pick(part))
            for part in self._parts
        ]
        return concatenated(found)


class Avx2(Sse4):
    """The same in registers of 32 bytes."""

    name = "avx2"
    cpu = "x86-64-v3"
    needs = (*Sse4.needs, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
    part = 32

    sign = "llvm.x86.avx2.psign.b"
    add_pairs = "llvm.x86.avx2.pmadd.ub.sw"
    widen = "llvm.x86.avx2.pmadd.wd"
    shuffle = "llvm.x86.avx2.pshuf.b"

    def halves(self, code: Code, bits: Value) -> Value:
        n = bits.kind.count
        return bits.bits(vector(F16, n)).to(vector(F32, n))


class AvxVnni(Avx2):
    """Four bytes are multiplied and added in 32 bits at once, for eight rows."""

    name = "avxvnni"
    features = "+avxvnni"
    needs = (*Avx2.needs, "avxvnni")
    signed_bytes = False
    dots = Isa.dots

    instruction: ClassVar[str] = "llvm.x86.avx512.vpdpbusd.256"

    def _add(self, code: Code, total: Value, weights: Value, x: Value) -> Value:
        return code.call(self.instruction, total.kind, total, weights.bits(total.kind), x)


class Avx512(AvxVnni):
    """The same for sixteen rows."""

    name = "avx512"
    cpu = "x86-64-v4"
    features = "+avx512vnni,-prefer-256-bit"
    needs = (
        *Avx2.needs, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni",
    )  # fmt: skip
    n_tokens = 8
    part = 64

    instruction = "llvm.x86.avx512.vpdpbusd.512"
    shuffle = "llvm.x86.avx512.pshuf.b.512"


class Neon(Isa):
    """Four signed bytes are multiplied and added in 32 bits, for four rows."""

    name = "neon"
    features = "+neon,+dotprod"
    needs = ("dotprod",)
    signed_bytes = True

    def _add(self, code: Code, total: Value, weights: Value, x: Value) -> Value:
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        return code.call(name, total.kind, total, weights, x.bits(weights.kind))

    def lookup(self, code: Code, table: Sequence[int], indices: Value) -> Value:
        entries = code.table(vector(I8, 16), table)
        name = "llvm.aarch64.neon.tbl1.v16i8"
        return concatenated(
            [code.call(name, entries.kind, entries, indices.pick(part)) for part in self._parts]
        )

    def halves(self, code: Code, bits: Value) -> Value:
        n = bits.kind.count
        return bits.bits(vector(F16, n)).to(vector(F32, n))


def concatenated(parts: Sequence[Value]) -> Value:
    """Vectors one behind the other; 1, 2 or 4 of them."""
    while len(parts) > 1:
        n = parts[0].kind.count
        parts = [parts[i].pick(range(2 * n), parts[i + 1]) for i in range(0, len(parts), 2)]
    return parts[0]


ISAS: tuple[type[Isa], ...] = (Avx512, AvxVnni, Avx2, Sse4, Neon, Isa)
"""Best first."""


CPU_FACTS = Path("/proc/cpuinfo")


def supported() -> tuple[Isa, ...]:
    """The kinds that this processor can do, best first."""
    found = llvm.get_host_cpu_features()
    if platform.machine().lower() in ("arm64", "aarch64") and _multiplies_bytes():
        found["dotprod"] = True
    return tuple(kind() for kind in ISAS if all(found.get(need) for need in kind.needs))


def _multiplies_bytes() -> bool:
    """Whether an ARM processor has SDOT, by what the system says; not every LLVM asks for it."""
    if sys.platform == "win32":
        dot_product = 43  # PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
        return bool(ctypes.WinDLL("kernel32").IsProcessorFeaturePresent(dot_product))
    if sys.platform == "darwin":
        return True  # all of Apple's do
    with suppress(OSError):
        return "asimddp" in CPU_FACTS.read_text(errors="replace").split()
    return False


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
