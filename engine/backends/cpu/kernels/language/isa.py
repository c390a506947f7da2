"""Instruction sets: byte products, table lookups, F16 conversion, and the features LLVM may use.

`chosen` returns the best one that this processor supports, or the one that `TANDEM_CPU` names.
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

from engine.backends.cpu.kernels.language.values import (
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    LANES,
    LINE,
    Code,
    Value,
    concatenated,
    vector,
)
from engine.errors import EngineError

MAX_ACTIVATION = 127
"""Quantised activations are bytes from -127 to 127."""


class Isa:
    """The baseline: operations that LLVM provides on every processor.

    Attributes:
        name: the value of `TANDEM_CPU` that selects it.
        cpu: LLVM's name for the target CPU; "" for the family's baseline.
        features: LLVM's feature string, added to the target CPU.
        needs: LLVM's names for the required features.
        signed_weights: whether 8-bit weights are multiplied as signed numbers.
        tile_tokens: maximum tokens per tile, a power of two; limited by the number of registers.
        register_bytes: size of a SIMD register, in bytes.
        has_word_dots: whether `word_dots` (int16) has twice the throughput of F32.
        joins_halves: whether one register computes both halves of 32 columns; see `joined`.
    """

    name: ClassVar[str] = "generic"
    cpu: ClassVar[str] = ""
    features: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    signed_weights: ClassVar[bool] = False
    tile_tokens: ClassVar[int] = 4
    register_bytes: ClassVar[int] = 16
    has_word_dots: ClassVar[bool] = False
    joins_halves: ClassVar[bool] = False

    def dots(
        self,
        code: Code,
        lines: Sequence[Value],
        x: Sequence[Sequence[Value]],
        starts: Sequence[Value],
        largest: int,
    ) -> list[Value]:
        """Return the dot products between 16 rows and each token, 16 × i32 per token.

        Args:
            lines: weights, 64 bytes each: four columns of 16 rows.
            x: for each token, one i32 per line, with four signed bytes.
            starts: each token's initial sums, 16 × i32.
            largest: largest unsigned weight, or minus the largest magnitude of signed weights.
        """
        totals = [self._in_registers(start) for start in starts]
        for number, line in enumerate(lines):
            weights = [line.shuffle(part) for part in self._registers]
            for token, numbers in enumerate(x):
                spread = code.splat(numbers[number], self.register_bytes // 4)
                totals[token] = [
                    self._multiply_add(code, total, part, spread)
                    for total, part in zip(totals[token], weights, strict=True)
                ]
        return [concatenated(total) for total in totals]

    def _in_registers(self, numbers: Value) -> list[Value]:
        size = numbers.kind.count * self.register_bytes // (4 * LANES)
        return [numbers.shuffle(range(n, n + size)) for n in range(0, numbers.kind.count, size)]

    def word_products(self, code: Code, numbers: Value, factor: Value) -> Value:
        """Return 16 × i32 times a factor, all within ±32767."""
        return numbers * code.splat(factor)

    def word_dots(self, code: Code, total: Value, weights: Value, x: Value) -> Value:
        """Return total + 16 rows' dot products with a token over two columns: 16 × i32.

        Available only if `has_word_dots`.

        Args:
            weights: 16 × i32 with two int16 each.
            x: the token's two int16, repeated in all 16 elements.
        """
        raise AssertionError(f"{self.name} has no int16 dot products")

    def joined(self, lines: Sequence[Value]) -> list[Value]:
        """Return the lines of 32 columns in pairs, each with four columns from both halves.

        Each i32 holds four columns of a row; the next i32, the row's four columns 16 further on.
        The first line of a pair has rows 0, 1, 4, 5 and so on; the second has the others.
        """
        half, rows = len(lines) // 2, range(LANES)
        return [
            line.shuffle([n + LANES * k for n in rows if n % 4 // 2 == part for k in (0, 1)], other)
            for line, other in zip(lines[:half], lines[half:], strict=True)
            for part in range(2)
        ]

    def joined_products(
        self, code: Code, lines: Sequence[Value], x: Sequence[Value], start: Value, units: Value
    ) -> Value:
        """Return both halves' dot products, each times its scale, added up: 16 × i32.

        Each half's dot product fits in 16 bits. Available only if `joins_halves`.

        Args:
            lines: see `joined`.
            x: for each pair of lines, eight of the token's signed bytes, as an i64.
            start: the halves' initial sums, two i32 in an i64.
            units: the halves' scales, two int16 in an i32.
        """
        raise AssertionError(f"{self.name} does not join halves")

    @property
    def _registers(self) -> list[range]:
        """Byte indices in a line, one range per SIMD register."""
        return [range(n, n + self.register_bytes) for n in range(0, 4 * LANES, self.register_bytes)]

    def _multiply_add(self, code: Code, total: Value, weights: Value, x: Value) -> Value:
        """Return total + weights × x for one register: four byte products are summed in each i32.

        Multiplies bytes 0 and 2 of each row first, then 1 and 3, so that no sum has to move.
        """
        kind = vector(I16, self.register_bytes // 2)
        w, v = weights.bitcast(kind), x.bitcast(kind)
        for weight, number in ((w & 255, v << 8), (w >> 8, v)):
            wide = vector(I32, self.register_bytes // 2)
            products = weight.to(wide) * number.arithmetic_shift(8).to(wide)
            even, odd = (range(n, self.register_bytes // 2, 2) for n in range(2))
            total = total + (products.shuffle(even) + products.shuffle(odd))
        return total

    def table_lookup(self, code: Code, table: Sequence[int], indices: Value) -> Value:
        """Look up 64 indices in a 16-byte table."""
        zero, entries = code.constant(LINE, 0), [code.constant(LINE, entry) for entry in table]
        for bit in (1, 2, 4, 8):
            is_set = code.where((indices & bit).equals(0), zero, zero ^ -1)
            pairs = zip(entries[::2], entries[1::2], strict=True)
            entries = [((even ^ odd) & is_set) ^ even for even, odd in pairs]
        return entries[0]

    def f16_to_f32(self, code: Code, bits: Value) -> Value:
        """Convert F16 (as i16) to F32 with exponent arithmetic; infinities become finite."""
        wide = bits.to(vector(I32, bits.kind.count), signed=False)
        kind = vector(F32, bits.kind.count)
        size = ((wide & 0x7FFF) << 13).bitcast(kind) * 2.0**112
        return (size.bitcast(wide.kind) | ((wide & 0x8000) << 16)).bitcast(kind)


class Sse4(Isa):
    """SSE4.1: 16-byte registers, `pmaddubsw` products of byte pairs, which must fit in 16 bits."""

    name = "sse4"
    cpu = "x86-64-v2"
    needs: ClassVar[tuple[str, ...]] = ("ssse3", "sse4.1", "sse4.2", "popcnt", "cx16", "sahf")
    signed_weights = True

    sign: ClassVar[str] = "llvm.x86.ssse3.psign.b.128"
    add_pairs: ClassVar[str] = "llvm.x86.ssse3.pmadd.ub.sw.128"
    widen: ClassVar[str] = "llvm.x86.sse2.pmadd.wd"
    shuffle: ClassVar[str] = "llvm.x86.ssse3.pshuf.b.128"

    def dots(
        self,
        code: Code,
        lines: Sequence[Value],
        x: Sequence[Sequence[Value]],
        starts: Sequence[Value],
        largest: int,
    ) -> list[Value]:
        n_fit = 32767 // (
            2 * MAX_ACTIVATION * abs(largest)
        )  # lines whose products fit in 16 bits when added up
        groups = [
            self._short_dots(
                code, lines[n : n + n_fit], [numbers[n : n + n_fit] for numbers in x], largest < 0
            )
            for n in range(0, len(lines), n_fit)
        ]
        ones = code.constant(vector(I16, self.register_bytes // 2), 1)
        results = []
        for token, total in enumerate(starts):
            for group in groups:
                kind = vector(I32, self.register_bytes // 4)
                sums = [code.call(self.widen, kind, pairs, ones) for pairs in group[token]]
                total = total + concatenated(sums)
            results.append(total)
        return results

    def word_products(self, code: Code, numbers: Value, factor: Value) -> Value:
        n = self.register_bytes // 2
        factors = code.splat(factor, n // 2).bitcast(vector(I16, n))
        return concatenated([
            code.call(self.widen, vector(I32, n // 2), part.bitcast(factors.kind), factors)
            for part in self._in_registers(numbers)
        ])  # fmt: skip

    def _short_dots(
        self, code: Code, lines: Sequence[Value], x: Sequence[Sequence[Value]], is_signed: bool
    ) -> list[list[Value]]:
        """Return 16-bit sums of byte-pair products, for each token and register."""
        zero = code.constant(vector(I16, self.register_bytes // 2), 0)
        totals = [[zero] * len(self._registers) for _ in x]
        for number, line in enumerate(lines):
            for n, part in enumerate(self._registers):
                weights = size = line.shuffle(part)
                if is_signed:  # |w| ≤ 128 as unsigned; the sign moves to x
                    yes = code.constant(I1, 0)
                    size = code.call(
                        f"llvm.abs.v{self.register_bytes}i8", weights.kind, weights, yes
                    )
                for token, numbers in enumerate(x):
                    v = code.splat(numbers[number], self.register_bytes // 4).bitcast(weights.kind)
                    if is_signed:
                        v = code.call(self.sign, v.kind, v, weights)
                    pairs = code.call(self.add_pairs, zero.kind, size, v)
                    totals[token][n] = totals[token][n] + pairs
        return totals

    def table_lookup(self, code: Code, table: Sequence[int], indices: Value) -> Value:
        entries = code.vector_of(
            vector(I8, self.register_bytes), list(table) * (self.register_bytes // 16)
        )
        found = [
            code.call(self.shuffle, entries.kind, entries, indices.shuffle(part))
            for part in self._registers
        ]
        return concatenated(found)


class Avx2(Sse4):
    """AVX2: 32-byte registers, `vpmaddubsw` products, F16 conversion in hardware."""

    name = "avx2"
    cpu = "x86-64-v3"
    needs = (*Sse4.needs, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
    register_bytes = 32

    sign = "llvm.x86.avx2.psign.b"
    add_pairs = "llvm.x86.avx2.pmadd.ub.sw"
    widen = "llvm.x86.avx2.pmadd.wd"
    shuffle = "llvm.x86.avx2.pshuf.b"

    def f16_to_f32(self, code: Code, bits: Value) -> Value:
        n = bits.kind.count
        return bits.bitcast(vector(F16, n)).to(vector(F32, n))


class AvxVnni(Avx2):
    """AVX-VNNI: `vpdpbusd` adds four byte products to an i32, for eight rows per instruction."""

    name = "avxvnni"
    features = "+avxvnni"
    needs = (*Avx2.needs, "avxvnni")
    signed_weights = False
    dots = Isa.dots

    instruction: ClassVar[str] = "llvm.x86.avx512.vpdpbusd.256"

    def _multiply_add(self, code: Code, total: Value, weights: Value, x: Value) -> Value:
        return code.call(self.instruction, total.kind, total, weights.bitcast(total.kind), x)


class Avx512(AvxVnni):
    """AVX-512 with VNNI: 64-byte registers, `vpdpbusd` for 16 rows per instruction."""

    name = "avx512"
    cpu = "x86-64-v4"
    features = "+avx512vnni,-prefer-256-bit,+fast-dpwssd"  # else LLVM splits `vpdpwssd` in two
    needs = (
        *Avx2.needs, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni",
    )  # fmt: skip
    tile_tokens = 8
    register_bytes = 64

    joins_halves = has_word_dots = True

    instruction = "llvm.x86.avx512.vpdpbusd.512"
    multiply_words: ClassVar[str] = "llvm.x86.avx512.vpdpwssd.512"
    widen = "llvm.x86.avx512.pmaddw.d.512"
    narrow: ClassVar[str] = "llvm.x86.avx512.packssdw.512"
    shuffle = "llvm.x86.avx512.pshuf.b.512"

    def word_dots(self, code: Code, total: Value, weights: Value, x: Value) -> Value:
        return code.call(self.multiply_words, total.kind, total, weights, x)

    def joined_products(
        self, code: Code, lines: Sequence[Value], x: Sequence[Value], start: Value, units: Value
    ) -> Value:
        ints = vector(I32, LANES)
        sums = [code.splat(start, LANES // 2).bitcast(ints)] * 2
        for n, numbers in enumerate(x):
            spread = code.splat(numbers, LANES // 2).bitcast(ints)
            sums = [
                self._multiply_add(code, total, line, spread)
                for total, line in zip(sums, lines[2 * n : 2 * n + 2], strict=True)
            ]
        words = code.call(self.narrow, vector(I16, 2 * LANES), *sums)
        return code.call(self.widen, ints, words, code.splat(units).bitcast(words.kind))


class Neon(Isa):
    """ARM NEON with dot products: `sdot` adds four signed byte products in each of four rows."""

    name = "neon"
    features = "+neon,+dotprod"
    needs = ("dotprod",)
    signed_weights = True

    def _multiply_add(self, code: Code, total: Value, weights: Value, x: Value) -> Value:
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        return code.call(name, total.kind, total, weights, x.bitcast(weights.kind))

    def table_lookup(self, code: Code, table: Sequence[int], indices: Value) -> Value:
        entries = code.vector_of(vector(I8, 16), table)
        name = "llvm.aarch64.neon.tbl1.v16i8"
        return concatenated(
            [
                code.call(name, entries.kind, entries, indices.shuffle(part))
                for part in self._registers
            ]
        )

    def f16_to_f32(self, code: Code, bits: Value) -> Value:
        n = bits.kind.count
        return bits.bitcast(vector(F16, n)).to(vector(F32, n))


ISAS: tuple[type[Isa], ...] = (Avx512, AvxVnni, Avx2, Sse4, Neon, Isa)
"""Known instruction sets, best first."""

CPU_FACTS = Path("/proc/cpuinfo")
"""File in which Linux describes the processor."""


def supported() -> tuple[Isa, ...]:
    """Return the instruction sets that this processor supports, best first."""
    found = llvm.get_host_cpu_features()
    if platform.machine().lower() in ("arm64", "aarch64") and _has_dot_products():
        found["dotprod"] = True
    fit = [kind for kind in ISAS if all(found.get(need) for need in kind.needs)]
    return tuple(kind() for kind in fit)


def named(name: str) -> Isa:
    """Return the supported instruction set with the given name."""
    return next(isa for isa in supported() if isa.name == name)


def _has_dot_products() -> bool:
    """Return whether the system reports `sdot` on ARM; not every LLVM version detects it."""
    if sys.platform == "win32":
        dot_product = 43  # PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
        return bool(ctypes.WinDLL("kernel32").IsProcessorFeaturePresent(dot_product))
    if sys.platform == "darwin":
        return True  # all Apple processors have it
    with suppress(OSError):
        return "asimddp" in CPU_FACTS.read_text(errors="replace").split()
    return False


@cache
def chosen() -> Isa:
    """Return the instruction set that kernels are compiled for.

    Raises:
        EngineError: this processor does not support the one that `TANDEM_CPU` names.
    """
    wanted, here = os.environ.get("TANDEM_CPU", ""), supported()
    if not wanted:
        return here[0]
    for isa in here:
        if isa.name == wanted:
            return isa
    names = ", ".join(isa.name for isa in here)
    raise EngineError(
        "TANDEM_CPU is '{name}', which this processor does not support.",
        "Set it to one of {names}.", name=wanted, names=names,
    )  # fmt: skip
