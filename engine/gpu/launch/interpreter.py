"""Triton's interpreter, which computes kernels on the CPU with numpy, made several times faster."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

_lock = threading.RLock()


def interpret(run: Callable[[], None]) -> None:
    """Start an interpreted kernel, one at a time: Triton's own functions are others meanwhile."""
    with _lock:
        _hasten()
        run()


@cache
def _hasten() -> None:
    """Leave out what takes most of the time.

    That is looking for overflows of integers, and replacing Triton's functions once more for each
    function that a kernel calls, as they are already. A version that is built differently stays
    as slow as it is.
    """
    from triton.language import standard
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow"):
        builder.options = replace(builder.options, sanitize_overflow=False)
    function = interpreter.InterpretedFunction
    if hasattr(function, "rewrite") and hasattr(interpreter, "_patch_lang"):
        # kernels see another module than the functions that Triton itself is written with
        interpreter._patch_lang(standard.zeros.fn)
        function.__call__ = _call


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.rewrite()(*args, **kwargs)
