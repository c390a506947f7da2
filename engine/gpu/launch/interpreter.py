"""Triton's interpreter, which runs kernels on the CPU with numpy, made several times faster."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

_lock = threading.RLock()


def interpret(run: Callable[[], None]) -> None:
    """Run an interpreted kernel, one at a time: Triton patches its own functions meanwhile."""
    with _lock:
        _patch_interpreter()
        run()


@cache
def _patch_interpreter() -> None:
    """Disable the interpreter's slowest steps.

    These are checks for integer overflow, patching Triton's functions again for each function
    that a kernel calls, and building a table of types for each result. A Triton version that is
    built differently stays as it is.
    """
    from triton.language import standard
    from triton.runtime import interpreter

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
