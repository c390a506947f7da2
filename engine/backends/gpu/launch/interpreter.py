"""Triton's interpreter, which runs kernels on the CPU with numpy: made faster, and mended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from engine.backends.gpu.launch.interpreter_types import share_shapes, shorten_checks

_lock = threading.RLock()


def interpret(run: Callable[[], None]) -> None:
    """Run an interpreted kernel, one at a time: Triton patches its own functions meanwhile."""
    with _lock:
        _patch_interpreter()
        run()


@cache
def _patch_interpreter() -> None:
    """Disable the interpreter's slowest steps, and mend what its versions have wrong.

    The steps are checks for integer overflow, patching Triton's functions again for each function
    that a kernel calls, building a table of types for each result, and what `interpreter_types`
    does without. A Triton version that is built differently stays as it is.
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
        # functions of Triton's own standard library see another module than kernels do
        interpreter._patch_lang(standard.zeros.fn)
        function.__call__ = _call
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    share_shapes()
    shorten_checks()
    made = interpreter.InterpreterBuilder
    made.binary_op = _with_truth(made.binary_op, interpreter.TensorHandle)


def _with_truth(binary_op: Callable[..., Any], handle: type[Any]) -> Callable[..., Any]:
    """Return `binary_op`, but with truth values for comparisons.

    Triton calls them numbers of the type that was compared, so that a comparison of two scalars
    becomes a block of such numbers; as a mask, Triton 3.8 and newer refuse it.
    """
    from triton.language import int1

    def combine(builder: Any, left: Any, right: Any, operator: Callable[..., Any]) -> Any:
        found = binary_op(builder, left, right, operator)
        return handle(found.data, int1) if found.data.dtype == bool else found

    return combine


def _with_index(patch: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return `patch`, but with tensors that are valid in `range`.

    Triton 3.7 and older convert an array of one number, which numpy 2.5 and newer refuse.
    """

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch_tensor


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.rewrite()(*args, **kwargs)


def _remembered(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `numpy_type` with a memory of its results, by the name of a type's elements."""
    known: dict[str, Any] = {}

    def remembered(triton_type: Any) -> Any:
        name = str(triton_type.scalar)
        if name not in known:
            known[name] = numpy_type(triton_type)
        return known[name]

    return remembered
