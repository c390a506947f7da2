"""The function that launches kernels, and their compilation before the first launch.

All launches go through `launch`, so they can be collected, recorded and repeated. No argument of a
launch changes from token to token; values that do are in device memory. So one token's launches, in
a CUDA graph, serve for all tokens, and few launches differ from earlier ones in anything but
addresses. For each launch, Triton examines the arguments to find the compiled variant, which takes
longer than many kernels run. Here this happens only once for equal launches.

Kernels are compiled in the background. A pass over meta tensors collects the kernels that a model
will launch (`intercept_launches`). Each variant is compiled once, while weights load. The real
launch then finds it in Triton's in-process cache, and the next process finds it on disk.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from engine.backends.gpu.launch.interpreter import interpret
from engine.backends.gpu.launch.kernel_cache import cache_in_use, is_full, leave_cache
from engine.backends.gpu.launch.own_launcher import OwnLauncher, Start, prepare
from engine.backends.reference.backend import Compilation
from engine.errors import Cancelled, EngineError, Sentence
from engine.hardware.devices.host import usable_cores
from engine.hardware.torch_devices import is_out_of_memory

Grid = tuple[int, ...]
Argument = Tensor | int | float

log = logging.getLogger(__name__)

ALIGNMENT = 16  # addresses and integers divisible by it get their own Triton variant
MAX_INT32 = (1 << 31) - 1
MAX_INT64 = (1 << 63) - 1
MAX_KNOWN = 1 << 14  # number of remembered launch kinds at which all are forgotten
MAX_THREADS = 4  # max. compiling threads; more gain little, since part of the work is in Python
POLL_S = 0.05  # seconds between checks of whether a wait was cancelled
COMPILING = Sentence("Compiling kernels")  # what `Cancelled` names

CompileProgress = Callable[[int, int], None]
"""Callback: number of compiled variants, total; called from several threads, one at a time."""


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel with the arguments for one launch.

    Args:
        kernel: a function decorated with `triton.jit`.
        grid: number of programs in each of up to three dimensions.
        args: run-time arguments, in the order of the kernel's parameters.
        constants: values of the `tl.constexpr` parameters, by name.
    """

    kernel: Any
    grid: Grid
    args: tuple[Argument, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int

    def run(self) -> None:
        """Make Triton launch the kernel, or interpret it."""
        run = self.kernel[self.grid]
        if not is_interpreted(self.kernel):
            run(*self.args, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)
            return
        interpret(lambda: run(*self.args, **self.constants))

    def compiled(self) -> Any:
        """Return the kernel compiled for such arguments; compile it if necessary."""
        return self.kernel.warmup(
            *self.args, grid=self.grid, **self.constants, num_warps=self.num_warps,
            num_stages=self.num_stages,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class FixedConstants:
    """Values for `tl.constexpr` parameters, compared by identity.

    A launch with them neither passes nor compares names and values; for the most frequent kernels.
    """

    values: Mapping[str, Any]


NO_CONSTANTS = FixedConstants({})

LaunchHook = Callable[[KernelLaunch], bool]
"""Callback before each of a thread's launches; returns whether to launch."""


class _Thread(threading.local):
    hook: LaunchHook | None = None


_thread = _Thread()
_known: dict[tuple[object, ...], Start] = {}

_torch: Any = torch._C
current_device: Callable[[], int] = getattr(_torch, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(_torch, "_cuda_getCurrentRawStream", lambda n: 0)
"""Function that returns the handle of torch's current stream on a device."""


def launch(
    kernel: Any, grid: Sequence[int], *args: Argument, num_warps: int = 4, num_stages: int = 2,
    fixed: FixedConstants = NO_CONSTANTS, **constants: Any,
) -> None:  # fmt: skip
    """Launch a kernel on its tensors' device, on torch's current stream.

    If the tensors are meta tensors, the kernel is not launched, only passed to the thread's hook.

    Args:
        grid: number of programs in each of up to three dimensions; nothing happens if one is 0.
        args: run-time arguments, in the order of the kernel's parameters; at least one is a tensor.
        fixed: values for some `tl.constexpr` parameters; pass the same object for equal values.
        constants: values for all others, by name.

    Raises:
        EngineError: kernels cannot be launched on this machine; see `own_launcher.prepare`.
    """
    if 0 in grid:
        return

    def request() -> KernelLaunch:
        values = {**fixed.values, **constants}
        return KernelLaunch(kernel, tuple(grid), args, values, num_warps, num_stages)

    hook = _thread.hook
    if hook and not hook(request()):
        return
    values, kinds, tensor = _examined(args)
    device: int = tensor.get_device()
    if device < 0:
        if not tensor.is_meta:
            request().run()
        return
    # one hash over all parts, with the function by identity; Triton's kernel hashes its source
    key = (kernel.fn, device, num_warps, num_stages, fixed, *kinds, *constants, *constants.values())
    start = _known.get(key)
    if start is None:
        start = _remember(key, request(), device)
    sizes = (*grid, 1, 1)[:3]
    if current_device() == device:
        start(sizes, current_stream(device), values)
    else:
        with torch.cuda.device(device):
            start(sizes, current_stream(device), values)


def _examined(args: Sequence[Any]) -> tuple[list[float], list[object], Any]:
    """Examine a launch's arguments, in a single loop because every launch does this.

    Returns:
        Their values, with addresses for tensors; their kinds, which determine what Triton compiles
        (integers by value, which is stricter than Triton; tensors by type and alignment; other
        numbers by type); and one of the tensors.
    """
    values: list[float] = []
    kinds: list[object] = []
    tensor: Any = None
    addresses = 0
    for value in args:
        kind = type(value)
        if kind is int:
            values.append(value)
            kinds.append(value)
        elif kind is float or kind is bool:
            values.append(value)
            kinds.append(kind)
        else:
            tensor = value
            address = tensor.data_ptr()
            values.append(address)
            kinds.append(tensor.dtype)
            addresses |= address
    if addresses % ALIGNMENT:
        kinds += [value % ALIGNMENT == 0 for value in values]
    if torch.version.hip:  # there, offsets are 32-bit if the memory is small
        kinds += [isinstance(x, Tensor) and is_far(x) for x in args]
    return values, kinds, tensor


def _remember(key: tuple[object, ...], request: KernelLaunch, device: int) -> Start:
    """Return the function that starts launches like this one, and remember it."""
    prepare()
    with torch.cuda.device(device):
        compiled = request.compiled()
        launcher = compiled.run  # reading this attribute makes Triton load the kernel
    places = [place for place, param in enumerate(request.kernel.params) if not param.is_constexpr]
    if isinstance(launcher, OwnLauncher):
        start = launcher.loaded(compiled.function, places)
    else:
        start = _by_triton(compiled, places, len(request.kernel.params))
    if len(_known) >= MAX_KNOWN:
        _known.clear()
    _known[key] = start
    return start


def _by_triton(compiled: Any, places: Sequence[int], n_param: int) -> Start:
    """Return a function that starts a compiled kernel with Triton's launcher.

    `places` are the indices of the run-time arguments among all `n_param` parameters; the launcher
    takes the other parameters too, but ignores them.
    """
    run, about = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    others: list[float | None] = [None] * n_param

    def start(grid: Sequence[int], stream: int, values: Sequence[float]) -> None:
        arguments = others.copy()
        for place, value in zip(places, values, strict=True):
            arguments[place] = value
        run(*grid, stream, *about, *arguments)

    return start


@contextmanager
def intercept_launches(hook: LaunchHook) -> Iterator[None]:
    """Call `hook` before each of this thread's launches; launches that it rejects do not happen."""
    before = _thread.hook
    _thread.hook = hook
    try:
        yield
    finally:
        _thread.hook = before


def is_far(x: Tensor) -> bool:
    """Return whether a tensor's memory is too large for 32-bit offsets."""
    return x.untyped_storage().nbytes() > MAX_INT32


def is_interpreted(kernel: Any) -> bool:
    """Return whether Triton interprets the kernel on the CPU, as with TRITON_INTERPRET=1."""
    return type(kernel).__name__ == "InterpretedFunction"


class Compiling(Compilation):
    """Compilation of kernel variants for one GPU, in threads that start immediately.

    Args:
        launches: launches of the kernels, with meta or real tensors; duplicates are harmless.
        on_progress: callback; the first call says that nothing is compiled yet.
        n_threads: number of threads; None for this machine's default.

    Attributes:
        n_total: number of variants.

    Raises:
        EngineError: kernels cannot be launched on this machine.
    """

    def __init__(
        self, device: torch.device, launches: Iterable[KernelLaunch],
        on_progress: CompileProgress = lambda n_done, n_total: None, n_threads: int | None = None,
    ) -> None:  # fmt: skip
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
            n_threads or min(MAX_THREADS, usable_cores()), "compile kernels"
        )
        on_progress(0, self.n_total)
        self._futures = [self._pool.submit(partial(self._compile, one, device)) for one in wanted]
        self._pool.shutdown(wait=False)

    @property
    def n_done(self) -> int:
        return self._n_done

    def cancel(self) -> None:
        """Cancel variants that have not started to compile."""
        for future in self._futures:
            future.cancel()

    def wait(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until all variants are compiled.

        Args:
            is_cancelled: called repeatedly to check for cancellation.

        Raises:
            EngineError: a variant cannot be compiled; those not started are cancelled.
            Cancelled: `is_cancelled` or `cancel` stopped the wait.
        """
        for future in self._futures:
            self._wait_for(future, is_cancelled)

    def _wait_for(self, future: Future[None], is_cancelled: Callable[[], bool]) -> None:
        while True:
            if is_cancelled():
                self.cancel()
                raise Cancelled(COMPILING)
            try:
                with contextlib.suppress(TimeoutError):
                    future.result(POLL_S)
                    return
            except CancelledError:
                raise Cancelled(COMPILING) from None
            except BaseException:
                self.cancel()
                raise

    def _compile(self, launch: KernelLaunch, device: torch.device) -> None:
        if self._has_failed:  # an earlier variant has failed; `wait` raises its error first
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

    Triton creates it on first use, keyed by its driver's device index; if two threads did so
    simultaneously, one would lose its variant.
    """
    driver = import_module("triton.runtime").driver
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for launch in launches:
            caches = getattr(launch.kernel, "device_caches", None)
            if caches is not None:
                _ = caches[driver.active.get_current_device()]


def compile_launch(launch: KernelLaunch, device: torch.device) -> Any:
    """Compile the variant that a launch needs, load it on the device, and return it.

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
    except Exception as error:  # compilers fail in many ways
        if is_out_of_memory(error):  # loading a kernel takes some memory
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
        "The kernel {name} cannot be compiled for this GPU ({problem}).",
        "Set TANDEM_BACKEND=reference to run without Tandem's own kernels.",
        name=launch.kernel.__name__,
        problem=line,
    )


def variants(launches: Iterable[KernelLaunch]) -> list[KernelLaunch]:
    """Return the first launch of each variant that Triton compiles, in order; none interpreted."""
    found: dict[Hashable, KernelLaunch] = {}
    for launch in launches:
        if not is_interpreted(launch.kernel):
            found.setdefault(variant_key(launch), launch)
    return list(found.values())


def variant_key(launch: KernelLaunch) -> Hashable:
    """Return a key for the variant that Triton compiles; equal keys mean one compiled kernel."""
    params = [p for p in launch.kernel.params if not p.is_constexpr]
    kinds = tuple(
        _specialisation(arg, is_plain=param.do_not_specialize)
        for param, arg in zip(params, launch.args, strict=True)
    )
    constants = tuple(sorted((name, str(value)) for name, value in launch.constants.items()))
    return (launch.kernel.__module__, launch.kernel.__name__, kinds, constants, launch.num_warps,
            launch.num_stages)  # fmt: skip


def _specialisation(arg: Argument, *, is_plain: bool) -> Hashable:
    """Return the properties of an argument for which Triton compiles separate variants.

    `is_plain` says that the kernel is not specialised for this argument's values.
    """
    if isinstance(arg, Tensor):  # on "meta", the address is the offset from an aligned one
        is_aligned = not is_plain and arg.data_ptr() % ALIGNMENT == 0
        return str(arg.dtype), is_aligned, is_far(arg)
    if isinstance(arg, bool | float):
        return type(arg).__name__
    size = "i32" if -MAX_INT32 - 1 <= arg <= MAX_INT32 else "i64" if arg <= MAX_INT64 else "u64"
    if is_plain:
        return size
    return size, arg == 1, arg % ALIGNMENT == 0
