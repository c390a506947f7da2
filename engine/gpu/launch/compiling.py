"""Compiling kernels in the background, before they are first started.

What a model will start is collected on the device "meta" (`launch.watched`): a pass over tensors
without memory. Each variant is compiled once, while weights load, and found by the real start in
Triton's own memory of this process, or the next time on disk.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from engine.devices.host import usable_cores
from engine.errors import Cancelled, EngineError
from engine.gpu.launch.kernel_cache import cache_in_use, is_full, leave_cache
from engine.gpu.launch.kernel_launch import Argument, KernelLaunch, is_interpreted
from engine.gpu.launch.launcher_choice import prepare

log = logging.getLogger(__name__)

CompileProgress = Callable[[int, int], None]
"""Is told how many variants of how many are compiled; from several threads, one at a time."""

MOST_THREADS = 4
"""More gain little: for a part of its time a compiler is in Python, one at a time."""

MOST_INT32 = (1 << 31) - 1
MOST_INT64 = (1 << 63) - 1

ALIGNMENT = 16
"""What addresses and numbers may be a multiple of so that Triton compiles for that."""

POLL_S = 0.05
"""Between looks at whether a wait was cancelled."""


class Compiling:
    """Variants of kernels that are being compiled for one GPU; it begins at once.

    Args:
        starts: with the device "meta" or the real one; more of the same variant do no harm.
        on_progress: called first with none compiled.
        n_threads: None for as many as is sensible here.

    Attributes:
        n_total: variants.

    Raises:
        EngineError: kernels cannot be started on this machine.
    """

    def __init__(
        self,
        device: torch.device,
        starts: Iterable[KernelLaunch],
        on_progress: CompileProgress = lambda n_done, n_total: None,
        n_threads: int | None = None,
    ) -> None:
        if device.type == "cuda":
            prepare()
        wanted = variants(starts)
        _open_memory(wanted, device)
        self.n_total = len(wanted)
        self._n_done = 0
        self._has_failed = False
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(
            n_threads or min(MOST_THREADS, usable_cores()), "compile kernels"
        )
        on_progress(0, self.n_total)
        self._futures = [self._pool.submit(partial(self._work, s, device)) for s in wanted]
        self._pool.shutdown(wait=False)

    @property
    def n_done(self) -> int:
        """Variants that are compiled."""
        return self._n_done

    def cancel(self) -> None:
        """Begin with no further variant."""
        for future in self._futures:
            future.cancel()

    def wait(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Return when all are compiled.

        Args:
            is_cancelled: asked all the time.

        Raises:
            EngineError: one cannot be compiled; the others that have not begun are left out.
            Cancelled: the person, or `cancel`, ended it.
        """
        for future in self._futures:
            self._wait_for(future, is_cancelled)

    def _wait_for(self, future: Future[None], is_cancelled: Callable[[], bool]) -> None:
        while True:
            if is_cancelled():
                self.cancel()
                raise Cancelled("Compiling kernels")
            try:
                with contextlib.suppress(TimeoutError):
                    future.result(POLL_S)
                    return
            except CancelledError:
                raise Cancelled("Compiling kernels") from None
            except BaseException:
                self.cancel()
                raise

    def _work(self, start: KernelLaunch, device: torch.device) -> None:
        if self._has_failed:  # of one that began before, which `wait` comes to first
            return
        try:
            compile_start(start, device)
        except BaseException:
            self._has_failed = True
            raise
        with self._lock:
            self._n_done += 1
            self._on_progress(self._n_done, self.n_total)


def _open_memory(starts: Iterable[KernelLaunch], device: torch.device) -> None:
    """Let each kernel make its place for variants now: of two threads at once, one would lose its.

    It belongs to a device, by the number that Triton's driver tells.
    """
    driver = import_module("triton.runtime").driver
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for start in starts:
            places = getattr(start.kernel, "device_caches", None)
            if places is not None:
                _ = places[driver.active.get_current_device()]


def compile_start(start: KernelLaunch, device: torch.device) -> Any:
    """Compile what a start needs, and load it on the device; returns Triton's compiled kernel.

    Raises:
        EngineError: it cannot be compiled.
    """
    folder = cache_in_use()
    try:
        return _compiled(start, device)
    except OSError as error:
        if not is_full(error):
            raise _not_compiled(start, error) from error
        leave_cache(folder, error)
    except EngineError:
        raise
    except Exception as error:  # compilers fail in all ways
        raise _not_compiled(start, error) from error
    return compile_start(start, device)


def _compiled(start: KernelLaunch, device: torch.device) -> Any:
    options = {"num_warps": start.num_warps, "num_stages": start.num_stages}
    compiling = partial(
        start.kernel.warmup, *start.args, grid=start.grid, **start.constants, **options
    )
    if device.type != "cuda":
        return compiling()
    with torch.cuda.device(device):
        kernel = compiling()
        _ = kernel.run  # Triton loads it when that is read
    return kernel


def _not_compiled(start: KernelLaunch, error: BaseException) -> EngineError:
    log.error("%s cannot be compiled", start.kernel.__name__, exc_info=error)
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
    return EngineError(
        f"The kernel {start.kernel.__name__} cannot be compiled for this GPU ({line}).",
        "Set TANDEM_BACKEND=reference to do without kernels of Tandem's own.",
    )


def variants(starts: Iterable[KernelLaunch]) -> list[KernelLaunch]:
    """One start of each variant that Triton would compile, in their order; none if interpreted."""
    found: dict[Hashable, KernelLaunch] = {}
    for start in starts:
        if not is_interpreted(start.kernel):
            found.setdefault(variant_key(start), start)
    return list(found.values())


def variant_key(start: KernelLaunch) -> Hashable:
    """What Triton compiles a kernel for: the same key means the same compiled kernel."""
    names = [p for p in start.kernel.params if not p.is_constexpr]
    kinds = tuple(
        _kind(arg, is_plain=param.do_not_specialize)
        for param, arg in zip(names, start.args, strict=True)
    )
    constants = tuple(sorted((name, str(value)) for name, value in start.constants.items()))
    return (start.kernel.__module__, start.kernel.__name__, kinds, constants, start.num_warps,
            start.num_stages)  # fmt: skip


def _kind(arg: Argument, *, is_plain: bool) -> Hashable:
    """What Triton distinguishes of an argument.

    Args:
        is_plain: whether it shall not be compiled for particular numbers.
    """
    if isinstance(arg, Tensor):  # on "meta" an address is the distance from what is aligned
        is_aligned = not is_plain and arg.data_ptr() % ALIGNMENT == 0
        return str(arg.dtype), is_aligned, arg.untyped_storage().nbytes() > MOST_INT32
    if isinstance(arg, bool | float):
        return type(arg).__name__
    size = "i32" if -MOST_INT32 - 1 <= arg <= MOST_INT32 else "i64" if arg <= MOST_INT64 else "u64"
    if is_plain:
        return size
    return size, arg == 1, arg % ALIGNMENT == 0
