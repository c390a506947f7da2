"""Kernels whose results were found wrong on a kind of GPU, which other code replaces there.

`gpu.checks` finds them. Where a function decides whether its kernel serves, it asks `allows`
or is `refusable`; its callers have another way already. The choice is one for all cards of a kind,
so that they go on computing the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from engine.backends.gpu.launch.configs import KernelTarget, target_of

Key = tuple[str | int, ...]
"""Name of a kernel, and what its variants differ by: type of the weights, number of rows."""

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_thread = threading.local()
_refused: dict[KernelTarget, frozenset[Key]] = {}
_n_watching = 0
_is_asked = False
"""Whether any kernel is refused or watched: if not, nothing else is looked at."""


def allows(device: torch.device, *key: str | int) -> bool:
    """Return whether a kernel may compute on a device."""
    if not _is_asked:
        return True
    asked: dict[Key, None] | None = getattr(_thread, "asked", None)
    if asked is not None:
        asked[key] = None
    if key in getattr(_thread, "on_trial", ()):
        return False
    return key not in _refused.get(target_of(device), ())


def refusable(function: Callable[P, T | None]) -> Callable[P, T | None]:
    """Decorate a function whose kernel is refused by the function's name: it then returns None."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        if _is_asked and not allows(_device_of(args), function.__name__):
            return None
        return function(*args, **kwargs)

    return guarded


def refuse(device: torch.device, keys: Collection[Key]) -> None:
    """Refuse kernels on all devices of a kind, for the rest of this process."""
    if keys:
        target = target_of(device)
        with _lock:
            _refused[target] = _refused.get(target, frozenset()).union(keys)
            _note()


def refused(device: torch.device) -> frozenset[Key]:
    """Return the kernels that are refused on a device."""
    return _refused.get(target_of(device), frozenset())


def allow_all() -> None:
    """Forget all refusals."""
    with _lock:
        _refused.clear()
        _note()


@contextmanager
def watched(on_trial: Collection[Key] = ()) -> Iterator[dict[Key, None]]:
    """Collect the kernels that this thread asks for; refuse it those on trial meanwhile."""
    global _n_watching
    asked: dict[Key, None] = {}
    with _lock:
        _n_watching += 1
        _note()
    _thread.asked, _thread.on_trial = asked, frozenset(on_trial)
    try:
        yield asked
    finally:
        _thread.asked, _thread.on_trial = None, ()
        with _lock:
            _n_watching -= 1
            _note()


def _note() -> None:
    global _is_asked
    _is_asked = bool(_refused) or _n_watching > 0


def _device_of(args: Collection[object]) -> torch.device:
    """Return the device of the first tensor among arguments, or inside one that is a tuple."""
    for value in args:
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            return value[0].device
    return torch.device("cpu")
