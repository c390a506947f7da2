"""Progress on Windows: the interface `ITaskbarList3` of the shell, called without a wrapper."""

from __future__ import annotations

import ctypes
import logging
import uuid
from collections.abc import Callable
from typing import Any, Final

from app.window.taskbar.painter import STEPS, Painter

log = logging.getLogger(__name__)

TASKBAR_LIST: Final = uuid.UUID("56fdf344-fd6d-11d0-958a-006097c9a090")
TASKBAR_LIST_3: Final = uuid.UUID("ea1afb91-9e28-4b86-90e9-5e9f8a5eefaf")
IN_THIS_PROCESS: Final = 1  # CLSCTX_INPROC_SERVER
INIT, SET_VALUE, SET_STATE = 3, 9, 10
"""Places of the methods in the interface's table, which begins with three of `IUnknown`."""

NO_PROGRESS: Final = 0  # TBPF_NOPROGRESS; a value that is set ends it


def windows_painter(window: int) -> Painter:
    """Return what shows a progress on the button of a window; nothing if the shell has no taskbar.

    Args:
        window: handle of the window.
    """
    interface = ctypes.c_void_p()
    ole32 = ctypes.WinDLL("ole32")  # type: ignore[attr-defined,unused-ignore]
    ole32.CoInitialize(None)  # Qt has done so on this thread; once more does no harm
    status = ole32.CoCreateInstance(
        TASKBAR_LIST.bytes_le, None, IN_THIS_PROCESS, TASKBAR_LIST_3.bytes_le,
        ctypes.byref(interface),
    )  # fmt: skip
    if status < 0 or not interface.value:
        log.info("the taskbar shows no progress: status %#x", status & 0xFFFFFFFF)
        return lambda share: None
    return interface_painter(interface.value, window, ctypes.WINFUNCTYPE)  # type: ignore[attr-defined,unused-ignore]


def interface_painter(interface: int, window: int, function_type: Callable[..., Any]) -> Painter:
    """Return what calls an `ITaskbarList3` at an address.

    Args:
        function_type: makes types of functions with the calling convention of its methods.
    """
    table = ctypes.cast(interface, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))).contents

    def method(place: int, *types: object) -> Callable[..., int]:
        made = function_type(ctypes.c_long, ctypes.c_void_p, *types)
        return made(table[place])  # type: ignore[no-any-return]

    set_value = method(SET_VALUE, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_ulonglong)
    set_state = method(SET_STATE, ctypes.c_void_p, ctypes.c_int)
    method(INIT)(interface)

    def paint(share: float | None) -> None:
        if share is None:
            set_state(interface, window, NO_PROGRESS)
        else:
            set_value(interface, window, round(STEPS * share), STEPS)

    return paint
