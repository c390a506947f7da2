"""LLVM values with Python operators, so that kernels read like formulas."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

LANES = 16
"""Number of elements in the kernels' vectors, which LLVM splits for smaller registers."""

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VOID = ir.VoidType()


def vector(kind: Any, n: int = LANES) -> Any:
    """Return the LLVM type for a vector of `n` elements."""
    return ir.VectorType(kind, n)


INTS, FLOATS = vector(I32), vector(F32)
LINE = vector(I8, 4 * LANES)
"""Type of a cache line of weights: four bytes per row, for 16 rows."""


class Value:
    """An LLVM integer, float, or vector of them; Python operators append instructions.

    A Python number as an operand becomes a constant of the same type. `>>` shifts in zeros.
    Integer comparisons are signed; integer divisions are not.

    Attributes:
        code: builder of the function that the value belongs to.
        raw: llvmlite's value.
    """

    def __init__(self, code: Code, raw: Any) -> None:
        self.code = code
        self.raw = raw

    @property
    def kind(self) -> Any:
        """LLVM type."""
        return self.raw.type

    @property
    def is_float(self) -> bool:
        """Whether the elements are floats."""
        element = self.kind.element if isinstance(self.kind, ir.VectorType) else self.kind
        return isinstance(element, ir.HalfType | ir.FloatType)

    def _apply(self, name: str, other: Value | float) -> Value:
        return Value(self.code, getattr(self.code.builder, name)(self.raw, self._like(other)))

    def _like(self, other: Value | float) -> Any:
        return other.raw if isinstance(other, Value) else self.code.constant(self.kind, other).raw

    def __add__(self, other: Value | float) -> Value:
        return self._apply("fadd" if self.is_float else "add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._apply("fsub" if self.is_float else "sub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._apply("fmul" if self.is_float else "mul", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._apply("fdiv", other)

    def __floordiv__(self, other: Value | int) -> Value:
        return self._apply("udiv", other)

    def __mod__(self, other: Value | int) -> Value:
        return self._apply("urem", other)

    def __and__(self, other: Value | int) -> Value:
        return self._apply("and_", other)

    def __or__(self, other: Value | int) -> Value:
        return self._apply("or_", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._apply("xor", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._apply("shl", other)

    def __rshift__(self, other: Value | int) -> Value:
        return self._apply("lshr", other)

    def arithmetic_shift(self, n: int) -> Value:
        """Return an integer shifted right by n bits, with sign extension."""
        return Value(self.code, self.code.builder.ashr(self.raw, self._like(n)))

    def _compare(self, how: str, other: Value | float) -> Value:
        builder = self.code.builder
        compare = builder.fcmp_ordered if self.is_float else builder.icmp_signed
        return Value(self.code, compare(how, self.raw, self._like(other)))

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Value | float) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Value | float) -> Value:
        """Compare for equality, element by element; false if either is NaN."""
        return self._compare("==", other)

    def differs(self, other: Value | float) -> Value:
        """Compare for inequality, element by element; false if either is NaN."""
        return self._compare("!=", other)

    def to(self, kind: Any, *, signed: bool = True) -> Value:
        """Convert the number to another integer or float type.

        Args:
            kind: LLVM type of the result.
            signed: whether the integers are signed.
        """
        builder, source = self.code.builder, self.kind
        wide = source.element if isinstance(source, ir.VectorType) else source
        goal = kind.element if isinstance(kind, ir.VectorType) else kind
        if self.is_float and isinstance(goal, ir.IntType):
            name = "fptosi"
        elif self.is_float:
            name = "fpext" if isinstance(goal, ir.FloatType) else "fptrunc"
        elif isinstance(goal, ir.FloatType):
            name = "sitofp" if signed else "uitofp"
        elif goal.width > wide.width:
            name = "sext" if signed else "zext"
        else:
            name = "trunc"
        return Value(self.code, getattr(builder, name)(self.raw, kind))

    def bitcast(self, kind: Any) -> Value:
        """Return the same bits as another type."""
        return Value(self.code, self.code.builder.bitcast(self.raw, kind))

    def __getitem__(self, index: int) -> Value:
        """Return one element of a vector."""
        return Value(
            self.code, self.code.builder.extract_element(self.raw, ir.Constant(I32, index))
        )

    def shuffle(self, indices: Sequence[int], other: Value | None = None) -> Value:
        """Return the elements at `indices` in the concatenation of this vector and `other`."""
        undefined = ir.Constant(self.kind, ir.Undefined)
        chosen = ir.Constant(vector(I32, len(indices)), list(indices))
        second = undefined if other is None else other.raw
        return Value(self.code, self.code.builder.shuffle_vector(self.raw, second, chosen))


Combine = Callable[[Value, Value], Value]
"""An operation on two values."""


class Variable:
    """A mutable value, such as a sum in a loop; LLVM keeps it in a register."""

    def __init__(self, code: Code, start: Value) -> None:
        self._code = code
        with code.builder.goto_entry_block():
            self._place = code.builder.alloca(start.kind)
        self.set(start)

    def get(self) -> Value:
        """Load the current value."""
        return Value(self._code, self._code.builder.load(self._place))

    def set(self, value: Value) -> None:
        """Store a new value."""
        self._code.builder.store(value.raw, self._place)


class Code:
    """Builder of one function, whose methods append instructions.

    Addresses are 64-bit integers, to which byte offsets can be added.
    """

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def constant(self, kind: Any, number: float) -> Value:
        """Return a constant; if the type is a vector, all elements are equal."""
        if isinstance(kind, ir.VectorType):
            return Value(self, ir.Constant(kind, [number] * kind.count))
        return Value(self, ir.Constant(kind, number))

    def vector_of(self, kind: Any, numbers: Iterable[float]) -> Value:
        """Return a constant vector with these numbers."""
        return Value(self, ir.Constant(kind, list(numbers)))

    def number(self, number: int) -> Value:
        """Return a 64-bit integer constant."""
        return self.constant(I64, number)

    def variable(self, start: Value) -> Variable:
        """Create a variable with an initial value."""
        return Variable(self, start)

    def splat(self, number: Value, n: int = LANES) -> Value:
        """Return a vector of n equal elements."""
        kind = vector(number.kind, n)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(undefined, number.raw, ir.Constant(I32, 0))
        return Value(self, first).shuffle([0] * n)

    def gathered(self, addresses: Sequence[Value], kind: Any) -> Value:
        """Load a number of type `kind` from each address into a vector."""
        whole = ir.Constant(vector(kind, len(addresses)), ir.Undefined)
        for n, address in enumerate(addresses):
            one = self.load(address, kind)
            whole = self.builder.insert_element(whole, one.raw, ir.Constant(I32, n))
        return Value(self, whole)

    def load(self, address: Value, kind: Any) -> Value:
        """Load a value of an LLVM type from an address, aligned or not."""
        value = self.builder.load(self._pointer(address, kind))
        value.align = 1
        return Value(self, value)

    def store(self, value: Value, address: Value) -> None:
        """Store a value at an address, aligned or not."""
        self.builder.store(value.raw, self._pointer(address, value.kind)).align = 1

    def load_part(self, address: Value, kind: Any, n: Value) -> Value:
        """Load the first n elements of a vector, padded with zeros; read no memory beyond them."""
        place, align = self._pointer_value(address, kind), self.constant(I32, 1)
        mask, others = self.lane_mask(n, kind.count), self.constant(kind, 0)
        return self.call(f"llvm.masked.load.{suffix(kind)}.p0", kind, place, align, mask, others)

    def store_part(self, value: Value, address: Value, n: Value) -> None:
        """Store the first n elements of a vector; write no memory beyond them."""
        place, align = self._pointer_value(address, value.kind), self.constant(I32, 1)
        name = f"llvm.masked.store.{suffix(value.kind)}.p0"
        self.call(name, VOID, value, place, align, self.lane_mask(n, value.kind.count))

    def lane_mask(self, n: Value, count: int = LANES) -> Value:
        """Return a mask with `count` lanes, true for the first n."""
        return self.vector_of(vector(I32, count), range(count)) < self.splat(n.to(I32), count)

    def _pointer_value(self, address: Value, kind: Any) -> Value:
        return Value(self, self._pointer(address, kind))

    def _pointer(self, address: Value, kind: Any) -> Any:
        return self.builder.inttoptr(address.raw, kind.as_pointer())

    def stack_array(self, values: Sequence[Value]) -> Value:
        """Store 64-bit integers in the function's stack frame and return their address."""
        place = self.builder.alloca(I64, len(values))
        address = Value(self, self.builder.ptrtoint(place, I64))
        for n, value in enumerate(values):
            self.store(value, address + 8 * n)
        return address

    def stack_buffer(self, kind: Any, n: int) -> Value:
        """Reserve n elements of a type in the function's stack frame and return their address."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(kind, n)
            return Value(self, self.builder.ptrtoint(place, I64))

    def load_array(self, address: Value, n: int) -> list[Value]:
        """Load n adjacent 64-bit integers."""
        return [self.load(address + 8 * index, I64) for index in range(n)]

    def function_address(self, name: str) -> Value:
        """Return the address of a function in this module."""
        return Value(self, self.builder.ptrtoint(self.builder.module.globals[name], I64))

    def prefetch(self, address: Value, cache: int = 1) -> None:
        """Prefetch the cache line at an address.

        Args:
            cache: cache level into which to load it.
        """
        flags = (self.constant(I32, flag) for flag in (0, 4 - cache, 1))  # read, locality, data
        self.call("llvm.prefetch.p0", VOID, self._pointer_value(address, I8), *flags)

    def call(self, name: str, result: Any, *values: Value) -> Value:
        """Call an LLVM intrinsic or a function in this module; `result` is the result's type."""
        module, kind = self.builder.module, ir.FunctionType(result, [v.kind for v in values])
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return Value(self, self.builder.call(function, [v.raw for v in values]))

    def call_at(self, address: Value, result: Any, *values: Value) -> Value:
        """Call the function at an address; `result` is the result's type."""
        kind = ir.FunctionType(result, [value.kind for value in values])
        pointer = self.builder.inttoptr(address.raw, kind.as_pointer())
        return Value(self, self.builder.call(pointer, [value.raw for value in values]))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return a × b + c, rounded only once if the processor supports that."""
        return self.call(f"llvm.fmuladd.{suffix(a.kind)}", a.kind, a, b, c)

    def maximum(self, a: Value, b: Value) -> Value:
        """Return the larger of two numbers, element by element; NaN if either is NaN."""
        name = "maximum" if a.is_float else "smax"
        return self.call(f"llvm.{name}.{suffix(a.kind)}", a.kind, a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        """Return the smaller of two floats, element by element; NaN if either is NaN."""
        return self.call(f"llvm.minimum.{suffix(a.kind)}", a.kind, a, b)

    def unary(self, name: str, a: Value) -> Value:
        """Call an LLVM intrinsic with one operand, such as "fabs" or "rint"."""
        return self.call(f"llvm.{name}.{suffix(a.kind)}", a.kind, a)

    def min_signed(self, a: Value, b: Value) -> Value:
        """Return the smaller of two signed integers."""
        return self.where(a < b, a, b)

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        """Return a where the condition holds, and b elsewhere."""
        return Value(self, self.builder.select(condition.raw, a.raw, b.raw))

    def reduce(self, name: str, a: Value) -> Value:
        """Reduce a vector to a number in a fixed order, by "add", "max" or "min" (floats only)."""
        while a.kind.count > 1:
            half = a.kind.count // 2
            low, high = a.shuffle(range(half)), a.shuffle(range(half, 2 * half))
            if name == "add":
                a = low + high
            else:
                a = self.maximum(low, high) if name == "max" else self.minimum(low, high)
        return a[0]

    def reduce_each(self, vectors: Sequence[Value], combine: Combine = operator.add) -> Value:
        """Reduce each of 1, 2, 4, … vectors in the same order as `reduce`; return the results."""
        width, n_groups = vectors[0].kind.count, 1
        while width > 1:
            half, is_single = width // 2, len(vectors) == 1
            n_groups = n_groups if is_single else 2 * n_groups
            low = [group * width + n for group in range(n_groups) for n in range(half)]
            high = [place + half for place in low]
            pairs = (
                [(vectors[0], None)] if is_single else zip(vectors[::2], vectors[1::2], strict=True)
            )
            vectors = [combine(a.shuffle(low, b), a.shuffle(high, b)) for a, b in pairs]
            width = half
        return vectors[0]

    @contextmanager
    def loop(self, start: Value, stop: Value, step: Value | int = 1) -> Iterator[Value]:
        """Emit a loop over start, start + step, … below stop; yield the 64-bit index."""
        function = self.builder.function
        head, body, after = (function.append_basic_block() for _ in range(3))
        index = self.variable(start)
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch((index.get() < stop).raw, body, after)
        self.builder.position_at_end(body)
        current = index.get()
        yield current
        index.set(current + step)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def forever(self) -> Iterator[Callable[[Value], None]]:
        """Emit an endless loop; yield a function that breaks out of it if a condition holds."""
        head, after = (self.builder.function.append_basic_block() for _ in range(2))
        self.builder.branch(head)
        self.builder.position_at_end(head)

        def leave(condition: Value) -> None:
            onward = self.builder.function.append_basic_block()
            self.builder.cbranch(condition.raw, after, onward)
            self.builder.position_at_end(onward)

        yield leave
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Emit a block that runs only if the condition holds."""
        with self.builder.if_then(condition.raw):
            yield

    @contextmanager
    def if_else(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        """Emit an if-else; yield its two blocks for the caller to enter."""
        with self.builder.if_else(condition.raw) as branches:
            yield branches


def concatenated(parts: Sequence[Value]) -> Value:
    """Concatenate 1, 2, 4, … vectors."""
    while len(parts) > 1:
        n = parts[0].kind.count
        parts = [a.shuffle(range(2 * n), b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def transposed(rows: Sequence[Value]) -> list[Value]:
    """Transpose 16 vectors of 16 elements in four steps of pairwise exchanges."""
    found = list(rows)
    for size in (1, 2, 4, 8):
        low = [lane + (LANES - size if lane & size else 0) for lane in range(LANES)]
        high = [lane + (LANES if lane & size else size) for lane in range(LANES)]
        for n in range(LANES):
            if not n & size:
                a, b = found[n], found[n + size]
                found[n], found[n + size] = a.shuffle(low, b), a.shuffle(high, b)
    return found


def suffix(kind: Any) -> str:
    """Return the type suffix of an LLVM intrinsic's name, such as "v16f32"."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{suffix(kind.element)}"
    return (
        f"i{kind.width}"
        if isinstance(kind, ir.IntType)
        else {"half": "f16", "float": "f32"}[str(kind)]
    )


def function(
    module: ir.Module, name: str, n_arguments: int, result: Any = VOID
) -> tuple[Code, list[Value]]:
    """Start a function that takes 64-bit integers; the caller emits its body and return."""
    made = ir.Function(module, ir.FunctionType(result, [I64] * n_arguments), name)
    made.attributes.add("nounwind")
    code = Code(ir.IRBuilder(made.append_basic_block()))
    return code, [Value(code, argument) for argument in made.args]


def internal(
    module: ir.Module, name: str, n_arguments: int, result: Any = VOID
) -> tuple[Code, list[Value]]:
    """Start a function that is internal to the module, so that LLVM may inline it."""
    code, values = function(module, name, n_arguments, result)
    code.builder.function.linkage = "internal"
    return code, values
