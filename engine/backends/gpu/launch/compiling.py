"""Background compilation of kernels, before their first launch.

A pass over tensors on the device "meta", which have no memory, collects the kernels that a model
will launch (`kernel_launch.intercept_launches`). Each variant is compiled once, while weights load.
The real launch then finds it in Triton's in-process cache, and the next process finds it on disk.
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

from engine.backends.gpu.launch.kernel_cache import cache_in_use, is_full, leave_cache
from engine.backends.gpu.launch.kernel_launch import (
    ALIGNMENT,
    MOST_INT32,
    Argument,
    KernelLaunch,
    is_far,
    is_interpreted,
)
from engine.backends.gpu.launch.own_launcher import prepare
from engine.backends.reference.backend import Compilation
from engine.errors import Cancelled, EngineError
from engine.hardware.devices.host import usable_cores
from engine.hardware.torch_devices import is_out_of_memory

log = logging.getLogger(__name__)

CompileProgress = Callable[[int, int], None]
"""Callback: number of compiled variants, number of all; from several threads, one at a time."""

MOST_THREADS = 4
"""Largest number of compiling threads; more gain little, since part of the work is in Python."""

MOST_INT64 = (1 << 63) - 1

POLL_S = 0.05
"""Time between two checks whether a wait was cancelled, in seconds."""


class Compiling(Compilation):
    """Compilation of kernel variants for one GPU, in threads that start at once.

    Args:
        launches: launches of the kernels, with tensors on "meta" or on the real device; several of
            one variant do no harm.
        on_progress: callback, called first with nothing compiled.
        n_threads: number of threads; None for a number that suits this machine.

    Attributes:
        n_total: number of variants.

    Raises:
        EngineError: kernels cannot be launched on this machine.
    """

    def __init__(
        self,
        device: torch.device,
        launches: Iterable[KernelLaunch],
        on_progress: CompileProgress = lambda n_done, n_total: None,
        n_threads: int | None = None,
    ) -> None:
        if device.type == "cuda":
            prepare()
        wanted = variants(launches)
        _create_kernel_caches(wanted, device)
        self.n_total = len(wanted)
        self._n_done = 0
        self._has_failed = False
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(
            n_threads or min(MOST_THREADS, usable_cores()), "compile kernels"
        )
        on_progress(0, self.n_total)
        self._futures = [self._pool.submit(partial(self._compile, one, device)) for one in wanted]
        self._pool.shutdown(wait=False)

    @property
    def n_done(self) -> int:
        """Number of compiled variants."""
        return self._n_done

    def cancel(self) -> None:
        """Cancel the variants whose compilation has not begun."""
        for future in self._futures:
            future.cancel()

    def wait(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until all variants are compiled.

        Args:
            is_cancelled: cancellation check, polled.

        Raises:
            EngineError: a variant cannot be compiled; those that have not begun are cancelled.
            Cancelled: `is_cancelled` or `cancel` ended the wait.
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

    def _compile(self, launch: KernelLaunch, device: torch.device) -> None:
        if self._has_failed:  # an earlier variant, whose error `wait` raises first
            return
        try:
            compile_launch(launch, device)
        except BaseException:
            self._has_failed = True
            raise
        with self._lock:
            self._n_done += 1
            self._on_progress(self._n_done, self.n_total)


def _create_kernel_caches(launches: Iterable[KernelLaunch], device: torch.device) -> None:
    """Create each kernel's table of compiled variants for this device.

    Triton creates it on first use, keyed by the device number of its driver; if two threads did
    that at once, one would lose its variant.
    """
    driver = import_module("triton.runtime").driver
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for launch in launches:
            caches = getattr(launch.kernel, "device_caches", None)
            if caches is not None:
                _ = caches[driver.active.get_current_device()]


def compile_launch(launch: KernelLaunch, device: torch.device) -> Any:
    """Compile the variant that a launch needs and load it on the device.

    Returns:
        Triton's compiled kernel.

    Raises:
        EngineError: the kernel cannot be compiled.
        RuntimeError: the device's memory is full.
    """
    folder = cache_in_use()
    try:
        return _compiled(launch, device)
    except OSError as error:
        if not is_full(error):
            raise _compile_error(launch, error) from error
        leave_cache(folder, error)
    except EngineError:
        raise
    except Exception as error:  # compilers fail in all ways
        if is_out_of_memory(error):  # loading a kernel takes some
            raise
        raise _compile_error(launch, error) from error
    return compile_launch(launch, device)


def _compiled(launch: KernelLaunch, device: torch.device) -> Any:
    if device.type != "cuda":
        return launch.compiled()
    with torch.cuda.device(device):
        kernel = launch.compiled()
        _ = kernel.run  # reading this attribute makes Triton load the kernel
    return kernel


def _compile_error(launch: KernelLaunch, error: BaseException) -> EngineError:
    log.error("%s cannot be compiled", launch.kernel.__name__, exc_info=error)
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
    return EngineError(
        f"The kernel {launch.kernel.__name__} cannot be compiled for this GPU ({line}).",
        "Set TANDEM_BACKEND=reference to do without kernels of Tandem's own.",
    )


def variants(launches: Iterable[KernelLaunch]) -> list[KernelLaunch]:
    """Return the first launch of each variant that Triton would compile, in order.

    Interpreted kernels are left out.
    """
    found: dict[Hashable, KernelLaunch] = {}
    for launch in launches:
        if not is_interpreted(launch.kernel):
            found.setdefault(variant_key(launch), launch)
    return list(found.values())


def variant_key(launch: KernelLaunch) -> Hashable:
    """Return a key of the variant that Triton compiles: equal keys mean one compiled kernel."""
    params = [p for p in launch.kernel.params if not p.is_constexpr]
    kinds = tuple(
        _specialisation(arg, is_plain=param.do_not_specialize)
        for param, arg in zip(params, launch.args, strict=True)
    )
    constants = tuple(sorted((name, str(value)) for name, value in launch.constants.items()))
    return (launch.kernel.__module__, launch.kernel.__name__, kinds, constants, launch.num_warps,
            launch.num_stages)  # fmt: skip


def _specialisation(arg: Argument, *, is_plain: bool) -> Hashable:
    """Return the properties of an argument that Triton compiles variants for.

    Args:
        is_plain: whether the kernel is not specialised for values of this argument.
    """
    if isinstance(arg, Tensor):  # on "meta" an address is the offset from an aligned one
        is_aligned = not is_plain and arg.data_ptr() % ALIGNMENT == 0
        return str(arg.dtype), is_aligned, is_far(arg)
    if isinstance(arg, bool | float):
        return type(arg).__name__
    size = "i32" if -MOST_INT32 - 1 <= arg <= MOST_INT32 else "i64" if arg <= MOST_INT64 else "u64"
    if is_plain:
        return size
    return size, arg == 1, arg % ALIGNMENT == 0
