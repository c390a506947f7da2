"""The one function that launches kernels, so that launches can be collected, recorded and repeated.

No argument of a launch differs from token to token: such values are in the device's memory. So the
launches of one token serve for all tokens, in a CUDA graph, and few launches differ from all before
them in more than addresses. Triton examines the arguments of each launch, to find what it compiled
for such arguments; that takes longer than many kernels run. Here it is asked only once for launches
that are alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.backends.gpu.launch.interpreter import interpret
from engine.backends.gpu.launch.own_launcher import OwnLauncher, Start, prepare

Grid = tuple[int, ...]
Argument = Tensor | int | float

ALIGNMENT = 16
"""Divisor of addresses (in bytes) and integers for which Triton compiles a variant of its own."""

MOST_INT32 = (1 << 31) - 1

MOST_KNOWN = 1 << 14
"""Number of remembered kinds of launches at which all are forgotten."""


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel with the arguments of one launch.

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
        """Let Triton launch the kernel, or compute it at once where it is interpreted."""
        run = self.kernel[self.grid]
        if not is_interpreted(self.kernel):
            run(*self.args, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)
            return
        interpret(lambda: run(*self.args, **self.constants))

    def compiled(self) -> Any:
        """Return what Triton compiles for such arguments, compiled now if it has not been yet."""
        return self.kernel.warmup(
            *self.args, grid=self.grid, **self.constants, num_warps=self.num_warps,
            num_stages=self.num_stages,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class FixedConstants:
    """Values of `tl.constexpr` parameters that are known as one thing, by identity.

    A launch with them passes and compares no names and values; for kernels that launch most often.
    """

    values: Mapping[str, Any]


NO_CONSTANTS = FixedConstants({})

LaunchHook = Callable[[KernelLaunch], bool]
"""Callback before each launch of a thread; returns whether the launch shall happen."""


class _Thread(threading.local):
    """State of a thread: its hook, if it has one."""

    hook: LaunchHook | None = None


_thread = _Thread()
_known: dict[tuple[object, ...], Start] = {}

_torch: Any = torch._C
current_device: Callable[[], int] = getattr(_torch, "_cuda_getDevice", torch.cuda.current_device)
"""Function that returns the number of torch's current device."""

current_stream: Callable[[int], int] = getattr(_torch, "_cuda_getCurrentRawStream", lambda n: 0)
"""Function that returns the handle of torch's current stream on a device."""


def launch(
    kernel: Any,
    grid: Sequence[int],
    *args: Argument,
    num_warps: int = 4,
    num_stages: int = 2,
    fixed: FixedConstants = NO_CONSTANTS,
    **constants: Any,
) -> None:
    """Launch a kernel on the device of its tensors, on torch's current stream.

    With tensors on the device "meta", which have no memory, the kernel is not launched, only
    passed to the thread's hook.

    Args:
        grid: number of programs in each of up to three dimensions; nothing happens if one is 0.
        args: run-time arguments, in the order of the kernel's parameters; one at least is a tensor.
        fixed: values of some `tl.constexpr` parameters; one object for equal values.
        constants: all others by name.

    Raises:
        EngineError: kernels cannot be launched on this machine, see `launcher_choice.prepare`.
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
    # all parts are hashed at once, the function by identity; Triton's kernel hashes its source
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
    """Examine the arguments of a launch, in one loop, since this is done for each.

    Returns:
        Their values, those of tensors being addresses; their kinds, which determine what Triton
        compiles: integers by value, which is more than it looks at, tensors by type and alignment,
        other numbers by type; and one of the tensors.
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
    if torch.version.hip:  # there offsets have 32 bits where memory is small
        kinds += [isinstance(x, Tensor) and is_far(x) for x in args]
    return values, kinds, tensor


def _remember(key: tuple[object, ...], request: KernelLaunch, device: int) -> Start:
    """Return what starts launches like this one, from now on without asking Triton again."""
    prepare()
    with torch.cuda.device(device):
        compiled = request.compiled()
        launcher = compiled.run  # reading this attribute makes Triton load the kernel
    places = [place for place, param in enumerate(request.kernel.params) if not param.is_constexpr]
    if isinstance(launcher, OwnLauncher):
        start = launcher.loaded(compiled.function, places)
    else:
        start = _by_triton(compiled, places, len(request.kernel.params))
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _known[key] = start
    return start


def _by_triton(compiled: Any, places: Sequence[int], n_param: int) -> Start:
    """Return what starts a compiled kernel by Triton's launcher.

    Args:
        places: positions of the run-time arguments among all `n_param` parameters; the launcher
            wants the others, too, but does not look at them.
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
    """Call `hook` before each launch of this thread; launches that it rejects do not happen."""
    before = _thread.hook
    _thread.hook = hook
    try:
        yield
    finally:
        _thread.hook = before


def is_far(x: Tensor) -> bool:
    """Return whether a tensor's memory is too large for offsets of 32 bits."""
    return x.untyped_storage().nbytes() > MOST_INT32


def is_interpreted(kernel: Any) -> bool:
    """Return whether Triton interprets the kernel on the CPU, as with TRITON_INTERPRET=1."""
    return type(kernel).__name__ == "InterpretedFunction"
