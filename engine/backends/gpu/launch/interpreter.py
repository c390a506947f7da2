"""Speed-ups and fixes for Triton's interpreter, which runs kernels on the CPU with numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

MAX_CONSTANTS = 4096  # number of cached constants at which the cache is cleared


def share_shapes() -> None:
    """Make block types with the same shape share the objects that describe it, also in tensors."""
    from triton.language import core

    block, tensor = core.block_type, core.tensor
    block.__init__ = _with_known_shapes(block.__init__, core)
    block.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, _: None)
    tensor.__init__ = _of_known_shape(tensor.__init__, core)


def _with_known_shapes(make: Callable[..., None], core: Any) -> Callable[..., None]:
    """Return the initialiser for block types, with a cache of checked shapes."""
    constexpr, known = core.constexpr, dict[tuple[int, ...], tuple[Any, Any]]()

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size.value if type(size) is constexpr else size for size in shape])
        if found := known.get(key):
            self.element_ty = element_ty
            self.shape, self.numel = found
            return
        make(self, element_ty, shape)
        sizes = core.tuple([constexpr(size) for size in self.shape])
        self.shape.of_tensors = sizes, constexpr(self.numel)
        known[key] = self.shape, self.numel

    return init


def _of_known_shape(make: Callable[..., None], core: Any) -> Callable[..., None]:
    """Return the initialiser for tensors, which takes the shape's objects from the type."""
    scalar = core.tuple([]), core.constexpr(1)

    def init(self: Any, handle: Any, kind: Any) -> None:
        if kind.is_block():
            known = vars(kind.shape).get("of_tensors")
            if known is None:  # the type is older than `share_shapes`
                make(self, handle, kind)
                return
            self.shape, self.numel = known
        else:
            self.shape, self.numel = scalar
        self.handle, self.type, self.dtype = handle, kind, kind.scalar

    return init


def shorten_checks() -> None:
    """Skip conversions in operations on tensors with the same type and shape."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic as Semantic

    Semantic.cast = _unless_same_type(Semantic.cast)
    Semantic.broadcast_impl_value = _unless_same_shape(Semantic.broadcast_impl_value)
    Semantic.binary_op_type_checking_impl = _with_known_operands(
        Semantic.binary_op_type_checking_impl, core.tensor
    )


def _unless_same_type(cast: Callable[..., Any]) -> Callable[..., Any]:
    def cast_if_needed(self: Any, value: Any, to: Any, *rest: Any, **named: Any) -> Any:
        if value.type.scalar is to.scalar:
            return value
        return cast(self, value, to, *rest, **named)

    return cast_if_needed


def _unless_same_shape(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_if_needed(self: Any, left: Any, right: Any) -> Any:
        a, b = left.type, right.type
        if a.is_block() and b.is_block() and a.shape is b.shape:
            return left, right
        return broadcast(self, left, right)

    return broadcast_if_needed


def _with_known_operands(convert: Callable[..., Any], tensor: type[Any]) -> Callable[..., Any]:
    """Return `convert`, which gives two operands the same type and shape, with a constant cache.

    Operands with the same type differ at most in shape, except floats to divide, of which Triton
    widens some. Zeros are not cached, because 0 and -0 are equal.
    """
    known: dict[tuple[object, ...], Any] = {}

    def converted(self: Any, left: Any, right: Any, *rest: Any, **named: Any) -> Any:
        kind = left.dtype if type(left) is tensor else None
        if kind is None or kind.is_ptr():
            return convert(self, left, right, *rest, **named)
        if type(right) is tensor and right.dtype is kind:
            divides = named.get("div_or_mod") or (len(rest) > 3 and rest[3])
            if not kind.is_floating() or not divides:
                return self.broadcast_impl_value(left, right)
        elif type(right) in (int, float) and right:
            shape = left.type.shape if left.type.is_block() else None
            key = right, type(right), kind.name, id(shape), rest, tuple(named.items())
            if key in known:
                return left, known[key][0]
            found = convert(self, left, right, *rest, **named)
            if found[0] is left:
                if len(known) >= MAX_CONSTANTS:
                    known.clear()
                known[key] = found[1], shape  # kept, so that its `id` is not reused
            return found
        return convert(self, left, right, *rest, **named)

    return converted


_lock = threading.RLock()


def interpret(run: Callable[[], None]) -> None:
    """Run an interpreted kernel, one at a time, because Triton patches its own functions for it."""
    with _lock:
        _patch_interpreter()
        run()


@cache
def _patch_interpreter() -> None:
    """Disable the interpreter's slowest steps, and fix bugs in some of its versions.

    The steps are checking for integer overflow, patching Triton's functions again for each function
    that a kernel calls, building a table of types for each result, and those that `share_shapes`
    and `shorten_checks` skip. Triton versions with a different structure are not patched.
    """
    from triton.language import standard
    from triton.runtime import interpreter

    if hasattr(interpreter, "_patch_lang_tensor"):
        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow"):
        builder.options = replace(builder.options, sanitize_overflow=False)
    function = interpreter.InterpretedFunction
    if hasattr(function, "rewrite") and hasattr(interpreter, "_patch_lang"):
        # functions in Triton's standard library see a different module than kernels do
        interpreter._patch_lang(standard.zeros.fn)
        function.__call__ = _call
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _cached(interpreter._get_np_dtype)
    share_shapes()
    shorten_checks()
    made = interpreter.InterpreterBuilder
    made.binary_op = _with_booleans(made.binary_op, interpreter.TensorHandle)


def _with_booleans(binary_op: Callable[..., Any], handle: type[Any]) -> Callable[..., Any]:
    """Return `binary_op`, changed so that comparisons give booleans.

    Triton gives the result the type that was compared, so that comparing two scalars gives a block
    of such numbers; Triton 3.8 and newer reject that as a mask.
    """
    from triton.language import int1

    def combine(builder: Any, left: Any, right: Any, operator: Callable[..., Any]) -> Any:
        found = binary_op(builder, left, right, operator)
        return handle(found.data, int1) if found.data.dtype == bool else found

    return combine


def _with_index(patch: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return `patch`, changed so that tensors are valid in `range`.

    Triton 3.7 and older convert an array with one number, which numpy 2.5 and newer reject.
    """

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch_tensor


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.rewrite()(*args, **kwargs)


def _cached(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def cached(triton_type: Any) -> Any:
        name = str(triton_type.scalar)
        if name not in known:
            known[name] = numpy_type(triton_type)
        return known[name]

    return cached
